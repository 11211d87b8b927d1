"""`submit`, `plan`, `status`, `report`, `resubmit` and `cancel` of a sweep: several runs in one folder."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from slurmgpu.cli.commands import submitted
from slurmgpu.cli.console import json_alone, result, result_json, say, wide_console
from slurmgpu.cli.exit_codes import EXIT_BAD_USAGE, EXIT_COMPLETE, EXIT_INCOMPLETE
from slurmgpu.cli.views import run_list
from slurmgpu.cli.views.columns import headed_table
from slurmgpu.cli.views.comparison import values_of
from slurmgpu.cli.views.dry_run import look_at_draft, show
from slurmgpu.errors import NothingToSubmitError, SlurmGPUError
from slurmgpu.executors import live_tasks
from slurmgpu.executors.submission import Outcome
from slurmgpu.inputs import sweeps
from slurmgpu.operations.resubmit import Request
from slurmgpu.operations.submit import (
    check_drafts,
    check_place,
    naming_submitted,
    plan_draft,
    submit_draft,
)
from slurmgpu.operations.wait import incomplete, wait_for
from slurmgpu.plan.items import Look
from slurmgpu.plan.site_file import origins
from slurmgpu.plan.variants import Drafts, Variant, Variants, drafted
from slurmgpu.report.completeness import is_complete
from slurmgpu.report.report_file import last_report
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import is_over
from slurmgpu.run.sweep_file import said_not_submitted, was_submitted
from slurmgpu.slurm.commands import settings_asked_once
from slurmgpu.util.amounts import count_of
from slurmgpu.util.ansi import plain
from slurmgpu.util.redact import hidden

MAX_VALUES = 8
"""The most values of summaries that `report` shows of a sweep; `--json` has all."""


def submit(
    run_file: Path,
    variants: Variants,
    *,
    look: Look | None,
    after: Sequence[Run],
    dry_run: bool,
    wait: bool,
    as_json: bool,
    inject: Sequence[str],
) -> int:
    """Plan all runs of a sweep, then submit each unless it is a dry run; return their largest exit code.

    With `wait` that includes runs that existed already: 3 if one of them ends incomplete.
    """
    with drafted(run_file, variants, after, look) as drafts, settings_asked_once():
        _say_first(drafts)
        if dry_run:
            return _show_drafts(run_file, drafts, after, as_json=as_json, inject=inject)
        check_drafts(drafts, after, inject)
        drafts.record()
        queued: list[tuple[Run, Outcome]] = []
        done: list[tuple[int, Mapping[str, Any]]] = []

        def conclude(run: Run, outcome: Outcome) -> None:
            if not as_json:
                result(f"{run.folder}:")
            done.append(_concluded(run, outcome, wait=wait, as_json=as_json))

        for variant, draft in drafts.to_submit:
            say(f"{variant.name}: {_values_in_words(variant)}")
            with (
                naming_submitted(drafts, variant),
                submitted.following(draft.run_dir, draft.plan.n_items) as follow,
            ):
                drafts.record()  # another command may have left out what was not made yet
                made = submit_draft(draft, after, follow.run, inject, tell=say)
            assert made.outcome is not None
            if made.outcome.report is None:
                queued.append((made.run, made.outcome))
            # Others are queued before the first is waited for.
            if made.outcome.report is not None or not wait:
                conclude(made.run, made.outcome)
    drafts.record()
    for run, outcome in queued if wait else ():
        conclude(run, outcome)
    codes = [code for code, _ in done] + [_wait_for_end(run) for run in (drafts.there if wait else ())]
    if as_json:
        result_json({"folder": str(variants.folder), "runs": [told for _, told in done]})
    else:
        result(f"next: slurmgpu {'status' if queued and not wait else 'report'} {shlex.quote(str(variants.folder))}")
    return max(codes, default=EXIT_COMPLETE)


def _concluded(run: Run, outcome: Outcome, *, wait: bool, as_json: bool) -> tuple[int, Mapping[str, Any]]:
    """The exit code and the JSON of a submission; its error is printed, because the other runs go on."""
    try:
        return submitted.conclude(run, outcome, wait=wait, as_json=as_json)
    except SlurmGPUError as error:
        return _refused(run.folder, error)


def _refused(folder: Path, error: SlurmGPUError) -> tuple[int, Mapping[str, Any]]:
    """The exit code and the JSON of a run whose error is printed."""
    say(f"{folder.name}: {error}")
    return EXIT_BAD_USAGE, {"run_dir": str(folder), "error": str(error)}


def _wait_for_end(run: Run) -> int:
    """Wait for a run that existed already, if it is running; return 3 if it ends incomplete."""
    if not is_complete(run) and not is_over(run.submissions()):
        try:
            with submitted.following(run.folder, run.plan.n_items) as follow:
                wait_for(run, follow.status)
        except SlurmGPUError as error:
            say(f"{run.name}: {error}")
    if is_complete(run):
        return EXIT_COMPLETE
    say(incomplete(run))
    return EXIT_INCOMPLETE


def plan(run_file: Path, variants: Variants, look: Look | None, *, as_json: bool) -> None:
    """Create the directories of all runs of a sweep, and print how to submit each by hand."""
    told = []
    with drafted(run_file, variants, look=look) as drafts:
        _say_first(drafts)
        for _, draft in drafts.to_submit:
            check_place(draft)
        drafts.record()
        for variant, draft in drafts.to_submit:
            with naming_submitted(drafts, variant):
                drafts.record()  # another command may have left out what was not made yet
                run, lines, notes = plan_draft(draft)
            for note in dict.fromkeys(notes):
                say(note)
            told.append({"run_dir": str(run.folder), "lines": lines})
            if not as_json:
                for line in lines:
                    result(line)
    if as_json:
        result_json({"folder": str(variants.folder), "runs": told})


def _say_first(drafts: Drafts) -> None:
    variants = drafts.variants
    say(f"{variants.said}, in {variants.folder}; GPUs, tasks and limits apply to each run.")
    for run in drafts.there:
        state = "complete" if is_complete(run) else f"not complete: slurmgpu status {run.typed}"
        say(f"{run.name} already exists and is {state}.")
    for note in drafts.notes():
        say(note)
    said = dict.fromkeys(line for _, draft in drafts.to_submit for line in (*draft.notes, *draft.plan.placement))
    for line in said:
        say(line)


def _values_in_words(variant: Variant) -> str:
    return sweeps.describe(hidden(variant.values))


def _show_drafts(run_file: Path, drafts: Drafts, after: Sequence[Run], *, as_json: bool, inject: Sequence[str]) -> int:
    shown = [
        (variant, look_at_draft(draft, after, origins(run_file, variant.overrides), inject))
        for variant, draft in drafts.to_submit
    ]
    code = max((each.code for _, each in shown), default=0)
    if as_json:
        runs = [{"name": variant.name, "values": variant.values, **each.value} for variant, each in shown]
        result_json({"folder": str(drafts.variants.folder), "runs": runs})
        return code
    table = headed_table("run", "values", "items", "shards", "tasks", words=("values",))
    for variant, each in shown:
        asked, frozen = each.seen.submission, each.draft.plan
        table.add_row(
            variant.name,
            escape(_values_in_words(variant)),
            f"{frozen.n_items:,}",
            f"{frozen.n_shards:,}",
            f"{asked.n_tasks:,}",
        )
    wide_console().print(table)
    for number, (variant, each) in enumerate(shown):
        if not number:
            result(f"\n# ---- {variant.name}; the others differ in the values of [sweep]. --json shows all ----")
            show(each)
        elif each.seen.trials and each.code:
            result(f"{variant.name}: {each.verdict}")
    return code


def report(folders: Sequence[Path], *, as_json: bool) -> int:
    """Print each run's rows, failed items and first values of its summary; return 3 if one is incomplete or missing."""
    reports, without = {}, []
    for folder in folders:
        if not was_submitted(folder):
            without.append(said_not_submitted(folder))
            continue
        try:
            reports[folder.name] = last_report(Run.open(folder))
        except SlurmGPUError as error:
            without.append(str(error))
    if as_json:
        result_json({"runs": reports})
    else:
        values = {name: values_of(each["summary"]) for name, each in reports.items()}
        if all(values[name].get("failed") == f"{each['n_errors']:,}" for name, each in reports.items()):
            for shown in values.values():
                shown.pop("failed")  # it has a column
        names = list(dict.fromkeys(name for each in values.values() for name in each))
        own = ("run", "rows", "failed")
        table = headed_table(*own, *(f"summary.{name}" if name in own else name for name in names[:MAX_VALUES]))
        for name, each in reports.items():
            cells = [values[name].get(value, "–") for value in names[:MAX_VALUES]]
            rows = f"{each['n_rows']:,} of {each['n_items']:,}"
            table.add_row(escape(plain(name)), rows, f"{each['n_errors']:,}", *(escape(plain(cell)) for cell in cells))
        wide_console().print(table)
        if len(names) > MAX_VALUES:
            result(f"… and {len(names) - MAX_VALUES:,} more values of the summaries; --json shows them.")
    for line in without:
        say(line)
    return EXIT_COMPLETE if not without and all(each["complete"] for each in reports.values()) else EXIT_INCOMPLETE


def status(folder: Path, runs: Sequence[Path], *, as_json: bool) -> None:
    """Print the folder of a sweep as `list` does, and name its runs that were never made."""
    value = run_list.list_runs(folder)
    if as_json:
        missing = [str(run) for run in runs if not was_submitted(run)]
        result_json({**value, "not_submitted": missing})
    else:
        run_list.show_list(value)
        say_not_submitted(runs)


def say_not_submitted(folders: Sequence[Path]) -> None:
    """Name the runs of a sweep that were never made."""
    for folder in folders:
        if not was_submitted(folder):
            say(said_not_submitted(folder))


@json_alone
def resubmit(folders: Sequence[Path], asked: Request, *, force: bool, wait: bool, as_json: bool) -> int:
    """Submit what the runs of a sweep lack; runs that lack nothing, or are running, are left as they are.

    All are submitted before the first is waited for. Returns the largest exit code; 2 if one is refused, or if nothing
    was submitted although something may be missing.
    """
    outcomes: list[tuple[Run, Outcome]] = []
    done: list[tuple[int, Mapping[str, Any]]] = []

    say_not_submitted(folders)
    for folder in filter(was_submitted, folders):
        try:
            run = Run.open(folder)
            if not is_complete(run) or asked.failed or asked.other_code:
                outcomes.append((run, submitted.resubmit_followed(run, asked, force=force)))
        except NothingToSubmitError as error:
            say(f"{folder.name}: {error}")
        except SlurmGPUError as error:
            done.append(_refused(folder, error))
    done += [_concluded(run, outcome, wait=wait, as_json=as_json) for run, outcome in outcomes]
    if as_json:
        result_json({"runs": [told for _, told in done]})
    if done:
        return max(code for code, _ in done)
    if not all(was_submitted(folder) and is_complete(Run.open(folder)) for folder in folders):
        return EXIT_BAD_USAGE
    say(f"All {count_of(len(folders), 'run')} are complete: nothing is left to compute.")
    return EXIT_COMPLETE


def cancel(folders: Sequence[Path]) -> int:
    """Stop the tasks and merges of all runs of a sweep; return 2 if one run could not be stopped."""
    say_not_submitted(folders)
    code = EXIT_COMPLETE
    runs = []
    for folder in filter(was_submitted, folders):
        try:
            runs.append(Run.open(folder))
        except SlurmGPUError as error:
            say(f"{folder.name}: {error}")
            code = EXIT_BAD_USAGE
    for run, done in live_tasks.cancel_all(runs):
        if isinstance(done, SlurmGPUError):
            say(f"{run.name}: {done}")
            code = EXIT_BAD_USAGE
        else:
            result(f"{run.name}: {f'cancelled: {done}' if done else 'no task of this run is alive.'}")
    return code
