"""Remember signals that ask a process to end, from its first instruction on, and handle them once it can.

Otherwise a signal that comes while modules are imported, or while the run is read, would kill a task or be lost. A task
asks for the signals that have come and then sets its own handlers (`recall`). A merge, and other holders of the run's
lock, are ended by an exception, so that they remove partial files and release the lock (`heeded`). So is every other
command (`end_by_exception`), and code that waits for tasks of this machine (`ended_by_exception`).
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import NoReturn

log = logging.getLogger(__name__)

SIGNUMS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
_came: list[int] = []
_is_heeding = False
_n_deferring = 0
_ended_by: int | None = None


class EndedBySignalError(SystemExit):
    """A signal ends this process, with exit code 128 plus its number, as in shells."""


INTERRUPTS = (KeyboardInterrupt, EndedBySignalError)
"""The exceptions that a signal raises in the main thread to end this process."""
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""The signals that end a process, without SIGINT (Ctrl-C), for which Python has a handler."""


def remember() -> None:
    """Remember signals from now on instead of ending."""
    for signum in listened():
        signal.signal(signum, _note)


def listened() -> list[int]:
    """The signals that a task listens for: SIGNUMS, without a SIGHUP that nohup has ignored."""
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signum for signum in SIGNUMS if not (is_nohup and signum == signal.SIGHUP)]


def end_by_exception() -> None:
    """Let the first SIGTERM or SIGHUP raise EndedBySignalError from now on, and ignore later ones.

    A signal that is ignored already, such as SIGHUP under nohup, stays ignored. Only the main thread can set handlers.
    """
    for signum in ENDING:
        if signal.getsignal(signum) == signal.SIG_DFL:
            signal.signal(signum, _end)


@contextlib.contextmanager
def ended_by_exception(*, then_killed: bool = False) -> Iterator[None]:
    """Within the block, the first SIGTERM or SIGHUP raises EndedBySignalError, unless it is ignored or has a handler.

    Later ones are ignored in the block, or kill the process if `then_killed`, which is for blocks that run a user's
    code: it may catch the exception. Only the main thread gets signals: in others this does nothing.
    """
    handlers = {signum: signal.getsignal(signum) for signum in ENDING} if _is_main() else {}
    former = {signum: handler for signum, handler in handlers.items() if handler in (signal.SIG_DFL, _end)}
    try:
        for signum in former:
            signal.signal(signum, _end_once if then_killed else _end)
        yield
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)


def _end(signum: int, _: FrameType | None) -> NoReturn:
    _raise(signum, signal.SIG_IGN)


def _end_once(signum: int, _: FrameType | None) -> NoReturn:
    _raise(signum, signal.SIG_DFL)


def _raise(signum: int, later: signal.Handlers) -> NoReturn:
    for each in ENDING:
        if signal.getsignal(each) in (_end, _end_once):
            signal.signal(each, later)
    raise EndedBySignalError(128 + signum)


def recall() -> list[int]:
    """The signals received so far, in order; each is returned once."""
    came = []
    while _came:
        came.append(_came.pop(0))
    return came


def is_asked_to_end() -> bool:
    """Whether a signal that ends a task has come and was not recalled yet; the notice SIGUSR2 ends none."""
    return any(signum != signal.SIGUSR2 for signum in _came)


@contextlib.contextmanager
def heeded() -> Iterator[None]:
    """Let signals raise in the block, also those that came before; SIGUSR2 is ignored.

    SIGINT raises KeyboardInterrupt, the others EndedBySignalError; only the first signal raises. Ignored signals stay
    ignored. Only the main thread gets signals: in others this does nothing.
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
    """Let no signal raise in the block, except in calls of `heed` and in `with allowed():`, which it yields.

    Signals that come during the block raise at its end. So a lock that was taken is released.
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
    """Raise for signals that have come, in a block of `heeded`."""
    global _ended_by
    if not _is_heeding or not _is_main():
        return
    asking = [signum for signum in _came if signum != signal.SIGUSR2]
    _came.clear()
    if not asking or (_ended_by is not None and signal.SIGINT not in asking):
        return  # it is ending already, and only another Ctrl-C interrupts that
    _ended_by = asking[0]
    raise KeyboardInterrupt if signal.SIGINT in asking else EndedBySignalError(128 + asking[0])


def _note(signum: int, frame: FrameType | None) -> None:
    _came.append(signum)
    if not _n_deferring:
        heed()


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
