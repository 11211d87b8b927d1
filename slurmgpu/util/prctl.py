"""Options of this process that the kernel keeps: prctl(2)."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h


def prctl(option: int, value: int | bytes) -> None:
    """Set an option of this process; OSError if the kernel refuses."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value!r})")


def end_with(parent: int, signum: int = signal.SIGTERM) -> None:
    """Let the kernel send this signal to this process, a fork of process `parent`, when the parent ends for any reason.

    More exactly, when the thread that forked ends; a fork of this process gets no such signal.
    """
    prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it has ended before
        os.kill(os.getpid(), signum)


def outlive_parent() -> None:
    """Undo `end_with`."""
    prctl(PR_SET_PDEATHSIG, 0)
