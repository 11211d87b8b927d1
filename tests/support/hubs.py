"""A Hugging Face hub on this machine, with the repositories that a test puts into it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """`repositories` are name → file → content; `refusals` name → the X-Error-Code that is answered."""

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]], refusals: Mapping[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.repositories, self.refusals = repositories, refusals
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        """What HF_ENDPOINT is to be."""
        return f"http://127.0.0.1:{self.server_port}"

    def downloaded(self) -> set[str]:
        """The files whose content was asked for."""
        return {path.partition(f"/resolve/{COMMIT}/")[2] for path in self.asked if "/resolve/" in path}


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        if self.command == "GET":
            self.server.asked.append(path)
        is_api = path.startswith("api/models/")
        owner, name, what, *rest = [*path.removeprefix("api/models/").split("/"), "", ""]
        repository = f"{owner}/{name}"
        files = self.server.repositories.get(repository)
        if files is None:
            code = self.server.refusals.get(repository, "RepoNotFound")
            return self._send(403 if code == "GatedRepo" else 404, b"{}", {"X-Error-Code": code})
        if what == "revision" and rest[0] not in ("main", COMMIT):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if is_api and what == "tree":
            tree = [
                {"type": "file", "path": path, "size": len(content), "oid": _digest(content)}
                for path, content in files.items()
            ]
            return self._send(200, json.dumps(tree).encode())
        if is_api:
            siblings = [{"rfilename": path} for path in files]
            return self._send(200, json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode())
        content = files.get("/".join(rest[1:]).rstrip("/"))
        if content is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self._send(200, content, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@contextlib.contextmanager
def serving(repositories: Mapping[str, Mapping[str, bytes]], **refusals: str) -> Iterator[Hub]:
    """A hub, while the `with` block lasts; `lab__model="GatedRepo"` has it refuse lab/model."""
    hub = Hub(repositories, {name.replace("__", "/"): code for name, code in refusals.items()})
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
