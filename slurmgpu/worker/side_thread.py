"""A second thread, next to the one that computes, which runs one function after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class SideThread:
    """A thread that is started with its first function and ends with `close`.

    It is a daemon: a function that hangs does not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in the thread; return the future of its result."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name=self._name)
            self._thread.start()
        future: Future[T] = Future()
        self._jobs.put((function, future))
        return future

    def close(self) -> None:
        """Let the thread end after what it runs now, without waiting for that."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, future = job
            try:
                future.set_result(function())
            except BaseException as error:  # the future raises it
                future.set_exception(error)
            del job, function, future  # so that they are not kept until the next job
