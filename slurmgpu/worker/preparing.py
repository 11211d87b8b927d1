"""Prepare the items of a call: ahead, in a thread beside the call before it, or in the call's own thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from slurmgpu.workload import Item

Made = tuple[list[Item], Any]
"""The items of a call, with mappings of their own, and what `prepare` returned for them."""


@dataclass
class Preparer:
    """Calls `prepare` of a workload, never twice at the same time.

    At most one batch is prepared ahead, in a thread that is started at the first one and ends with `close`.
    """

    prepare: Callable[[Sequence[Item]], Any]
    _jobs: queue.SimpleQueue[tuple[Sequence[Item], Future[Made]] | None] = field(default_factory=queue.SimpleQueue)
    _thread: threading.Thread | None = None
    _ahead: tuple[list[int], Future[Made]] | None = None

    def begin(self, items: Sequence[Item]) -> None:
        """Begin to prepare these items in the thread; what was prepared ahead must have been taken or dropped."""
        if self._thread is None:
            # A daemon: a call that hangs must not keep a worker from its end, nor must this.
            self._thread = threading.Thread(target=self._work, daemon=True, name="prepare")
            self._thread.start()
        future: Future[Made] = Future()
        self._ahead = [item.index for item in items], future
        self._jobs.put((items, future))

    def take(self, items: Sequence[Item]) -> Made:
        """What `prepare` makes of these items: what was prepared ahead, if it was of the same ones.

        Raises what `prepare` raised.
        """
        if self._ahead is not None:
            (indices, future), self._ahead = self._ahead, None
            if indices == [item.index for item in items]:
                try:
                    return future.result()
                finally:
                    del future  # an exception in it would keep itself, and the tensors of its frames, alive
            _wait(future)
        return self._made(items)

    def drop(self) -> None:
        """Forget what was prepared ahead, once it is made."""
        if self._ahead is not None:
            (_, future), self._ahead = self._ahead, None
            _wait(future)

    def close(self) -> None:
        """Let the thread end after what it prepares now, without waiting for that."""
        self._ahead = None
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None

    def _made(self, items: Sequence[Item]) -> Made:
        own = [item.copy() for item in items]
        return own, self.prepare(own)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            items, future = job
            try:
                future.set_result(self._made(items))
            except BaseException as error:  # that of the call, which raises it
                future.set_exception(error)
            del job, items, future  # not kept until the next job comes


def _wait(future: Future[Made]) -> None:
    """Wait until a batch is prepared, whatever came of it."""
    future.exception()
