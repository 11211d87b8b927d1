"""What to do next about a run: as `report` prints it, and as its page shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurmgpu.logs.files import attempts_with_logs
from slurmgpu.report.attempts import AttemptRow, of_last_submission, ran_out_of_memory
from slurmgpu.report.report_file import Report, every_item_failed, only_input_failed
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import policy_of
from slurmgpu.run.submissions import SubmissionLine, is_of_processes

OTHER_RUN = "to change settings, columns or input, which a run freezes, submit a new run with another --run-dir"


@dataclass(frozen=True)
class NextStep:
    """A command and the words that introduce it, with sentences before and after; without a command `words` say all."""

    words: str
    command: str | None = None
    before: str | None = None
    after: tuple[str, ...] = ()


def next_step(report: Report, run: Run) -> NextStep | None:
    """The next command, and what to change first if the same command would fail again; None if nothing is left."""
    if report["resubmit"]:
        return _for_missing(report, run, report["resubmit"])
    if not report["n_errors"]:
        return None
    again = report.get("resubmit_failed") or f"slurmgpu resubmit {run.typed} --failed"
    by = "with" if again.startswith("slurmgpu ") else "in Python, with the edited function, by"
    if only_input_failed(report):
        if not run.plan.has_promised_input:
            return NextStep(
                "the same input fails again: correct it, or recompute the failed items of the earlier run that it "
                "comes from, then submit a new run with another --run-dir"
            )
        return NextStep(
            "after recomputing the failed items of the run that this one waited for (--after), recompute those of this "
            f"one {by}",
            again,
        )
    if every_item_failed(report) and report["errors"]:
        return NextStep(
            f"after fixing the code, recompute them {by}",
            again,
            f"every item failed: slurmgpu logs {run.typed} --item {report['errors'][0]['index']} shows where",
            (OTHER_RUN,),
        )
    other_run = f"{OTHER_RUN} (--items: of some items alone)"
    return NextStep(f"after fixing the cause, recompute failed items {by}", again, after=(other_run,))


def _for_missing(report: Report, run: Run, command: str) -> NextStep:
    lines, attempts = report["submissions"], report["attempts"]
    before = _waited_in_vain(lines, attempts)
    if before is None and all(attempt["submission"] is None for attempt in attempts):
        before = none_began(run)
    after = []
    policies = [policy_of(attempt["failure"]) for attempt in attempts if attempt["failure"]]
    fails_again = policies and not any(each is None or each.retriable or each.on_purpose for each in policies)
    if lines and lines[-1].get("array_job") and ran_out_of_memory(of_last_submission(attempts, lines)):
        after += ["host memory ran out: resubmit asks for more, or for what you say: --slurm mem=…"]
    if fails_again and not report["n_rows"]:
        after += [OTHER_RUN]
    words = "after fixing the cause, compute the rest with" if fails_again else "to compute the rest"
    return NextStep(words, command, before, tuple(after))


def none_began(run: Run) -> str:
    """What to say of a run of which no task has started: where its jobs wrote, or why they may not even have."""
    lines = run.submissions()
    if waited := _waited_in_vain(lines, ()):
        return waited
    if attempts_with_logs(run):
        return f"no task has started: slurmgpu logs {run.typed} lists what their jobs wrote"
    if not lines or is_of_processes(lines[-1]):
        return "no task has started"
    return (
        "no task has started, and no job could write a log: if they ended at once, their nodes may lack this folder, "
        "which has to lie on a file system that they share with this machine"
    )


def _waited_in_vain(lines: Sequence[SubmissionLine], attempts: Sequence[AttemptRow]) -> str | None:
    """What to say if no task of the last submission has started because it waited for another run; else None."""
    if not lines or not (jobs := lines[-1].get("after")) or of_last_submission(attempts, lines):
        return None
    return (
        f"no task has started: the array waited for {'jobs' if len(jobs) > 1 else 'job'} {', '.join(jobs)} (--after), "
        f"and Slurm cancels it if that run ends incomplete; complete that run first"
    )
