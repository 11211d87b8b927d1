"""What of a run waits in Slurm's queue, by what squeue said some time ago and what attempts have written since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurmgpu.run.liveness import last_heard
from slurmgpu.run.records import BriefRecord
from slurmgpu.run.submissions import SubmissionLine, ended_jobs
from slurmgpu.util.array_ids import array_of, indices_of

Job = Mapping[str, Any]
"""A job of the run in Slurm's queue, as the JSON of status has it."""
Queue = Sequence[Job]


def array_task(thing: Mapping[str, Any]) -> str:
    """The array task that a record, or a job in the queue, is of: "1234_7"."""
    if "task" in thing:
        return f"{thing['job']}_{thing['task']}"
    return str(thing["job_id"]) if "_" in thing["job_id"] else f"{thing['job_id']}_0"


def of_open(queue: Queue, lines: Sequence[SubmissionLine]) -> list[Job]:
    """The queue without jobs of submissions that have ended since it was asked."""
    over = ended_jobs(lines)
    return [job for job in queue if array_of(job["job_id"]) not in over]


def still_waiting(queue: Queue, records: Iterable[BriefRecord], asked: float) -> list[dict[str, Any]]:
    """The jobs in the queue without the tasks that have written of themselves since it was asked: these have started.

    A task that was put back into the queue after it had ended waits again.
    """
    seen: dict[str, set[int]] = {}
    for record in records:
        if last_heard(record) >= asked:
            seen.setdefault(record["job"], set()).add(record["task"])
    jobs = []
    for job in queue:
        if _waits(job) and seen:
            indices = indices_of(job["job_id"])
            n_left = job["n_tasks"] - sum(task in indices for task in seen.get(array_of(job["job_id"]), ()))
            if n_left > 0:
                jobs.append({**job, "n_tasks": n_left})
        else:
            jobs.append(dict(job))
    return jobs


def startable(queue: Queue, living: Iterable[BriefRecord]) -> list[tuple[Job, int]]:
    """The jobs that wait, each with the number of its tasks that may start while no other task of its array ends.

    squeue tells one reason for all of them, and one time: that of the first.
    """
    at_work = {array_task(job) for job in queue if job["n_tasks"] and job["state"] != "PENDING"}
    n_running = Counter(map(array_of, at_work | {array_task(record) for record in living}))
    waiting = [job for job in queue if _waits(job)]
    limits = {
        array_of(job["job_id"]): limit for job in waiting if (limit := indices_of(job["job_id"]).at_once) is not None
    }
    room = {array: max(0, limit - n_running[array]) for array, limit in limits.items()}
    found = []
    for job in waiting:
        n_tasks = 0 if job["reason"] == "JobArrayTaskLimit" else int(job["n_tasks"])
        if (array := array_of(job["job_id"])) in room:
            n_tasks = min(n_tasks, room[array])
            room[array] -= n_tasks
        found.append((job, n_tasks))
    return found


def _waits(job: Job) -> bool:
    return bool(job["state"] == "PENDING" and job["n_tasks"])
