"""What `status` and `report` show: how a run stands, and what came of it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slurmgpu.cli.output import count_of, result, say, wide_console
from slurmgpu.cli.summaries import show_summary
from slurmgpu.report import IDLE_PERCENT, last_death

MAX_LISTED = 20
"""Failed items, holes and messages that are listed; the JSON has all."""
MAX_ATTEMPTS = 200
MAX_NAMES = 3

WORDS = {"attempt", "node", "state", "progress", "end", "last word"}
"""Columns of text; the others are numbers."""
FOLDING = {"node", "progress", "end"}
"""Of these, the ones that take several lines where the terminal is narrow."""


def show_status(status: Mapping[str, Any]) -> None:
    """A run's progress, its attempts and what Slurm's queue says."""
    console = wide_console()
    done, total = status["n_items_done"], status["n_items"]
    console.print(
        f"[bold]{escape(status['run'])}[/]  {status['state']}  {done:,} of {count_of(total, 'item')} "
        f"({done / total:.1%}), {status['n_shards_done']:,} of {count_of(status['n_shards'], 'shard')}, "
        f"{count_of(status['n_errors'], 'item')} failed"
    )
    if attempts := status["attempts"]:
        columns = {
            "attempt": [a["attempt"] for a in attempts],
            "node": [a["node"] for a in attempts],
            "state": [a["state"] for a in attempts],
            "shard": ["" if a["shard"] is None else str(a["shard"]) for a in attempts],
            **({"progress": [a["progress"] or "" for a in attempts]} if any(a["progress"] for a in attempts) else {}),
            **_counts(attempts),
            "last word": [
                a["failure"] or ("" if a["state"] == "ended" else f"{a['age_s']:.0f} s ago") for a in attempts
            ],
        }
        console.print(_table(console, columns))
        _show_failures(console, attempts)
    for job in status["queue"] or ():
        if job["state"] == "PENDING":
            result(f"queued: {job['job_id']} ({job['reason']})")
    folder = shlex.quote(status["run_dir"])
    if status["state"] == "planned":
        say(f"next: slurmgpu resubmit {folder}, or the two lines that `slurmgpu plan` printed")
    if status["state"] in ("incomplete", "ended"):
        verb = "merge" if status["n_shards_done"] == status["n_shards"] else "resubmit"
        say(f"next: slurmgpu {verb} {folder}")


def show_report(report: Mapping[str, Any]) -> None:
    """The report: what is complete, every hole, failed items, attempts and the command that computes the rest."""
    console = wide_console()
    word = "[bold green]complete[/]" if report["complete"] else "[bold red]incomplete[/]"
    console.print(
        f"[bold]{escape(report['run'])}[/]  {word}  {report['n_rows']:,} of {count_of(report['n_items'], 'row')}, "
        f"{report['n_errors']:,} of them failed, {report['gpu_hours']:.2f} GPU-hours"
    )
    if report["merged"]:
        result(f"merged: {report['merged']}")
    if report["image"]:
        result(f"image: {report['image']['path']} (sha256 {report['image']['sha256'][:12]})")
    show_summary(console, report.get("summary"))
    _show_holes(console, report)
    _show_errors(console, report)
    _show_attempts(console, report)
    for trace in {a["traceback"] for a in report["attempts"] if a["traceback"]}:
        result(f"\n{trace.rstrip()}")
    if report["resubmit"]:
        result(f"\nto compute the rest: {report['resubmit']}")


def _show_holes(console: Console, report: Mapping[str, Any]) -> None:
    if not report["missing"]:
        return
    items, shards = count_of(report["n_missing_items"], "item"), count_of(len(report["missing"]), "shard")
    console.print(f"\n[bold]missing[/]  {items} in {shards}")
    for hole in report["missing"][:MAX_LISTED]:
        why = f"  damaged: {hole['damaged']}" if hole["damaged"] else ""
        result(f"  shard {hole['shard']}: items {hole['start']}..{hole['stop'] - 1}{why}")
    _more(len(report["missing"]), "report --json lists them")


def _show_errors(console: Console, report: Mapping[str, Any]) -> None:
    if not report["errors"]:
        return
    classes = ", ".join(f"{count:,} {name}" for name, count in report["errors_by_class"].items())
    console.print(f"\n[bold]failed items[/]  {classes}")
    for item in report["errors"][:MAX_LISTED]:
        first_line = item["message"].partition("\n")[0]
        result(f"  item {item['index']}: {item['class']}: {first_line}")
    _more(len(report["errors"]), "report --json lists them")


def _show_attempts(console: Console, report: Mapping[str, Any]) -> None:
    attempts = report["attempts"][:MAX_ATTEMPTS]
    if not attempts:
        return
    names = {"attempt": [a["attempt"] for a in attempts]}
    columns = {
        **names,
        "node": [a["node"] for a in attempts],
        "GPUs": [str(a["n_gpus"]) for a in attempts],
        "time": [_seconds(a["seconds"]) for a in attempts],
        **_counts([{**a, "n_deaths": len(a["deaths"]), "last_death": last_death(a)} for a in attempts]),
    }
    end = {"end": [a["failure"] or (f"ok ({a['reason']})" if a["reason"] else "ok") for a in attempts]}
    used = _used(attempts)
    console.print("\n[bold]attempts[/]")
    if used and _width(console, _table(console, {**columns, **used, **end})) > console.width:
        console.print(_table(console, {**columns, **end}))
        console.print()
        console.print(_table(console, {**names, **used}))
    else:
        console.print(_table(console, {**columns, **used, **end}))
    _more(len(report["attempts"]), "report --json lists them", MAX_ATTEMPTS)
    _show_failures(console, report["attempts"])
    _show_idle(report["attempts"])


def _show_failures(console: Console, attempts: Sequence[Mapping[str, Any]]) -> None:
    """Each message once, behind the attempts that ended with it."""
    met: dict[str, list[str]] = {}
    for a in attempts:
        if a["failure"]:
            met.setdefault(f"{a['failure']}: {a['message']}", []).append(a["attempt"])
    if not met:
        return
    console.print("\n[bold]failures[/]")
    for message, names in list(met.items())[:MAX_LISTED]:
        more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
        result(f"  {', '.join(names[:MAX_NAMES])}{more}: {message}")
    _more(len(met), "--json has them all")


def _counts(attempts: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The columns of what attempts have done."""
    keys = {"shards": "n_shards", "items": "n_items", "failed": "n_errors"}
    counts = {name: [f"{a[key]:,}" for a in attempts] for name, key in keys.items()}
    # Of deaths, what the last one was: an attempt may live on, or end well, after some.
    deaths = [f"{a['last_death']} {a['n_deaths']:,}" if a["n_deaths"] else "0" for a in attempts]
    return {**counts, "deaths": deaths}


def _table(console: Console, columns: Mapping[str, Sequence[str]]) -> Table:
    """A table in which nothing is cut: numbers keep to one line, and where it is narrow, words fold."""
    for gap in (2, 1):
        table = Table(box=None, header_style="bold", padding=(0, gap, 0, 0), pad_edge=False)
        for name in columns:
            words = name in WORDS
            folds = name in FOLDING
            table.add_column(name, justify="left" if words else "right", no_wrap=not folds, overflow="fold")
        for row in zip(*columns.values(), strict=True):
            table.add_row(*map(escape, row))
        if _width(console, table) <= console.width:
            break
    return table


def _width(console: Console, table: Table) -> int:
    """The columns of a terminal that a table would like to have."""
    return console.measure(table, options=console.options.update(width=10_000)).maximum


def _used(attempts: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The columns of what attempts used: those of which anything is known."""
    columns: dict[str, list[str]] = {}
    for name, key, show in (
        ("GPU %", "gpu_utilisation", lambda share: f"{share:.0f}"),
        ("GPU GB", "gpu_memory_peak_bytes", _gigabytes),
        ("host GB", "host_memory_peak_bytes", _gigabytes),
    ):
        values = [a["usage"].get(key) for a in attempts]
        if any(value is not None for value in values):
            columns[name] = ["–" if value is None else show(value) for value in values]
    return columns


def _show_idle(attempts: Sequence[Mapping[str, Any]]) -> None:
    idle = sorted((a["usage"]["gpu_utilisation"], a["attempt"]) for a in attempts if a["idle_gpu"])
    if not idle:
        return
    share, name = idle[0]
    others = f" (and under {IDLE_PERCENT} % in {len(idle) - 1:,} more)" if len(idle) > 1 else ""
    result(
        f"\nthe GPU of attempt {name} was used {share:.0f} % on average{others}: a larger batch_size gives it more "
        "to do at once; if the workload prepares its items on the CPU, that may be what it waits for"
    )


def _more(count: int, where: str, shown: int = MAX_LISTED) -> None:
    if count > shown:
        result(f"  … and {count - shown:,} more; {where}")


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f}"


def _seconds(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds < 86400 else f"{seconds / 86400:.1f} d"
