"""`submit`, `plan` and `resubmit`, with their progress and results."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from slurmgpu import api
from slurmgpu.cli.console import result, result_json, say
from slurmgpu.cli.views import probe as forecasts
from slurmgpu.cli.views.dry_run import show_draft
from slurmgpu.cli.views.tables import show_report
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import probe as probes
from slurmgpu.executors.registry import executor_named
from slurmgpu.executors.submission import Outcome
from slurmgpu.faults.verdicts import judge
from slurmgpu.plan.items import look_at
from slurmgpu.plan.planner import Draft, draft_run
from slurmgpu.plan.site_file import origins
from slurmgpu.report.status import Status, StatusAttempt
from slurmgpu.run.directory import Run
from slurmgpu.run.records import Record
from slurmgpu.util.plurals import count_of

PROGRESS_S = 3.0
"""How often attempts' records are read for progress: as often as they are written."""


def submit(
    run_file: Path,
    overrides: Mapping[str, Any],
    *,
    run_dir: Path | None,
    limit: int | None,
    items: str | None,
    extend: Path | None,
    after: Path | None,
    dry_run: bool,
    wait: bool,
    as_json: bool,
    inject: Sequence[str] | None,
    probe: int | None,
    yes: bool,
) -> int:
    """Plan a run, and submit it unless it is a dry run or its probe fails or is declined; the exit code."""
    if yes and probe is None:
        raise SlurmGPUError("--yes answers the question of --probe; leave it out, or add --probe N.")
    if probe is not None and dry_run:
        raise SlurmGPUError("--probe computes items and --dry-run computes nothing; leave one of them out.")
    foretold: Mapping[str, Any] | None = None
    inject = inject or ()
    other = Run.open(after) if after is not None else None
    look, old = look_at(items, limit), None if extend is None else Run.open(extend)
    with _planning() as progress, draft_run(run_file, overrides, run_dir, progress, other, look, old) as draft:
        if dry_run:
            return show_draft(draft, other, origins(run_file, overrides), as_json=as_json, inject=inject)
        for line in (*draft.notes, *draft.plan.placement):
            say(line)
        if probe is not None:
            api.submission_of(draft, other, inject)  # finds errors before the probe
            foretold = _probe(draft, probe, as_json=as_json)
            if foretold["failure"] or not forecasts.shall_queue(yes=yes, as_json=as_json):
                if as_json:
                    result_json({**foretold, "submitted": None})
                return api.EXIT_INCOMPLETE if foretold["failure"] else 0
        with _following(draft.run_dir, draft.plan.n_items) as follow:
            handle = api.submit_draft(draft, other, follow.run, inject)
    assert handle.outcome is not None
    return _conclude(handle.run, handle.outcome, wait=wait, as_json=as_json, foretold=foretold)


def _probe(draft: Draft, n_items: int, *, as_json: bool) -> Mapping[str, Any]:
    """Run the probe; the forecast, which is printed unless it becomes part of the JSON."""
    small = probes.draft_probe(draft, n_items)
    n_probed, n_all = small.plan.n_items, draft.plan.n_items
    twice = f", the whole run, as a batch has {draft.plan.batch_size}; the run computes them again"
    say(f"probing {count_of(n_probed, 'item')} of {n_all:,} in {small.run_dir}{twice if n_probed == n_all else ''}")
    with _following(small.run_dir, small.plan.n_items, forecasts.INTERRUPTED) as follow:
        foretold = api.probe_draft(draft, n_items, follow.run, follow.status)
    if foretold["failure"]:
        forecasts.show_failure(foretold)
    elif not as_json:
        forecasts.show_forecast(foretold)
    return foretold


def plan(
    run_file: Path,
    overrides: Mapping[str, Any],
    *,
    run_dir: Path | None,
    limit: int | None,
    items: str | None,
    extend: Path | None,
    as_json: bool,
) -> None:
    """Create the run directory, and print how to submit it by hand."""
    look, old = look_at(items, limit), None if extend is None else Run.open(extend)
    with _planning() as progress, draft_run(run_file, overrides, run_dir, progress, None, look, old) as draft:
        run, lines, notes = api.plan_draft(draft)
    for note in (*draft.notes, *run.plan.placement, *notes):
        say(note)
    if as_json:
        result_json({"run_dir": str(run.folder), "lines": lines})
        return
    say(f"{run.folder} is created, and nothing is queued. To submit it:")
    for line in lines:
        result(line)


def resubmit(
    run: Run,
    tables: Mapping[str, Any],
    *,
    failed: bool,
    force: bool,
    code: str | None,
    other_code: bool,
    wait: bool,
    as_json: bool,
) -> int:
    """Submit the missing items; the exit code."""
    with _following(run.folder, run.plan.n_items) as follow:
        which: Any = {"failed": failed, "force": force, "code": code, "other_code": other_code}
        outcome = api.resubmit(
            run,
            tables.get("resources"),
            tables.get("slurm"),
            follow.run,
            merging=tables.get("merge"),
            tell=say,
            **which,
        )
    return _conclude(run, outcome, wait=wait, as_json=as_json)


def _conclude(
    run: Run, outcome: Outcome, *, wait: bool, as_json: bool, foretold: Mapping[str, Any] | None = None
) -> int:
    for note in outcome.notes:
        say(note)
    report = outcome.report
    if report is None and wait:
        _say_submitted(run, outcome, to_stderr=True)
        with _following(run.folder, run.plan.n_items) as follow:
            report = api.wait_for(run, follow.status)
    if report is None:
        if as_json:
            told = {"run_dir": str(run.folder), "submission": asdict(outcome.submission), **outcome.jobs}
            result_json({**foretold, "submitted": told} if foretold else told)
        else:
            _say_submitted(run, outcome, to_stderr=False)
        return 0
    if as_json:
        result_json({**foretold, "submitted": report} if foretold else report)
    else:
        show_report(report)
    verdicts = judge(run, report)
    if verdicts and not as_json:
        say("")
    for verdict in verdicts:
        say(verdict.text)
    if not all(verdict.kept for verdict in verdicts):
        return api.EXIT_FAILED
    return 0 if report["complete"] else api.EXIT_INCOMPLETE


def _say_submitted(run: Run, outcome: Outcome, *, to_stderr: bool) -> None:
    tell = say if to_stderr else result
    first, *others = outcome.jobs_in_words
    tell(", ".join([f"submitted: {first} ({count_of(outcome.submission.n_tasks, 'task')})", *others]))
    tell(f"next: slurmgpu status --watch {run.typed}")


@contextlib.contextmanager
def _planning() -> Iterator[Any]:
    """A progress bar for reading the input, on a terminal."""
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
    """Shows how many items are done: by a bar on a terminal, else by a line for each tenth."""

    def __init__(self, bar: Progress | None, n_items: int) -> None:
        self._bar = partial(bar.update, bar.add_task("items", total=n_items, progress="")) if bar else None
        self._n_items = n_items
        self._last = -1
        self._looked = 0.0

    def run(self, run: Run) -> None:
        """Show published shards, and on a terminal also the progress of items."""
        if self._bar is not None and time.monotonic() - self._looked >= PROGRESS_S:
            self._looked = time.monotonic()
            self._tell(run.attempts())
        self._show(sum(stop - start for start, stop in map(run.plan.bounds, run.published())))

    def status(self, status: Status) -> None:
        """Show the progress in a status."""
        self._tell(status["attempts"])
        self._show(status["n_items_done"])

    def _tell(self, attempts: Sequence[Record] | Sequence[StatusAttempt]) -> None:
        """Show the item progress of the first attempt that reports one."""
        if self._bar is not None:
            told = [text for attempt in attempts if (text := attempt["progress"])]
            self._bar(progress=escape(told[0]) if told else "")

    def _show(self, n_done: int) -> None:
        if self._bar is not None:
            self._bar(completed=n_done)
        elif n_done * 10 // self._n_items > self._last:
            self._last = n_done * 10 // self._n_items
            say(f"{n_done:,} of {count_of(self._n_items, 'item')}")


@contextlib.contextmanager
def _following(folder: Path, n_items: int, if_interrupted: str = "") -> Iterator[_Follower]:
    """Follow a run; Ctrl-C prints `if_interrupted`, or else what continues."""
    columns = (
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} items"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[progress]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True) if sys.stderr.isatty() else None
    try:
        with bar or contextlib.nullcontext():
            yield _Follower(bar, n_items)
    except KeyboardInterrupt:
        if if_interrupted:
            say(if_interrupted)
        else:
            _say_interrupted(folder)
        raise


def _say_interrupted(folder: Path) -> None:
    if not (folder / "run.json").exists():
        say("interrupted; nothing was submitted.")
        return
    run = Run.open(folder)
    last = run.submissions()[-1]
    executor = executor_named(last["executor"])
    if executor.queues:
        say(f"interrupted; {executor.title} continues the run. To see it: slurmgpu status --watch {run.typed}")
        say(f"To stop it: slurmgpu cancel {run.typed}")
    else:
        say(f"interrupted; the tasks have ended, published shards are kept. To continue: slurmgpu resubmit {run.typed}")
