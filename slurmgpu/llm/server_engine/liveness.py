"""Notice a server that neither answers nor computes, as one that is stopped or hangs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from slurmgpu.llm.server_engine.http_client import Client
from slurmgpu.llm.server_engine.process import is_healthy

LEAST_CPU_S = 0.01
"""The CPU time that says that a process computes: a tick of the kernel's clock, as /proc counts."""


class Liveness:
    """How long a server has given no sign of life: an answer, or CPU time if `cpu_s` tells what it has used.

    A server may answer nothing while it computes, so that one that uses CPU time is there. Threads may share it.
    """

    def __init__(self, client: Client, most_s: float, cpu_s: Callable[[], float] | None) -> None:
        self._client, self._most_s, self._cpu_s = client, most_s, cpu_s
        self._lock = threading.Lock()
        self._used_s = 0.0
        self._heard = time.monotonic()

    def begin(self) -> None:
        """Count from now on: a request is sent, or answered."""
        self._heard = time.monotonic()

    def look(self) -> None:
        """Ask the server whether it is there; ConnectionError if it has given no sign of life for too long."""
        if self._lock.acquire(blocking=False):  # of several threads, one asks
            try:
                self._ask()
            finally:
                self._lock.release()
        if (silent_s := time.monotonic() - self._heard) > self._most_s:
            raise ConnectionError(f"{self._client.url} has not answered for {silent_s:.0f} s")

    def _ask(self) -> None:
        with contextlib.suppress(ConnectionError):
            is_healthy(self._client)
            self.begin()
            return
        used_s = 0.0 if self._cpu_s is None else self._cpu_s()
        if used_s >= self._used_s + LEAST_CPU_S:
            self._used_s = used_s
            self.begin()
