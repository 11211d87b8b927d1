"""What the commands print: JSON, plain lines, and tables of Rich's where the stream is a terminal."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

MAX_LISTED = 20
"""Failed items and holes that a table lists; the JSON has all."""


def complain(text: str) -> None:
    """A sentence for the user, on stderr."""
    Console(stderr=True, soft_wrap=True, highlight=False, emoji=False).print(f"[bold red]error:[/] {_escape(text)}")


def say(text: str) -> None:
    """A line beside the result, on stderr."""
    Console(stderr=True, soft_wrap=True, highlight=False, emoji=False).print(_escape(text))


def result(text: str) -> None:
    """A line of the result, on stdout."""
    Console(soft_wrap=True, highlight=False, emoji=False).print(_escape(text))


def result_json(value: Any) -> None:
    """The result as JSON, on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _console() -> Console:
    """Rich on stdout; in a pipe, lines wide enough that no table is broken."""
    return Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 200)


def show_plan(plan: Mapping[str, Any], submission: Mapping[str, Any], run_dir: str, notes: Sequence[str]) -> None:
    """The plan of `submit --dry-run`, without its scripts."""
    console = _console()
    table = Table.grid(padding=(0, 2))
    files = plan["input"]["files"]
    size = sum(max(0, file["size_bytes"]) for file in files)
    table.add_row("run", _escape(f"{run_dir} (not made)"))
    table.add_row("input", f"{plan['n_items']:,} items in {len(files)} file{_s(len(files))}, {_bytes(size)}")
    table.add_row("workload", _escape(f"{plan['workload']} {json.dumps(plan['settings'])}"))
    columns = ", ".join(f"{name} ({_kind(column)})" for name, column in plan["columns"].items())
    table.add_row("columns", _escape(columns))
    n_shards = -(-plan["n_items"] // plan["shard_items"])
    table.add_row("shards", f"{n_shards:,} of {plan['shard_items']:,} items, in batches of {plan['batch_size']}")
    table.add_row("tasks", _tasks(submission))
    for note in notes:
        table.add_row("note", _escape(note))
    console.print(table)


def show_scripts(scripts: Mapping[str, str]) -> None:
    """The sbatch scripts of `submit --dry-run`, word for word."""
    for job, text in scripts.items():
        result(f"\n# ---- {job}.sbatch ----")
        sys.stdout.write(text)


def show_status(status: Mapping[str, Any]) -> None:
    """A run's progress, its attempts and what Slurm's queue says."""
    console = _console()
    done, total = status["n_items_done"], status["n_items"]
    console.print(
        f"[bold]{_escape(status['run'])}[/]  {status['state']}  {done:,} of {total:,} items ({done / total:.1%}), "
        f"{status['n_shards_done']:,} of {status['n_shards']:,} shards, {status['n_errors']:,} items failed"
    )
    if status["attempts"]:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for name in ("attempt", "node", "state", "shard"):
            table.add_column(name, no_wrap=True, overflow="fold")
        for name in ("shards", "items", "failed", "deaths"):
            table.add_column(name, justify="right")
        table.add_column("last word")
        for a in status["attempts"]:
            word = (
                f"{a['failure']}: {a['message']}"
                if a["failure"]
                else ""
                if a["state"] == "ended"
                else f"{a['age_s']:.0f} s ago"
            )
            shard = "" if a["shard"] is None else str(a["shard"])
            numbers = (a["n_shards"], a["n_items"], a["n_errors"], a["n_deaths"])
            table.add_row(a["attempt"], a["node"], a["state"], shard, *(f"{n:,}" for n in numbers), _escape(word))
        console.print(table)
    for job in status["queue"] or ():
        if job["state"] == "PENDING":
            result(f"queued: {job['job_id']} ({job['reason']})")
    if status["state"] in ("incomplete", "ended"):
        verb = "merge" if status["n_shards_done"] == status["n_shards"] else "resubmit"
        say(f"next: slurmgpu {verb} {shlex.quote(status['run_dir'])}")


def show_report(report: Mapping[str, Any]) -> None:
    """The report: what is complete, every hole, failed items, attempts and the command that computes the rest."""
    console = _console()
    word = "[bold green]complete[/]" if report["complete"] else "[bold red]incomplete[/]"
    console.print(
        f"[bold]{_escape(report['run'])}[/]  {word}  {report['n_rows']:,} of {report['n_items']:,} rows, "
        f"{report['n_errors']:,} of them failed, {report['gpu_hours']:.2f} GPU-hours"
    )
    if report["merged"]:
        result(f"merged: {report['merged']}")
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
    console.print(f"\n[bold]missing[/]  {report['n_missing_items']:,} items in {len(report['missing']):,} shards")
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
    if not report["attempts"]:
        return
    table = Table(box=None, header_style="bold", pad_edge=False, title="attempts", title_justify="left")
    for name in ("attempt", "node"):
        table.add_column(name, no_wrap=True, overflow="fold")
    for name in ("GPUs", "time", "shards", "items", "failed", "deaths"):
        table.add_column(name, justify="right")
    table.add_column("end")
    for a in report["attempts"][:200]:
        end = f"{a['failure']}: {a['message']}" if a["failure"] else f"ok ({a['reason']})" if a["reason"] else "ok"
        numbers = (a["n_shards"], a["n_items"], a["n_errors"], len(a["deaths"]))
        cells = [f"{n:,}" for n in numbers]
        table.add_row(a["attempt"], a["node"], str(a["n_gpus"]), _seconds(a["seconds"]), *cells, _escape(end))
    console.print()
    console.print(table)


def _more(count: int, where: str) -> None:
    if count > MAX_LISTED:
        result(f"  … and {count - MAX_LISTED:,} more; {where}")


def _tasks(submission: Mapping[str, Any]) -> str:
    n, per_task = submission["n_tasks"], submission["gpus_per_task"]
    what = f"{per_task} GPU{_s(per_task)}" if per_task else "CPUs only"
    at_once = "" if submission["n_concurrent"] == n else f", {submission['n_concurrent']} at once"
    return f"{n} of {what}{at_once}, executor {submission['executor']}, device {submission['device']}"


def _kind(column: Mapping[str, Any]) -> str:
    shape = f"{column['shape']}" if column.get("shape") else ""
    return f"{column['kind']} {column.get('dtype', '')}{shape}".strip()


def _bytes(size: int) -> str:
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _seconds(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds < 86400 else f"{seconds / 86400:.1f} d"


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
