"""How the nodes of a task find each other and speak: lines of JSON over TCP, for those who know a secret.

A connection that closes means that the other side is gone.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurmgpu.files import fsync_dir

KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}
"""A node that lost its power says nothing: after 45 s it is taken for dead."""
GREETING_S = 10.0


class Line:
    """One connection, as one side holds it."""

    def __init__(self, connection: socket.socket, host: str = "") -> None:
        self.host = host
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection.settimeout(GREETING_S)
        self._connection = connection
        self._reader = connection.makefile("rb")
        self._lock = threading.Lock()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message; that the other side is gone, `hear` says."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(dict(message)).encode() + b"\n")

    def hear(self) -> dict[str, Any] | None:
        """The next message; None when the other side is gone, or is none of ours."""
        try:
            line = self._reader.readline()
            found = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def trust(self) -> None:
        """From now on wait for messages as long as it takes."""
        self._connection.settimeout(None)

    def close(self) -> None:
        """End the connection, also for a thread that waits to hear."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class Meeting:
    """A port where others are waited for; `path` tells them, and nobody else, where it is and what to say there.

    `serve(line, hello)` is called, in a thread of its own, for each that says it.
    """

    def __init__(self, path: Path, hosts: list[str], serve: Callable[[Line, dict[str, Any]], None]) -> None:
        self._path, self._serve = path, serve
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        self._secret, self._answer = secrets.token_hex(16), secrets.token_hex(16)
        port = self._server.getsockname()[1]
        _write_secret(path, {"hosts": hosts, "port": port, "secret": self._secret, "answer": self._answer})
        threading.Thread(target=self._accept, daemon=True, name="meeting").start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._greet, args=(Line(connection),), daemon=True, name="follower").start()

    def _greet(self, line: Line) -> None:
        hello = line.hear()
        if hello is not None and hmac.compare_digest(str(hello.get("secret")), self._secret):
            line.tell({"answer": self._answer})
            line.trust()
            self._serve(line, hello)
        line.close()

    def close(self) -> None:
        """End it: nobody comes any more."""
        self._path.unlink(missing_ok=True)
        self._server.close()


def join_meeting(path: Path, hello: Mapping[str, Any]) -> Line | None:
    """A line to who opened the meeting; None as long as there is none, or it cannot be reached."""
    try:
        meeting = json.loads(path.read_bytes())
    except (OSError, ValueError):  # on a network file system it may be seen before its content is
        return None
    for host in meeting["hosts"]:
        with contextlib.suppress(OSError):
            line = Line(socket.create_connection((host, meeting["port"]), timeout=GREETING_S), host)
            line.tell({**hello, "secret": meeting["secret"]})
            answer = line.hear()
            if answer is not None and hmac.compare_digest(str(answer.get("answer")), meeting["answer"]):
                line.trust()
                return line
            line.close()
    return None


def own_hosts() -> list[str]:
    """By what other nodes may reach this one, the likeliest first."""
    # srun's host is the first of a job's nodes, and Slurm itself reaches it by this address from all of them.
    names = [os.environ.get("SLURM_LAUNCH_NODE_IPADDR"), socket.gethostname(), os.environ.get("SLURMD_NODENAME")]
    return list(dict.fromkeys(name for name in names if name))


def free_port() -> int:
    """A port on which nothing listens at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _write_secret(path: Path, value: Mapping[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    fsync_dir(path.parent)
