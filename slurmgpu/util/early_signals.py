"""Signals that ask a process to end: remembered from its first instruction on, and heeded once it can.

Without this one that comes while modules are imported, or while the run is read, ends a task or is passed over. A task
asks for what has come and listens by itself (`recall`); a merge, and whoever else holds the run's lock, is ended by an
exception, so that it takes away what it has begun and gives the lock back (`heeded`).
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType

log = logging.getLogger(__name__)

SIGNUMS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
_came: list[int] = []
_is_heeding = False
_n_deferring = 0
_ended_by: int | None = None


class EndedBySignalError(SystemExit):
    """A signal ends this process, with 128 and its number as shells have it."""


def remember() -> None:
    """Remember from now on what asks this process to end, instead of ending."""
    for signum in SIGNUMS:
        if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
            continue  # nohup: the run shall outlive its terminal
        signal.signal(signum, _note)


def recall() -> list[int]:
    """What has come until now, in order; each is given once."""
    came = []
    while _came:
        came.append(_came.pop(0))
    return came


def is_asked_to_end() -> bool:
    """Whether one has come that ends a task, and was not recalled yet; the notice SIGUSR2 is none."""
    return any(signum != signal.SIGUSR2 for signum in _came)


@contextlib.contextmanager
def heeded() -> Iterator[None]:
    """Have what asks this process to end raise in the block, also what has come before; SIGUSR2 is passed over.

    SIGINT raises KeyboardInterrupt, the others EndedBySignalError, and only the first of them does. What is ignored
    stays so, and in other threads than the main one, which gets no signals, nothing changes.
    """
    global _is_heeding, _ended_by
    if _is_heeding or not _is_main():
        yield
        return
    handlers = {signum: signal.getsignal(signum) for signum in SIGNUMS}
    former = {signum: handler for signum, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    try:
        for signum in former:
            signal.signal(signum, _note)
        _is_heeding = True
        heed()
        yield
    except BaseException:
        if _ended_by is not None:
            log.warning("ended by %s", signal.Signals(_ended_by).name)
        raise
    finally:
        _is_heeding, _ended_by = False, None
        recall()
        for signum, handler in former.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def deferred() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Have nothing raise in the block, but where it calls `heed`, and in the blocks of what this gives.

    What comes meanwhile raises at the end. So what is taken is given back.
    """
    global _n_deferring
    if not _is_main():
        yield contextlib.nullcontext
        return
    _n_deferring += 1
    try:
        yield _allowed
    finally:
        _n_deferring -= 1
    if not _n_deferring:
        heed()


@contextlib.contextmanager
def _allowed() -> Iterator[None]:
    global _n_deferring
    former, _n_deferring = _n_deferring, 0
    try:
        heed()
        yield
    finally:
        _n_deferring = former


def heed() -> None:
    """Raise what has come, where that is heeded."""
    global _ended_by
    if not _is_heeding or not _is_main():
        return
    asking = [signum for signum in _came if signum != signal.SIGUSR2]
    _came.clear()
    if not asking or (_ended_by is not None and signal.SIGINT not in asking):
        return  # it is ending already; Ctrl-C once more is somebody who will not wait
    _ended_by = asking[0]
    raise KeyboardInterrupt if signal.SIGINT in asking else EndedBySignalError(128 + asking[0])


def _note(signum: int, frame: FrameType | None) -> None:
    _came.append(signum)
    if not _n_deferring:
        heed()


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
