"""A Hugging Face hub on this machine, with the repositories that a test puts into it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """`repositories` are name → file → content; `refusals` name → the X-Error-Code that is answered.

    `datasets` are name → revision → file → content, and each such content has a commit of its own.
    """

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]], refusals: Mapping[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.repositories, self.refusals = repositories, refusals
        self.datasets: dict[str, dict[str, dict[str, bytes]]] = {}
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        """The value for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_port}"

    def downloaded(self) -> set[str]:
        """The files whose content was requested."""
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
        if re.match(r"(api/)?datasets/", path):
            return self._answer_dataset(path)
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

    def _answer_dataset(self, path: str) -> None:
        found = re.fullmatch(r"(?:api/)?datasets/([^/]+/[^/]+)(?:/(revision|tree|resolve)/(.+))?", path)
        revisions = self.server.datasets.get(found[1], {}) if found else {}
        if not found or not revisions:
            code = self.server.refusals.get(found[1] if found else "", "RepoNotFound")
            return self._send(403 if code == "GatedRepo" else 404, b"{}", {"X-Error-Code": code})
        known = {commit_of(files): files for files in revisions.values()} | revisions
        rest = (found[3] or "main").rstrip("/") + "/"
        revision = next((each for each in known if rest.startswith(f"{each}/")), None)
        if revision is None:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files, commit = known[revision], commit_of(known[revision])
        if found[2] == "tree":
            tree = [
                {"type": "file", "path": path, "size": len(content), "oid": _digest(content)}
                for path, content in files.items()
            ]
            return self._send(200, json.dumps(tree).encode())
        if found[2] != "resolve":
            return self._send(200, json.dumps({"id": found[1], "sha": commit, "siblings": []}).encode())
        content = files.get(rest.removeprefix(f"{revision}/").rstrip("/"))
        if content is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self._send(200, content, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": commit})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def commit_of(files: Mapping[str, bytes]) -> str:
    """The commit of a data set's files."""
    return _digest(b"".join(name.encode() + content for name, content in sorted(files.items())))


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
