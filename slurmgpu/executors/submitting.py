"""Submissions, the first and the further ones, and the merge that ends each: the same for every executor."""

from __future__ import annotations

import logging
import platform
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slurmgpu import merge
from slurmgpu.claims import Watch
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import commands
from slurmgpu.records import Attempt
from slurmgpu.report import Lives, attempts_of, bad_nodes, retriable
from slurmgpu.runs import Run
from slurmgpu.submissions import Submission
from slurmgpu.task import Task

log = logging.getLogger(__name__)

MEMORY_FACTOR = 1.5
ACCOUNTING_PATIENCE_S = 20.0
"""sacct lags behind a job's end; so long the merge waits for the end of attempts that wrote none themselves."""


@dataclass(frozen=True)
class Outcome:
    """What came of a submission: the job ids, and for those that ran here the report."""

    submission: Submission
    jobs: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    report: Mapping[str, Any] | None = None


def start(run: Run, submission: Submission, on_tick: Callable[[], None] = lambda: None) -> Outcome:
    """Queue the submission on Slurm, or run it here to the end of its merge."""
    if submission.executor == "slurm":
        return _start_on_slurm(run, submission)
    with run.submitting():
        run.record_submission(submission.to_json())
    jobs = _run_here(run, submission, on_tick)
    report = merge.merge(run)
    run.record_submission({"submission": submission.submission, "state": "ended"})
    if _goes_on(run, report, submission.round):
        further, notes = next_submission(run, round=submission.round + 1)
        log.warning(
            "incomplete; automatic resubmission %d of %d. %s",
            further.round,
            run.plan.auto_resubmit,
            " ".join(notes),
        )
        return start(run, further, on_tick)
    return Outcome(submission, jobs, report=report)


def _start_on_slurm(run: Run, submission: Submission) -> Outcome:
    from slurmgpu.executors import slurm

    submission, notes = slurm.respect_limits(submission)
    with run.submitting():
        # Before sbatch: if this process dies in between, what it has queued can be found by this line.
        run.record_submission(submission.to_json())
        try:
            jobs = slurm.submit(run, submission)
        except SlurmGPUError as error:
            run.record_submission({"submission": submission.submission, "state": "refused", "message": str(error)})
            raise
        run.record_submission({"submission": submission.submission, "state": "queued", **jobs})
    return Outcome(submission, jobs, tuple(notes))


def _run_here(run: Run, submission: Submission, on_tick: Callable[[], None]) -> dict[str, Any]:
    number = submission.submission
    if submission.executor == "debug":
        attempt = Attempt(f"debug{number}", 0, 0, number, "debug", submission.gpus_per_task, submission.device)
        Task(run, attempt).run_in_process()
        return {}
    from slurmgpu.executors import local

    jobs = local.start(run, submission)
    pids = [int(job.job_id) for job in jobs]
    where = {"host": platform.node(), "pids": pids}
    run.record_submission({"submission": number, "state": "running", **where})
    try:
        local.wait(jobs, on_tick)
    except BaseException:
        run.record_submission({"submission": number, "state": "ended", "cancelled": True})
        raise
    return where


def next_submission(
    run: Run,
    resources: Mapping[str, Any] | None = None,
    slurm: Mapping[str, Any] | None = None,
    round: int = 0,  # noqa: A002  the word of the run file's docs
) -> tuple[Submission, list[str]]:
    """The submission that computes what is missing: the last one, adjusted to what failed; and what changed."""
    from slurmgpu.config import merge_tables, parse_resources
    from slurmgpu.planning import allocate

    last = run.submissions()[-1]
    wanted = parse_resources(merge_tables(last["resources"], resources or {}))
    n_missing = run.plan.n_shards - len(run.published())
    allocation = allocate(wanted, max(1, n_missing))
    options = {**last["slurm"], **(slurm or {})}
    attempts = [a for a in attempts_of(run, _lives(run)) if a["submission"] in (last["submission"], None)]
    notes = []
    exclude: list[str] = []
    if wanted.executor == "slurm" and "exclude" not in (slurm or {}):  # a user who names nodes has the last word
        exclude = sorted({*last["exclude"], *bad_nodes(attempts)})
    if new := sorted(set(exclude) - set(last["exclude"])):
        notes.append(f"Excluded: {', '.join(new)}, where nodes or GPUs failed.")
    if wanted.executor == "slurm" and _ran_out_of_memory(attempts) and not slurm:
        options, note = _with_more_memory(options, attempts)
        notes.append(note)
    submission = Submission(
        submission=last["submission"] + 1,
        executor=wanted.executor,
        device=wanted.device,
        n_tasks=allocation.n_tasks,
        n_concurrent=allocation.n_concurrent,
        gpus_per_task=allocation.gpus_per_task,
        slurm=options,
        merge=last["merge"],
        exclude=tuple(exclude),
        round=round,
        resources=wanted.model_dump(),
    )
    return submission, notes


def _ran_out_of_memory(attempts: list[dict[str, Any]]) -> bool:
    return any(a["failure"] == "host_oom" or any(d["class"] == "host_oom" for d in a["deaths"]) for a in attempts)


def _with_more_memory(options: Mapping[str, Any], attempts: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    for name in ("mem", "mem_per_gpu", "mem_per_cpu"):
        if name in options:
            match = re.fullmatch(r"(\d+)([KMGTkmgt]?)[Bb]?", str(options[name]))
            if match is None:
                return dict(
                    options
                ), f"Memory ran out, but {name} = {options[name]!r} is not understood: raise it by hand."
            # Whole megabytes: 1.5 of 1G is no whole number of G.
            megabytes = int(match[1]) * {"K": 1 / 1024, "G": 1024, "T": 1024**2}.get(match[2].upper(), 1)
            more = f"{-(-int(megabytes * MEMORY_FACTOR) // 1)}M"
            return {**options, name: more}, f"Memory ran out: {name} is {more} instead of {options[name]}."
    had = max((a["memory_mb"] or 0 for a in attempts), default=0)
    if not had:
        return dict(
            options
        ), "Memory ran out, and how much there was is not known: set mem under [slurm], or --slurm mem=…"
    more = f"{int(had * MEMORY_FACTOR)}M"
    return {**options, "mem": more}, f"Memory ran out: mem is {more} instead of {had}M."


# What is alive


def alive(run: Run) -> str | None:
    """What of this run is alive or queued, in words; None when nothing is. Raises when Slurm does not tell."""
    for line in reversed(run.submissions()):
        if line["state"] in ("ended", "refused"):
            continue
        if line["executor"] == "slurm":
            # By the run directory, too: a submission that died between sbatch and its record has left no job ids.
            ids = [line[key] for key in ("array_job", "merge_job") if key in line]
            jobs = commands.queue(ids, run.logs)
            if jobs:
                return f"Slurm has {len(jobs)} of its jobs, such as {jobs[0].job_id} ({jobs[0].state})"
        elif "pids" in line and (here := _alive_here(run, line)):
            return here
    return None


def _alive_here(run: Run, line: Mapping[str, Any]) -> str | None:
    from slurmgpu.executors import local

    if line["host"] == platform.node():
        living = [pid for pid in line["pids"] if local.is_alive(pid)]
        return f"process {living[0]} works on it" if living else None
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
            f"{run.folder} is still at work: {what}. `slurmgpu status {run.folder}` shows it; wait for its end, "
            f"or `slurmgpu cancel {run.folder}`, before you {to_do}."
        )


def cancel(run: Run) -> str:
    """Stop what is alive of the run; what was done, in words."""
    from slurmgpu.executors import local

    stopped = []
    for line in run.submissions():
        if line["state"] in ("ended", "refused"):
            continue
        if line["executor"] == "slurm" and "array_job" in line:
            run.record_submission({"submission": line["submission"], "cancelled": True})
            commands.cancel(line["array_job"], line["merge_job"])
            stopped.append(f"Slurm jobs {line['array_job']} and {line['merge_job']}")
        elif "pids" in line and line["host"] == platform.node():
            run.record_submission({"submission": line["submission"], "cancelled": True})
            local.stop(line["pids"])
            stopped.append(f"processes {', '.join(map(str, line['pids']))}")
        elif "pids" in line:
            raise SlurmGPUError(f"This run works on {line['host']}; cancel it there.")
    return "; ".join(stopped)


# The merge job


def merge_by_hand(run: Run) -> dict[str, Any]:
    """Merge now, when nothing of the run is alive; the report."""
    refuse_alive(run, "merge")
    return merge.merge(run, _lives(run))


def merge_on_slurm(run: Run, own_job: str) -> int:
    """What the merge job does; 0 when the run is complete, else 3. Resubmits as often as `auto_resubmit` says."""
    last = run.submissions()[-1]
    report = merge.merge(run, _settled_lives(run))
    log.info("%s", {key: report[key] for key in ("complete", "n_rows", "n_errors", "failures")})
    try:
        if _goes_on(run, report, last["round"]):
            submission, notes = next_submission(run, round=last["round"] + 1)
            outcome = start(run, submission)
            log.warning("resubmitted as %s. %s", dict(outcome.jobs), " ".join([*notes, *outcome.notes]))
            _hand_dependents_on(own_job, outcome.jobs["merge_job"])
        elif not report["complete"]:
            log.error("incomplete; %s", report["resubmit"])
    finally:
        # Not before the next submission is there: who waits for the run would take it for ended.
        run.record_submission({"submission": last["submission"], "state": "ended"})
    return 0 if report["complete"] else 3


def _goes_on(run: Run, report: Mapping[str, Any], round_done: int) -> bool:
    return not report["complete"] and round_done < run.plan.auto_resubmit and retriable(report)


def _hand_dependents_on(own_job: str, merge_job: str) -> None:
    """Let the jobs that wait for this merge wait for the next one instead."""
    for job, dependency in commands.dependents(own_job):
        renamed = re.sub(rf"(?<!\d){own_job}(?!\d)", merge_job, dependency)
        commands.run("scontrol", "update", f"JobId={job}", f"Dependency={renamed}")
        log.info("job %s waits for %s now", job, renamed)


def after_jobs(other: Run) -> tuple[str, ...]:
    """The jobs to wait for so that `other` is complete; none when it is. A sentence when nothing will complete it."""
    if len(other.published()) == other.plan.n_shards and other.merged.exists():
        return ()
    last = other.submissions()[-1]
    if last["executor"] == "slurm" and last["state"] == "queued" and commands.queue([last["merge_job"]]):
        return (last["merge_job"],)
    raise SlurmGPUError(
        f"{other.folder} is incomplete and no job of Slurm's is going to complete it. "
        f"`slurmgpu resubmit {other.folder}` first."
    )


def _job_ids(run: Run) -> list[str]:
    return [line["array_job"] for line in run.submissions() if "array_job" in line]


def _lives(run: Run) -> Lives | None:
    """What accounting knows of the run's tasks; None when it cannot be asked, which costs detail only."""
    ids = _job_ids(run)
    if not ids:
        return None
    try:
        return commands.accounting(ids)
    except commands.SlurmUnavailableError as error:
        log.warning("the report does without Slurm's accounting: %s", error)
        return None


def _settled_lives(run: Run) -> Lives | None:
    """The same, once accounting knows how attempts that wrote no end have ended; or as far as it came in 20 seconds."""
    deadline = time.monotonic() + ACCOUNTING_PATIENCE_S
    while True:
        lives = _lives(run)
        unsettled = any(a["failure"] == "lost" and a["executor"] == "slurm" for a in attempts_of(run, lives))
        if lives is None or not unsettled or time.monotonic() > deadline:
            return lives
        time.sleep(1.0)


def first_submission(plan_resources: Mapping[str, Any], n_shards: int, **given: Any) -> Submission:
    """A run's first submission, from its [resources]."""
    from slurmgpu.config import parse_resources
    from slurmgpu.planning import allocate

    wanted = parse_resources(plan_resources)
    allocation = allocate(wanted, n_shards)
    submission = Submission(
        submission=1,
        executor=wanted.executor,
        device=wanted.device,
        n_tasks=allocation.n_tasks,
        n_concurrent=allocation.n_concurrent,
        gpus_per_task=allocation.gpus_per_task,
        resources=wanted.model_dump(),
    )
    return replace(submission, **given)
