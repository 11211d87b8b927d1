"""TCP tunnels from a task's other nodes to the group's store on the leader's node.

The store listens on the leader's loopback address without authentication. On each other node, an `Entrance` listens on
the loopback address and forwards to the `Exit` on the leader's node, which checks the secret and forwards to the store.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

from slurmgpu.run.rendezvous import Listener, connect, keep_alive

log = logging.getLogger(__name__)

PATIENCE_S = 120.0
"""How much later than other launchers the leader's launcher may start."""
PAUSE_S = 0.2
CHUNK_BYTES = 1 << 16


class Exit:
    """Listens at `port` on all addresses, and connects peers that know the secret to `host`:`store_port`."""

    def __init__(self, host: str, store_port: int, port: int, secret: str) -> None:
        self._place = host, store_port
        self._listener = Listener(secret, self._enter, port)

    def _enter(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), socket.create_connection(self._place) as inner:
            carry(connection, inner)


class Entrance:
    """Listens on a free `port` of the loopback address, and forwards to the Exit at `host`."""

    def __init__(self, own: str, host: str, exit_port: int, secret: str, patience_s: float = PATIENCE_S) -> None:
        self._host, self._exit_port, self._secret, self._patience_s = host, exit_port, secret, patience_s
        self._server = socket.create_server((own, 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True, name="entrance").start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._server.accept()
            threading.Thread(target=self._enter, args=(connection,), daemon=True, name="tunnel").start()

    def _enter(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            outer = self._knock()
            if outer is None:
                log.error("the leader's launcher does not answer at %s, port %d", self._host, self._exit_port)
                return
            with outer:
                carry(connection, outer)

    def _knock(self) -> socket.socket | None:
        deadline = time.monotonic() + self._patience_s
        while True:
            with contextlib.suppress(OSError):
                if found := connect(self._host, self._exit_port, self._secret):
                    return found
            if time.monotonic() > deadline:
                return None
            time.sleep(PAUSE_S)


def carry(one: socket.socket, other: socket.socket) -> None:
    """Forward bytes both ways until both ends have closed."""
    for connection in (one, other):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection)
    back = threading.Thread(target=_carry, args=(other, one), daemon=True, name="tunnel back")
    back.start()
    _carry(one, other)
    back.join()


def _carry(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(CHUNK_BYTES):
            target.sendall(chunk)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
