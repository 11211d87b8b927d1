"""Prepare the items of a call: ahead, in a second thread during the previous call, or in the call's own thread."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any, TypeVar

from slurmgpu.util.forks import ending_forks
from slurmgpu.worker.item_copies import own_copies
from slurmgpu.worker.side_thread import SideThread
from slurmgpu.workload import Item

T = TypeVar("T")
Made = tuple[list[Item], Any]
"""The items of a call, with mappings of their own, and what `prepare` returned for them."""


class _Thread(threading.local):
    prepares = False


_this_thread = _Thread()


@dataclass
class Preparer:
    """Calls `prepare` of a workload, never twice at the same time; at most one batch is prepared ahead."""

    prepare: Callable[[Sequence[Item]], Any]
    _thread: SideThread = field(default_factory=lambda: SideThread("prepare"))
    _ahead: tuple[Sequence[Item], Future[Made]] | None = None

    def begin(self, items: Sequence[Item]) -> None:
        """Begin to prepare these items in the thread; what was prepared ahead must have been taken or dropped."""
        self._ahead = items, self._thread.begin(partial(self._made, items))

    def keep(self, items: Sequence[Item]) -> None:
        """Drop what was prepared ahead, unless it was of the same items."""
        if self._ahead is not None:
            prepared, _ = self._ahead
            if len(prepared) != len(items) or not all(map(is_, prepared, items)):
                self.drop()

    def take(self, items: Sequence[Item]) -> Made:
        """The result of `prepare` for these items, for which `keep` was called.

        Raises what `prepare` raised.
        """
        if self._ahead is None:
            return self._made(items)
        (_, future), self._ahead = self._ahead, None
        try:
            return future.result()
        finally:
            del future  # an exception in it would keep itself, and the tensors of its frames, in memory

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
        own = own_copies(items)
        _this_thread.prepares = True
        try:
            with ending_forks():
                return own, self.prepare(own)
        finally:
            _this_thread.prepares = False


def only_for_calls(name: str, function: Callable[..., T]) -> Callable[..., T]:
    """`function`, but a call from `prepare` raises a RuntimeError: it would happen during a call for other items.

    `name` is the function's name for the workload.
    """

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> T:
        if _this_thread.prepares:
            raise RuntimeError(f"`prepare` must not call {name}, which belongs to the current call; use it in __call__")
        return function(*args, **kwargs)

    return checked


def _wait(future: Future[Made]) -> None:
    """Wait until a batch is prepared, or its preparation has failed."""
    future.exception()
