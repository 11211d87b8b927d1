"""The signals by which processes have ended."""

from __future__ import annotations

import signal


def signal_of(code: int) -> int:
    """The signal that a process died of by its exit code, 0 for none; shells report one as 128 + its number."""
    return -code if code < 0 else code - 128 if 128 < code < 192 else 0


def name_of_signal(number: int) -> str:
    """SIGKILL, or `signal 40` for one that has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
