"""The output of `report`."""

from __future__ import annotations

import json
import keyword
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from slurmgpu.cli.console import result, wide_console
from slurmgpu.cli.views.columns import (
    MAX_ATTEMPTS,
    MAX_LISTED,
    counts_of,
    show_failures,
    show_rest,
    show_table,
    used_by,
)
from slurmgpu.code.versions import are_told
from slurmgpu.code.versions import in_words as in_words_of
from slurmgpu.loader.names import title_of
from slurmgpu.report.attempts import IDLE_PERCENT, AttemptRow, in_task_order, node_of, outcome_of
from slurmgpu.report.ledger import KINDS, Ledger, energy_in_words, in_words
from slurmgpu.report.next_step import next_step
from slurmgpu.report.origin import origin_in_words, origin_of
from slurmgpu.report.report_file import FailedItem, Hole, Report, every_item_failed, faults_of, last_death
from slurmgpu.report.versions import versions_in_words
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import without_numbers
from slurmgpu.run.frozen_plan import Plan
from slurmgpu.run.submissions import shares_gpus
from slurmgpu.util.amounts import count_of, stretch_of, wide_clock
from slurmgpu.util.ansi import plain

EVERYWHERE = ("python", "numpy", "h5py")
"""Packages of every run, whose versions are only on the page and in the JSON."""
MAX_ODD = 8
"""The most columns with NaN or infinities that are named."""
MIN_HOURS = 0.05
"""The ledger of fewer hours is not printed: a few minutes are not representative."""


def show_report(report: Report, plan: Plan | None = None) -> None:
    """Print the report: completeness, missing shards, failed items, attempts, and the command for the rest.

    With the `plan` also the workload and the input, which whoever has just submitted the run knows.
    """
    from slurmgpu.cli.views.summaries import show_summary

    console = wide_console()
    word = "[bold green]complete[/]" if report["complete"] else "[bold red]incomplete[/]"
    if every_item_failed(report):
        word = "[bold red]complete, every item failed[/]"
    name = escape(plain(report["run"]))
    console.print(
        f"[bold]{name}[/]  {word}  {report['n_rows']:,} of {count_of(report['n_items'], 'row')}, "
        f"{report['n_errors']:,} of them failed, {report['gpu_hours']:.2f} GPU-hours"
    )
    if plan is not None:
        result(plain(origin_in_words(origin_of(plan), title_of(plan.workload, ""))))
    _show_origin(report)
    _show_ledger(report["ledger"], is_shared=any(shares_gpus(each.get("slurm", {})) for each in report["submissions"]))
    show_summary(console, report["summary"])
    _show_holes(console, report)
    _show_errors(console, report)
    _show_attempts(console, report)
    _show_damage(report)
    for trace in dict.fromkeys(a["traceback"] for a in report["attempts"] if a["traceback"]):
        result(f"\n{trace.rstrip()}")
    _show_next(report)


def _show_origin(report: Report) -> None:
    """Print where the rows are, and what computed them."""
    if report["merged"]:
        result(f"merged: {report['merged']}")
    if faults := faults_of(report):
        result(f"rehearsal: faults were injected: {faults}")
    if image := report["image"]:
        result(f"image: {image['path']} (sha256 {image.get('sha256', '–')[:12]})")
    if versions := versions_in_words(report["computed_with"], leaving_out=EVERYWHERE):
        result(f"computed with: {plain(versions)}")
    if odd := report["not_finite"]:
        result(f"not finite: {_not_finite(odd)}")
        result(
            f"  These rows are good: the workload gave such values, as for what is unknown.{_which_rows(report, odd)}"
        )
    if are_told(code := report["code"]):
        result(f"code: {in_words_of(code)}")
    if n_retried := sum(a["n_retried"] for a in report["attempts"]):
        waited_s = sum(a["waited_s"] for a in report["attempts"])
        result(f"tried again: {count_of(n_retried, 'item')}, after waiting {waited_s:,.0f} s")


def _show_damage(report: Report) -> None:
    """Print the revisions and records that cannot be used."""
    for name, why in report["damaged_revisions"].items():
        result(f"damaged: shards/{plain(name)}, with recomputed items: {plain(why)}")
        result("  These items keep their former rows, unless merged.h5 already had the new ones.")
    for name in report["damaged_records"]:
        result(f"record damaged: tasks/{name}.json; the work of attempt {name} is unknown")
    for name in report["unreadable_records"]:
        result(f"record could not be read: tasks/{name}.json; run `slurmgpu merge` once it can be read")


def _show_next(report: Report) -> None:
    """Print the next command, and what to change first if the same command would fail again."""
    step = next_step(report, Run.open(Path(report["run_dir"])))
    if step is None:
        return
    if step.before:
        result(f"\n{step.before}")
    result(f"\n{step.words}: {step.command}" if step.command else f"\n{step.words}")
    for line in step.after:
        result(line)


def _not_finite(columns: Mapping[str, Mapping[str, int]]) -> str:
    words, told = (("nan", "NaN"), ("infinite", "infinity")), []
    for name, counts in list(columns.items())[:MAX_ODD]:
        parts = [f"{word} in {count_of(n, 'row')}" for key, word in words if (n := counts.get(key))]
        told.append(f"{plain(name)} ({', '.join(parts)})")
    more = f" and {count_of(len(columns) - MAX_ODD, 'more column')}" if len(columns) > MAX_ODD else ""
    return ", ".join(told) + more


def _which_rows(report: Report, columns: Mapping[str, Mapping[str, int]]) -> str:
    """The command that shows such rows of the first column that has one number a row, behind a blank."""
    of_plan = Run.open(Path(report["run_dir"])).plan.columns
    name = next((name for name in columns if of_plan.get(name, {}).get("shape") == []), None)
    if name is None:
        return ""
    is_word = name.isidentifier() and not keyword.iskeyword(name)
    value = name if is_word else f"col({json.dumps(name, ensure_ascii=False)})"
    condition = f"isnan({value} - {value})" if columns[name].get("infinite") else f"isnan({value})"
    return f" slurmgpu show {shlex.quote(report['run_dir'])} --where {shlex.quote(condition)}"


def _show_ledger(ledger: Ledger, *, is_shared: bool) -> None:
    if ledger["allocated"] < MIN_HOURS:
        return
    shown = in_words(ledger)
    parts = ", ".join(f"{shown.texts[kind]} {kind} ({shown.shares[kind]})" for kind in KINDS)
    result(f"allocated: {shown.texts['allocated']} {shown.unit}: {parts}")
    if ledger["energy_kwh"] is not None:
        result(f"energy: {' '.join(energy_in_words(ledger['energy_kwh']))}")
    if is_shared:
        result("tasks shared GPUs: each counts as if it had a GPU of its own")


def _show_holes(console: Console, report: Report) -> None:
    if not report["missing"]:
        return
    items, shards = count_of(report["n_missing_items"], "item"), count_of(len(report["missing"]), "shard")
    console.print(f"\n[bold]missing[/]  {items} in {shards}")
    stretches = _stretches(report["missing"])
    for first, last in stretches[:MAX_LISTED]:
        shards = stretch_of(first["shard"], last["shard"], "shard")
        why = f"  damaged: {plain(first['damaged'])}" if first["damaged"] else ""
        result(f"  {shards}: {stretch_of(first['start'], last['stop'] - 1, 'item')}{why}")
    show_rest(len(stretches), "report --json lists them")


def _stretches(holes: Sequence[Hole]) -> list[tuple[Hole, Hole]]:
    """The first and last hole of each run of adjacent holes; a damaged one stands alone."""
    found: list[tuple[Hole, Hole]] = []
    for hole in holes:
        first, last = found[-1] if found else (hole, hole)
        if found and hole["shard"] == last["shard"] + 1 and not (hole["damaged"] or last["damaged"]):
            found[-1] = first, hole
        else:
            found.append((hole, hole))
    return found


def _show_errors(console: Console, report: Report) -> None:
    """Print each message once, with the first item that failed with it.

    Of too many messages, those that differ only in numbers count as one.
    """
    if not report["errors"]:
        return
    classes = ", ".join(f"{count:,} {name}" for name, count in report["errors_by_class"].items())
    console.print(f"\n[bold]failed items[/]  {classes}")
    met: dict[str, list[FailedItem]] = {}
    for item in report["errors"]:
        first_line = plain(item["message"].partition("\n")[0])
        met.setdefault(f"{item['class']}: {first_line}", []).append(item)
    how = ""
    if len(met) > MAX_LISTED:
        alike: dict[str, tuple[str, list[FailedItem]]] = {}
        for message, items in met.items():
            alike.setdefault(without_numbers(message), (message, []))[1].extend(items)
        met, how = dict(alike.values()), " like it"
    for message, items in list(met.items())[:MAX_LISTED]:
        name = f" ({plain(known)})" if (known := items[0].get("name")) else ""
        more = f" and {len(items) - 1:,} more{how}" if len(items) > 1 else ""
        result(f"  item {items[0]['index']}{name}{more}: {message}")
    show_rest(len(met), "report --json lists them")
    if report["n_errors"] > (n_listed := len(report["errors"])):
        folder = shlex.quote(report["run_dir"])
        result(
            f"  Only the first {n_listed:,} failed items are listed; `slurmgpu show {folder} --failed` shows others."
        )


def _show_attempts(console: Console, report: Report) -> None:
    attempts = in_task_order(report["attempts"])
    if not attempts:
        return
    shown = attempts[:MAX_ATTEMPTS]
    names = {"attempt": [a["attempt"] for a in shown]}
    columns = {
        **names,
        "node": list(map(node_of, shown)),
        "GPUs": [str(a["n_gpus"] * a["n_nodes"]) for a in shown],
        "time": [wide_clock(a["seconds"]) for a in shown],
        **counts_of(shown, [(len(a["deaths"]), last_death(a["deaths"])) for a in shown]),
    }
    end = {"end": list(map(outcome_of, shown))}
    used = used_by([a["usage"] for a in shown])
    console.print("\n[bold]attempts[/]")
    show_table(console, names, columns, used, end)
    show_rest(len(attempts), "report --json lists them", MAX_ATTEMPTS)
    show_failures(console, attempts)
    _show_idle(attempts)


def _show_idle(attempts: Sequence[AttemptRow]) -> None:
    used = [(a["usage"].get("gpu_utilisation"), a["attempt"]) for a in attempts if a["idle_gpu"]]
    idle = sorted((share, name) for share, name in used if share is not None)
    if not idle:
        return
    share, name = idle[0]
    others = f" (and under {IDLE_PERCENT} % in {len(idle) - 1:,} more)" if len(idle) > 1 else ""
    result(
        f"\nthe GPU of attempt {name} was used {share:.0f} % on average{others}. A larger batch_size gives it more "
        "work at once. If it waits while the workload prepares items on the CPU, several tasks can share it "
        "(docs/how-to/share-a-gpu.md)."
    )
