"""What of a run is alive, here or in Slurm's queue, and how to stop it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from slurmgpu.errors import SlurmGPUError
from slurmgpu.run.claims import Watch
from slurmgpu.run.directory import Run
from slurmgpu.run.heartbeats import Observer, Sign
from slurmgpu.run.liveness import are_seen_here, patience, processes_here
from slurmgpu.run.owners import name_of
from slurmgpu.run.submissions import JOB_KEYS, SubmissionLine, slots_of
from slurmgpu.slurm import commands, queue

log = logging.getLogger(__name__)

MERGE_PAUSE_S = 5.0


def alive(run: Run, waiting_merge: str | None = None) -> str | None:
    """What of this run is alive or queued, in words; None when nothing is. Raises when Slurm does not tell.

    `waiting_merge` is the job of who asks, to merge when the others have ended; others that wait like it do not count.
    Of tasks of which Slurm here knows nothing, another user's or another cluster's, the heartbeats are watched: that
    may take as long as a lease, and half a minute at least.
    """
    queued = _queue_of(run)
    if jobs := _queued(run, waiting_merge, queued):
        return f"Slurm has {len(jobs)} of its jobs, such as {jobs[0].job_id} ({jobs[0].state})"
    is_hidden = False
    for line in reversed(run.submissions()):
        if line["state"] != "ended" and "pids" in line:
            if (here := processes_here(line)) is None:
                is_hidden = True
            elif here:
                return f"process {here[0]} works on it"
    return _heard(run, queued, is_hidden, waiting_merge)


def _queue_of(run: Run) -> list[queue.QueuedJob] | None:
    """The jobs in the queue of all users that the run knows of; None where there is no Slurm, and need not be."""
    if not queue.may_be_queued(run):
        return None
    lines = run.submissions()
    try:
        return queue.own_jobs(line["uid"] for line in lines if line["state"] != "ended" and "uid" in line)
    except commands.SlurmUnavailableError as error:
        if all(line["state"] == "ended" or line["executor"] != "slurm" for line in lines):
            return None  # where there is no Slurm, nothing was submitted by hand
        raise commands.SlurmUnavailableError(f"It cannot be known what the run has in the queue. {error}") from error


def _queued(run: Run, waiting_merge: str | None, queued: Sequence[queue.QueuedJob] | None) -> list[queue.QueuedJob]:
    if queued is None:
        return []
    # By the run directory, too: a submission that died between sbatch and its record has left no job ids, and one
    # that was refused may have left an array that could not be cancelled.
    jobs = queue.jobs_of(run, queued)
    if waiting_merge is None:
        return jobs
    waiting = {waiting_merge, *(line.get("merge_job") for line in run.submissions() if line.get("by_hand"))}
    waiting |= {job.array_job for job in jobs if job.is_merge and not job.is_submitits(run)}
    return [job for job in jobs if job.array_job not in waiting]


def _heard(
    run: Run, queued: Sequence[queue.QueuedJob] | None, is_hidden: bool, waiting_merge: str | None
) -> str | None:
    """Which task shows that it lives; None once all others have been silent for long enough.

    `is_hidden` is whether processes of this run may work where they cannot be seen from here. Of the queue of another
    cluster nothing is heard: who has jobs there is told so, but not a merge that waits, as one there waits for it.
    """
    patience_s, cluster = patience(run.plan.lease_s), None if queued is None else queue.own_cluster()
    observer = _OBSERVERS.setdefault(run.folder, Observer(run.folder, patience_s))
    foreign = [line["cluster"] for line in run.submissions() if _waits_elsewhere(line, cluster)]
    is_unclear = queued is not None and any(map(_is_unclear, run.submissions()))
    is_hidden, written = is_hidden or is_unclear, _written_by_living(run) if is_unclear else {}
    leases, begun, is_told = Watch(run.plan.lease_s), time.monotonic(), False
    while True:
        signs = [sign for sign in observer.look() if not _is_over(sign, cluster, queued)]
        if living := [sign for sign in signs if sign.lives]:
            return f"{living[0].in_words} is alive"
        doubts = [sign.in_words for sign in signs if sign.lives is None]
        if foreign and waiting_merge is None and not doubts:
            return f"jobs of it may wait in the queue of the cluster {foreign[0]}, which is not seen here"
        if time.monotonic() - begun <= patience_s:
            doubts += [f"a task of a job on the cluster {name}" for name in foreign[:1]]
            doubts += ["a task of a submission by an older slurmgpu"] * is_unclear
        changed = _written_by_living(run).items() - written.items() if is_unclear else ()
        if changed:
            return f"task {min(changed)[0]} writes of itself"
        if is_hidden:
            states = [leases.look(shard, claim) for shard, claim in run.claims.held() if not claim.parked]
            if "alive" in states:
                return "tasks renew their leases"
            doubts += ["a task that holds a claim"] * ("unknown" in states)
        if not doubts:
            return None
        if not is_told:
            log.warning("waiting up to %.0f s to see whether %s lives", patience_s, doubts[0])
            is_told = True
        time.sleep(min(1.0, patience_s / 20))


_OBSERVERS: dict[Path, Observer] = {}
"""What this process has seen of heartbeats: a second look does not watch again who was silent for long."""


def _is_over(sign: Sign, cluster: str | None, queued: Sequence[queue.QueuedJob] | None) -> bool:
    """Whether a task is known to have ended, however: its job, of this user and cluster, is not in the queue."""
    told = sign.told
    if queued is None or told.get("cluster") is None or told["cluster"] != cluster or told.get("uid") != os.getuid():
        return False
    # The queue knows nothing of tasks of the local executor, in an allocation of another job's say.
    return str(told.get("job")).isdecimal() and all(job.array_job != told.get("job") for job in queued)


def _waits_elsewhere(line: SubmissionLine, cluster: str | None) -> bool:
    """Whether a submission may have tasks in a queue that is not seen here."""
    if line["state"] not in ("submitting", "queued") or line.get("cancelled"):
        return False
    return line.get("cluster") is not None and line["cluster"] != cluster


def _is_unclear(line: SubmissionLine) -> bool:
    """Whether a submission of an older slurmgpu may be another user's or another cluster's, which it does not say."""
    is_open = line["executor"] == "slurm" and line["state"] in ("submitting", "queued")
    return is_open and not (line.keys() >= {"uid", "cluster"})


def _written_by_living(run: Run) -> dict[str, float]:
    """When each attempt that has not ended wrote of itself, by its own clock: older ones have no heartbeats."""
    return {record["attempt"]: record["updated"] for record in run.attempts() if record["state"] != "ended"}


def wait_for_others(run: Run, own_array: str | None) -> None:
    """Wait until no task lives but those of an array whose merge job this is, and which is over."""
    while what := others_alive(run, own_array):
        log.info("waiting: %s", what)
        time.sleep(MERGE_PAUSE_S)


def others_alive(run: Run, own_array: str | None) -> str | None:
    """Which task lives that is of another array than this one of this cluster; None once all are silent."""
    cluster = os.environ.get("SLURM_CLUSTER_NAME")
    observer = _OBSERVERS.setdefault(run.folder, Observer(run.folder, patience(run.plan.lease_s)))
    while True:
        signs = observer.look()
        others = [s for s in signs if s.told.get("cluster") != cluster or s.told.get("job") != own_array]
        if living := [sign for sign in others if sign.lives]:
            return f"{living[0].in_words} is alive"
        if not any(sign.lives is None for sign in others):
            return None
        time.sleep(1.0)


def forget_the_dead(run: Run) -> None:
    """Remove the heartbeats of tasks that were killed, after a merge: who asks next need not watch them again."""
    observer = _OBSERVERS.get(run.folder) or Observer(run.folder, patience(run.plan.lease_s))
    observer.forget([sign for sign in observer.look() if sign.lives is False])


def refuse_alive(run: Run, to_do: str, *, force: bool = False) -> None:
    """Raise a sentence when something of the run is alive, or may be; with `force` only say so."""
    try:
        what = alive(run)
    except commands.SlurmUnavailableError as error:
        if not force:
            raise SlurmGPUError(f"{error} Where you know that nothing of {run.folder} is at work: --force.") from error
        what = str(error)
    if what and not force:
        raise SlurmGPUError(
            f"{run.folder} is still at work: {what}. `slurmgpu status {run.typed}` shows it; wait for its end, "
            f"or `slurmgpu cancel {run.typed}`, before you {to_do}. Where you know better: --force."
        )
    if what:
        log.warning("--force: %s", what)


def cancel(run: Run) -> str:
    """Stop what is alive of the run; what was done, in words."""
    from slurmgpu.executors import local

    stopped = []
    if jobs := sorted({job.array_job for job in _queued(run, None, _queue_of(run))}, key=int):
        cluster = queue.own_cluster()
        here = [line for line in run.submissions() if cluster is None or line.get("cluster", cluster) == cluster]
        lines = [line for line in here if line["state"] != "ended" and line["executor"] == "slurm"]
        # One that has no ids may not have written them.
        lines = [line for line in lines if ({line[key] for key in JOB_KEYS if key in line} or set(jobs)) & set(jobs)]
        for line in lines:
            _refuse_anothers(run, line)
        for line in lines:
            run.record_submission({"submission": line["submission"], "cancelled": True})
        commands.cancel(*jobs)
        stopped.append(f"Slurm jobs {', '.join(jobs)}")
    for line in run.submissions():
        if line["state"] == "ended" or line["executor"] == "slurm":
            continue
        if not are_seen_here(line):
            raise SlurmGPUError(f"This run works on {line['host']}; cancel it there, outside a container.")
        if pids := sorted({*(processes_here(line) or ())} & {*slots_of(line)}):
            _refuse_anothers(run, line)
            run.record_submission({"submission": line["submission"], "cancelled": True})
            local.stop(pids)
            stopped.append(f"processes {', '.join(map(str, pids))}")
    return "; ".join(stopped)


def _refuse_anothers(run: Run, line: SubmissionLine) -> None:
    """Raise a sentence where what a submission has at work is another user's, whom alone the system lets stop it."""
    if (uid := line.get("uid", os.getuid())) != os.getuid() != 0:
        name = name_of(uid)
        raise SlurmGPUError(
            f"Submission {line['submission']} of {run.folder} is {name}'s, and so is what it has at work: "
            f"have {name} type `slurmgpu cancel {run.typed}`."
        )
