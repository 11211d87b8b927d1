"""The differences of two runs, in lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from rich.markup import escape

from slurmgpu.cli.console import result, say, wide_console
from slurmgpu.cli.views.columns import headed_table
from slurmgpu.cli.views.rows import text_of
from slurmgpu.merge.compare import Comparison
from slurmgpu.report.summaries import summary_of
from slurmgpu.util.amounts import count_of
from slurmgpu.util.ansi import harmless, plain

MAX_VALUES = 40
"""The most values of summaries; `--json` has all."""
MAX_ROWS, MAX_COLUMNS = 20, 8
"""The most rows and columns of a table in a summary."""
VALUE_CHARACTERS = 300
BEFORE = 60
"""Characters before the first difference of long values."""


def show_comparison(found: Comparison) -> None:
    """Print both sides beside each other, what differs by column, and the first rows that differ."""
    _show_sides(found)
    of_rows = f"{found.n_different:,} of {count_of(found.n_common, 'row')} in both"
    result(
        f"\n{of_rows} {'differs' if found.n_different == 1 else 'differ'}."
        if found.n_different
        else f"\nNo row of {found.n_common:,} in both differs."
        if found.n_common
        else "\nNo row is in both."
    )
    if list(found.columns) == ["error"] and (found.a.only_columns or found.b.only_columns):
        result("No column is in both: only errors were compared.")
    for name, test in found.paired.items():
        if test.n:
            result(
                f"{plain(name)}: {test.n_only_a:,} right in A alone, {test.n_only_b:,} in B alone, "
                f"of {count_of(test.n, 'item')}; p = {test.p_value:.2g} (exact McNemar test)"
            )
    if differing := {name: each for name, each in found.columns.items() if each.n_rows}:
        table = headed_table("column", "rows that differ", "largest difference")
        for name, each in differing.items():
            table.add_row(escape(plain(name)), f"{each.n_rows:,}", _distance(each.largest))
        wide_console().print(table)
    for row in found.differences:
        where = f"item {row.a_index}" if row.a_index == row.b_index else f"items {row.a_index} and {row.b_index}"
        result(f"\n{where}{'' if row.key is None else f', {found.key} {plain(row.key)}'}")
        width = max(len(plain(name)) for name in row.columns)
        for name, values in row.columns.items():
            dtypes = (None, None) if name == "error" else found.dtypes[name]
            for letter, text in zip("AB", texts_apart(values, dtypes), strict=True):
                result(f"  {plain(name) if letter == 'A' else '':<{width}}  {letter}  {text}")
    for name, side, other in (("A", found.a, "B"), ("B", found.b, "A")):
        if side.n_only:
            some = ", ".join(map(str, side.only)) + (", …" if side.n_only > len(side.only) else "")
            result(f"\n{count_of(side.n_only, 'row')} only in {name}, without a partner in {other}: items {some}")
        for problem in side.damaged:
            say(f"{name}: {problem}")


DType: TypeAlias = "np.dtype[Any] | None"


def texts_apart(values: tuple[Any, Any], dtypes: tuple[DType, DType] = (None, None)) -> list[str]:
    """Two values that differ, as one-line texts that differ: with enough digits, or the part of long values."""
    shown: list[str] = []
    for text_for in (_briefly, _wholly, _exactly):
        one, other = map(text_for, values, dtypes)
        shorter = min(len(one), len(other))
        start = next((place for place in range(shorter) if one[place] != other[place]), shorter)
        shown = [_part(one, start), _part(other, start)]
        if shown[0] != shown[1]:
            break
    return shown


def _briefly(value: Any, dtype: DType) -> str:
    """Texts without quotes, numbers with the digits of their dtype, long arrays by their ends."""
    if isinstance(value, str):
        text = harmless(value)
    else:
        text = _wholly(value, dtype) if isinstance(value, list | dict) else text_of(value, dtype)
    return " ".join(text.split())


def _wholly(value: Any, dtype: DType) -> str:
    """All elements, with the digits of their dtype, and blanks as they are."""
    if isinstance(value, np.ndarray):
        text = np.array2string(value, threshold=sys.maxsize, floatmode="unique", max_line_width=sys.maxsize)
        return " ".join(text.split())
    return harmless(json.dumps(value, ensure_ascii=False, default=str))


def _exactly(value: Any, dtype: DType) -> str:
    """Numbers with the digits of float64, and texts in ASCII."""
    return json.dumps(value.tolist() if isinstance(value, np.ndarray) else value, default=str)


def _part(text: str, start: int) -> str:
    """The beginning of a text; if `start` is further back, the part around it."""
    first = 0 if start < VALUE_CHARACTERS - BEFORE else start - BEFORE
    part = text[first : first + VALUE_CHARACTERS]
    return f"{'…' if first else ''}{part}{'…' if first + len(part) < len(text) else ''}"


def _distance(largest: float | None) -> str:
    if largest is None:
        return ""
    return str(largest) if isinstance(largest, int) and largest < 1 << 65 else f"{largest:.6g}"


def _show_sides(found: Comparison) -> None:
    sides = found.a, found.b
    table = headed_table("", "A", "B")
    table.add_row("", *(escape(plain(side.path)) for side in sides))
    for name, values in {
        "rows": [side.n_rows for side in sides],
        "failed": [side.n_failed for side in sides],
        "items without a row": [side.n_missing for side in sides],
        f"rows without a {found.key}": [side.n_without_key for side in sides],
    }.items():
        if any(values) or name == "rows":
            table.add_row(escape(plain(name)), *(f"{value:,}" for value in values))
    if any(side.only_columns for side in sides):
        table.add_row("columns of its own", *(escape(plain(", ".join(side.only_columns)) or "–") for side in sides))
    summaries = [values_of(side.summary) for side in sides]
    names = list(dict.fromkeys([*summaries[0], *summaries[1]]))
    for name in names[:MAX_VALUES]:
        table.add_row(escape(plain(name)), *(escape(plain(values.get(name, "–"))) for values in summaries))
    wide_console().print(table)
    if len(names) > MAX_VALUES:
        result(f"… and {len(names) - MAX_VALUES:,} more values of the summaries; --json shows them.")


def values_of(summary: Mapping[str, Any] | None) -> dict[str, str]:
    """The values of a summary by their names; values in tables by row and column."""
    shown = summary_of(summary, MAX_ROWS, MAX_COLUMNS)
    if shown is None:
        return {}
    found = {value.name: value.text for value in shown.values}
    for table in shown.tables:
        for key, *cells in table.rows:
            names = [f" {column}" for column in table.columns] or [""]
            found |= {f"{table.title} {key}{name}": cell for name, cell in zip(names, cells, strict=False)}
    return found
