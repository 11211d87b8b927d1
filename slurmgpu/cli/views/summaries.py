"""A workload's summary in `report`: lines of values, and tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from slurmgpu.cli.console import result
from slurmgpu.cli.views.columns import bare_table
from slurmgpu.report.summaries import Table, summary_of
from slurmgpu.util.ansi import plain

MAX_ROWS = 30
MAX_COLUMNS = 12


def show_summary(console: Console, summary: Mapping[str, Any] | None) -> None:
    """Print the summary of a report, if it has one."""
    shown = summary_of(summary, MAX_ROWS, MAX_COLUMNS)
    if shown is None:
        return
    console.print("\n[bold]summary[/]")
    if shown.error:
        result(f"  the workload could not summarize its rows: {shown.error}")
    width = max((len(plain(value.name)) for value in shown.values), default=0)
    for value in shown.values:
        result(f"  {plain(value.name):<{width}}  {value.text}")
    for table in shown.tables:
        _show_table(console, table)
    if shown.hint:
        result(f"\n  {shown.hint}")


def _show_table(console: Console, table: Table) -> None:
    title = plain(table.title)
    if table.note:
        result(f"  {title}: {table.note}; report --json lists them")
    elif not table.columns:
        more = f" and {table.n_more:,} more; report --json lists them" if table.n_more else ""
        result(f"  {title}: {', '.join(f'{plain(key)} {text}' for key, text in table.rows)}{more}")
    else:
        drawn = bare_table()
        drawn.add_column(f"  {escape(title)}", no_wrap=True)
        for column in table.columns:
            drawn.add_column(escape(plain(column)), justify="right", no_wrap=True)
        for key, *cells in table.rows:
            drawn.add_row(f"  {escape(plain(key))}", *(escape(plain(cell)) for cell in cells))
        console.print()
        console.print(drawn)
        if table.n_more:
            result(f"  … and {table.n_more:,} more; report --json lists them")
