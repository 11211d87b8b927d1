"""The rendezvous of the nodes of a task: lines of JSON over TCP, between processes that know a secret.

Before the other side has proved that it knows the secret, only a greeting of 64 bytes is read from it. The secret is
never sent. A closed connection means that the other side is gone.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurmgpu.util.atomic_files import fsync_dir
from slurmgpu.util.own_files import read_own

KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}
"""A node without power sends nothing: it is taken for dead after 45 s."""
GREETING_S = 10.0
"""How long the other side may take to prove that it knows the secret."""
MOST_GREETINGS = 64
"""The most connections at once that have not proved the secret; more are closed."""
MOST_LINE_BYTES = 16 << 20
"""More than any message of slurmgpu."""
NONCE_BYTES = 32  # and as many in a proof
MOST_MEETING_BYTES = 1 << 16
OPENING, JOINING = b"opening", b"joining"


def prove(connection: socket.socket, secret: str, *, opens: bool) -> bool:
    """Whether the other side knows the secret: both prove it with nonces, without sending it.

    `opens` is true on the side that listens. The other side gets GREETING_S for all of it.
    """
    own, other = (OPENING, JOINING) if opens else (JOINING, OPENING)
    deadline, nonce = time.monotonic() + GREETING_S, secrets.token_bytes(NONCE_BYTES)
    try:
        connection.settimeout(GREETING_S)
        connection.sendall(nonce)
        theirs = _read_exactly(connection, NONCE_BYTES, deadline)
        # The side that listens waits for the proof first, so strangers get nothing that depends on the secret.
        if not opens:
            connection.sendall(_proof(secret, own, nonce, theirs))
        if not hmac.compare_digest(
            _read_exactly(connection, NONCE_BYTES, deadline), _proof(secret, other, theirs, nonce)
        ):
            return False
        if opens:
            connection.sendall(_proof(secret, own, nonce, theirs))
        connection.settimeout(None)
    except OSError:
        return False
    return True


def _proof(secret: str, side: bytes, own: bytes, other: bytes) -> bytes:
    return hmac.digest(secret.encode(), side + own + other, "sha256")


def _read_exactly(connection: socket.socket, n_bytes: int, deadline: float) -> bytes:
    content = b""
    while len(content) < n_bytes:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        chunk = connection.recv(n_bytes - len(content))
        if not chunk:
            raise ConnectionError("the other side is gone")
        content += chunk
    return content


class Listener:
    """A port that listens; `enter(connection)` is called, in a thread, for clients that know the secret."""

    def __init__(self, secret: str, enter: Callable[[socket.socket], None], port: int = 0) -> None:
        self._secret, self._enter = secret, enter
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(("", port), family=family, dualstack_ipv6=both)
        self.port: int = self._server.getsockname()[1]
        self._strangers = threading.BoundedSemaphore(MOST_GREETINGS)
        threading.Thread(target=self._accept, daemon=True, name="listener").start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # closed
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(connection,), daemon=True, name="guest").start()
            else:
                connection.close()

    def _greet(self, connection: socket.socket) -> None:
        try:
            is_known = prove(connection, self._secret, opens=True)
        finally:
            self._strangers.release()
        with connection:
            if is_known:
                self._enter(connection)

    def close(self) -> None:
        """Stop listening; connections stay open."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # otherwise the thread in accept() keeps the port
        self._server.close()


def connect(host: str, port: int, secret: str) -> socket.socket | None:
    """A connection to a listener that knows the secret; None if another program listens there. OSError if none does."""
    connection = socket.create_connection((host, port), timeout=GREETING_S)
    if prove(connection, secret, opens=False):
        return connection
    connection.close()
    return None


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel ask whether the other side is alive, also while nothing is sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Line:
    """One side of a connection."""

    def __init__(self, connection: socket.socket, host: str = "") -> None:
        self.host = host
        keep_alive(connection)
        self._connection = connection
        self._reader = connection.makefile("rb")
        self._lock = threading.Lock()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message; if the other side is gone, `hear` returns None."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(dict(message)).encode() + b"\n")

    def hear(self) -> dict[str, Any] | None:
        """The next message; None if the other side is gone, or sent no JSON object."""
        try:
            line = self._reader.readline(MOST_LINE_BYTES)
            found = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def close(self) -> None:
        """Close the connection, also for a thread in `hear`."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class Rendezvous:
    """A listener whose address and secret are in the file `path`, which only this user can read.

    `serve(line, hello)` is called for each client, in its own thread.
    """

    def __init__(self, path: Path, hosts: list[str], serve: Callable[[Line, dict[str, Any]], None]) -> None:
        self._path, self._serve = path, serve
        secret = secrets.token_hex(32)
        self._listener = Listener(secret, self._enter)
        _write_secret(path, {"hosts": hosts, "port": self._listener.port, "secret": secret})

    def _enter(self, connection: socket.socket) -> None:
        line = Line(connection)
        hello = line.hear()
        if hello is not None:
            self._serve(line, hello)
        line.close()

    def close(self) -> None:
        """Remove the file and stop listening."""
        self._path.unlink(missing_ok=True)
        self._listener.close()


def join_rendezvous(path: Path, hello: Mapping[str, Any]) -> Line | None:
    """A line to the process that opened the rendezvous; None while there is none, or if it cannot be reached."""
    try:
        meeting = json.loads(read_own(path, max_bytes=MOST_MEETING_BYTES))
        hosts, port, secret = meeting["hosts"], int(meeting["port"]), str(meeting["secret"])
    except (OSError, ValueError, KeyError, TypeError):  # a network file system may show the file before its content
        return None
    for host in hosts:
        with contextlib.suppress(OSError):
            connection = connect(host, port, secret)
            if connection is not None:
                line = Line(connection, host)
                line.tell(hello)
                return line
    return None


def own_hosts() -> list[str]:
    """Names and addresses of this node for other nodes, the likeliest first."""
    # srun runs on the first of a job's nodes, and Slurm itself reaches it at this address from all nodes.
    names = [os.environ.get("SLURM_LAUNCH_NODE_IPADDR"), socket.gethostname(), os.environ.get("SLURMD_NODENAME")]
    return list(dict.fromkeys(name for name in names if name))


def _write_secret(path: Path, value: Mapping[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)  # a default ACL of the folder overrides the mode above
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    fsync_dir(path.parent)
