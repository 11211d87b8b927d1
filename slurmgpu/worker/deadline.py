"""When a worker has to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Deadline:
    """A worker may continue until `stop` is set, or the walltime is nearly over.

    `end_time` is the end of the walltime in seconds since the epoch, None for never; `margin_s` of it stay unused.
    `late_end_times` gets the end if it becomes known later.
    """

    end_time: float | None
    margin_s: float
    stop: threading.Event
    late_end_times: Sequence[float] = ()
    _over: str | None = None
    _end: float | None = field(init=False)

    def __post_init__(self) -> None:
        # The monotonic clock, because the system clock may be set meanwhile.
        self._end = None if self.end_time is None else time.monotonic() + self.end_time - time.time()

    def over(self, needed_s: float = 0.0) -> str | None:
        """Why the worker may not continue for `needed_s`: "told to stop" or "deadline"; None if it may.

        Once it is not None, it stays so.
        """
        if self._over is None and self.stop.is_set():
            self._over = "told to stop"
        if self.end_time is None and self.late_end_times:
            self.end_time = self.late_end_times[-1]
            self.__post_init__()
        if self._over is None and self._end is not None:
            self._over = "deadline" if time.monotonic() + needed_s + self.margin_s > self._end else None
        return self._over

    def end_now(self) -> float:
        """Move the end of the walltime so close that no further shard fits; return the new end."""
        self._end = time.monotonic() + self.margin_s
        self.end_time = time.time() + self.margin_s
        return self.end_time
