"""What attempts have done, use and do now, in columns, and the tables that columns make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from slurmgpu.cli.views.state_words import plain
from slurmgpu.report.attempts import AttemptRow
from slurmgpu.report.status import StatusAttempt
from slurmgpu.run.records import Usage
from slurmgpu.util.amounts import rate_of

if TYPE_CHECKING:
    from rich.table import Table

Columns = Mapping[str, Sequence[str]]
"""By its name, the cells of each column."""

WORDS = {"attempt", "node", "state", "progress", "end", "last heard"}
"""Columns of text; the others are numbers."""
FOLDING = {"node", "progress", "end"}
"""Of these, the ones that take several lines where the terminal is narrow."""


def show_table(console: Console, names: Columns, columns: Columns, more: Columns, end: Columns | None = None) -> None:
    """A table with more columns in it before its end; where the terminal is narrow, they are a table of their own."""
    names, columns, more, end = map(_plain, (names, columns, more, end or {}))
    whole = {**columns, **more, **end}
    if not more or _width(whole, 1) <= console.width:
        _print(console, whole)
        return
    _print(console, {**columns, **end})
    console.print()
    _print(console, {**names, **more})


def counts_of(
    attempts: Sequence[StatusAttempt] | Sequence[AttemptRow], deaths: Sequence[tuple[int, str | None]]
) -> dict[str, list[str]]:
    """The columns of what attempts have done; `deaths` are the number of each one's, and what the last one was."""
    return {
        "shards": [f"{a['n_shards']:,}" for a in attempts],
        "items": [f"{a['n_items']:,}" for a in attempts],
        "failed": [f"{a['n_errors']:,}" for a in attempts],
        # An attempt may live on, or end well, after some.
        "deaths": [f"{last} ×{n:,}" if n else "0" for n, last in deaths],
    }


def used_by(usage: Sequence[Usage]) -> dict[str, list[str]]:
    """The columns of what attempts used: those of which anything is known."""
    return _known(
        ("GPU %", [of.get("gpu_utilisation") for of in usage], _percents),
        ("GPU GB", [of.get("gpu_memory_peak_bytes") for of in usage], _gigabytes),
        ("host GB", [of.get("host_memory_peak_bytes") for of in usage], _gigabytes),
    )


def doing_now(attempts: Sequence[StatusAttempt]) -> dict[str, list[str]]:
    """The columns of what attempts do at the moment: those of which anything is known."""
    gpus = [a["gpu"] for a in attempts]
    return _known(
        ("items/s", [a["items_per_s"] for a in attempts], lambda rates: list(map(rate_of, rates))),
        ("GPU %", [gpu and gpu["utilisation"] for gpu in gpus], _percents),
        ("GPU GB", [gpu and gpu["memory_bytes"] for gpu in gpus], _gigabytes),
    )


def _known(*columns: tuple[str, Sequence[Any], Callable[[Sequence[Any]], list[str]]]) -> dict[str, list[str]]:
    """The columns with any value, each shown beside the others of its column."""
    found = {}
    for name, values, show in columns:
        if known := [value for value in values if value is not None]:
            shown = iter(show(known))
            found[name] = ["–" if value is None else next(shown) for value in values]
    return found


def _print(console: Console, columns: Columns) -> None:
    """A table in which nothing is cut: numbers keep to one line, and where it is narrow, words fold."""
    for gap in (2, 1):
        if _width(columns, gap) <= console.width:
            console.print(_unfolded(columns, gap))
            return
    console.print(_folded(columns))


def _plain(columns: Columns) -> Columns:
    return {name: list(map(plain, cells)) for name, cells in columns.items()}


def _unfolded(columns: Columns, gap: int) -> Segments:
    """The table where it has room: the lines of Rich's Table, which takes as long for them as all else of a status."""
    padded = [_padded(name, [name, *cells]) for name, cells in columns.items()]
    header, *lines = map((" " * gap).join, zip(*padded, strict=True))
    return Segments([Segment(header, Style(bold=True)), Segment("".join(f"\n{line}" for line in (*lines, "")))])


def _folded(columns: Columns) -> Table:
    """The table where its words have to take several lines."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        folds = name in FOLDING
        justify: Literal["left", "right"] = "left" if name in WORDS else "right"
        table.add_column(name, justify=justify, no_wrap=not folds, overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(escape, row))
    return table


def _padded(name: str, cells: Sequence[str]) -> list[str]:
    """Cells that are equally wide in a terminal."""
    sizes = list(map(cell_len, cells))
    blanks = [" " * (max(sizes) - size) for size in sizes]
    if name in WORDS:
        return [cell + blank for cell, blank in zip(cells, blanks, strict=True)]
    return [blank + cell for cell, blank in zip(cells, blanks, strict=True)]


def _width(columns: Columns, gap: int) -> int:
    """The columns of a terminal that a table would like to have."""
    widest = [max(map(cell_len, (name, *cells))) for name, cells in columns.items()]
    return sum(widest) + gap * (len(widest) - 1)


def _gigabytes(sizes: Sequence[int]) -> list[str]:
    """Sizes in GB; with two decimals where all are small."""
    n_decimals = 1 if max(sizes) >= 1e8 else 2
    return [f"{size / 1e9:.{n_decimals}f}" for size in sizes]


def _percents(shares: Sequence[float]) -> list[str]:
    return [f"{share:.0f}" for share in shares]
