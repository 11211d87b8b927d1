"""Looking at each file's beginning: what is not the format is refused before anything long is done."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs.finding import LINE_FORMATS
from slurmgpu.inputs.lines import Layout, csv_header
from slurmgpu.inputs.records import RecordFinder, split
from slurmgpu.inputs.tables import open_table

_BOM = b"\xef\xbb\xbf"
_HEAD_BYTES = 1 << 16
_N_RECORDS = 100


@dataclass(frozen=True)
class Preview:
    """What one file's beginning and its size tell.

    The records of a line-based file lie in bytes `begin` to `end`, the first of them in line `line`.
    `keys` are those of a jsonl file's first objects. `n_items` is known for tables only.
    """

    layout: Layout
    size_bytes: int
    mtime_ns: int
    begin: int = 0
    end: int = 0
    line: int = 1
    keys: frozenset[str] = frozenset()
    n_items: int = 0


def preview(path: Path, format_name: str) -> Preview:
    """What the beginning of a file tells; SlurmGPUError if it is empty or not the format."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            found = Preview(Layout(str(path), format_name), status.st_size, status.st_mtime_ns)
            found = _preview_lines(file, found) if format_name in LINE_FORMATS else _preview_table(found)
    except OSError as error:
        raise SlurmGPUError(f"Input {path} cannot be read: {error.strerror or error}.") from error
    if found.begin >= found.end:
        raise SlurmGPUError(f"Input {path} is empty: expected at least one item. Leave the file out.")
    return found


def refuse_mixed(previews: Sequence[Preview]) -> None:
    """Refuse files whose columns differ, and a jsonl file that has no key in common with the first."""
    first, first_path = previews[0], previews[0].layout.path
    for other in previews[1:]:
        path, columns = other.layout.path, other.layout.columns
        if columns != first.layout.columns:
            raise SlurmGPUError(
                f"{path} has the columns {_names(columns)}: expected those of {first_path}, "
                f"{_names(first.layout.columns)}, in that order. Make them the same, or plan two runs."
            )
        if first.keys and other.keys and first.keys.isdisjoint(other.keys):
            raise SlurmGPUError(
                f"{path} has the keys {_names(sorted(other.keys))}: expected one at least of those "
                f"in {first_path}, {_names(sorted(first.keys))}. Make them the same, or plan two runs."
            )


def _preview_lines(file: BinaryIO, found: Preview) -> Preview:
    layout = found.layout
    end = _end_of_records(file, found)
    file.seek(0)
    begin = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
    if begin >= end:
        return found
    records = _first_records(file, begin, end, layout)
    line = 1
    if layout.format == "csv":
        header = records.pop(0)
        begin += len(header) + 1
        line += header.count(b"\n") + 1
        layout = replace(layout, columns=csv_header(header, layout.path))
    items = [layout.check(item, record) for item, record in enumerate(records[:_N_RECORDS])]
    keys = frozenset[str]().union(*items) if layout.format == "jsonl" else found.keys
    return replace(found, layout=layout, begin=begin, end=end, line=line, keys=keys)


def _end_of_records(file: BinaryIO, found: Preview) -> int:
    """Where the last record ends: newlines at the very end make no items, except in .txt."""
    end = found.size_bytes
    while found.layout.format != "txt" and end > 0:
        start = max(0, end - _HEAD_BYTES)
        file.seek(start)
        tail = file.read(end - start).rstrip(b"\r\n")
        end = start + len(tail)
        if tail:
            break
    return end


def _first_records(file: BinaryIO, begin: int, end: int, layout: Layout) -> list[bytes]:
    """The first records: two at least (the header and another) where there are two, whole ones only."""
    file.seek(begin)
    finder = RecordFinder(layout.path, begin, end, line=1, quoting=layout.quoting)
    data, n_starts = b"", 0
    while n_starts < 2 and (block := file.read(min(max(_HEAD_BYTES, len(data)), end - begin - len(data)))):
        n_starts += len(finder.starts(np.frombuffer(block, np.uint8)))
        data += block
    records = split(data, quoting=layout.quoting)
    if begin + len(data) < end:
        return records[:-1]
    finder.finish()
    return records


def _preview_table(found: Preview) -> Preview:
    with closing(open_table(found.layout.path, found.layout.format, verify=True)) as table:
        columns, n_items = table.columns, len(table)
    doubled = sorted({name for name in columns if columns.count(name) > 1})
    if doubled:
        raise SlurmGPUError(
            f"{found.layout.path}: {doubled[0]!r} names two columns: expected a name of its own for each."
        )
    return replace(found, layout=replace(found.layout, columns=columns), end=n_items, n_items=n_items)


def _names(names: Sequence[str] | None) -> str:
    names = names or ()
    shown = ", ".join(map(repr, names[:8]))
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")
