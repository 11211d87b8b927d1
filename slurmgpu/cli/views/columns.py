"""Columns on attempts, tables of columns, and lists that end early."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from slurmgpu.cli.console import result
from slurmgpu.report.attempts import AttemptRow
from slurmgpu.report.status import StatusAttempt
from slurmgpu.run.records import Usage
from slurmgpu.util.amounts import rate_of, some_of
from slurmgpu.util.ansi import plain

if TYPE_CHECKING:
    from rich.table import Table

Columns = Mapping[str, Sequence[str]]
"""The cells of each column, by its name."""

WORDS = {"attempt", "node", "state", "progress", "end", "last heard"}
"""Columns of text; the others hold numbers."""
FOLDING = {"node", "progress", "end"}
"""Columns that fold in a narrow terminal."""
MAX_ATTEMPTS = 200
MAX_LISTED = 20
"""The most failed items, holes and messages that are printed; the JSON has more."""
MAX_NAMES = 3


def show_table(console: Console, names: Columns, columns: Columns, more: Columns, end: Columns | None = None) -> None:
    """Print `columns`, `more` and `end` as one table; in a narrow terminal `more` becomes a second table."""
    names, columns, more, end = map(_plain, (names, columns, more, end or {}))
    whole = {**columns, **more, **end}
    if not more or _width(whole, 1) <= console.width or _is_too_wide(console, {**columns, **end}):
        _print(console, whole)
        return
    _print(console, {**columns, **end})
    console.print()
    _print(console, {**names, **more})


def bare_table(gap: int = 2, **options: Any) -> Table:
    """An empty table without lines, whose columns are `gap` blanks apart."""
    from rich.table import Table

    return Table(box=None, header_style="bold", padding=(0, gap, 0, 0), pad_edge=False, **options)


def headed_table(*names: str, words: Collection[str] = ()) -> Table:
    """An empty table whose first column and `words` are text, and whose others are numbers; no cell is cut."""
    from rich.markup import escape

    table = bare_table()
    for number, name in enumerate(names):
        is_text = number == 0 or name in words
        table.add_column(escape(plain(name)), justify="left" if is_text else "right", overflow="fold")
    return table


def counts_of(
    attempts: Sequence[StatusAttempt] | Sequence[AttemptRow], deaths: Sequence[tuple[int, str | None]]
) -> dict[str, list[str]]:
    """The work of attempts; `deaths` are the number of worker deaths and the class of the last."""
    return {
        "shards": [f"{a['n_shards']:,}" for a in attempts],
        "items": [f"{a['n_items']:,}" for a in attempts],
        "failed": [f"{a['n_errors']:,}" for a in attempts],
        # An attempt may continue, or succeed, after worker deaths.
        "deaths": [f"{last} ×{n:,}" if n else "0" for n, last in deaths],
    }


def used_by(usage: Sequence[Usage]) -> dict[str, list[str]]:
    """The resources that attempts used, as far as known."""
    return _known(
        ("GPU %", [of.get("gpu_utilisation") for of in usage], _percents),
        ("GPU GB", [of.get("gpu_memory_peak_bytes") for of in usage], _gigabytes),
        ("host GB", [of.get("host_memory_peak_bytes") for of in usage], _gigabytes),
    )


def doing_now(attempts: Sequence[StatusAttempt]) -> dict[str, list[str]]:
    """The current rate and GPU usage of attempts, as far as known."""
    gpus = [a["gpu"] for a in attempts]
    return _known(
        ("items/s", [a["items_per_s"] for a in attempts], lambda rates: list(map(rate_of, rates))),
        ("GPU %", [gpu and gpu["utilisation"] for gpu in gpus], _percents),
        ("GPU GB", [gpu and gpu["memory_bytes"] for gpu in gpus], _gigabytes),
    )


def show_failures(console: Console, attempts: Sequence[StatusAttempt] | Sequence[AttemptRow]) -> None:
    """Print each message once, with the attempts that ended with it."""
    met: dict[str, list[str]] = {}
    for a in attempts:
        if a["failure"]:
            met.setdefault(f"{a['failure']}: {a['message']}", []).append(a["attempt"])
    if not met:
        return
    console.print("\n[bold]failures[/]")
    for message, names in list(met.items())[:MAX_LISTED]:
        result(f"  {some_of(names, MAX_NAMES)}: {message}")
    show_rest(len(met), "--json lists them all")


def show_rest(count: int, where: str, shown: int = MAX_LISTED) -> None:
    """Say how many more there are than are shown, and `where`."""
    if count > shown:
        result(f"  … and {count - shown:,} more; {where}")


def _known(*columns: tuple[str, Sequence[Any], Callable[[Sequence[Any]], list[str]]]) -> dict[str, list[str]]:
    """The columns with any value; the values of a column are formatted together."""
    found = {}
    for name, values, show in columns:
        if known := [value for value in values if value is not None]:
            shown = iter(show(known))
            found[name] = ["–" if value is None else next(shown) for value in values]
    return found


def _print(console: Console, columns: Columns) -> None:
    """Print a table without cutting anything: in a narrow terminal, text folds; in a narrower one, rows are lines."""
    for gap in (2, 1):
        if _width(columns, gap) <= console.width:
            console.print(_unfolded(columns, gap))
            return
    if not _is_too_wide(console, columns):
        console.print(_folded(columns))
        return
    for row in zip(*columns.values(), strict=True):
        told = [f"{name} {cell}" for name, cell in zip(columns, row, strict=True) if cell]
        console.print(", ".join(told), markup=False, soft_wrap=True)


def _is_too_wide(console: Console, columns: Columns) -> bool:
    """Whether a table would have to cut cells though its text folds."""
    return _width({name: [] if name in FOLDING else cells for name, cells in columns.items()}, 1) > console.width


def _plain(columns: Columns) -> Columns:
    return {name: list(map(plain, cells)) for name, cells in columns.items()}


def _unfolded(columns: Columns, gap: int) -> Segments:
    # The same lines as Rich's Table, which takes as long as the rest of `status`.
    padded = [_padded(name, [name, *cells]) for name, cells in columns.items()]
    header, *lines = map((" " * gap).join, zip(*padded, strict=True))
    return Segments([Segment(header, Style(bold=True)), Segment("".join(f"\n{line}" for line in (*lines, "")))])


def _folded(columns: Columns) -> Table:
    from rich.markup import escape

    table = bare_table(1)
    for name in columns:
        folds = name in FOLDING
        justify: Literal["left", "right"] = "left" if name in WORDS else "right"
        table.add_column(name, justify=justify, no_wrap=not folds, overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(escape, row))
    return table


def _padded(name: str, cells: Sequence[str]) -> list[str]:
    sizes = list(map(cell_len, cells))
    blanks = [" " * (max(sizes) - size) for size in sizes]
    if name in WORDS:
        return [cell + blank for cell, blank in zip(cells, blanks, strict=True)]
    return [blank + cell for cell, blank in zip(cells, blanks, strict=True)]


def _width(columns: Columns, gap: int) -> int:
    widest = [max(map(cell_len, (name, *cells))) for name, cells in columns.items()]
    return sum(widest) + gap * (len(widest) - 1)


def _gigabytes(sizes: Sequence[int]) -> list[str]:
    """Sizes in GB, with two decimals if all are small."""
    n_decimals = 1 if max(sizes) >= 1e8 else 2
    return [f"{size / 1e9:.{n_decimals}f}" for size in sizes]


def _percents(shares: Sequence[float]) -> list[str]:
    return [f"{share:.0f}" for share in shares]
