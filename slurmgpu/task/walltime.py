"""When the allocation of an attempt ends."""

from __future__ import annotations

import time
from collections.abc import Callable

NOTICE_S = 120
"""A signal this close to the end of the walltime is its notice; Slurm may send it 60 s early (sbatch(1))."""


class Walltime:
    """The end of an allocation, None for never; `late_end` gives it where Slurm did not know it when the attempt began.

    It is kept by the monotonic clock, so that setting the clock does not change the time left.
    """

    def __init__(self, end_time: float | None, late_end: Callable[[], float | None]) -> None:
        self._late_end = late_end
        self._end: float | None = None
        if end_time is not None:
            self.set(end_time)

    @property
    def end_time(self) -> float | None:
        """The end in seconds since the epoch, by the clock as it is set now; None if it is not known."""
        return None if self._end is None else time.time() + self._end - time.monotonic()

    @property
    def is_near(self) -> bool:
        """Whether a signal from Slurm is about the walltime, not a preemption."""
        return self._end is not None and time.monotonic() > self._end - NOTICE_S

    def set(self, end_time: float) -> None:
        """Let the allocation end at this time."""
        self._end = time.monotonic() + end_time - time.time()

    def learn(self) -> float | None:
        """The end of the allocation, if it was not known before."""
        if self._end is None and (end_time := self._late_end()) is not None:
            self.set(end_time)
            return end_time
        return None
