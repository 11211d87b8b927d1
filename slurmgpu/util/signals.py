"""The signals that have ended processes, and whether a process caused its signal itself."""

from __future__ import annotations

import signal

SELF_INFLICTED = {
    *(signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS)
}
"""Signals that a process causes itself; SIGKILL and SIGTERM may come from outside.

SIGTRAP is __builtin_trap of C on ARM, which is SIGILL on x86.
"""


def signal_of(code: int) -> int:
    """The signal that ended a process, from its exit code; 0 for none. Shells report 128 + the signal's number."""
    return -code if code < 0 else code - 128 if 128 < code < 192 else 0


def name_of_signal(number: int) -> str:
    """SIGKILL, or `signal 40` for one that has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_self_inflicted(code: int) -> bool:
    """Whether a process ended by itself (a segfault, an exit) rather than being killed from outside."""
    number = signal_of(code)
    return number == 0 or number in SELF_INFLICTED
