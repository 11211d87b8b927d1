"""The values that a workload logs, checked and thinned, on their way to the task."""

from __future__ import annotations

import json
import logging
import math
import operator
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from slurmgpu.run.metric_log import Point
from slurmgpu.run.worker_events import Report, WorkerEvent

log = logging.getLogger("slurmgpu.worker")

FLUSH_S = 1.0
"""Points are sent at most this often, or before the worker's next event."""
BURST = 2000
RATE = 100.0
"""After a burst, this many points a second are kept; of the others only the last one before the next event."""
HALVING_BYTES = 16 << 20
"""Each time a process has kept this many more points, it halves the rate."""
LARGEST_STEP = 2**63 - 1


class LoggedValues:
    """Collects what `task.log` gets; sent by `flush` before shards are published, so that none of them lacks any.

    `item` is the current item of a workload that takes one at a time, else None.
    """

    def __init__(self, report: Report, clock: Callable[[], float] = time.monotonic) -> None:
        self.item: int | None = None
        self._report, self._clock = report, clock
        self._lock = threading.Lock()
        self._points: list[Point] = []
        self._last: Point | None = None  # beyond the rate, and not sent yet
        self._n_left_out = self._n_bytes = 0
        self._room, self._counted = float(BURST), clock()
        self._flushed = -math.inf

    def log(self, step: int, **values: Any) -> None:
        """Log numbers of a step; raises TypeError or ValueError, with a sentence, for anything else."""
        point = (round(time.time(), 3), self.item, _checked(step), _numbers(values))
        with self._lock:
            now = self._clock()
            rate = RATE / 2.0 ** (self._n_bytes // HALVING_BYTES)
            self._room = min(BURST, self._room + rate * (now - self._counted))
            self._counted = now
            if self._last is not None:
                self._n_left_out += 1
                if self._n_left_out == 1:
                    log.warning("task.log is called more than %.3g times a second, so some steps are left out", rate)
            if self._room < 1:
                self._last = point
                return
            self._room -= 1
            self._last = None
            self._keep(point)
            points = self._take() if now - self._flushed >= FLUSH_S else []
        self._send(points)

    def flush(self) -> None:
        """Send what was logged so far."""
        if not self._points and self._last is None:
            return  # as mostly: it is called before every event
        with self._lock:
            if self._last is not None:
                self._keep(self._last)
                self._last = None
            points = self._take()
        self._send(points)

    def before(self, report: Report) -> Report:
        """`report`, which first sends what was logged."""

        def send(event: WorkerEvent) -> None:
            self.flush()
            report(event)

        return send

    def _keep(self, point: Point) -> None:
        self._points.append(point)
        self._n_bytes += len(json.dumps(point))

    def _take(self) -> list[Point]:
        points, self._points = self._points, []
        self._flushed = self._clock()
        return points

    def _send(self, points: list[Point]) -> None:
        if points:
            self._report({"event": "log", "points": points})


def noted_number(name: str, value: Any) -> float:
    """The number that `task.note` gets, as a shard's notes hold it; TypeError or ValueError for anything else."""
    number = _plain(value)
    if not isinstance(number, int | float) or not math.isfinite(number):
        raise TypeError(f"task.note: {name} is {_shown(value)}; expected a finite number, such as 16.")
    return number


def _checked(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"task.log: the step is {_shown(step)}; expected a whole number, such as 100.") from None
    if isinstance(step, bool) or not 0 <= number <= LARGEST_STEP:
        raise ValueError(f"task.log: the step is {step!r}; expected a whole number of at least 0.")
    return number


def _numbers(values: Mapping[str, Any]) -> dict[str, float | str]:
    if not values:
        raise TypeError("task.log: there is no value; name at least one, such as task.log(step, loss=0.3).")
    return {name: _number(name, value) for name, value in values.items()}


def _number(name: str, value: Any) -> float | str:
    """A number; as text if JSON has none for it, "nan" or "inf"."""
    given, value = value, _plain(value)
    try:
        number = float(value) if isinstance(value, int | float) else None
    except OverflowError:
        number = None
    if number is None:
        raise TypeError(
            f"task.log: {name} is {_shown(given)}; expected one number. Reduce it first, for instance to its mean."
        )
    return number if math.isfinite(number) else str(number)


def _plain(value: Any) -> Any:
    """Python's number for NumPy's scalars, and arrays and tensors without dimensions."""
    is_scalar = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    return value.item() if is_scalar and not isinstance(value, int | float) else value


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    kind = f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape else "")
    return kind if shape or len(repr(value)) > 60 else f"{kind}, {value!r}"
