"""The state of a run in one word, from its submissions, its attempts and Slurm's queue."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import TypedDict

from slurmgpu.report.queued import Queue, tasks_of_job
from slurmgpu.run.liveness import processes_here
from slurmgpu.run.submissions import ENDS, SubmissionLine, is_of_processes, is_over

Lines = Sequence[SubmissionLine]
"""The submissions of a run."""


class Standing(TypedDict):
    """The state of an attempt."""

    submission: int
    state: str
    silent: bool


def is_at_work(lines: Lines, queue: Queue | None) -> bool | None:
    """Whether tasks of the run are alive or queued, from Slurm and this machine's processes; None if unknown.

    An empty queue proves that none of this user's is: it has no jobs of others. None, a queue that was not asked,
    proves nothing.
    """
    if queue:
        return True
    if not lines:
        return None if queue is None else False
    found = [_has_processes(line, queue) for line in lines if line["state"] not in ENDS]
    if True in found:
        return True
    return None if None in found else False


def _has_processes(line: SubmissionLine, queue: Queue | None) -> bool | None:
    """The same for one submission, if the queue is empty or unknown."""
    if not is_of_processes(line):
        return None if queue is None or line.get("uid", os.getuid()) != os.getuid() else False
    here = processes_here(line)
    return None if here is None else bool(here)


def is_told(lines: Lines, merged: Lines, queue: Queue | None) -> bool:
    """Whether a report is up to date: the run is over, and no submission is newer than `merged`, the report's own.

    A later submission counts even if it was cancelled, because it set shards aside; a refused one put them back.
    """
    is_any = any(line["state"] != "refused" for line in lines)
    return not queue and is_over(lines) and is_any and made_since(lines, merged) is None


def made_since(lines: Lines, merged: Lines) -> int | None:
    """The last submission that Slurm did not refuse, if it is newer than `merged`, the report's own."""
    submitted = [line["submission"] for line in lines if line["state"] != "refused"][-1:]
    known = {line["submission"] for line in merged}
    return next((number for number in submitted if number not in known), None)


def state_of(
    lines: Lines,
    all_published: bool,
    is_complete: bool,
    attempts: Sequence[Standing],
    queue: Queue | None,
    leaving: Collection[str],
    at_work: bool | None,
) -> str:
    """One of planned, queued, running, merging, complete, incomplete, or ended (tasks are over, nothing is merged).

    `leaving` are tasks that recorded their end but may still be in the queue; `at_work` is from `is_at_work`.
    """
    if not lines:
        return "queued" if queue else "complete" if is_complete else "planned"
    # The merge may stay in the queue a little longer, and a task may be requeued after all is done.
    if is_over(lines) and (is_complete or not queue):
        if lines[-1].get("copied"):
            return "ended"
        return "complete" if is_complete else "incomplete"
    has_living = any(attempt["state"] != "ended" and not attempt["silent"] for attempt in attempts)
    if at_work is False and not has_living:
        return "ended"
    if all_published:
        return "merging"
    # A task may have started since the queue was asked, or ended.
    if has_living:
        return "running"
    if queue:
        tasks = [j for j in queue if j["n_tasks"] and (j["state"] == "PENDING" or not tasks_of_job(j) <= set(leaving))]
        if not tasks:
            return "merging" if any(not job["n_tasks"] for job in queue) else "ended"
        return "queued" if all(job["state"] == "PENDING" for job in tasks) else "running"
    latest = [attempt for attempt in attempts if attempt["submission"] == lines[-1]["submission"]]
    if not latest:
        return "running" if at_work else "queued"  # processes start at once; earlier submissions do not matter
    if not at_work:
        return "ended"
    return "merging" if all(attempt["state"] == "ended" for attempt in latest) else "running"
