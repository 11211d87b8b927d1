"""The spans of time of attempts and shards, from a report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slurmgpu.page.words import plain
from slurmgpu.report.attempts import AttemptRow
from slurmgpu.report.ledger import Counting, counting, kind_of
from slurmgpu.report.report_file import Report
from slurmgpu.run.records import ATTEMPT_STATES, Computed
from slurmgpu.util.array_ids import task_of_attempt

NONSENSE = (TypeError, ValueError, KeyError, IndexError)
"""The errors of a damaged row, which is left out."""


@dataclass(frozen=True)
class AttemptSpan:
    """An attempt's times: `phases` are (state, start, stop), `shards` (shard, start, stop, kind).

    A shard's kind is that of the ledger: useful, repeated or lost.
    """

    attempt: str
    task: str
    node: str
    start: float
    stop: float
    failed: bool
    phases: Sequence[tuple[str, float, float]]
    shards: Sequence[tuple[int, float, float, str]]
    deaths: Sequence[float]


def spans_of(report: Report) -> list[AttemptSpan]:
    """The attempts with known times, in the order of the report."""
    counts = _counting(report)
    spans = []
    for attempt in report["attempts"]:
        with contextlib.suppress(*NONSENSE):
            if (span := _span(attempt, counts)) is not None:
                spans.append(span)
    return spans


def rows_of(spans: Sequence[AttemptSpan]) -> list[tuple[str, list[AttemptSpan]]]:
    """The tasks in order, each with its attempts."""
    rows: dict[str, list[AttemptSpan]] = {}
    for span in spans:
        rows.setdefault(span.task, []).append(span)
    return list(rows.items())


def begin_of(report: Report, spans: Sequence[AttemptSpan]) -> float:
    """The time of the first submission, or of the first attempt if a node's clock is slow."""
    times = [line["time"] for line in report["submissions"] if isinstance(line.get("time"), int | float)]
    starts = [*times[:1], *(span.start for span in spans)]
    return float(min(starts, default=report["written"]))


def makers_of(spans: Sequence[AttemptSpan]) -> dict[int, str]:
    """The attempt whose rows are in the result, by shard."""
    return {shard: span.attempt for span in spans for shard, _, _, kind in span.shards if kind == "useful"}


def items_of(report: Report, size_of: Callable[[int], int]) -> dict[tuple[str, int, float], float]:
    """The items of each computation of a shard, by attempt, shard and start; `size_of` is the number in a whole shard.

    Computations of a few items again have equal shares of what the attempt computed beside whole shards.
    """
    found = {}
    for attempt in report["attempts"]:
        with contextlib.suppress(*NONSENSE):
            entries = _published(attempt)
            n_whole = sum(size_of(shard) for shard, _, _, won, *revision in entries if won and not revision)
            n_again = sum(bool(won and revision) for _, _, _, won, *revision in entries)
            share = max(0, attempt["n_items"] - n_whole) / max(1, n_again)
            for shard, at, _, _, *revision in entries:
                found[str(attempt["attempt"]), shard, at] = share if revision else float(size_of(shard))
    return found


def _counting(report: Report) -> Counting:
    records: list[Computed] = []
    for attempt in report["attempts"]:
        with contextlib.suppress(*NONSENSE):
            name, submission = str(attempt["attempt"]), int(attempt["submission"] or 0)
            records.append({"attempt": name, "submission": submission, "published": _published(attempt)})
    return counting(records, set(range(report["n_shards"])) - {hole["shard"] for hole in report["missing"]})


def _published(attempt: AttemptRow) -> list[list[Any]]:
    """Published shards: shard, start, seconds, whether it was the first, and the revision, if it is one."""
    return [[int(entry[0]), float(entry[1]), float(entry[2]), *entry[3:5]] for entry in attempt["shards"]]


def _span(attempt: AttemptRow, counts: Counting) -> AttemptSpan | None:
    if attempt["started"] is None:
        return None
    name = str(attempt["attempt"])
    start = float(attempt["started"])
    stop = max(start + float(attempt["seconds"]), float(attempt["ended"] or attempt["updated"] or start))
    shards = [
        (shard, at, at + seconds, kind_of(shard, name, at, counts)) for shard, at, seconds, *_ in _published(attempt)
    ]
    return AttemptSpan(
        attempt=name,
        task=task_of_attempt(name),
        node=plain(attempt["node"] or ""),
        start=start,
        stop=stop,
        failed=attempt["failure"] is not None,
        phases=list(_phases(attempt, stop)),
        shards=shards,
        deaths=[float(death["at"]) for death in attempt["deaths"] if "at" in death],
    )


def _phases(attempt: AttemptRow, stop: float) -> Iterator[tuple[str, float, float]]:
    changes = [(float(at), str(state)) for at, state in attempt["phases"]]
    ends = [*(at for at, _ in changes[1:]), stop]
    for (at, state), end in zip(changes, ends, strict=True):
        if state in ATTEMPT_STATES and end > at:
            yield state, at, end
