"""Send JSON over HTTP to a port, a unix socket or a URL, as servers of language models take it."""

from __future__ import annotations

import http.client
import json
import selectors
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from slurmgpu.errors import SlurmGPUError

CONNECT_S = 30.0
GET_S = 30.0
"""How long a GET waits for a byte: the kernel accepts connections even for a stopped or hanging process."""
LOOK_S = 30.0
"""How often to check that a server that has not answered a POST is still alive."""
MOST_ERROR_CHARACTERS = 500


@dataclass(frozen=True)
class Reply:
    """A server's answer: its status, its JSON (or text if it is not JSON), and how long it asks to wait."""

    status: int
    body: Any
    retry_after: float | None = None

    @property
    def message(self) -> str:
        """The message of an error, shortened, from `error.message`, `message` or `detail`, as servers write it."""
        found = self.body
        for name in ("error", "message", "detail"):
            if isinstance(found, Mapping) and name in found:
                found = found[name]
        text = found if isinstance(found, str) else json.dumps(found)
        return text[:MOST_ERROR_CHARACTERS].strip()


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Client:
    """Sends requests to the server at `url`: http://…, https://… or unix:/path. Threads may share it.

    Each request has its own connection: the server may have closed a kept one, and a completion takes longer than a new
    connection. A GET waits GET_S for its answer. A POST waits without a limit, and checks every LOOK_S that the server
    is alive. A lost answer is a ConnectionError.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._parts = urlsplit(self.url)
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key := (key or "").strip():
            _check_key(key)
            self._headers["Authorization"] = f"Bearer {key}"

    def get(self, path: str) -> Reply:
        """The answer to a GET."""
        return self._ask("GET", path, None, GET_S)

    def post(self, path: str, body: Mapping[str, Any], look: Callable[[], None] = lambda: None) -> Reply:
        """The answer to a POST of JSON; `look` raises a ConnectionError if the server is gone.

        `look` is called every LOOK_S until the answer begins.
        """
        return self._ask("POST", path, json.dumps(body).encode(), None, look)

    def _ask(
        self, method: str, path: str, body: bytes | None, most_s: float | None, look: Callable[[], None] | None = None
    ) -> Reply:
        connection = self._connection()
        prefix = "" if self._parts.scheme == "unix" else self._parts.path
        try:
            connection.connect()
            connection.sock.settimeout(most_s)
            connection.request(method, prefix + path, body, self._headers)
            if look is not None:
                _wait_for(connection.sock, look)
            answer = connection.getresponse()
            return Reply(answer.status, _content(answer.read()), _seconds(answer.getheader("Retry-After")))
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionError(f"{self.url} does not answer: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._parts.scheme == "unix":
            return _UnixConnection(self._parts.path)
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=CONNECT_S)


def _wait_for(sock: socket.socket, look: Callable[[], None]) -> None:
    """Return when the socket can be read; with TLS, session tickets may come before an answer."""
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        while not selector.select(LOOK_S):
            look()


def _check_key(key: str) -> None:
    """Refuse a key that a header cannot hold: the error from http.client would show the key."""
    wrong = [place for place, each in enumerate(key, 1) if each > "\xff" or not each.isprintable()]
    if wrong:
        raise SlurmGPUError(
            f"The server's key has a character at position {wrong[0]} that an HTTP header cannot hold; expected "
            "printable Latin-1 characters. Set it again, without line breaks."
        )


def _content(data: bytes) -> Any:
    text = data.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else max(0.0, float(header))
    except ValueError:  # a date
        return None
