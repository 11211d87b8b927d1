"""The line-based formats: what one record of .jsonl, .csv or .txt says, or what is wrong with it."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs.index import Index
from slurmgpu.inputs.records import split

_JSON_NAMES = {list: "an array", str: "a string", int: "a number", float: "a number", bool: "a boolean"}


@dataclass(frozen=True)
class Layout:
    """How the records of one file are read; `columns` are those of a csv file's header."""

    path: str
    format: str
    columns: tuple[str, ...] | None = None

    @property
    def quoting(self) -> bool:
        """Whether a record may hold newlines, inside quotes."""
        return self.format == "csv"

    def parse(self, item: int, record: bytes) -> Mapping[str, Any] | ItemError:
        """The data of the file's `item`-th item (0-based), or what was expected and found at which line.

        In .csv it says which record, counted from 1 behind the header: a record may span lines.
        """
        try:
            return self._parse(record.removesuffix(b"\r"))
        except ItemError as error:
            place = "record" if self.quoting else "line"
            return ItemError(f"{self.path}, {place} {item + 1}: {error}")

    def check(self, item: int, record: bytes) -> Mapping[str, Any]:
        """As `parse`, for planning: a malformed record is a SlurmGPUError with the same words."""
        data = self.parse(item, record)
        if isinstance(data, ItemError):
            raise SlurmGPUError(f"{data}. Correct it and plan again.")
        return data

    def _parse(self, record: bytes) -> Mapping[str, Any]:
        if self.format == "jsonl":
            return _json_object(record)
        if self.format == "csv":
            return _csv_record(record, self.columns or ())
        return {"text": _decode(record)}


class LineRows:
    """The items of one line-based file, the `number`-th of the input, which holds the input's `items`."""

    def __init__(self, layout: Layout, index: Index, number: int, items: range) -> None:
        self._layout = layout
        self._index = index
        self._number = number
        self._items = items
        self._file: BinaryIO = open(layout.path, "rb")  # noqa: SIM115 - closed by close

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, start: int, stop: int) -> list[Mapping[str, Any] | ItemError]:
        """Items start..stop-1 of this file."""
        before = self._items.start
        first, begin, end = self._index.span(self._number, self._items, before + start, before + stop)
        self._file.seek(begin)
        data = self._file.read(-1 if end is None else end - begin)
        skipped = before + start - first
        records = split(data, quoting=self._layout.quoting)[skipped : skipped + stop - start]
        return [self._layout.parse(item, record) for item, record in enumerate(records, start)]


def csv_header(record: bytes, path: str) -> tuple[str, ...]:
    """The column names in a csv file's header, each once."""
    try:
        columns = tuple(_csv_fields(record.removesuffix(b"\r")))
    except ItemError as error:
        raise SlurmGPUError(f"{path}, header: {error}. Correct it and plan again.") from error
    doubled = sorted({name for name in columns if columns.count(name) > 1})
    if doubled:
        raise SlurmGPUError(f"{path}, header: {doubled[0]!r} names two columns: expected a name of its own for each.")
    if len(columns) == 1 and any(mark in columns[0] for mark in ";\t"):
        raise SlurmGPUError(
            f"{path}, header: expected names separated by commas, found {columns[0]!r}. Convert the file."
        )
    return columns


def _decode(record: bytes) -> str:
    try:
        return record.decode()
    except UnicodeDecodeError as error:
        found = f"0x{record[error.start]:02x} at byte {error.start + 1}"
        raise ItemError(f"expected UTF-8, found {found}") from error


def _json_object(record: bytes) -> dict[str, Any]:
    if not record:
        raise ItemError("expected a JSON object, found an empty line")
    text = _decode(record)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        found = f"text that is not JSON ({error.msg} at column {error.colno})"
        raise ItemError(f"expected a JSON object, found {found}") from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of more than 4300 digits; brackets nested too deep
        raise ItemError(f"expected a JSON object, found text that is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ItemError(f"expected a JSON object, found {_JSON_NAMES.get(type(value), 'null')}")
    return value


def _csv_fields(record: bytes) -> list[str]:
    if not record:
        raise ItemError("expected a CSV record, found an empty line")
    text = _decode(record)
    if len(text) > csv.field_size_limit():
        csv.field_size_limit(len(text))  # the limit of 128 KiB, one for the whole process, is only ever raised
    try:
        [fields] = csv.reader([text], strict=True)
    except csv.Error as error:
        raise ItemError(f"expected a CSV record as in RFC 4180, found none ({error})") from error
    return fields


def _csv_record(record: bytes, columns: tuple[str, ...]) -> dict[str, str]:
    fields = _csv_fields(record)
    if len(fields) != len(columns):
        raise ItemError(f"expected {len(columns)} fields as in the header, found {len(fields)}")
    return dict(zip(columns, fields, strict=True))
