"""What the last report says of items, read once for many of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from slurmgpu.errors import SlurmGPUError
from slurmgpu.report.build import Report, read_report, report_path
from slurmgpu.report.states import Lines
from slurmgpu.run.directory import Run
from slurmgpu.util.shared_files import retried


class Told(NamedTuple):
    """What a report says: its submissions, the shards that were missing, and by item its failure and its message."""

    submissions: Lines
    missing: frozenset[int]
    failures: Mapping[int, tuple[str, str]]


_read: dict[str, tuple[tuple[int, int, int], Told | None]] = {}


def told_of(run: Run) -> Told | None:
    """What the report says of items; None if there is none, or it is damaged. It is read once for many items."""
    path = report_path(run)
    try:
        about = retried(path.stat)
        mark = (about.st_ino, about.st_mtime_ns, about.st_size)
        known = _read.get(str(path))
        if known is None or known[0] != mark:
            _read.clear()  # one of a million failures is large
            known = _read[str(path)] = mark, _told_by(read_report(run))
    except (OSError, SlurmGPUError):
        return None
    return known[1]


def _told_by(report: Report | None) -> Told | None:
    if report is None:
        return None
    failures = {error["index"]: (error["class"], error["message"]) for error in report["errors"]}
    return Told(report["submissions"], frozenset(hole["shard"] for hole in report["missing"]), failures)
