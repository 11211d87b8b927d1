"""Detect a server that neither answers nor computes, because it is stopped or hangs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from slurmgpu.llm.server_engine.http_client import Client
from slurmgpu.llm.server_engine.process import is_healthy

LEAST_CPU_S = 0.01
"""The CPU time that shows that a process computes: a tick of the kernel's clock, as counted in /proc."""


class Liveness:
    """How long a server has shown no sign of life: an answer, or CPU time if `cpu_s` returns it.

    A server may not answer while it computes, so using CPU time counts as alive. Threads may share this object.
    """

    def __init__(self, client: Client, most_s: float, cpu_s: Callable[[], float] | None) -> None:
        self._client, self._most_s, self._cpu_s = client, most_s, cpu_s
        self._lock = threading.Lock()
        self._used_s = 0.0
        self._heard = time.monotonic()

    def begin(self) -> None:
        """Count from now: a request was sent or answered."""
        self._heard = time.monotonic()

    def look(self) -> None:
        """Check that the server is alive; ConnectionError if it has shown no sign of life for too long."""
        if self._lock.acquire(blocking=False):  # only one of several threads asks
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
