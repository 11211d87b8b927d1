"""Merge a run once nothing of it is alive: by hand, in a job that waits, or in the last task."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator

from slurmgpu.errors import NoAnswerError, SlurmGPUError
from slurmgpu.executors import on_end
from slurmgpu.executors.live_tasks import alive, forget_dead_tasks, others_alive, refuse_alive, wait_for_cancelled
from slurmgpu.executors.registry import accounting_of
from slurmgpu.merge import merge
from slurmgpu.report.completeness import command_to_continue
from slurmgpu.report.outcomes import Accounting
from slurmgpu.report.report_file import Report, every_item_failed
from slurmgpu.run import owners
from slurmgpu.run.directory import Run
from slurmgpu.run.liveness import is_orphaned, processes_here
from slurmgpu.run.lock import Lock, run_lock
from slurmgpu.run.submissions import SubmissionLine
from slurmgpu.util.early_signals import heeded
from slurmgpu.util.shared_files import FULL, list_names

log = logging.getLogger(__name__)

MAX_PAUSE_S = 15.0
"""The longest pause between two looks of a merge that waits."""


def merge_by_hand(run: Run, *, force: bool = False) -> Report:
    """Merge now and return the report; refused while the run has live tasks or queued jobs, unless `force`."""
    owners.refuse_unwritable(run, "merge it", merges=True)

    def ask() -> Accounting | None:
        if not force:
            wait_for_cancelled(run)  # so that accounting knows the ends of its tasks
        return accounting_of(run)

    over = locked_when_over(run, lambda: None, ask, patient=False)
    with heeded(), over as (lock, accounting):
        may_live = refuse_alive(run, "merge", force=force, waits=False)  # `ask` has waited, without the lock
        report, has_ended = _merge_and_end(run, accounting, lock, may_live=may_live)
    if has_ended:
        tell_end(run, report)
    return report


def merge_when_over(run: Run) -> Report:
    """Wait until no task of the run is alive or queued, then merge; return the report. sbatch/merge.sbatch does this.

    The run file's `auto_resubmit` is ignored: users who submit by hand decide what comes next.
    """
    from slurmgpu.executors import manual_jobs  # pydantic: tasks that merge need not wait for its import

    owners.refuse_unwritable(run, "merge it", merges=True)
    own_job = os.environ.get("SLURM_JOB_ID", "")
    run.make_folders()
    with heeded(), manual_jobs.log_beside(run, own_job) if own_job else contextlib.nullcontext():
        if own_job:
            _record_merge_job(run, own_job)
        with locked_when_over(run, lambda: _alive_as_far_as_known(run, own_job)) as (lock, accounting):
            report, has_ended = _merge_and_end(run, accounting, lock)
        if has_ended:
            tell_end(run, report)
        if own_job:
            log.info("%s", in_words(report))
        return report


def merge_orphaned(run: Run, number: int) -> None:
    """Merge a submission whose process was killed, once no task is alive; each of its tasks may call this at its end.

    `auto_resubmit` is ignored: a task has only a part of this machine's GPUs.
    """
    with heeded(), locked_when_over(run, lambda: others_alive(run, None)) as (lock, accounting):
        if not is_orphaned(run, number):
            return  # another task has merged
        report, has_ended = _merge_and_end(run, accounting, lock)
    log.info("%s", in_words(report))
    if has_ended:
        tell_end(run, report)


def _merge_and_end(
    run: Run, accounting: Accounting | None, lock: Lock, *, may_live: bool = False
) -> tuple[Report, bool]:
    """Merge; return the report, and whether a submission that had not ended ends with it.

    With `may_live`, submissions that are running here are left to end with their own merge.
    """
    with naming_room(run):
        report = merge.merge(run, accounting, lock.check, may_live=may_live)
    lock.check()
    forget_dead_tasks(run)
    open_ones = [
        line for line in run.submissions() if line["state"] != "ended" and not (may_live and processes_here(line))
    ]
    for line in open_ones:
        run.record_submission({"submission": line["submission"], "state": "ended"})
    return report, any(line["state"] != "refused" for line in open_ones)


def _record_merge_job(run: Run, own_job: str) -> None:
    """Record this job as the merge job of the submissions that lack one, for runs that wait for it (--after)."""
    for line in run.submissions():
        if line.get("by_hand") and line["state"] != "ended" and "merge_job" not in line:
            told: SubmissionLine = {"submission": line["submission"], "merge_job": own_job}
            if name := os.environ.get("SLURM_JOB_NAME"):
                told["merge_name"] = name
            run.record_submission(told)


@contextlib.contextmanager
def locked_when_over(
    run: Run,
    what_lives: Callable[[], str | None],
    ask: Callable[[], Accounting | None] | None = None,
    level: int = logging.INFO,
    *,
    patient: bool = True,
) -> Iterator[tuple[Lock, Accounting | None]]:
    """Hold the run's lock once nothing is alive, and yield it with the answer of `ask` about all attempts.

    By default that is the executors' accounting, settled. It is asked before, since a task that joins the run waits for
    the lock: a Slurm that is silent takes minutes. `level` is the level of the message that says what is waited for:
    merge jobs log INFO, a terminal only warnings.
    """
    while True:
        _wait_for_end(what_lives, level)
        seen = _submissions_and_attempts(run)
        accounting = accounting_of(run, settled=True) if ask is None else ask()
        with run_lock(run.folder, "merging", patient=patient) as lock:
            if what_lives() is None and _submissions_and_attempts(run) == seen:  # else another array was there
                yield lock, accounting
                return


def _submissions_and_attempts(run: Run) -> tuple[object, object]:
    # The listing is as fresh as the file server's: to see what lives, the folder was just changed.
    return run.submissions(), [name for name in list_names(run.tasks) if name.endswith(".json")]


def _wait_for_end(what_lives: Callable[[], str | None], level: int) -> None:
    said, pause = None, 1.0
    while what := what_lives():
        if what != said:
            said = what
            log.log(level, "waiting: %s", what)
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_S)


def _alive_as_far_as_known(run: Run, own_job: str) -> str | None:
    try:
        return alive(run, own_job)
    except NoAnswerError as error:
        if error.is_absent:
            raise
        return f"the run's live tasks are unknown; {error}"


@contextlib.contextmanager
def naming_room(run: Run) -> Iterator[None]:
    """Turn a full disk into a SlurmGPUError with the path and the next command."""
    try:
        yield
    except OSError as error:
        if error.errno not in (*FULL, errno.EFBIG):
            raise
        to_do = "Raise `ulimit -f`" if error.errno == errno.EFBIG else "Free space there"
        raise SlurmGPUError(
            f"{error.filename or run.merged}: {error.strerror}. Published shards are kept. {to_do}, then: "
            f"{command_to_continue(run)}"
        ) from error


def tell_end(run: Run, report: Report, *, is_told: bool = False) -> None:
    """Run `on_end`, unless that `is_told` of the end, and send what tasks logged to trackers."""
    if not is_told:
        on_end.run_on_end(run, report)
    on_end.track(run)  # after: a tracker may take half an hour, or the rest of the job's time


def in_words(report: Report) -> str:
    """What a merge has merged, as a line for a log."""
    failures = ", ".join(f"{count} {name}" for name, count in report["failures"].items())
    state = "complete" if report["complete"] else "incomplete"
    state += ", every item failed" * every_item_failed(report)
    return (
        f"merged: {state}, {report['n_rows']:,} of {report['n_items']:,} "
        f"rows, {report['n_errors']:,} of them failed" + (f"; attempts that failed: {failures}" if failures else "")
    )
