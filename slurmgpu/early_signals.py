"""Signals that come before a task listens for them: remembered from its first instruction on, and heeded once it does.

Without this one that comes while modules are imported, or while the run is read, ends the process or is passed over.
"""

from __future__ import annotations

import signal
from types import FrameType

SIGNUMS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
_came: list[int] = []


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


def _note(signum: int, frame: FrameType | None) -> None:
    _came.append(signum)
