"""The event loop in which a worker awaits the coroutines of a mapped function."""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop  # which takes 60 ms to import

END_S = 1.0
"""How long tasks may take to end once they are cancelled at a worker's end."""


class EventLoop:
    """One loop for all calls: a client's connections belong to their loop, and do not work in another."""

    def __init__(self) -> None:
        self._loop: AbstractEventLoop | None = None
        self._others: set[Any] = set()  # tasks that continue between calls, such as those of a client's connection

    def result_of(self, returned: Any) -> Any:
        """What a function returned; the result of a coroutine is awaited."""
        if not isinstance(returned, Coroutine):
            return returned
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            weakref.finalize(self, _end, self._loop, self._others)
        loop, others = self._loop, self._others
        try:
            result = _run(loop, returned)
        except BaseException:
            for left in asyncio.all_tasks(loop) - others:  # the rest of a `gather` after one has failed
                loop.call_soon_threadsafe(left.cancel)
            raise
        others.clear()
        others.update(asyncio.all_tasks(loop))
        return result


def _run(loop: AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result; computed in another thread if an event loop runs in this one, as in a notebook."""
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return loop.run_until_complete(coroutine)
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(contextvars.copy_context().run, loop.run_until_complete, coroutine).result()
    finally:
        pool.shutdown(wait=False)  # after Ctrl-C the caller cancels the coroutine


def _end(loop: AbstractEventLoop, others: set[Any]) -> None:
    """Cancel tasks that clients left in the loop: Python warns if a pending task is destroyed."""
    import asyncio

    if loop.is_running() or loop.is_closed():
        return
    if left := asyncio.all_tasks(loop) | {task for task in others if not task.done()}:
        for task in left:
            task.cancel()
        _run(loop, asyncio.wait(left, timeout=END_S))
    loop.close()
