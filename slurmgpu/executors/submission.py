"""Submissions, the first and the further ones, and the merge that ends each: the same for every executor."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import manual_jobs, on_end
from slurmgpu.executors.interface import Executor, Started
from slurmgpu.executors.liveness import alive, forget_the_dead, others_alive, refuse_alive, wait_for_others
from slurmgpu.executors.registry import executor_named
from slurmgpu.executors.resubmission import next_submission
from slurmgpu.faults import parse_faults
from slurmgpu.faults.striking import damage_shards
from slurmgpu.merge import merge
from slurmgpu.report.attempts import Lives
from slurmgpu.report.build import Report, is_complete, retriable
from slurmgpu.run import owners
from slurmgpu.run.directory import Run, protect
from slurmgpu.run.lock import Lock, run_lock
from slurmgpu.run.submissions import Submission, SubmissionLine
from slurmgpu.slurm import commands, queue
from slurmgpu.slurm.accounting import lives_of, settled_lives_of
from slurmgpu.util.early_signals import heeded

log = logging.getLogger(__name__)

MAX_PAUSE_S = 15.0
"""Between two calls of squeue by a merge that waits."""


@dataclass(frozen=True)
class Outcome:
    """What came of a submission: the job ids, and for those that ran here the report."""

    submission: Submission
    jobs: Mapping[str, str]
    notes: tuple[str, ...] = ()
    report: Report | None = None

    @property
    def jobs_in_words(self) -> list[str]:
        """Each job: "array job 1234"."""
        return [f"{key.replace('_', ' ')} {job}" for key, job in self.jobs.items()]


Prepare = Callable[[Lock], tuple[Submission, list[str]]]
"""Makes a submission, and a sentence for each thing that was adjusted; checks whether there may be one at all.

It asks the run's lock, which is held meanwhile, before it changes what cannot be changed back.
"""


def start(run: Run, prepare: Prepare, on_tick: Callable[[], None] = lambda: None, *, patient: bool = False) -> Outcome:
    """Queue a submission, or run it here to the end of its merge.

    `prepare` is called while no other shell can submit, so that what it has checked stays true. The `patient` wait for
    another that submits or merges, instead of being refused.
    """
    owners.refuse_unwritable(run, "submit it", computes=True, merges=True)
    owners.refuse_foreign(run, "submit it", [run.folder / "submissions.jsonl"])
    if not protect(run.folder):  # one of an older slurmgpu, or that somebody has opened to others since
        owners.refuse_foreign(run, "submit it", [run.logs])  # which has what the jobs unpickle
    with heeded(), run_lock(run.folder, "submitting", patient=patient) as lock:
        submission, notes = prepare(lock)
        executor = executor_named(submission.executor)
        submission, fitted = executor.fit(submission, run.plan.container)
        place = executor.place(run, submission)
        lock.check()
        # Before it starts: if this process dies in between, it is known that there may be something of it.
        run.record_submission(cast(SubmissionLine, {**submission.to_json(), **place}))
        started = _start(run, submission, executor)
    if started.wait is None:
        return Outcome(submission, _jobs_in(started), (*notes, *fitted))
    try:
        lives = _wait(run, submission.submission, started.wait, on_tick)
        if submission.inject:
            damage_shards(run, parse_faults(submission.inject))
        with heeded(), run_lock(run.folder, "merging", patient=True) as lock:
            report = merge.merge(run, lives, lock.check)
            forget_the_dead(run)
        if _goes_on(run, report, submission.round):
            log.warning("incomplete; resubmitting, %d of %d times", submission.round + 1, run.plan.auto_resubmit)
            return start(run, lambda _: next_submission(run, round=submission.round + 1), on_tick, patient=True)
    finally:
        # Not before the next submission is there: a second shell would take the run for ended.
        run.record_submission({"submission": submission.submission, "state": "ended"})
    on_end.run_on_end(run, report)
    return Outcome(submission, {}, (*notes, *fitted), report)


def _start(run: Run, submission: Submission, executor: Executor) -> Started:
    number = submission.submission
    try:
        started = executor.start(run, submission)
    except SlurmGPUError as error:
        if executor.queues:
            run.record_submission({"submission": number, "state": "refused", "message": str(error)})
        raise
    if started.line:
        run.record_submission(cast(SubmissionLine, {"submission": number, **started.line}))
    return started


def _jobs_in(started: Started) -> dict[str, str]:
    return {key: value for key, value in started.line.items() if key != "state"}


def _wait(run: Run, number: int, wait: Callable[[Callable[[], None]], Lives], on_tick: Callable[[], None]) -> Lives:
    try:
        return wait(on_tick)
    except BaseException:
        run.record_submission({"submission": number, "state": "ended", "cancelled": True})
        raise


def merge_by_hand(run: Run, *, force: bool = False) -> Report:
    """Merge now, when nothing of the run is alive, or with `force` even then; the report."""
    owners.refuse_unwritable(run, "merge it", merges=True)
    with heeded(), run_lock(run.folder, "merging") as lock:
        refuse_alive(run, "merge", force=force)
        report, has_ended = _merge_and_end(run, lives_of(run), lock)
    if has_ended:
        on_end.run_on_end(run, report)
    return report


def merge_when_over(run: Run) -> Report:
    """Wait until no task of the run is alive or queued, then merge; the report. What sbatch/merge.sbatch does.

    The run file's `auto_resubmit` is not honoured: who submits by hand decides what comes next.
    """
    owners.refuse_unwritable(run, "merge it", merges=True)
    own_job = os.environ.get("SLURM_JOB_ID", "")
    with heeded(), manual_jobs.log_beside(run, own_job) if own_job else contextlib.nullcontext():
        if not own_job:
            return _merge_when_over(run, own_job)
        _say_who_merges(run, own_job)
        report = _merge_when_over(run, own_job)
        log.info("%s", _in_words(report))
        return report


def _merge_when_over(run: Run, own_job: str) -> Report:
    report, has_ended = None, False
    while report is None:
        _wait_for_end(run, own_job)
        with run_lock(run.folder, "merging", patient=True) as lock:
            if _alive_as_far_as_known(run, own_job) is None:  # since the last look another array may have started
                report, has_ended = _merge_and_end(run, settled_lives_of(run), lock)
    if has_ended:
        on_end.run_on_end(run, report)
    return report


def _say_who_merges(run: Run, own_job: str) -> None:
    """Write this job down as the merge job of the submissions that lack one, for runs that wait for it (--after)."""
    for line in run.submissions():
        if line.get("by_hand") and line["state"] != "ended" and "merge_job" not in line:
            run.record_submission({"submission": line["submission"], "merge_job": own_job})


def _wait_for_end(run: Run, own_job: str) -> None:
    said, pause = None, 1.0
    while what := _alive_as_far_as_known(run, own_job):
        if what != said:
            said = what
            log.info("waiting: %s", what)
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_S)


def _alive_as_far_as_known(run: Run, own_job: str) -> str | None:
    try:
        return alive(run, own_job)
    except commands.SlurmUnavailableError as error:
        if shutil.which("squeue") is None:
            raise
        return f"Slurm does not tell what is alive; {error}"


def _merge_and_end(run: Run, lives: Lives | None, lock: Lock) -> tuple[Report, bool]:
    """The report, and whether it is the end of a submission that had not ended."""
    report = merge.merge(run, lives, lock.check)
    lock.check()
    forget_the_dead(run)
    open_ones = [line for line in run.submissions() if line["state"] != "ended"]
    for line in open_ones:
        run.record_submission({"submission": line["submission"], "state": "ended"})
    return report, any(line["state"] != "refused" for line in open_ones)


def merge_on_slurm(run: Run, own_job: str) -> int:
    """What the merge job does; 0 when the run is complete, else 3. Resubmits as often as `auto_resubmit` says."""
    last, over = _submission_of(run, own_job), True
    lives, report = settled_lives_of(run), None
    while report is None:
        wait_for_others(run, last.get("array_job"))
        with run_lock(run.folder, "merging", patient=True) as lock:
            if others_alive(run, last.get("array_job")) is None:  # a task by hand may have joined since
                report = merge.merge(run, lives, lock.check)
                forget_the_dead(run)
    log.info("%s", _in_words(report))
    try:
        if _goes_on(run, report, last["round"]):
            outcome = start(run, lambda _: next_submission(run, round=last["round"] + 1), patient=True)
            over = False
            log.warning("resubmitted as %s. %s", ", ".join(outcome.jobs_in_words), " ".join(outcome.notes))
            _keep_mail_for_the_end(last, own_job)
            _hand_dependents_on(own_job, outcome.jobs["merge_job"])
        elif not report["complete"]:
            log.error("incomplete; %s", report["resubmit"])
    finally:
        # Not before the next submission is there: who waits for the run would take it for ended.
        for line in run.submissions():
            # Others than its own are those of jobs by hand, which have helped.
            if line["submission"] == last["submission"] or (report["complete"] and line["state"] == "queued"):
                run.record_submission({"submission": line["submission"], "state": "ended"})
        if over:  # also if Slurm has refused the next one
            on_end.run_on_end(run, report)
    return 0 if report["complete"] else 3


def _submission_of(run: Run, merge_job: str) -> SubmissionLine:
    """The submission that a merge job of Submitit's is of: one by hand may have joined the run behind it."""
    lines = [line for line in run.submissions() if not line.get("by_hand")]
    here = os.environ.get("SLURM_CLUSTER_NAME")
    own = [line for line in lines if line.get("merge_job") == merge_job and line.get("cluster", here) == here]
    return (own or lines)[-1]


def _in_words(report: Report) -> str:
    failures = ", ".join(f"{count} {name}" for name, count in report["failures"].items())
    return (
        f"merged: {'complete' if report['complete'] else 'incomplete'}, {report['n_rows']:,} of {report['n_items']:,} "
        f"rows, {report['n_errors']:,} of them failed" + (f"; attempts that failed: {failures}" if failures else "")
    )


def _merges(job: queue.QueuedJob, run: Run) -> bool:
    return job.is_merge or job.array_job in [line.get("merge_job") for line in run.submissions()]


def _goes_on(run: Run, report: Report, round_done: int) -> bool:
    return not report["complete"] and round_done < run.plan.auto_resubmit and retriable(report)


def _keep_mail_for_the_end(submission: SubmissionLine, own_job: str) -> None:
    """Let Slurm send no mail of this merge job's end: the run goes on, and its last merge asks for mail as well."""
    if "mail_user" in submission["merge"] or "mail_type" in submission["merge"]:
        try:
            commands.run("scontrol", "update", f"JobId={own_job}", "MailType=NONE")
        except commands.SlurmUnavailableError as error:
            log.warning("a mail may come before the run's end: %s", error)


def _hand_dependents_on(own_job: str, merge_job: str) -> None:
    """Let the jobs that wait for this merge wait for the next one instead."""
    for job, dependency in queue.dependents(own_job):
        renamed = re.sub(rf"(?<!\d){own_job}(?!\d)", merge_job, dependency)
        commands.run("scontrol", "update", f"JobId={job}", f"Dependency={renamed}")
        log.info("job %s waits for %s now", job, renamed)


def after_jobs(other: Run) -> tuple[str, ...]:
    """The jobs to wait for so that `other` is complete; none when it is. A sentence when nothing will complete it."""
    if is_complete(other):
        return ()
    # Of a run that was submitted by hand the merge job may be queued without having said so.
    jobs = queue.jobs_of(other) if queue.may_be_queued(other) else []
    if merges := [job.array_job for job in jobs if _merges(job, other)]:
        return (max(merges, key=int),)
    raise SlurmGPUError(
        f"{other.folder} is incomplete and no job of Slurm's is going to complete it. "
        f"`slurmgpu resubmit {other.typed}` first."
    )
