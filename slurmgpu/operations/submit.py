"""Make the run directory of a draft, and submit it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from slurmgpu.errors import NoAnswerError, SlurmGPUError
from slurmgpu.executors import resubmission
from slurmgpu.executors.detached import Background
from slurmgpu.executors.registry import executor_named
from slurmgpu.executors.submission import Outcome, start
from slurmgpu.faults import check_faults, parse_faults
from slurmgpu.operations.replacement import PLANNED, check_room, remove_left, room
from slurmgpu.plan.planner import Draft
from slurmgpu.plan.variants import Drafts, Variant
from slurmgpu.report.completeness import is_complete
from slurmgpu.run.creation import create_run
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import Submission
from slurmgpu.util.atomic_files import write_bytes
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, retried, status_of

log = logging.getLogger(__name__)

ENDING_S = 15.0
"""How long to wait for cancelled jobs to end before their run directory is left in place."""


@dataclass(frozen=True)
class Submitted:
    """A run that was submitted, and its outcome; None if another process submits it."""

    run: Run
    outcome: Outcome | None


def check_drafts(drafts: Drafts, after: Sequence[Run] = (), inject: Sequence[str] = ()) -> None:
    """Check the submissions of a sweep's runs, and their directories, before the first is made."""
    for _, draft in drafts.to_submit:
        check_place(draft)
        submission = submission_of(draft, after, inject)
        executor_named(submission.executor).check(submission, draft.plan.container)


@contextlib.contextmanager
def naming_submitted(drafts: Drafts, variant: Variant) -> Iterator[None]:
    """Add to the error of a sweep's submission which runs were submitted before it."""
    try:
        yield
    except SlurmGPUError as error:
        names = [each.name for each, _ in drafts.to_submit]
        before = names[: names.index(variant.name)]
        told = f"Submitted before it: {', '.join(before)}." if before else "None was submitted."
        if not drafts.variants.replace_looks:
            told += " Repeat the command to submit those that do not exist yet."
        raise SlurmGPUError(f"Run {variant.name} of [sweep]: {error} {told}") from error


def plan_draft(draft: Draft) -> tuple[Run, list[str], list[str]]:
    """Make the run directory of a draft without queueing it; return the run, the two commands to type, and notes."""
    from slurmgpu.executors.manual import Manual

    by_hand = Manual()
    submission, notes = by_hand.fit(submission_of(draft), draft.plan.container)
    with _room_for(draft):
        run = create_run(draft.run_dir, draft.plan, draft.items.files)
        draft.fill(run)
        write_bytes(run.folder / PLANNED, b"")
    return run, [*by_hand.start(run, submission).to_type], notes


def submit_draft(
    draft: Draft,
    after: Sequence[Run] = (),
    on_tick: Callable[[Run], None] = lambda run: None,
    inject: Sequence[str] = (),
    *,
    begun: str | None = None,
    background: Background | None = None,
    tell: Callable[[str], None] | None = None,
) -> Submitted:
    """Make the run directory of a draft and submit it, in the process `background` if given.

    `inject` are faults on demand. `tell` gets the notes before anything starts; without it the outcome has them.
    `begun` is a note that is true only if the scheduler takes the run: it comes after that.
    """
    submission = submission_of(draft, after, inject)
    executor = executor_named(submission.executor)
    executor.check(submission, draft.plan.container)
    with _room_for(draft):
        run = create_run(draft.run_dir, draft.plan, draft.items.files)
        made = status_of(run.folder / "run.json")
        try:
            draft.fill(run)
            notes = [*draft.code.left_out, *resubmission.fewer_tasks(submission, draft.plan, draft.n_missing)]
            last = [] if begun is None else [begun]
            if background is not None:
                return Submitted(run, background.start(run, submission, [*notes, *last]))
            if not executor.queues:
                notes, last = [*notes, *last], []
            outcome = start(run, lambda _: (submission, notes), lambda: on_tick(run), tell=tell)
            if tell is not None:
                for note in last:
                    tell(note)
            if submission.after:
                executor.wait_for(run, after)
            return Submitted(run, outcome)
        except BaseException:
            there = status_of(run.folder / "run.json")
            if made is not None and there is not None and os.path.samestat(made, there):  # not another process's
                remove_unused(run)
            raise


def check_place(draft: Draft) -> None:
    """Raise SlurmGPUError if the draft cannot replace an earlier look."""
    if draft.replaces_look:
        check_room(draft.run_dir, "look")


def _room_for(draft: Draft) -> contextlib.AbstractContextManager[None]:
    if draft.replaces_look:
        return room(draft.run_dir, "look")
    if draft.plan.look:
        remove_left(draft.run_dir)
    return contextlib.nullcontext()


def submission_of(draft: Draft, after: Sequence[Run] = (), inject: Sequence[str] = ()) -> Submission:
    """The first submission of a draft."""
    submission = resubmission.first_submission(draft.plan.resources, draft.plan.most_tasks(draft.n_missing))
    executor = executor_named(submission.executor)
    jobs = dict.fromkeys(job for run in after if not is_complete(run) for job in executor.jobs_completing(run))
    faults = parse_faults(inject)
    executor.check_faults(faults)
    check_faults(faults, draft.plan)
    inject = tuple(map(str, faults))
    submission = replace(submission, slurm=draft.plan.slurm, merge=draft.plan.merge, after=(*jobs,), inject=inject)
    resubmission.check_walltime(submission, draft.plan)
    return replace(submission, code=draft.code.line())


def remove_unused(run: Run) -> None:
    """Remove the run directory if its first submission failed and none of its jobs is queued."""
    lines = run.submissions()
    if lines and (len(lines) > 1 or lines[0]["state"] != "refused"):
        return
    # A task that had started before it was cancelled takes a moment to end.
    patience = time.monotonic() + ENDING_S
    try:
        while lines and executor_named(lines[0]["executor"]).look(run, lines, None).at_work:
            if time.monotonic() > patience:
                return
            time.sleep(0.5)
    except NoAnswerError as error:
        log.warning("%s is not removed, because its jobs may be queued. %s", run.folder, error)
        return
    try:
        with contextlib.suppress(FileNotFoundError):  # the reply was lost
            retried(lambda: shutil.rmtree(run.folder), BRIEF_PATIENCE_S)
    except OSError as error:  # what made the submission fail is what the user must see
        log.warning("%s cannot be removed: %s", run.folder, error)
