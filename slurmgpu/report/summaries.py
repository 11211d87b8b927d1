"""A workload's summary as values and tables of texts, for `slurmgpu report` and the page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PERCENT = ("accuracy", "_rate", "_share", "accuracy_interval", "rate_interval")
"""Endings of keys whose values up to 1 are shares, shown in percent."""
NO_SHARES = ("learning_rate", "decay_rate")
"""Endings of keys, of settings in a ranking, whose values are no shares."""
LEAST_SHOWN = 1e-9
"""A share that is nearer to 0 or 1 is that, but for rounding errors."""
NO_NAME = "(none)"
"""The name of the group of items without a name."""


@dataclass(frozen=True)
class Value:
    """A single value: its name in words, its key, and its text."""

    name: str
    key: str
    text: str


@dataclass(frozen=True)
class Table:
    """Rows of texts that begin with the row's name; `columns` are the names of the others, empty if there is only one.

    `n_more` rows of a long table are left out. A value that is no table, or too wide, has a `note` instead of rows.
    """

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    n_more: int = 0
    note: str = ""


@dataclass(frozen=True)
class Summary:
    """A workload's summary of all rows, or its error."""

    values: Sequence[Value] = ()
    tables: Sequence[Table] = ()
    error: str = ""
    hint: str = ""


def summary_of(summary: Mapping[str, Any] | None, max_rows: int, max_columns: int) -> Summary | None:
    """The summary of a report as texts; None if it has none."""
    if not summary:
        return None
    if summary.keys() == {"error"}:
        return Summary(error=str(summary["error"]))
    values: list[Value] = []
    tables: list[Table] = []
    for name, value in summary.items():
        if name == "hint":
            continue
        if (rows := _rows_of(value)) is None:
            values.append(Value(_words(name), name, _text(name, value)))
        else:
            tables += _tables(name, rows, max_rows, max_columns)
    return Summary(values, tables, hint=str(summary.get("hint") or ""))


def _rows_of(value: Any) -> Mapping[str, Any] | None:
    """An object, or a list of objects by number; None for a single value."""
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        return {str(number): each for number, each in enumerate(value, 1)}
    return value if isinstance(value, Mapping) else None


def _tables(name: str, value: Mapping[str, Any], max_rows: int, max_columns: int) -> Iterator[Table]:
    """A table; for deeper objects one table each; none for empty objects, such as failed items' labels."""
    title, inner = _words(name), list(value.values())
    if all(each == {} for each in inner):
        return
    first, n_more = list(value.items())[:max_rows], max(0, len(value) - max_rows)
    if not any(isinstance(each, Mapping) for each in inner):
        yield Table(title, rows=[[key or NO_NAME, _text(name, each)] for key, each in first], n_more=n_more)
    elif not all(isinstance(each, Mapping) and each.keys() == inner[0].keys() for each in inner):
        yield Table(title, note="objects with different keys")
    elif any(isinstance(cell, Mapping) for each in inner for cell in each.values()):
        for key, each in list(value.items())[:max_columns]:
            yield from _tables(f"{name}: {key or NO_NAME}", each, max_rows, max_columns)
    elif len(inner[0]) > max_columns:
        yield Table(title, note=f"{len(inner):,} × {len(inner[0]):,} values")
    else:
        columns = list(inner[0])
        rows = [[key or NO_NAME, *(_text(column, each[column]) for column in columns)] for key, each in first]
        yield Table(title, [_words(column) for column in columns], rows, n_more)


def _words(name: str) -> str:
    return name.removeprefix("n_").replace("_", " ")


def _text(name: str, value: Any) -> str:
    """A value with its significant digits; a share in percent."""
    if value is None:
        return "–"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, list):
        return " – ".join(_text(name, each) for each in value)
    if isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False)
    if name.endswith(PERCENT) and not name.endswith(NO_SHARES) and abs(value) <= 1:  # a frame rate is no share
        return _percent(value)
    if isinstance(value, int):
        return f"{value:,}"
    if 0 < abs(value) < 0.1:
        return f"{value:.3g}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def _percent(share: float) -> str:
    """A share in percent with one decimal; with more if it would show as none or all, and is not."""
    text, rest = f"{share:.1%}", min(abs(share), 1 - abs(share))
    if text.lstrip("-") not in ("0.0%", "100.0%") or rest < LEAST_SHOWN:
        return text
    return f"{share:.{-math.floor(math.log10(100 * rest))}%}"
