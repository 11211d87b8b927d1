"""The output of a submission: progress, job ids, the report, and what goes on after Ctrl-C."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from slurmgpu.cli.console import bar_console, result, say
from slurmgpu.cli.exit_codes import EXIT_COMPLETE, EXIT_FAILED, EXIT_INCOMPLETE
from slurmgpu.cli.views.report import show_report
from slurmgpu.executors.registry import executor_named
from slurmgpu.executors.submission import Outcome
from slurmgpu.faults.verdicts import judge
from slurmgpu.operations.resubmit import Request, resubmit
from slurmgpu.operations.wait import wait_for
from slurmgpu.report.completeness import command_to_continue, is_complete
from slurmgpu.report.state_words import News, line_of
from slurmgpu.report.status import Status, StatusReader
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import is_over
from slurmgpu.util.amounts import count_of
from slurmgpu.util.early_signals import INTERRUPTS
from slurmgpu.util.pauses import rest_s

PROGRESS_S = 3.0
"""How often attempts' records are read for progress: as often as they are written."""


def resubmit_followed(run: Run, asked: Request, *, force: bool) -> Outcome:
    """Submit the missing items of a run, and follow what is computed here; the outcome."""
    with following(run.folder, run.plan.n_items) as follow:
        return resubmit(run, asked, follow.run, force=force, tell=say)


def conclude(run: Run, outcome: Outcome, *, wait: bool, as_json: bool) -> tuple[int, Mapping[str, Any]]:
    """Print the outcome of a submission; with `wait`, wait for its report. Return the exit code and the JSON."""
    report = outcome.report
    if report is None and wait:
        _say_submitted(run, outcome, to_stderr=True)
        with following(run.folder, run.plan.n_items) as follow:
            report = wait_for(run, follow.status)
    if report is None:
        if not as_json:
            _say_submitted(run, outcome, to_stderr=False)
        return EXIT_COMPLETE, {"run_dir": str(run.folder), "submission": asdict(outcome.submission), **outcome.jobs}
    if not as_json:
        show_report(report)
    if n_left := _not_again(run):
        what = count_of(n_left, "item")
        say(f"Not recomputed: {what}; the former rows stay. Repeat the command to compute the rest.")
    verdicts = judge(run, report)
    if verdicts and not as_json:
        say("")
    for verdict in verdicts:
        say(verdict.text)
    if not all(verdict.kept for verdict in verdicts):
        return EXIT_FAILED, cast(dict[str, Any], report)
    return EXIT_COMPLETE if report["complete"] else EXIT_INCOMPLETE, cast(dict[str, Any], report)


def _say_submitted(run: Run, outcome: Outcome, *, to_stderr: bool) -> None:
    tell = say if to_stderr else result
    first, *others = outcome.jobs_in_words
    tell(", ".join([f"submitted: {first} ({count_of(outcome.submission.n_tasks, 'task')})", *others]))
    tell(f"next: slurmgpu status --watch {run.typed}")


class _Follower:
    """Shows the progress of a run: a bar on a terminal, else lines as `status --watch` prints them in a pipe.

    With the executor debug it prints lines on a terminal, too: a bar would draw over what is typed in a debugger.
    """

    def __init__(self, shown: contextlib.ExitStack, n_items: int) -> None:
        self._shown, self._n_items = shown, n_items
        self._bar: Callable[..., None] | None = None
        self._begins = True
        self._news = News()
        self._reader: StatusReader | None = None
        self._looked, self._counts_from = -PROGRESS_S, 0.0

    def run(self, run: Run) -> None:
        """Show the status every PROGRESS_S, and on a terminal published shards meanwhile."""
        if self._reader is None:
            self._reader = StatusReader(run)
            lines = run.submissions()  # none if they were lost
            self._begin(draws=not (lines and executor_named(lines[-1]["executor"]).in_process))
        begun = time.monotonic()
        if begun - self._looked >= PROGRESS_S:
            self._looked = begun
            self.status(self._reader.read(gpus_of=()))
        elif self._bar is not None and begun >= self._counts_from:
            self._bar(completed=sum(stop - start for start, stop in map(run.plan.bounds, run.published())))
            now = time.monotonic()
            self._counts_from = now + rest_s(now - begun, 0.0)

    def status(self, status: Status) -> None:
        """Show a status, with the progress of the first attempt that reports one."""
        self._begin(draws=True)
        if self._bar is not None:
            told = next(filter(None, (attempt["progress"] for attempt in status["attempts"])), "")
            self._bar(completed=status["n_items_done"], progress=escape(told))
        elif self._news.is_due(status):
            say(line_of(status))

    def _begin(self, *, draws: bool) -> None:
        console = bar_console() if draws and self._begins else None
        self._begins = False
        if console is None:
            return
        counted = Column(no_wrap=True, min_width=len(f"{self._n_items:,} of {self._n_items:,} items"))
        columns = (
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} items", table_column=counted),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[progress]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        )
        bar = self._shown.enter_context(Progress(*columns, console=console, transient=True))
        self._bar = partial(bar.update, bar.add_task("items", total=self._n_items, progress=""))


@contextlib.contextmanager
def following(folder: Path, n_items: int, if_interrupted: str = "") -> Iterator[_Follower]:
    """Follow a run; Ctrl-C, SIGTERM and SIGHUP print `if_interrupted`, or else what continues."""
    try:
        with contextlib.ExitStack() as shown:
            yield _Follower(shown, n_items)
    except INTERRUPTS:
        if if_interrupted:
            say(if_interrupted)
        else:
            _say_interrupted(folder)
        raise


def _not_again(run: Run) -> int:
    """How many items the last submission should have recomputed but did not; a complete run has their former rows."""
    if not (lines := run.submissions()):  # lost meanwhile
        return 0
    asked = run.computing(lines[-1]["submission"])
    if asked.recompute is None:
        return 0
    left = asked.recompute.shards.keys() - asked.published(fresh=True)
    return sum(asked.recompute.shards[shard].n_items for shard in left)


def _say_interrupted(folder: Path) -> None:
    if not (folder / "run.json").exists():
        say(f"interrupted; {folder} was not submitted.")
        return
    run = Run.open(folder)
    lines = run.submissions()
    executor = executor_named(lines[-1]["executor"]) if lines else None
    if executor is not None and executor.queues and not is_over(lines):
        say(f"interrupted; {executor.title} continues the run. To see it: slurmgpu status --watch {run.typed}")
        say(f"To stop it: slurmgpu cancel {run.typed}")
    else:
        said = "the tasks have ended, published shards are kept" if lines else "nothing was submitted"
        command = "repeat the command" if is_complete(run) else command_to_continue(run)
        say(f"interrupted; {said}. To continue: {command}")
