"""Progress of the built-in workloads while they compute, shown by `status --watch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

TELL_S = 2.0
"""The least time between two reports within a batch."""

T = TypeVar("T")


class Progress:
    """Reports the number of finished `things`, such as "texts embedded", by the task's `tell`."""

    def __init__(self, tell: Callable[[str], None], things: str) -> None:
        self._tell, self._things = tell, things
        self._n_done, self._told = 0, time.monotonic()

    def add(self, n_done: int) -> None:
        """Report that `n_done` more are done."""
        self._n_done += n_done
        self._told = time.monotonic()
        self._tell(f"{self._n_done:,} {self._things}")

    def each(self, found: Iterable[T]) -> Iterator[T]:
        """Pass the results on, and report their number every few seconds and at the end."""
        n_new = 0
        for one in found:
            n_new += 1
            if time.monotonic() - self._told >= TELL_S:
                self.add(n_new)
                n_new = 0
            yield one
        if n_new:
            self.add(n_new)
