"""The run's jobs in Slurm's queue, from an earlier squeue and the attempts' records since then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TypedDict

from slurmgpu.run.liveness import last_heard
from slurmgpu.run.records import BriefRecord, task_of
from slurmgpu.run.submissions import SubmissionLine, ended_jobs
from slurmgpu.util.array_ids import Indices, array_of, indices_of


class _Shared(TypedDict, total=False):
    tasks_per_node: int


class Job(_Shared):
    """A job of the run in Slurm's queue, as in the JSON of status, or several of an array; a merge has no tasks.

    `tasks_per_node` is there if each job has several tasks.
    """

    job_id: str
    state: str
    reason: str
    start: float | None
    n_tasks: int


Queue = Sequence[Job]


def is_held(job: Job) -> bool:
    """Whether a job waits to be released, by its user or an administrator, and until then has no start."""
    reason = job["reason"].lower()  # "JobHeldUser", "job requeued in held state", "JobHoldMaxRequeue"
    return job["state"] == "PENDING" and ("held" in reason or reason.startswith("jobhold"))


def reason_of(job: Job) -> str:
    """Why a job is pending, in Slurm's words; empty until Slurm has looked at it (squeue says None)."""
    return "" if job["reason"] == "None" else job["reason"]


def is_suspended(job: Job) -> bool:
    """Whether a job is suspended, by scontrol or by a preemption."""
    return job["state"] in ("SUSPENDED", "STOPPED")


def tasks_of_job(job: Job) -> set[str]:
    """The tasks of a job that squeue lists alone: `1234_7`; none for jobs of an array that have not started."""
    if "[" in job["job_id"]:
        return set()
    array = array_of(job["job_id"])
    return {f"{array}_{task}" for task in _indices(job)}


def _indices(job: Job) -> Indices:
    return indices_of(job["job_id"], job.get("tasks_per_node", 1))


def requeued(queue: Queue) -> set[str]:
    """The array tasks that squeue lists one by one: an attempt of one without a recorded end died with its node."""
    return {task for job in queue if _waits(job) for task in tasks_of_job(job)}


def of_open(queue: Queue, lines: Sequence[SubmissionLine], over_before: Collection[str | None]) -> list[Job]:
    """The queue without jobs of submissions that ended since squeue was asked.

    Tasks of jobs that were `over_before` stay: somebody has requeued them, or they run after their merge.
    """
    over = ended_jobs(lines)

    def stays(job: Job) -> bool:
        array = array_of(job["job_id"])
        return array not in over or (job["n_tasks"] > 0 and array in over_before)

    return list(filter(stays, queue))


def still_waiting(queue: Queue, records: Iterable[BriefRecord], asked: float) -> list[Job]:
    """The jobs in the queue without tasks that have written since squeue was asked: these have started.

    A task that Slurm requeued after its end waits again.
    """
    seen: dict[str, set[int]] = {}
    for record in records:
        if last_heard(record) >= asked:
            seen.setdefault(record["job"], set()).add(record["task"])
    jobs: list[Job] = []
    for job in queue:
        if _waits(job) and seen:
            indices = _indices(job)
            tasks = seen.get(array_of(job["job_id"]), ())
            started = {task // indices.per_job for task in tasks if task in indices}  # a job's tasks start together
            n_left = job["n_tasks"] - len(started) * indices.per_job
            if n_left > 0:
                jobs.append({**job, "n_tasks": n_left})
        else:
            jobs.append(job)
    return jobs


def startable(queue: Queue, living: Iterable[BriefRecord]) -> list[tuple[Job, int]]:
    """The waiting jobs, each with the number of tasks that may start before another task of its array ends.

    squeue gives one reason and one start time for all of them: those of the first.
    """
    at_work = {task for job in queue if job["state"] != "PENDING" for task in tasks_of_job(job)}
    n_running = Counter(map(array_of, at_work | {task_of(record) for record in living}))
    waiting = [job for job in queue if _waits(job)]
    limits = {array_of(job["job_id"]): limit for job in waiting if (limit := _indices(job).at_once) is not None}
    room = {array: max(0, limit - n_running[array]) for array, limit in limits.items()}
    found = []
    for job in waiting:
        n_tasks = 0 if job["reason"] == "JobArrayTaskLimit" else job["n_tasks"]
        if (array := array_of(job["job_id"])) in room:
            n_tasks = min(n_tasks, room[array])
            room[array] -= n_tasks
        found.append((job, n_tasks))
    return found


def _waits(job: Job) -> bool:
    return job["state"] == "PENDING" and job["n_tasks"] > 0
