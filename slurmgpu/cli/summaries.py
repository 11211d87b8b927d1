"""What `report` shows of a workload's summary: values in lines, and what has rows and columns in tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slurmgpu.cli.output import result

PERCENT = ("accuracy", "_rate", "_share", "accuracy_interval")
"""Keys that end so have shares, which are shown in percent."""
NO_NAME = "(none)"
"""What a group without a name is called: that of the items without one."""
MAX_ROWS = 30
MAX_COLUMNS = 12


def show_summary(console: Console, summary: Mapping[str, Any] | None) -> None:
    """The summary of a report, if it has one."""
    if not summary:
        return
    console.print("\n[bold]summary[/]")
    if "error" in summary:
        result(f"  the workload could not summarize its rows: {summary['error']}")
        return
    lines = {name: value for name, value in summary.items() if not isinstance(value, Mapping) and name != "hint"}
    width = max((len(_words(name)) for name in lines), default=0)
    for name, value in lines.items():
        result(f"  {_words(name):<{width}}  {_text(name, value)}")
    for name, value in summary.items():
        if isinstance(value, Mapping) and value:  # of failed items alone there may be nothing to tell
            _show_mapping(console, name, value)
    if "hint" in summary:
        result(f"\n  {summary['hint']}")


def _show_mapping(console: Console, name: str, value: Mapping[str, Any]) -> None:
    """Values in one line; a table; or, of what is deeper, a table for each."""
    inner = list(value.values())
    if not any(isinstance(each, Mapping) for each in inner):
        result(f"  {_words(name)}: {', '.join(f'{key or NO_NAME} {_text(name, each)}' for key, each in value.items())}")
    elif not all(isinstance(each, Mapping) and each.keys() == inner[0].keys() for each in inner):
        result(f"  {_words(name)}: report --json has it")
    elif any(isinstance(cell, Mapping) for each in inner for cell in each.values()):
        for key, each in list(value.items())[:MAX_COLUMNS]:
            _show_mapping(console, f"{name}: {key or NO_NAME}", each)
    else:
        _show_table(console, name, value)


def _show_table(console: Console, name: str, value: Mapping[str, Mapping[str, Any]]) -> None:
    columns = list(next(iter(value.values())))
    if len(columns) > MAX_COLUMNS:
        result(f"  {_words(name)}: {len(value):,} × {len(columns):,} values; report --json has them")
        return
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(f"  {escape(_words(name))}", no_wrap=True)
    for column in columns:
        table.add_column(escape(_words(column)), justify="right", no_wrap=True)
    for key, cells in list(value.items())[:MAX_ROWS]:
        table.add_row(f"  {escape(key or NO_NAME)}", *(_text(column, cells[column]) for column in columns))
    console.print()
    console.print(table)
    if len(value) > MAX_ROWS:
        result(f"  … and {len(value) - MAX_ROWS:,} more; report --json lists them")


def _words(name: str) -> str:
    return name.removeprefix("n_").replace("_", " ")


def _text(name: str, value: Any) -> str:
    """A value with the digits that tell something; a share in percent."""
    if value is None:
        return "–"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, list):
        return " – ".join(_text(name, each) for each in value)
    if name.endswith(PERCENT):
        return f"{value:.1%}"
    if isinstance(value, int):
        return f"{value:,}"
    if 0 < abs(value) < 0.1:
        return f"{value:.3g}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
