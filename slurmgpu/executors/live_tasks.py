"""Find a run's live processes and queued jobs, through its executors and by heartbeats, and cancel them."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmgpu.errors import NoAnswerError, NothingToSubmitError, SlurmGPUError
from slurmgpu.executors.interface import Executor, Sight
from slurmgpu.executors.registry import executors_of
from slurmgpu.run.claims import Watch
from slurmgpu.run.directory import Run
from slurmgpu.run.heartbeats import Observer
from slurmgpu.run.liveness import patience
from slurmgpu.run.submissions import ENDS

log = logging.getLogger(__name__)


def alive(run: Run, waiting_merge: str | None = None) -> str | None:
    """The live processes or queued jobs of this run, in words; None without any. NoAnswerError if a queue is silent.

    `waiting_merge` is the caller's own Slurm job, which merges when the others have ended; it does not count, nor do
    other jobs that wait to merge. Tasks of other users and clusters are not in the queue here: their heartbeats are
    watched, which takes as long as a lease, and at least half a minute.
    """
    sights = []
    for executor, lines in executors_of(run):
        sights.append(executor.look(run, lines, waiting_merge))
        if sights[-1].at_work:
            return sights[-1].at_work
    return _heard(run, sights, waiting_merge)


def may_live(run: Run) -> bool:
    """Whether something of the run is alive, or may be, because a queue is silent."""
    try:
        return alive(run) is not None
    except NoAnswerError:
        return True


def _heard(run: Run, sights: Sequence[Sight], waiting_merge: str | None) -> str | None:
    """A task whose heartbeat goes on, in words; None once all have been silent for long enough.

    Jobs in the queue of another cluster cannot be seen here. They count as alive, except for a merge that waits: jobs
    there may wait for that merge.
    """
    patience_s, observer = patience(run.plan.lease_s), _observer(run)
    elsewhere = [name for sight in sights for name in sight.elsewhere]
    is_hidden = any(sight.hides for sight in sights)
    leases, begun, is_told = Watch(run.plan.lease_s), time.monotonic(), False
    while True:
        tasks = [task for task in observer.look() if not any(sight.has_ended(task) for sight in sights)]
        if living := [task for task in tasks if task.lives]:
            return f"{living[0].in_words} is alive"
        doubts = [task.in_words for task in tasks if task.lives is None]
        if elsewhere and waiting_merge is None and not doubts:
            return f"it may have jobs in the queue of the cluster {elsewhere[0]}, which cannot be seen here"
        if time.monotonic() - begun <= patience_s:
            doubts += [f"a task of a job on the cluster {name}" for name in elsewhere[:1]]
        if is_hidden:
            states = [leases.look(shard, claim) for shard, claim in run.claims.held() if not claim.parked]
            if "alive" in states:
                return "tasks renew their leases"
            doubts += ["a task that holds a claim"] * ("unknown" in states)
        if not doubts:
            return None
        if not is_told:
            log.warning("waiting up to %.0f s to see whether %s is alive", patience_s, doubts[0])
            is_told = True
        time.sleep(min(1.0, patience_s / 20))


ANSWER_S = 2.0
"""How long to reuse an answer about all queued jobs. Not longer, because a merge may resubmit its run."""

_OBSERVERS: dict[Path, Observer] = {}
"""The heartbeats that this process has seen: a second look need not wait again for tasks that are silent."""


def _observer(run: Run) -> Observer:
    return _OBSERVERS.setdefault(run.folder, Observer(run.folder, patience(run.plan.lease_s)))


def others_alive(run: Run, own_array: str | None) -> str | None:
    """A live task outside this array of this cluster, in words; None once all others are silent."""
    cluster, observer = os.environ.get("SLURM_CLUSTER_NAME"), _observer(run)
    while True:
        tasks = observer.look()
        others = [task for task in tasks if task.told.get("cluster") != cluster or task.told.get("job") != own_array]
        if living := [task for task in others if task.lives]:
            return f"{living[0].in_words} is alive"
        if not any(task.lives is None for task in others):
            return None
        time.sleep(1.0)


def forget_dead_tasks(run: Run) -> None:
    """Remove the heartbeats of killed tasks after a merge, so that nobody has to watch them again."""
    observer = _observer(run)
    observer.forget([task for task in observer.look() if task.lives is False])


FORCE = "use --force"


def refuse_alive(run: Run, to_do: str, *, force: bool = False, waits: bool = True, otherwise: str = FORCE) -> bool:
    """Raise a SlurmGPUError if something of the run is or may be alive; with `force` only warn, and return True.

    `waits`: the end of what was cancelled is waited for first, up to ENDING_S. `otherwise` says what helps who knows
    better.
    """
    try:
        what = alive(run)
        if what and waits and not force and _is_cancelled(run):
            what = _once_cancelled(run, what)
    except NoAnswerError as error:
        if not force:
            raise SlurmGPUError(f"{error} If you know that no task of {run.folder} is alive, {otherwise}.") from error
        what = str(error)
    if what and not force:
        raise NothingToSubmitError(
            f"{run.folder} is still running: {what}. `slurmgpu status {run.typed}` shows it. Before you {to_do}, wait "
            f"for its end, or `slurmgpu cancel {run.typed}`. If you know that it has ended, {otherwise}."
        )
    if what:
        log.warning("--force: %s", what)
    return bool(what)


ENDING_S = 60.0
"""How long to wait for cancelled jobs: tasks have 20 s to give their shards back, then Slurm has its KillWait."""


def wait_for_cancelled(run: Run) -> None:
    """Wait up to ENDING_S for the end of what `slurmgpu cancel` ended, if nothing else of the run can be alive."""
    with contextlib.suppress(NoAnswerError):  # `refuse_alive` tells it
        if _is_cancelled(run) and (what := alive(run)):
            _once_cancelled(run, what)


def _is_cancelled(run: Run) -> bool:
    """Whether `slurmgpu cancel` ended every submission that has not ended by itself."""
    lines = [line for line in run.submissions() if line["state"] not in ENDS]
    return bool(lines) and all(line.get("cancelled") for line in lines)


def _once_cancelled(run: Run, what: str) -> str | None:
    """What of a cancelled run is alive once its jobs have ended, or after ENDING_S; None if nothing is."""
    log.warning("waiting up to %.0f s for the end of the cancelled jobs: %s", ENDING_S, what)
    found: str | None = what
    begun = time.monotonic()
    while found and time.monotonic() - begun < ENDING_S:
        time.sleep(min(1.0, ENDING_S / 20))
        found = alive(run)
    return found


def cancel(run: Run) -> str:
    """Cancel the run's live processes and queued jobs; return what was done, in words."""
    return "; ".join(done for executor, lines in executors_of(run) for done in executor.cancel(run, lines))


def cancel_all(runs: Sequence[Run]) -> Iterator[tuple[Run, str | SlurmGPUError]]:
    """Cancel several runs; yields each with what was done, in words, or the error.

    Each queue is asked once, and ends jobs with one request, for all runs that are handled within ANSWER_S.
    """
    left = deque(runs)
    while left:
        since, among, seen = time.monotonic(), dict[str, Sequence[Any] | None](), list[_Cancelled]()
        try:
            while left and len(seen) < MOST_TOGETHER and not (seen and time.monotonic() - since > ANSWER_S):
                seen.append(_cancelled_but_jobs(left.popleft(), among))
        finally:  # their runs say by now that they are cancelled
            _end_jobs(seen)
        for each in seen:
            yield each.run, each.error or "; ".join(each.done)


MOST_TOGETHER = 200
"""The most runs whose jobs one request ends: its command line has a few ids of each."""


@dataclass
class _Cancelled:
    """A run, what was cancelled of it, in words, the error if something could not be, and jobs that must still end."""

    run: Run
    done: list[str] = field(default_factory=list)
    jobs: list[tuple[Executor, list[str]]] = field(default_factory=list)
    error: SlurmGPUError | None = None


def _cancelled_but_jobs(run: Run, among: dict[str, Sequence[Any] | None]) -> _Cancelled:
    """Cancel a run, except jobs that a later request ends; `among` gets all of the user's jobs by executor."""
    found = _Cancelled(run)
    try:
        for executor, lines in executors_of(run):
            if executor.name not in among:
                among[executor.name] = None
                with contextlib.suppress(NoAnswerError):  # the next line asks again, and says so
                    among[executor.name] = executor.own_jobs()
            jobs = executor.jobs_to_cancel(run, lines, among[executor.name])
            if jobs is None:
                found.done += executor.cancel(run, lines, among[executor.name])
            elif jobs:
                found.jobs.append((executor, jobs))
    except SlurmGPUError as error:
        found.error = error
    return found


def _end_jobs(seen: Sequence[_Cancelled]) -> None:
    """End the remaining jobs with one request to each executor; if that fails, with one for each run."""
    for executor in {id(executor): executor for each in seen for executor, _ in each.jobs}.values():
        theirs = [(each, jobs) for each in seen for its, jobs in each.jobs if its is executor]
        failed: SlurmGPUError | None = None
        try:
            executor.cancel_jobs([job for _, jobs in theirs for job in jobs])
        except SlurmGPUError as error:
            failed = error
        for each, jobs in theirs:
            try:
                if isinstance(failed, NoAnswerError) and failed.is_silent:
                    raise failed
                if failed is not None:
                    executor.cancel_jobs(jobs)
                each.done.append(f"{executor.title} jobs {', '.join(jobs)}")
            except SlurmGPUError as error:
                each.error = error
