"""Start submissions, merge at the end of each, and resubmit by `auto_resubmit`: the same for every executor."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from slurmgpu.errors import MayBeQueuedError, NoAnswerError, SlurmGPUError
from slurmgpu.executors.interface import Executor, Started
from slurmgpu.executors.live_tasks import forget_dead_tasks, others_alive
from slurmgpu.executors.registry import executor_named
from slurmgpu.executors.run_merge import MAX_PAUSE_S, in_words, locked_when_over, naming_room, tell_end
from slurmgpu.faults import parse_faults
from slurmgpu.faults.injection import damage_shards
from slurmgpu.merge import merge
from slurmgpu.report.outcomes import Accounting
from slurmgpu.report.report_file import Report, retriable
from slurmgpu.run import owners
from slurmgpu.run.creation import protect
from slurmgpu.run.directory import Run
from slurmgpu.run.lock import Lock, run_lock
from slurmgpu.run.submissions import ENDS, Submission, SubmissionLine, is_of_processes, jobs_of
from slurmgpu.util.early_signals import heeded

log = logging.getLogger(__name__)

SILENCE_S = 600.0
"""How long a merge job that resubmits its run waits for a scheduler that does not answer."""

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """The result of a submission: its job ids, or the report if it ran in this process."""

    submission: Submission
    jobs: Mapping[str, str]
    notes: tuple[str, ...] = ()
    report: Report | None = None

    @property
    def jobs_in_words(self) -> list[str]:
        """Each job: "array job 1234"."""
        return [f"{key.replace('_', ' ')} {job}" for key, job in self.jobs.items()]


Prepare = Callable[[Lock], tuple[Submission, list[str]]]
"""Makes a submission, and a sentence for each adjustment; raises if the run must not be submitted.

It is called under the run's lock, which it checks before each step that cannot be undone.
"""


def start(
    run: Run,
    prepare: Prepare,
    on_tick: Callable[[], None] = lambda: None,
    *,
    patient: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Outcome:
    """Queue a submission, or run it here to the end of its merge.

    `prepare` is called under the run's lock, so that what it has checked stays true. If another process is submitting
    or merging, `patient` waits for it; otherwise the call raises. `tell` gets the notes before anything starts; without
    it the outcome has them.
    """
    owners.refuse_unwritable(run, "submit it", computes=True, merges=True)
    # Jobs unpickle what is in logs/, which the owner protects below.
    unprotected = [] if owners.is_owner(run) else [run.logs]
    owners.refuse_foreign(run, "submit it", [run.folder / "submissions.jsonl", *unprotected])
    with heeded(), run_lock(run.folder, "submitting", patient=patient) as lock:
        submission, notes = prepare(lock)
        protect(run.folder)  # not earlier: it would keep running tasks of other users from writing
        executor = executor_named(submission.executor)
        submission, fitted = executor.fit(submission, run.plan.container)
        place = executor.place(run, submission)
        lock.check()
        notes = [*notes, *fitted]
        if tell is not None:
            for note in notes:
                tell(note)
            notes = []
        # Record it first: if this process dies in between, others know that jobs may be queued.
        run.record_submission(cast(SubmissionLine, {**submission.to_json(), **place}))
        started = _start(run, submission, executor)
    if started.wait is None:
        jobs = {key: value for key, value in started.line.items() if key != "state"}
        return Outcome(submission, jobs, tuple(notes))
    try:
        report = _compute_and_merge(run, submission, started.wait, on_tick)
        if _goes_on(run, report, submission.round):
            log.warning("incomplete; resubmitting, %d of %d times", submission.round + 1, run.plan.auto_resubmit)
            return start(run, lambda _: _next_here(run, submission), on_tick, patient=True, tell=tell)
    finally:
        # Only after the next submission is recorded; otherwise a second shell would think that the run has ended.
        run.record_submission({"submission": submission.submission, "state": "ended"})
    tell_end(run, report)
    return Outcome(submission, {}, tuple(notes), report)


def _next(run: Run, number: int) -> tuple[Submission, list[str]]:
    """The submission of a round of `auto_resubmit`."""
    from slurmgpu.executors.resubmission import next_submission  # pydantic: the tasks of a local run wait for imports

    return next_submission(run, round=number)


def _next_here(run: Run, last: Submission) -> tuple[Submission, list[str]]:
    """The same on this machine, where two submissions must not share the GPUs."""
    newest = run.last_submission()
    if newest["submission"] > last.submission and is_of_processes(newest) and newest["state"] not in ENDS:
        raise SlurmGPUError(f"Another process has resubmitted {run.folder} and continues it.")
    if what := others_alive(run, None):
        raise SlurmGPUError(f"{run.folder} is not resubmitted: {what}. Type `slurmgpu resubmit {run.typed}` later.")
    return _next(run, last.round + 1)


def _start(run: Run, submission: Submission, executor: Executor) -> Started:
    number = submission.submission
    try:
        started = executor.start(run, submission)
    except SlurmGPUError as error:
        if executor.queues and not isinstance(error, MayBeQueuedError):
            run.record_submission({"submission": number, "state": "refused", "message": str(error)})
        raise
    if started.line:
        run.record_submission(cast(SubmissionLine, {"submission": number, **started.line}))
    return started


def _compute_and_merge(
    run: Run, submission: Submission, wait: Callable[[Callable[[], None]], Accounting], on_tick: Callable[[], None]
) -> Report:
    """Wait for the tasks of a submission to this machine, and merge."""
    try:
        accounting = wait(on_tick)
    except BaseException:
        run.record_submission({"submission": submission.submission, "state": "ended", "cancelled": True})
        raise
    if submission.inject:
        damage_shards(run, parse_faults(submission.inject))
    # A task of this submission may have outlived its supervisor, and others may have joined the run.
    over = locked_when_over(run, lambda: others_alive(run, None), lambda: accounting, logging.WARNING)
    with heeded(), over as (lock, _), naming_room(run):
        report = merge.merge(run, accounting, lock.check)
        forget_dead_tasks(run)
    return report


def merge_behind(run: Run, submission: int) -> int:
    """Run the merge job of a submission whose tasks have ended; return 0 if the run is complete, else 3.

    It waits for tasks of other jobs, merges, and resubmits as often as `auto_resubmit` says. If it is requeued after it
    has resubmitted, it hands over to that submission instead of making another.
    """
    last = run.submission(submission)
    if "state" not in last:
        raise SlurmGPUError(
            f"{run.folder / 'submissions.jsonl'} has no submission {submission}, which this job should merge: its line "
            f"is damaged or was removed. To merge what is published: slurmgpu merge {run.typed}"
        )
    if last["state"] == "ended":
        # Else `slurmgpu cancel` takes this job for one that tells of the end.
        run.record_submission({"submission": submission, "merges_again": True})
    goes_on = False
    over = locked_when_over(run, lambda: others_alive(run, last.get("array_job")))
    with over as (lock, accounting), naming_room(run):
        # Slurm requeues a job whose end slurmctld has missed; then `on_end` has run already.
        had_ended = run.submission(submission).get("state") == "ended"
        _refuse_lost(run, submission)
        report = merge.merge(run, accounting, lock.check)
        forget_dead_tasks(run)
    log.info("%s", in_words(report))
    try:
        if not report["complete"] and (later := _later(run, last)) is not None:
            goes_on = True
            if later["state"] == "queued":
                log.warning("submission %d computes what is missing", later["submission"])
                _once_answered(lambda: executor_named(last["executor"]).hand_over(last, jobs_of(later)))
            else:
                log.warning(
                    "submission %d came after this one and has ended; %s", later["submission"], report["resubmit"]
                )
        elif _goes_on(run, report, last["round"]):
            outcome = _once_answered(lambda: start(run, lambda _: _next(run, last["round"] + 1), patient=True))
            goes_on = True
            log.warning("resubmitted as %s. %s", ", ".join(outcome.jobs_in_words), " ".join(outcome.notes))
            _once_answered(lambda: executor_named(last["executor"]).hand_over(last, outcome.jobs))
        elif not report["complete"]:
            log.error("incomplete; %s", report["resubmit"])
    finally:
        # Only after the next submission is recorded; otherwise waiting processes would think that the run has ended.
        for line in run.submissions():
            # A complete run also ends submissions by hand that are still queued.
            if line["submission"] == last["submission"] or (report["complete"] and line["state"] == "queued"):
                told: SubmissionLine = {"submission": line["submission"], "state": "ended"}
                if "merges_again" in line:
                    told["merges_again"] = False
                run.record_submission(told)
        if not goes_on:  # also if Slurm refused the resubmission
            tell_end(run, report, is_told=had_ended)
    return 0 if report["complete"] else 3


def _refuse_lost(run: Run, number: int) -> None:
    """Record the end of later submissions whose process was killed before it recorded their jobs; none is alive."""
    for line in run.submissions():
        if line["submission"] > number and line["state"] == "submitting":
            message = "the process that submitted it was killed"
            run.record_submission({"submission": line["submission"], "state": "refused", "message": message})


def _once_answered(do: Callable[[], T]) -> T:
    """The result of `do`, called again while the scheduler does not answer, for example during a restart."""
    deadline, pause = time.monotonic() + SILENCE_S, min(1.0, MAX_PAUSE_S)
    while True:
        try:
            return do()
        except MayBeQueuedError:
            raise
        except NoAnswerError as error:
            if not error.is_silent or time.monotonic() > deadline:
                raise
            log.warning("trying again: %s", error)
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_S)


def _later(run: Run, line: SubmissionLine) -> SubmissionLine | None:
    """The submission that Slurm took after this one, from `submit` or `resubmit`; None if there is none.

    It may have ended already, if the merge job of this one was requeued and waited for long.
    """
    newest = [each for each in run.submissions() if not each.get("by_hand") and each["state"] != "refused"][-1]
    return newest if newest["submission"] > line["submission"] else None


def _goes_on(run: Run, report: Report, round_done: int) -> bool:
    return not report["complete"] and round_done < run.plan.auto_resubmit and retriable(report)
