"""`submit` and `resubmit`: what they print while a run is planned, followed and over."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from slurmgpu import api
from slurmgpu.cli.output import count_of, result, result_json, say, show_origins, show_plan, show_scripts
from slurmgpu.cli.tables import show_report
from slurmgpu.executors import commands
from slurmgpu.executors.submitting import Outcome
from slurmgpu.planning import Draft, draft_run
from slurmgpu.runs import Run
from slurmgpu.site import Origins, origins


def submit(
    run_file: Path,
    overrides: Mapping[str, Any],
    run_dir: Path | None,
    after: Path | None,
    *,
    dry_run: bool,
    wait: bool,
    as_json: bool,
) -> int:
    """Plan, and submit unless it is a dry run; the exit code."""
    other = Run.open(after) if after is not None else None
    with _planning() as progress, draft_run(run_file, overrides, run_dir, progress, other) as draft:
        if dry_run:
            _show_draft(draft, other, origins(run_file, overrides), as_json=as_json)
            return 0
        for line in draft.plan.placement:
            say(line)
        with _following(draft.run_dir, draft.plan.n_items) as follow:
            handle = api.submit_draft(draft, other, follow.run)
    assert handle.outcome is not None
    return _conclude(handle.run, handle.outcome, wait=wait, as_json=as_json)


def plan(run_file: Path, overrides: Mapping[str, Any], run_dir: Path | None, *, as_json: bool) -> None:
    """Make the run directory, and print how to submit it by hand."""
    with _planning() as progress, draft_run(run_file, overrides, run_dir, progress) as draft:
        run, lines, notes = api.plan_draft(draft)
    for note in (*run.plan.placement, *notes):
        say(note)
    if as_json:
        result_json({"run_dir": str(run.folder), "lines": lines})
        return
    say(f"{run.folder} is made, and nothing is queued. To submit it:")
    for line in lines:
        result(line)


def resubmit(
    run: Run, resources: Mapping[str, Any], slurm: Mapping[str, Any], *, failed: bool, wait: bool, as_json: bool
) -> int:
    """Submit what is missing; the exit code."""
    with _following(run.folder, run.plan.n_items) as follow:
        outcome = api.resubmit(run, resources, slurm, follow.run, failed=failed)
    return _conclude(run, outcome, wait=wait, as_json=as_json)


def _conclude(run: Run, outcome: Outcome, *, wait: bool, as_json: bool) -> int:
    for note in outcome.notes:
        say(note)
    report = outcome.report
    if report is None and wait:
        _say_submitted(run, outcome, to_stderr=True)
        with _following(run.folder, run.plan.n_items) as follow:
            report = api.wait_for(run, follow.status)
    if report is None:
        if as_json:
            result_json({"run_dir": str(run.folder), "submission": asdict(outcome.submission), **outcome.jobs})
        else:
            _say_submitted(run, outcome, to_stderr=False)
        return 0
    if as_json:
        result_json(report)
    else:
        show_report(report)
    return 0 if report["complete"] else api.EXIT_INCOMPLETE


def _say_submitted(run: Run, outcome: Outcome, *, to_stderr: bool) -> None:
    tell = say if to_stderr else result
    submission, jobs = outcome.submission, outcome.jobs
    tasks = count_of(submission.n_tasks, "task")
    tell(f"submitted: array job {jobs['array_job']} ({tasks}), merge job {jobs['merge_job']}")
    tell(f"next: slurmgpu status {run.typed}")


def _show_draft(draft: Draft, after: Run | None, values: Origins, *, as_json: bool) -> None:
    from slurmgpu.executors import slurm

    submission = api.submission_of(draft, after)
    notes: list[str] = []
    scripts: dict[str, str] = {}
    if submission.executor == "slurm":
        try:
            submission, notes = slurm.respect_limits(submission)
            notes += slurm.hazards(draft.plan.container)
            scripts = slurm.scripts(draft.run_dir, draft.plan.name, submission)
        except commands.SlurmUnavailableError as error:
            notes = [f"Neither limits nor scripts can be shown. {error}"]
    if as_json:
        plan, asked = draft.plan.to_json(), asdict(submission)
        result_json(
            {
                "run_dir": str(draft.run_dir),
                "plan": plan,
                "submission": asked,
                "origins": values,
                "notes": notes,
                "scripts": scripts,
            }
        )
    else:
        show_plan(draft.plan.to_json(), asdict(submission), str(draft.run_dir), notes)
        show_origins(values)
        show_scripts(scripts)


@contextlib.contextmanager
def _planning() -> Iterator[Any]:
    """A bar for the scan of a large input, on a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with Progress(TextColumn("reading the input"), BarColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("input", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if done >= total:
                bar.stop()

        yield show


class _Follower:
    """Shows how many items are done: a bar on a terminal, else a line now and then."""

    def __init__(self, bar: Progress | None, n_items: int) -> None:
        self._bar = bar
        self._task: TaskID | None = bar.add_task("items", total=n_items) if bar else None
        self._n_items = n_items
        self._last = -1

    def run(self, run: Run) -> None:
        """From the shards that are published."""
        self._show(sum(stop - start for start, stop in map(run.plan.bounds, run.published())))

    def status(self, status: Mapping[str, Any]) -> None:
        """From a status."""
        self._show(status["n_items_done"])

    def _show(self, n_done: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=n_done)
        elif n_done * 10 // self._n_items > self._last:
            self._last = n_done * 10 // self._n_items
            say(f"{n_done:,} of {count_of(self._n_items, 'item')}")


@contextlib.contextmanager
def _following(folder: Path, n_items: int) -> Iterator[_Follower]:
    """Follow a run; Ctrl-C says what goes on without us."""
    columns = (
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} items"),
        BarColumn(),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True) if sys.stderr.isatty() else None
    try:
        with bar or contextlib.nullcontext():
            yield _Follower(bar, n_items)
    except KeyboardInterrupt:
        _say_interrupted(folder)
        raise


def _say_interrupted(folder: Path) -> None:
    if not (folder / "run.json").exists():
        say("interrupted; nothing was submitted.")
        return
    run = Run.open(folder)
    last = run.submissions()[-1]
    if last["executor"] == "slurm":
        say(f"interrupted; Slurm goes on with the run. To see it: slurmgpu status {run.typed}")
        say(f"To stop it: slurmgpu cancel {run.typed}")
    else:
        say(f"interrupted; the tasks have ended and what is published is kept. To go on: slurmgpu resubmit {run.typed}")
