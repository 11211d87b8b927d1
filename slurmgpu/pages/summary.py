"""A workload's summary as the page shows it: values, and tables of what has rows and columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurmgpu.pages.words import cut

PERCENT = ("accuracy", "_rate", "_share", "accuracy_interval")
"""Keys that end so have shares, which are shown in percent; `slurmgpu report` does the same."""
NO_NAME = "(none)"
MAX_ROWS = 200
MAX_COLUMNS = 20
MAX_CHARACTERS = 400


@dataclass
class Table:
    """A table of texts; `note` says what it leaves out."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


@dataclass
class Summary:
    """What a workload says of all rows: single values by name, tables, and why there is nothing, if it failed."""

    values: list[tuple[str, str, str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    error: str = ""
    hint: str = ""


def summary_of(value: Mapping[str, Any] | None) -> Summary | None:
    """The summary of a report; None if it has none. A value is (words, key, text)."""
    if not value:
        return None
    if "error" in value:
        return Summary(error=cut(value["error"], MAX_CHARACTERS))
    shown = Summary(hint=cut(value.get("hint", ""), MAX_CHARACTERS))
    for name, each in value.items():
        if isinstance(each, Mapping):
            shown.tables += _tables(name, each)
        elif name != "hint":
            shown.values.append((words(name), name, text(name, each)))
    return shown


def _tables(name: str, value: Mapping[str, Any]) -> Iterator[Table]:
    inner = list(value.values())
    if not inner:
        return
    if not any(isinstance(each, Mapping) for each in inner):
        rows = [[cut(key or NO_NAME, MAX_CHARACTERS), text(name, each)] for key, each in value.items()]
        yield Table(words(name), ["", ""], rows[:MAX_ROWS], _left_out(len(rows)))
    elif not all(isinstance(each, Mapping) and each.keys() == inner[0].keys() for each in inner):
        yield Table(words(name), [], [], "report.json has it")
    elif any(isinstance(cell, Mapping) for each in inner for cell in each.values()):
        for key, each in list(value.items())[:MAX_COLUMNS]:
            yield from _tables(f"{name}: {key or NO_NAME}", each)
    elif len(inner[0]) > MAX_COLUMNS:
        yield Table(words(name), [], [], f"{len(inner):,} × {len(inner[0]):,} values; report.json has them")
    else:
        columns = list(inner[0])
        rows = [
            [cut(key or NO_NAME, MAX_CHARACTERS), *(text(column, each[column]) for column in columns)]
            for key, each in list(value.items())[:MAX_ROWS]
        ]
        yield Table(words(name), ["", *map(words, columns)], rows, _left_out(len(value)))


def _left_out(count: int) -> str:
    return f"and {count - MAX_ROWS:,} more, in report.json" if count > MAX_ROWS else ""


def words(name: str) -> str:
    """A key as words."""
    return cut(name.removeprefix("n_").replace("_", " "), MAX_CHARACTERS)


def text(name: str, value: Any) -> str:
    """A value with the digits that tell something; a share in percent."""
    if value is None:
        return "–"
    if isinstance(value, bool | str):
        return cut(value, MAX_CHARACTERS)
    if isinstance(value, list):
        return " – ".join(text(name, each) for each in value)
    if name.endswith(PERCENT):
        return f"{value:.1%}"
    if isinstance(value, int):
        return f"{value:,}"
    if 0 < abs(value) < 0.1:
        return f"{value:.3g}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
