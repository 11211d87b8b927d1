"""The output of a call as rows by index: JSON lines, a JSON list, CSV, npz or npy."""

from __future__ import annotations

import contextlib
import csv
import json
import lzma
import math
import re
import struct
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np

from slurmgpu.errors import ItemError, Retry, SlurmGPUError
from slurmgpu.shards.columns import Array, Column, Json, Ragged, Text
from slurmgpu.util.amounts import count_of
from slurmgpu.workloads.command.items_file import as_field
from slurmgpu.workloads.command.placeholders import as_json
from slurmgpu.workloads.command.sinks import MAX_BYTES, OutputError

Values = Mapping[str, Any]


class WrongFormError(OutputError):
    """The program writes several rows, and none of them in a form that a slice can have: no item is at fault."""


NPZ_ERRORS = (
    *(ValueError, OSError, EOFError, KeyError, RuntimeError, TypeError, OverflowError, MemoryError, SyntaxError),
    *(zlib.error, lzma.LZMAError, struct.error, zipfile.BadZipFile, tokenize.TokenError),
)
"""The exceptions of NumPy and zipfile for a damaged file: one that claims petabytes is a MemoryError."""

_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}
_DATES = re.compile(r"(?i)timestamp.*|.*_(?:at|time)|modified|date")
"""The names of fields in JSON that pandas takes for dates, or for seconds since 1970, and writes in milliseconds."""


class Collected:
    """Collects the rows of a call: one for each index in `wanted`, in any order.

    With `is_one` there is one item, and its row need not have its index.
    """

    def __init__(self, wanted: Collection[int], *, is_one: bool = False) -> None:
        self._wanted = wanted
        self._usual = next(iter(wanted)) if is_one else None
        self.rows: dict[int, Values] = {}

    def add(self, row: Values, where: str) -> int:
        """Take a row with its `index`, which is returned; OutputError if that is unknown or repeated.

        OutputError also if the row's error is not text.
        """
        index = row.get("index", self._usual)
        if not isinstance(index, int) or isinstance(index, bool):
            found = "no" if index is None else f"{index!r:.80} as"
            raise OutputError(f"{where} has {found} index. Copy the index of the item from {{in}} into each row")
        if index not in self._wanted:
            raise OutputError(f"{where} has the index {index}, but this call has no such item")
        if index in self.rows:
            raise OutputError(
                f"{where} is a second row for item {index}. Write one row for each item; several values, such as "
                f"samples, go into it as a list"
            )
        error = row.get("error")
        if not (error is None or error is False or isinstance(error, str)):
            raise OutputError(f"{where} has {error!r:.80} as error; expected a text")
        self.rows[index] = {name: value for name, value in row.items() if name != "index"}
        return index


class Match:
    """Finds the item of a row by the value of `field`, which is in both and differs between items."""

    def __init__(self, field: str, requests: Mapping[int, bytes]) -> None:
        self.field = field
        self._indices = {name: index for index, name in _names(requests, field)}

    def index_of(self, row: Values, where: str) -> int:
        """The index of a row's item; OutputError if no item has the row's value."""
        name = _name(row[self.field])
        if name not in self._indices:
            number = _number(name)
            others = self._indices if number is not None else ()
            like = [f"; one has {other!r:.80}" for other in others if _number(other) == number]
            more = f"{like[0]}. Keep {self.field!r} a text, as pandas does with dtype=str" if like else ""
            found = f"{where} has {name!r:.80} as {self.field!r}"
            raise OutputError(f"{found}, but no item of this call has that value{more}")
        return self._indices[name]


def without_namesakes(requests: Mapping[int, bytes], field: str) -> list[dict[int, bytes]]:
    """The items in as few calls as possible, such that no two items of a call have the same value of `field`."""
    calls: list[dict[int, bytes]] = []
    n_earlier = Counter[str]()
    for index, name in _names(requests, field):
        if n_earlier[name] == len(calls):
            calls.append({})
        calls[n_earlier[name]][index] = requests[index]
        n_earlier[name] += 1
    return calls


def _names(requests: Mapping[int, bytes], field: str) -> Iterator[tuple[int, str]]:
    return ((index, _name(json.loads(line)["data"][field])) for index, line in requests.items())


def _name(value: Any) -> str:
    """A value as text: CSV has no others."""
    try:
        return value if isinstance(value, str) else as_json(value)
    except (TypeError, ValueError):  # NaN, complex numbers: no item has these
        return repr(value)


def _number(name: str) -> float | None:
    try:
        return float(name)
    except ValueError:
        return None


def row_of(values: Values) -> Values | ItemError | Retry:
    """A row, or the item's error; a Retry if the row has `retry`, which is true or a number of seconds."""
    if values.get("error"):
        retry = values.get("retry")
        if retry is True or (isinstance(retry, int | float) and retry > 0):
            return Retry(values["error"], after=None if retry is True else retry)
        return ItemError(values["error"])
    return {name: value for name, value in values.items() if name != "error"}


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


def read_output(
    path: Path,
    form: str,
    columns: Mapping[str, Column],
    wanted: Collection[int],
    *,
    is_one: bool,
    given: Mapping[int, Values],
    match: Match | None,
    is_ordered: bool,
) -> dict[int, Values]:
    """The rows in the file `{out}`, by index; OutputError if it is not in its format.

    If the output `is_ordered`, it has a row for each item that is `wanted`, in the same order.
    A program may write back what it got: fields as they were `given`, by index, the field for `match` and the unnamed
    index column of pandas are left out unless they are declared columns. A field with another value is a result.
    """
    collected = Collected(wanted, is_one=is_one)
    fields = {name for item in given.values() for name in item}
    passed = {"", *([] if match is None else [match.field])} if given or match is not None or is_ordered else set()
    name_field = "index" if match is None else match.field
    in_order_of = list(wanted)

    def is_result(name: str, value: Any, item: Values) -> bool:
        if name in columns:
            return True
        return not (name in passed or (name in fields and is_written_back(name, value, item.get(name))))

    try:
        reads = _READERS[form](path) if path.is_file() else iter(())
        if form == "npy":
            reads = _rows_of_array(reads, next(iter(columns)), is_one=is_one)
        if is_ordered:
            reads = _as_many_as(wanted, reads)
        for number, read in enumerate(reads, 1):
            where = f"{_UNITS[form]} {number} of {{out}}"
            row = _typed(read, columns) if form == "csv" else read
            if is_ordered:
                row = {**row, "index": in_order_of[number - 1]}
            elif read.get(name_field) is None and not is_one:
                said = f"{where} has no {name_field}. {_how_to_match(row, fields)}"
                if match is not None:
                    said = f"{where} has no {name_field!r}, which match needs to find its item"
                others = list(reads) if number == 1 else []
                is_of_all = bool(others) and all(other.get(name_field) is None for other in others)
                raise (WrongFormError if is_of_all else OutputError)(said)
            if match is not None:  # compares the text as written: a column of the same name may have a type
                row = {**row, "index": match.index_of(read, where)}
            index = collected.add(row, where)
            item = given.get(index, {})
            kept = {name: value for name, value in collected.rows[index].items() if is_result(name, value, item)}
            if is_ordered and (changed := [name for name in kept if name in item and name not in columns]):
                raise OutputError(
                    f"{where} has another {changed[0]!r} than its item: the rows are not in the order of the items, "
                    f"which in_order = true says, or {changed[0]!r} is a result and needs a column"
                )
            collected.rows[index] = kept
    except PermissionError as error:
        raise OutputError(f"{{out}} cannot be read: {error.strerror}") from error
    return collected.rows


def _as_many_as(wanted: Collection[int], rows: Iterator[Values]) -> Iterator[Values]:
    """The rows; OutputError unless there is one for each item, or none."""
    found = list(rows)
    if found and len(found) != len(wanted):
        raise OutputError(
            f"{{out}} has {count_of(len(found), 'row')}, and in_order = true needs one for each of the "
            f"{count_of(len(wanted), 'item')} of the call"
        )
    return iter(found)


def _rows_of_array(read: Iterator[Values], column: str, *, is_one: bool) -> Iterator[Values]:
    """The rows of the array that is read, which are values of the only column; of one item, the array is the value."""
    for each in read:
        array = each["array"]
        if not (is_one or array.ndim):
            raise OutputError("{out} is a single number; expected an array with a row for each item")
        yield from ({column: _scalar(value)} for value in ([array[()]] if is_one else array))


def is_written_back(name: str, value: Any, given: Any) -> bool:
    """Whether a row's value of a field is the one that the item has, white space aside: many scripts strip texts.

    pandas writes 7 for `007`, 7.0 for 7, True or 1.0 for `true`, ten decimals of a number and ten digits of one above
    1e16, nothing for what is missing, and milliseconds for the date in a field such as `created_at`. R writes NA for
    what is missing, a table of structs null for a key that another row has, and a CSV writer of Python `['a']` for a
    list.
    """
    if isinstance(given, list | dict) and isinstance(value, str) and value != str(given):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, list) and isinstance(given, list):
        return len(value) == len(given) and all(is_written_back("", *pair) for pair in zip(value, given, strict=True))
    if isinstance(value, dict) and isinstance(given, dict):
        return given.keys() <= value.keys() and all(is_written_back(key, value[key], given.get(key)) for key in value)
    one, other = map(_without_space, (as_field(value), as_field(given)))
    if one in ("", "NaN", _without_space(str(given)), other) or (one == "NA" and not other):
        return True
    amount, its = _amount(one), _amount(other)
    is_date = _DATES.fullmatch(name) is not None
    if amount is None or its is None:
        return is_date and isinstance(value, int)  # of a date in words
    exact = 1e-9 if abs(its) >= 1e16 else 1e-15
    units = (1, 1000, 1e-3, 1e-6) if is_date else (1,)
    return any(math.isclose(amount, its * unit, rel_tol=exact, abs_tol=1e-10) for unit in units)


_EPOCH = datetime.fromtimestamp(0, timezone.utc)


def _amount(text: str) -> float | None:
    """A number, 1 for true and 0 for false, or milliseconds of a date in ISO 8601 since 1970; None for other texts."""
    if text.lower() in _BOOLEANS:
        return float(_BOOLEANS[text.lower()])
    with contextlib.suppress(ValueError):
        return float(text)
    with contextlib.suppress(ValueError):
        date = datetime.fromisoformat(text.removesuffix("Z"))  # which Python 3.10 does not read
        since = (date if date.tzinfo else date.replace(tzinfo=timezone.utc)) - _EPOCH
        return float(since // timedelta(milliseconds=1))
    return None


def _without_space(text: str) -> str:
    """The text with single blanks for all white space."""
    return " ".join(text.split())


def _how_to_match(row: Values, fields: Collection[str]) -> str:
    name = next((name for name in row if name in fields), "FIELD")
    return (
        f"Copy the index of the item from {{in}} into each row, or match rows by a field that rows and items have "
        f"and that differs between items: --set match={name}. If there are as many rows as items, in their order, use "
        "--set in_order=true"
    )


def check_format(form: str, columns: Mapping[str, Column]) -> None:
    """Refuse columns that the format cannot hold."""
    if form == "npy" and (len(columns) > 1 or any(isinstance(column, Json) for column in columns.values())):
        raise SlurmGPUError(
            f"command: {{out:npy}} is one array, and the columns are {', '.join(columns)}; expected one column, which "
            "is not json. Use {out:npz} or {out}, JSON lines."
        )
    if form == "npz" and (odd := [name for name, column in columns.items() if isinstance(column, (Ragged, Json))]):
        raise SlurmGPUError(f"command: {{out:npz}} cannot hold the column {odd[0]!r}. Use {{out}}, JSON lines.")


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
        if text.strip().lower() not in _BOOLEANS:
            raise ValueError
        return _BOOLEANS[text.strip().lower()]
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


def _read_npz(path: Path) -> Iterator[Values]:
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            said = "it has one array without a name; expected arrays with names, as np.savez writes them, or {out:npy}"
            raise ValueError(said)
        with file:
            arrays = {name: np.asarray(file[name]) for name in file.files}
    except PermissionError:
        raise
    except NPZ_ERRORS as error:
        said = str(error) or type(error).__name__
        raise OutputError(f"{{out}} is not an npz file of numbers and texts: {said}") from error
    lengths = {len(array) if array.ndim else None for array in arrays.values()}
    if len(lengths) != 1 or None in lengths:
        raise OutputError("{out} has arrays of different lengths; expected one row for each index in all of them")
    for number in range(lengths.pop() or 0):
        yield {name: _scalar(array[number]) for name, array in arrays.items()}


def _read_npy(path: Path) -> Iterator[Values]:
    """The whole array, with the name `array`."""
    try:
        array = np.load(path, allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it has arrays with names, as np.savez writes them: use {out:npz}")
    except PermissionError:
        raise
    except NPZ_ERRORS as error:
        said = str(error) or type(error).__name__
        raise OutputError(f"{{out}} is not an npy file of numbers or texts: {said}") from error
    yield {"array": array}


def _scalar(value: Any) -> Any:
    return value.item() if isinstance(value, (np.integer, np.str_, np.bool_)) else value


_READERS: Mapping[str, Callable[[Path], Iterator[Values]]] = {
    "jsonl": _read_jsonl,
    "json": _read_json,
    "csv": _read_csv,
    "npz": _read_npz,
    "npy": _read_npy,
}
_UNITS = {"jsonl": "line", "json": "object", "csv": "record", "npz": "row", "npy": "row"}


def in_order(indices: Sequence[int], rows: Mapping[int, Values]) -> list[Values | ItemError | Retry]:
    """The rows of these items, with an error for an item that has none."""
    missing = "the command wrote no row for this item"
    return [row_of(rows[index]) if index in rows else ItemError(missing) for index in indices]
