"""The values that workloads log with `task.log`: a file of JSON lines for each attempt, in telemetry/.

docs/reference/files.md has the lines. Only the attempt itself appends to its file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from slurmgpu.run.records import Attempt
from slurmgpu.util.regular_files import open_file, open_to_append
from slurmgpu.util.shared_files import PATIENCE_S, list_names, retried

log = logging.getLogger(__name__)

METRICS_FORMAT = "slurmgpu metrics"
METRICS_VERSION = 1
SUFFIX = ".metrics.jsonl"
CHUNK_BYTES = 1 << 20

Point = tuple[float, "int | None", int, "dict[str, float | str]"]
"""Time in seconds since the epoch by the node's clock, item, step, and values by name."""


class HeadLine(TypedDict):
    """The first line of a file."""

    format: str
    version: int
    submission: int


class PointLine(TypedDict):
    """A call of `task.log`; `item` is null unless the workload takes one item at a time."""

    time: float
    item: int | None
    step: int
    values: dict[str, float | str]


@dataclass(frozen=True)
class Logged:
    """A point, and the submission and the attempt that logged it."""

    submission: int
    attempt: str
    time: float
    item: int | None
    step: int
    values: dict[str, float]


class MetricWriter:
    """Appends what an attempt's worker logs; lines that cannot be written are kept for the next time."""

    def __init__(self, folder: Path, attempt: Attempt) -> None:
        self._path = folder / "telemetry" / f"{attempt.name}{SUFFIX}"
        self._unwritten = _line(HeadLine(format=METRICS_FORMAT, version=METRICS_VERSION, submission=attempt.submission))
        self._has_points = False

    def write(self, points: Sequence[Point]) -> None:
        """Append points in one write."""
        self._has_points = True
        for at, item, step, values in points:
            self._unwritten += _line(PointLine(time=at, item=item, step=step, values=values))
        self._append(0.0)

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Append what could not be written before."""
        if self._has_points and self._unwritten:
            self._append(patience_s)

    def _append(self, patience_s: float) -> None:
        def append() -> None:
            with open_to_append(self._path) as file:
                file.write(self._unwritten)

        try:
            retried(append, patience_s)
            self._unwritten = b""
        except OSError as error:
            log.warning("%s cannot be written and is retried: %s", self._path, error)
            if not self._unwritten.startswith(b"\n"):
                self._unwritten = b"\n" + self._unwritten  # the failed write may have left half a line


def _count(value: object) -> int:
    """A whole number that SQLite and trackers can keep; ValueError for anything else."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.80} is not a count")
    return value


def _time(value: object) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r:.80} is not a time")
    return float(value)


class MetricReader:
    """Reads the metric files of a run from where it stopped the last time; damaged lines are skipped."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / "telemetry"
        self._read: dict[str, int] = {}
        self._submissions: dict[str, int] = {}

    def news(self) -> Iterator[Logged]:
        """The values that were logged since the last call."""
        with contextlib.suppress(FileNotFoundError):
            for name in list_names(self._folder):
                if name.endswith(SUFFIX):
                    yield from self._news_of(name)

    def _news_of(self, name: str) -> Iterator[Logged]:
        attempt = name.removesuffix(SUFFIX)
        while chunk := retried(lambda: self._chunk(name)):
            whole = chunk.rfind(b"\n") + 1
            if not whole and len(chunk) < CHUNK_BYTES:
                return  # its last line is being written
            whole = whole or len(chunk)
            self._read[name] = self._read.get(name, 0) + whole
            for line in chunk[:whole].splitlines():
                if (point := self._point(attempt, line)) is not None:
                    yield point

    def _chunk(self, name: str) -> bytes:
        with open_file(self._folder / name) as file:
            file.seek(self._read.get(name, 0))
            return file.read(CHUNK_BYTES)

    def _point(self, attempt: str, line: bytes) -> Logged | None:
        try:
            value = json.loads(line)
            if "format" in value:
                self._submissions[attempt] = _count(value["submission"])
                return None
            item = None if value["item"] is None else _count(value["item"])
            numbers = {str(key): float(number) for key, number in value["values"].items()}
            submission = self._submissions.get(attempt, 1)
            return Logged(submission, attempt, _time(value["time"]), item, _count(value["step"]), numbers)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            if line.strip():
                log.debug("%s: a damaged line is skipped: %.100r", attempt, line)
            return None


def _line(value: HeadLine | PointLine) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
