"""Rows as a table if they are short, else one below the other, with a line for each column."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text as Line

from slurmgpu.cli.console import wide_console
from slurmgpu.results.published import Row
from slurmgpu.shards.columns import Column
from slurmgpu.util.ansi import harmless

MOST_CHARACTERS = 2000
"""The most characters of a value; `--json` and `export` give all of them."""
MOST_CELL = 40
"""The widest cell of a table."""


def show_rows(rows: Sequence[Row], columns: Mapping[str, Column], items: Mapping[int, Any]) -> None:
    """Print rows; `items` are the data of their items by index, if these are shown, too."""
    console = wide_console()
    texts = [_texts(row, columns, items) for row in rows]
    if not items and _fit(texts, console.width):
        _print_table(console, texts)
    else:
        for number, each in enumerate(texts):
            if number:
                console.print()
            _print_record(console, each)


def _texts(row: Row, columns: Mapping[str, Column], items: Mapping[int, Any]) -> dict[str, str]:
    found = {"index": str(row.index)}
    if row.index in items:
        data = items[row.index]
        fields = data.items() if isinstance(data, Mapping) else [("", data)]
        found |= {f"item {name}".rstrip(): text_of(value) for name, value in fields}
    values = {name: text_of(row[name], column.dtype) for name, column in columns.items()}
    if row.error is None:
        return found | values
    kept = {name: text for name, text in values.items() if row[name] is not None}
    return found | kept | {"error": text_of(row.error)}


def text_of(value: Any, dtype: np.dtype[Any] | None = None) -> str:
    """A value as harmless text; a float with the digits that its dtype has, a long array by its ends."""
    if isinstance(value, np.ndarray):
        text = np.array2string(value, threshold=8, edgeitems=3, precision=4, max_line_width=1 << 30, separator=" ")
        text = " ".join(text.split())
        if value.size > 8:
            text += f" {value.dtype} {value.shape}"
    elif isinstance(value, float) and dtype is not None and dtype.kind == "f":
        text = str(dtype.type(value))
    elif isinstance(value, bytes):
        text = repr(value)[2:-1]
    elif isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    n_characters = len(text)
    if n_characters > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS]}… ({n_characters:,} characters)"
    return harmless(text).replace("\t", "    ")


def _fit(texts: Sequence[Mapping[str, str]], width: int) -> bool:
    """Whether the rows fit a table of this width without folding."""
    cells = [cell for each in texts for cell in each.values()]
    is_plain = all("\n" not in cell and cell_len(cell) <= MOST_CELL for cell in cells)
    return is_plain and sum(_widths(texts).values()) + 2 * (len(_widths(texts)) - 1) <= width


def _widths(texts: Sequence[Mapping[str, str]]) -> dict[str, int]:
    names = {name: None for each in texts for name in each}
    return {name: max(cell_len(harmless(name)), *(cell_len(each.get(name, "")) for each in texts)) for name in names}


def _print_table(console: Console, texts: Sequence[Mapping[str, str]]) -> None:
    if not texts:
        return
    widths = _widths(texts)
    is_number = {name: all(_is_number(each[name]) for each in texts if name in each) for name in widths}
    for place, each in enumerate([{name: harmless(name) for name in widths}, *texts]):
        cells = []
        for name, width in widths.items():
            text = each.get(name, "–" if name != "error" else "")
            blank = " " * (width - cell_len(text))
            cells.append(blank + text if is_number[name] else text + blank)
        console.print(Line("  ".join(cells).rstrip(), style="" if place else "bold"), soft_wrap=True)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _print_record(console: Console, texts: Mapping[str, str]) -> None:
    width = min(20, max((cell_len(harmless(name)) for name in texts if name != "index"), default=0))
    for number, (name, text) in enumerate(texts.items()):
        if not number:
            console.print(Line(f"item {text}", style="bold"), soft_wrap=True)
            continue
        head = f"  {harmless(name)}"
        indent = width + 4
        lines = [Line(part) for part in text.split("\n")]
        wrapped = [piece for line in lines for piece in (line.wrap(console, max(20, console.width - indent)) or [line])]
        first = head + " " * max(2, indent - cell_len(head))
        for place, piece in enumerate(wrapped):
            piece.rstrip()
            console.print(Line(first if not place else " " * indent).append_text(piece), soft_wrap=True)
