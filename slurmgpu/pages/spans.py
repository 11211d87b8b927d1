"""What attempts did when, as spans of time that can be drawn; from reports of any age."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmgpu.pages.words import plain

STATES = ("starting", "loading", "running")


@dataclass(frozen=True)
class Life:
    """An attempt's time: `phases` are (state, start, stop), `shards` (shard, start, stop, won)."""

    attempt: str
    task: str
    node: str
    start: float
    stop: float
    failed: bool
    phases: Sequence[tuple[str, float, float]]
    shards: Sequence[tuple[int, float, float, bool]]
    deaths: Sequence[float]

    @property
    def label(self) -> str:
        """The task, and its node if it has one."""
        return f"{self.task} {self.node}".strip()


def lives_of(report: Mapping[str, Any]) -> list[Life]:
    """The attempts of which it is known when they lived; those of one task lie behind each other."""
    lives = []
    for attempt in report["attempts"]:
        try:
            if (life := _life(attempt)) is not None:
                lives.append(life)
        except (TypeError, ValueError, KeyError, IndexError):
            continue  # a record that makes no sense costs its own row
    order = {task: number for number, task in enumerate(dict.fromkeys(life.task for life in lives))}
    return sorted(lives, key=lambda life: (_number(life.task), order[life.task], life.start))


def rows_of(lives: Sequence[Life]) -> list[tuple[str, list[Life]]]:
    """The tasks in order, each with its attempts."""
    rows: dict[str, list[Life]] = {}
    for life in lives:
        rows.setdefault(life.task, []).append(life)
    return list(rows.items())


def begin_of(report: Mapping[str, Any], lives: Sequence[Life]) -> float:
    """When the run was submitted first, or began, if that was before it by the node's clock."""
    times = [line["time"] for line in report["submissions"] if isinstance(line.get("time"), int | float)]
    starts = [*times[:1], *(life.start for life in lives)]
    return float(min(starts, default=report["written"]))


def _life(attempt: Mapping[str, Any]) -> Life | None:
    if attempt["started"] is None:
        return None
    start = float(attempt["started"])
    stop = max(start + float(attempt["seconds"]), float(attempt["ended"] or attempt["updated"] or start))
    shards = [
        (int(entry[0]), float(entry[1]), float(entry[1]) + float(entry[2]), entry[3] if len(entry) > 3 else True)
        for entry in attempt.get("shards") or ()
    ]
    return Life(
        attempt=str(attempt["attempt"]),
        task=str(attempt["attempt"]).rpartition(".")[0],
        node=plain(attempt["node"] or ""),
        start=start,
        stop=stop,
        failed=attempt["failure"] is not None,
        phases=list(_phases(attempt, start, stop)),
        shards=shards,
        deaths=[float(death["at"]) for death in attempt["deaths"] if "at" in death],
    )


def _phases(attempt: Mapping[str, Any], start: float, stop: float) -> Iterator[tuple[str, float, float]]:
    changes = [(float(at), str(state)) for at, state in attempt.get("phases") or ()]
    if not changes:  # of an older slurmgpu, which told only how long loading took
        loading = float(attempt["load_s"] or 0.0)
        changes = [(start, "loading"), (start + loading, "running")] if attempt["load_s"] else [(start, "running")]
    ends = [*(at for at, _ in changes[1:]), stop]
    for (at, state), end in zip(changes, ends, strict=True):
        if state in STATES and end > at:
            yield state, at, end


def _number(task: str) -> tuple[int, str, int]:
    """A key that sorts tasks of one job by their number."""
    job, _, number = task.rpartition("_")
    local = job.removeprefix("local").removeprefix("debug")
    return int(local) if local.isdecimal() else 0, job, int(number) if number.isdecimal() else 0
