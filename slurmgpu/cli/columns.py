"""What attempts have done, use and do now, in columns, and the tables that columns make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slurmgpu.cli.words import plain, rate_of

Columns = Mapping[str, Sequence[str]]
"""By its name, the cells of each column."""

WORDS = {"attempt", "node", "state", "progress", "end", "last heard"}
"""Columns of text; the others are numbers."""
FOLDING = {"node", "progress", "end"}
"""Of these, the ones that take several lines where the terminal is narrow."""


def show_table(console: Console, names: Columns, columns: Columns, more: Columns, end: Columns | None = None) -> None:
    """A table with more columns in it before its end; where the terminal is narrow, they are a table of their own."""
    whole = _table(console, {**columns, **more, **(end or {})})
    if not more or _width(console, whole) <= console.width:
        console.print(whole)
        return
    console.print(_table(console, {**columns, **(end or {})}))
    console.print()
    console.print(_table(console, {**names, **more}))


def counts_of(attempts: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The columns of what attempts have done."""
    keys = {"shards": "n_shards", "items": "n_items", "failed": "n_errors"}
    counts = {name: [f"{a[key]:,}" for a in attempts] for name, key in keys.items()}
    # Of deaths, what the last one was: an attempt may live on, or end well, after some.
    deaths = [f"{a['last_death']} ×{a['n_deaths']:,}" if a["n_deaths"] else "0" for a in attempts]
    return {**counts, "deaths": deaths}


def used_by(attempts: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The columns of what attempts used: those of which anything is known."""
    usage = [a["usage"] for a in attempts]
    return _known(
        ("GPU %", [of.get("gpu_utilisation") for of in usage], _percents),
        ("GPU GB", [of.get("gpu_memory_peak_bytes") for of in usage], _gigabytes),
        ("host GB", [of.get("host_memory_peak_bytes") for of in usage], _gigabytes),
    )


def doing_now(attempts: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The columns of what attempts do at the moment: those of which anything is known."""
    gpus = [a["gpu"] or {} for a in attempts]
    return _known(
        ("items/s", [a["items_per_s"] for a in attempts], lambda rates: list(map(rate_of, rates))),
        ("GPU %", [gpu.get("utilisation") for gpu in gpus], _percents),
        ("GPU GB", [gpu.get("memory_bytes") for gpu in gpus], _gigabytes),
    )


def _known(*columns: tuple[str, Sequence[Any], Callable[[Sequence[Any]], list[str]]]) -> dict[str, list[str]]:
    """The columns with any value, each shown beside the others of its column."""
    found = {}
    for name, values, show in columns:
        if known := [value for value in values if value is not None]:
            shown = iter(show(known))
            found[name] = ["–" if value is None else next(shown) for value in values]
    return found


def _table(console: Console, columns: Columns) -> Table:
    """A table in which nothing is cut: numbers keep to one line, and where it is narrow, words fold."""
    for gap in (2, 1):
        table = Table(box=None, header_style="bold", padding=(0, gap, 0, 0), pad_edge=False)
        for name in columns:
            words = name in WORDS
            folds = name in FOLDING
            table.add_column(name, justify="left" if words else "right", no_wrap=not folds, overflow="fold")
        for row in zip(*columns.values(), strict=True):
            table.add_row(*(escape(plain(cell)) for cell in row))
        if _width(console, table) <= console.width:
            break
    return table


def _width(console: Console, table: Table) -> int:
    """The columns of a terminal that a table would like to have."""
    return console.measure(table, options=console.options.update(width=10_000)).maximum


def _gigabytes(sizes: Sequence[int]) -> list[str]:
    """Sizes in GB; with two decimals where all are small."""
    n_decimals = 1 if max(sizes) >= 1e8 else 2
    return [f"{size / 1e9:.{n_decimals}f}" for size in sizes]


def _percents(shares: Sequence[float]) -> list[str]:
    return [f"{share:.0f}" for share in shares]
