"""The formats of a call's output: JSON lines, a JSON list, CSV, Parquet, npz and npy."""

from __future__ import annotations

import contextlib
import csv
import json
import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slurmgpu.errors import SlurmGPUError
from slurmgpu.shards.columns import Array, Column, Json, Ragged, Text
from slurmgpu.workloads.command.items_file import BOOLEANS
from slurmgpu.workloads.command.placeholders import PARQUET
from slurmgpu.workloads.command.sinks import MAX_BYTES, OutputError

Values = Mapping[str, Any]
_NUMPY_ERRORS = (
    *(ValueError, OSError, EOFError, KeyError, RuntimeError, TypeError, OverflowError, MemoryError, SyntaxError),
    *(zlib.error, lzma.LZMAError, struct.error, zipfile.BadZipFile, tokenize.TokenError),
)
"""The exceptions of NumPy and zipfile for a damaged file: one that claims petabytes is a MemoryError."""


class WrongFormError(OutputError):
    """The program writes several rows, and none of them in a form that a slice can have: no item is at fault."""


def check_format(form: str, columns: Mapping[str, Column]) -> None:
    """Refuse columns that the format cannot hold."""
    if form == "npy" and (len(columns) > 1 or any(isinstance(column, Json) for column in columns.values())):
        raise SlurmGPUError(
            f"command: {{out:npy}} is one array, and the columns are {', '.join(columns)}; expected one column, which "
            "is not json. Use {out:npz} or {out}, JSON lines."
        )
    if form == "npz" and (odd := [name for name, column in columns.items() if isinstance(column, (Ragged, Json))]):
        raise SlurmGPUError(f"command: {{out:npz}} cannot hold the column {odd[0]!r}. Use {{out}}, JSON lines.")


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    """The JSON object in a text; OutputError if the text is something else."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        shown = line[:80].decode(errors="replace").strip()
        raise OutputError(f"{where} is {shown!r}; expected a JSON object" if shown else f"{where} has no JSON object")
    return found


def _read_jsonl(path: Path) -> Iterator[Values]:
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(MAX_BYTES + 1):
            if len(line) > MAX_BYTES:
                raise OutputError(f"line {number + 1} of {{out}} has more than {MAX_BYTES >> 20} MiB")
            if line.strip():
                number += 1
                yield parse_object(line, f"line {number} of {{out}}")


def _read_json(path: Path) -> Iterator[Values]:
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise OutputError(f"{{out}} is not JSON: {error}") from error
    if not _are_rows(rows):
        said = "{out} is JSON, but not a list of objects. Write a list with an object for each item"
        if isinstance(rows, dict) and (found := [name for name, value in rows.items() if value and _are_rows(value)]):
            said += f", such as the one in {found[0]!r:.80}"
            raise (WrongFormError if len(rows[found[0]]) > 1 else OutputError)(said)
        raise OutputError(said)
    yield from rows


def _are_rows(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _read_csv(path: Path) -> Iterator[Values]:
    csv.field_size_limit(MAX_BYTES)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            records = csv.DictReader(file, strict=True)
            if twice := [name for name, times in Counter(records.fieldnames or ()).items() if times > 1]:
                raise OutputError(f"the header of {{out}} has the column {twice[0]!r:.80} twice")
            for record in records:
                if None in record or None in record.values():
                    fields = list(record.values())
                    raise OutputError(f"a record of {{out}} does not have as many fields as the header: {fields!r:.80}")
                yield record
    except (csv.Error, UnicodeDecodeError) as error:
        raise OutputError(f"{{out}} is not CSV in UTF-8: {error}") from error


def _typed(record: Mapping[str, str], columns: Mapping[str, Column]) -> Values:
    """A record's texts as values; the row has an `error` if a text does not fit its column's type."""
    row: dict[str, Any] = {}
    errors: list[str] = []
    for name, text in record.items():
        try:
            column = columns.get(name)
            row[name] = _whole(text) if name == "index" else text if column is None else _value(text, column)
        except (ValueError, RecursionError):
            if name == "index":
                row[name] = text
            else:
                errors.append(f"column {name!r}: found {text!r:.80}, which does not fit the column's type")
    return {**row, "error": errors[0]} if errors and not row.get("error") else row


def _value(text: str, column: Column) -> Any:
    if isinstance(column, Json) or not isinstance(column, Array) or column.shape:
        return text if type(column) is Text else json.loads(text)
    kind = column.dtype.kind
    if kind == "b":
        if text.strip().lower() not in BOOLEANS:
            raise ValueError
        return BOOLEANS[text.strip().lower()]
    if "_" in text and kind != "S":  # Python reads 1_0 as 10
        raise ValueError
    parse: Callable[[str], Any] = {"f": float, "c": complex, "S": str}.get(kind, _whole)
    return parse(text)


def _whole(text: str) -> int:
    """An integer, also written as a float, such as `3.0`."""
    if "_" in text:
        raise ValueError
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer() or abs(number) >= 2**53:
            raise
        return int(number)


def _read_parquet(path: Path) -> Iterator[Values]:
    from slurmgpu.workloads.command import parquet_files  # pyarrow is an extra, and slow to import

    return parquet_files.read_rows(path)


def _with_nan(row: Values, columns: Mapping[str, Column]) -> Values:
    """The row with NaN for each null that is a number with a fraction: pandas writes NaN as null."""
    floats = [name for name, each in columns.items() if isinstance(each, Array) and each.dtype.kind in "fc"]
    missing = [name for name in floats if row.get(name, 0) is None and not columns[name].shape]
    return {**row, **dict.fromkeys(missing, math.nan)} if missing and not row.get("error") else row


def _read_npz(path: Path) -> Iterator[Values]:
    with _damage_is_told("an npz file of numbers and texts"):
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            said = "it has one array without a name; expected arrays with names, as np.savez writes them, or {out:npy}"
            raise ValueError(said)
        with file:
            arrays = {name: np.asarray(file[name]) for name in file.files}
    lengths = {len(array) if array.ndim else None for array in arrays.values()}
    if len(lengths) != 1 or None in lengths:
        raise OutputError("{out} has arrays of different lengths; expected one row for each index in all of them")
    for number in range(lengths.pop() or 0):
        yield {name: scalar(array[number]) for name, array in arrays.items()}


def _read_npy(path: Path) -> Iterator[Values]:
    """The whole array, with the name `array`."""
    with _damage_is_told("an npy file of numbers or texts"):
        array = np.load(path, allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it has arrays with names, as np.savez writes them: use {out:npz}")
    yield {"array": array}


@contextlib.contextmanager
def _damage_is_told(expected: str) -> Iterator[None]:
    """Make an exception of NumPy's an OutputError that says what was expected."""
    try:
        yield
    except PermissionError:
        raise
    except _NUMPY_ERRORS as error:
        raise OutputError(f"{{out}} is not {expected}: {str(error) or type(error).__name__}") from error


def scalar(value: Any) -> Any:
    """An element of an array; Python's own integer, text or boolean for NumPy's."""
    return value.item() if isinstance(value, (np.integer, np.str_, np.bool_)) else value


READERS: Mapping[str, Callable[[Path], Iterator[Values]]] = {
    "jsonl": _read_jsonl,
    "json": _read_json,
    "csv": _read_csv,
    PARQUET: _read_parquet,
    "npz": _read_npz,
    "npy": _read_npy,
}
READ_AS: Mapping[str, Callable[[Values, Mapping[str, Column]], Values]] = {"csv": _typed, PARQUET: _with_nan}
"""What a row of a format means by its columns' types."""
UNITS = {"jsonl": "line", "json": "object", "csv": "record", PARQUET: "row", "npz": "row", "npy": "row"}
