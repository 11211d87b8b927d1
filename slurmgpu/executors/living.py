"""What of a run is alive, here or in Slurm's queue, and how to stop it."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Mapping
from typing import Any

from slurmgpu.claims import Watch
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import commands, queue
from slurmgpu.runs import Run
from slurmgpu.signs import processes_here
from slurmgpu.submissions import JOB_KEYS, slots_of

log = logging.getLogger(__name__)


def alive(run: Run, waiting_merge: str | None = None) -> str | None:
    """What of this run is alive or queued, in words; None when nothing is. Raises when Slurm does not tell.

    `waiting_merge` is the job of who asks, to merge when the others have ended; others that wait like it do not count.
    """
    if jobs := _queued(run, waiting_merge):
        return f"Slurm has {len(jobs)} of its jobs, such as {jobs[0].job_id} ({jobs[0].state})"
    for line in reversed(run.submissions()):
        if line["state"] != "ended" and "pids" in line and (here := _alive_here(run, line)):
            return here
    return None


def _queued(run: Run, waiting_merge: str | None) -> list[queue.QueuedJob]:
    if not queue.may_be_queued(run):
        return []
    try:
        # By the run directory, too: a submission that died between sbatch and its record has left no job ids, and one
        # that was refused may have left an array that could not be cancelled.
        jobs = queue.jobs_of(run)
    except commands.SlurmUnavailableError:
        if all(line["state"] == "ended" or line["executor"] != "slurm" for line in run.submissions()):
            return []  # where there is no Slurm, nothing was submitted by hand
        raise
    if waiting_merge is None:
        return jobs
    waiting = {waiting_merge, *(line.get("merge_job") for line in run.submissions() if line.get("by_hand"))}
    waiting |= {job.array_job for job in jobs if job.is_merge and not job.is_submitits(run)}
    return [job for job in jobs if job.array_job not in waiting]


def _alive_here(run: Run, line: Mapping[str, Any]) -> str | None:
    if (here := processes_here(line)) is not None:
        return f"process {here[0]} works on it" if here else None
    log.warning("this run was started on %s; watching its leases for %.0f s", line["host"], run.plan.lease_s)
    return f"tasks on {line['host']} renew their leases" if _renews(run) else None


def _renews(run: Run) -> bool:
    """Whether any claim is renewed within a lease's time."""
    watch = Watch(run.plan.lease_s)
    while True:
        states = [watch.look(shard, claim) for shard, claim in run.claims.held() if not claim.parked]
        open_states = [state for state in states if state != "stale"]
        if "alive" in states or not open_states:
            return "alive" in states
        time.sleep(min(1.0, run.plan.lease_s / 20))


def refuse_alive(run: Run, to_do: str) -> None:
    """Raise a sentence when something of the run is alive."""
    if what := alive(run):
        raise SlurmGPUError(
            f"{run.folder} is still at work: {what}. `slurmgpu status {run.typed}` shows it; wait for its end, "
            f"or `slurmgpu cancel {run.typed}`, before you {to_do}."
        )


def cancel(run: Run) -> str:
    """Stop what is alive of the run; what was done, in words."""
    from slurmgpu.executors import local

    stopped = []
    if jobs := sorted({job.array_job for job in _queued(run, None)}, key=int):
        for line in run.submissions():
            ids = {line[key] for key in JOB_KEYS if key in line} or set(jobs)  # it may not have written them
            if line["state"] != "ended" and line["executor"] == "slurm" and ids & set(jobs):
                run.record_submission({"submission": line["submission"], "cancelled": True})
        commands.cancel(*jobs)
        stopped.append(f"Slurm jobs {', '.join(jobs)}")
    for line in run.submissions():
        if line["state"] == "ended" or line["executor"] == "slurm":
            continue
        if line["host"] != platform.node():
            raise SlurmGPUError(f"This run works on {line['host']}; cancel it there.")
        if pids := sorted({*(processes_here(line) or ())} & {*slots_of(line)}):
            run.record_submission({"submission": line["submission"], "cancelled": True})
            local.stop(pids)
            stopped.append(f"processes {', '.join(map(str, pids))}")
    return "; ".join(stopped)
