"""Prepare the items of a call: ahead, in a thread beside the call before it, or in the call's own thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slurmgpu.util.side_thread import SideThread
from slurmgpu.workload import Item

Made = tuple[list[Item], Any]
"""The items of a call, with mappings of their own, and what `prepare` returned for them."""


@dataclass
class Preparer:
    """Calls `prepare` of a workload, never twice at the same time; at most one batch is prepared ahead."""

    prepare: Callable[[Sequence[Item]], Any]
    _thread: SideThread = field(default_factory=lambda: SideThread("prepare"))
    _ahead: tuple[list[int], Future[Made]] | None = None

    def begin(self, items: Sequence[Item]) -> None:
        """Begin to prepare these items in the thread; what was prepared ahead must have been taken or dropped."""
        self._ahead = [item.index for item in items], self._thread.begin(partial(self._made, items))

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
        self._thread.close()

    def _made(self, items: Sequence[Item]) -> Made:
        own = [item.copy() for item in items]
        return own, self.prepare(own)


def _wait(future: Future[Made]) -> None:
    """Wait until a batch is prepared, whatever came of it."""
    future.exception()
