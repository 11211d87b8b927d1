"""What a process asks of the kernel about itself: prctl(2)."""

from __future__ import annotations

import ctypes

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h


def prctl(option: int, value: int | bytes) -> None:
    """Set an option of this process; OSError if the kernel refuses."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value!r})")
