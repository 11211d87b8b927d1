"""The state of a run in a word, by its submissions, its attempts and Slurm's queue."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from slurmgpu.signs import processes_here
from slurmgpu.submissions import ENDS, is_over
from slurmgpu.waiting import Queue, array_task

Lines = Sequence[Mapping[str, Any]]
"""The submissions of a run."""


def anybody(lines: Lines, queue: Queue | None) -> bool | None:
    """Whether somebody works on the run, as Slurm and this machine's processes tell; None if that cannot be known."""
    if queue or not lines:
        return None if queue is None else bool(queue)
    open_lines = [line for line in lines if line["state"] not in ENDS]
    found = [queue if line["executor"] == "slurm" else processes_here(line) for line in open_lines]
    return True if any(found) else None if None in found else False


def is_told(lines: Lines, merged: Lines, queue: Queue | None) -> bool:
    """Whether a report tells how a run stands: it is over, and `merged`, the report's submissions, are all there are.

    What was submitted since, and was cancelled or refused, had set shards aside.
    """
    return not queue and is_over(lines) and bool(merged) and merged[-1]["submission"] == lines[-1]["submission"]


def state_of(
    lines: Lines,
    all_published: bool,
    is_complete: bool,
    attempts: Sequence[Mapping[str, Any]],
    queue: Queue | None,
    leaving: Collection[str],
    works: bool | None,
) -> str:
    """One of planned, queued, running, merging, complete, incomplete; "ended" if tasks are over, nothing merged.

    `leaving` are the tasks that have written their end, and may still be in the queue; `works` is of `anybody`.
    """
    if not lines:
        return "queued" if queue else "planned"
    if is_over(lines) and not queue:  # the merge may be in the queue a little longer
        return "complete" if is_complete else "incomplete"
    is_at_work = any(attempt["state"] != "ended" and not attempt["silent"] for attempt in attempts)
    if works is False and not is_at_work:
        return "ended"
    if all_published:
        return "merging"
    # A task may have started since the queue was asked, or ended.
    if is_at_work:
        return "running"
    if queue:
        tasks = [j for j in queue if j["n_tasks"] and (j["state"] == "PENDING" or array_task(j) not in leaving)]
        if not tasks:
            return "merging" if any(not job["n_tasks"] for job in queue) else "ended"
        return "queued" if all(job["state"] == "PENDING" for job in tasks) else "running"
    if works and attempts:
        return "merging" if all(attempt["state"] == "ended" for attempt in attempts) else "running"
    return "ended" if attempts else "queued"
