"""`submit`, `plan` and `resubmit`, with their progress and results."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn

from slurmgpu.cli.commands import sweep
from slurmgpu.cli.commands.submitted import conclude, following, resubmit_followed
from slurmgpu.cli.console import bar_console, json_alone, result, result_json, say
from slurmgpu.cli.exit_codes import EXIT_COMPLETE, EXIT_INCOMPLETE
from slurmgpu.cli.views import probe as forecasts
from slurmgpu.cli.views.dry_run import show_draft, show_resubmission
from slurmgpu.errors import SlurmGPUError
from slurmgpu.operations.earlier_run import compare_earlier
from slurmgpu.operations.probe import draft_probe, probe_draft
from slurmgpu.operations.resubmit import Request, foresee
from slurmgpu.operations.submit import plan_draft, submission_of, submit_draft
from slurmgpu.plan.items import Look, look_at
from slurmgpu.plan.overrides import Overrides
from slurmgpu.plan.planner import Draft, draft_run
from slurmgpu.plan.site_file import origins
from slurmgpu.plan.variants import variants_of
from slurmgpu.run.directory import Run
from slurmgpu.util.amounts import count_of


@json_alone
def submit(
    run_file: Path,
    overrides: Overrides,
    *,
    run_dir: Path | None,
    limit: int | None,
    items: str | None,
    extend: Path | None,
    after: Sequence[Path] | None,
    dry_run: bool,
    wait: bool,
    as_json: bool,
    inject: Sequence[str] | None,
    probe: int | None,
    yes: bool,
    earlier: Path | None = None,
) -> int:
    """Plan a run, and submit it unless it is a dry run or its probe fails or is declined; the exit code.

    `earlier` is the last run by the same name, if this one has the next name that is free.
    """
    if yes and probe is None:
        raise SlurmGPUError("--yes answers the question of --probe; leave it out, or add --probe N.")
    if probe is not None and dry_run:
        raise SlurmGPUError("--probe computes items and --dry-run computes nothing; leave one of them out.")
    estimate: Mapping[str, Any] | None = None
    inject = inject or ()
    others = [Run.open(folder) for folder in after or ()]
    look, old = look_at(items, limit), None if extend is None else Run.open(extend)
    if (variants := variants_of(run_file, overrides, run_dir, look)) is not None:
        _refuse_for_sweep({"--probe": probe, "--extend": extend})
        return sweep.submit(
            run_file,
            variants,
            look=look,
            after=others,
            dry_run=dry_run,
            wait=wait,
            as_json=as_json,
            inject=inject,
        )
    with _drafted(run_file, overrides, run_dir, after=others, look=look, extends=old) as draft:
        if dry_run:
            return show_draft(draft, others, origins(run_file, overrides), as_json=as_json, inject=inject)
        for line in (*draft.notes, *draft.plan.placement):
            say(line)
        begun = None if earlier is None else _about_earlier(earlier, draft)
        if probe is not None:
            submission_of(draft, others, inject)  # finds errors before the probe
            estimate = _probe(draft, probe, as_json=as_json)
            if estimate["failure"] or not forecasts.shall_queue(yes=yes, as_json=as_json):
                if as_json:
                    result_json({**estimate, "submitted": None})
                return EXIT_INCOMPLETE if estimate["failure"] else EXIT_COMPLETE
        with following(draft.run_dir, draft.plan.n_items) as follow:
            made = submit_draft(draft, others, follow.run, inject, begun=begun, tell=say)
    assert made.outcome is not None
    code, told = conclude(made.run, made.outcome, wait=wait, as_json=as_json)
    if as_json:
        result_json({**estimate, "submitted": told} if estimate else told)
    return code


def _about_earlier(folder: Path, draft: Draft) -> str:
    folder = folder.absolute()
    rows, resubmit = f"its rows are in {folder / 'merged.h5'}", f"`slurmgpu resubmit {shlex.quote(str(folder))}`"
    return compare_earlier(folder, draft, "program", rows, resubmit, lambda earlier: draft.plan)


def _refuse_for_sweep(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if value is not None:
            raise SlurmGPUError(
                f"{name} works with one run, and [sweep] makes several. Leave {name} out, or remove the keys of the "
                "run file from [sweep]."
            )


def _probe(draft: Draft, n_items: int, *, as_json: bool) -> Mapping[str, Any]:
    """Run the probe and return its forecast, which is printed unless it becomes part of the JSON."""
    small = draft_probe(draft, n_items)
    n_probed, n_all = small.plan.n_items, draft.plan.n_items
    twice = f" (the whole run: a batch has {draft.plan.batch_size} items); the run computes them again"
    say(f"probing {count_of(n_probed, 'item')} of {n_all:,} in {small.run_dir}{twice if n_probed == n_all else ''}")
    with following(small.run_dir, small.plan.n_items, forecasts.INTERRUPTED) as follow:
        estimate = probe_draft(draft, small, follow.run, follow.status)
    if estimate["failure"]:
        forecasts.show_failure(estimate)
    elif not as_json:
        forecasts.show_forecast(estimate)
    return estimate


@json_alone
def plan(
    run_file: Path,
    overrides: Overrides,
    *,
    run_dir: Path | None,
    limit: int | None,
    items: str | None,
    extend: Path | None,
    as_json: bool,
) -> None:
    """Create the run directory, and print how to submit it by hand."""
    look, old = look_at(items, limit), None if extend is None else Run.open(extend)
    if (variants := variants_of(run_file, overrides, run_dir, look)) is not None:
        _refuse_for_sweep({"--extend": extend})
        sweep.plan(run_file, variants, look, as_json=as_json)
        return
    with _drafted(run_file, overrides, run_dir, look=look, extends=old) as draft:
        run, lines, notes = plan_draft(draft)
    for note in (*draft.notes, *run.plan.placement, *notes):
        say(note)
    if as_json:
        result_json({"run_dir": str(run.folder), "lines": lines})
        return
    say(f"{run.folder} is created, and nothing is queued. To submit it:")
    for line in lines:
        result(line)


@json_alone
def resubmit(run: Run, asked: Request, *, force: bool, dry_run: bool, wait: bool, as_json: bool) -> int:
    """Submit the missing items, unless it is a dry run; the exit code."""
    if dry_run:
        return show_resubmission(run, foresee(run, asked, force=force), as_json=as_json)
    exit_code, told = conclude(run, resubmit_followed(run, asked, force=force), wait=wait, as_json=as_json)
    if as_json:
        result_json(told)
    return exit_code


@contextlib.contextmanager
def _drafted(
    run_file: Path,
    overrides: Overrides,
    run_dir: Path | None,
    *,
    after: Sequence[Run] = (),
    look: Look | None,
    extends: Run | None,
) -> Iterator[Draft]:
    """The draft of a run. The bar is removed at the end, also if the input reports no progress, like a folder."""
    with contextlib.ExitStack() as open_ones:
        with _planning() as progress:
            draft = open_ones.enter_context(
                draft_run(run_file, overrides, run_dir, progress=progress, after=after, look=look, extends=extends)
            )
        yield draft


@contextlib.contextmanager
def _planning() -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar for reading the input, on a terminal."""
    console = bar_console()
    if console is None:
        yield None
        return
    with Progress(TextColumn("reading the input"), BarColumn(), console=console, transient=True) as bar:
        task = bar.add_task("input", total=None)

        yield lambda done, total: bar.update(task, completed=done, total=total)
