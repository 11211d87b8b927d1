"""The output of a call as rows by index."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmgpu.errors import ItemError, Retry
from slurmgpu.shards.columns import Column
from slurmgpu.util.amounts import count_of
from slurmgpu.workloads.command.output_formats import READ_AS, READERS, UNITS, Values, WrongFormError, scalar
from slurmgpu.workloads.command.placeholders import as_json
from slurmgpu.workloads.command.sinks import OutputError
from slurmgpu.workloads.command.written_back import is_written_back

PANDAS = ("", "__index_level_0__")
"""The names of an index that pandas writes without being asked for it, in CSV and in Parquet."""


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
    A program may write back what it got: fields as they were `given`, by index, the field for `match` and the
    index of pandas are left out unless they are declared columns. A field with another value is a result.
    """
    collected = Collected(wanted, is_one=is_one)
    fields = {name for item in given.values() for name in item}
    passed = {*PANDAS, *([] if match is None else [match.field])} if given or match is not None or is_ordered else set()
    name_field = "index" if match is None else match.field
    in_order_of = list(wanted)

    def is_result(name: str, value: Any, item: Values) -> bool:
        if name in columns:
            return True
        return not (name in passed or (name in fields and is_written_back(name, value, item.get(name))))

    try:
        reads = READERS[form](path) if path.is_file() else iter(())
        if form == "npy":
            reads = _rows_of_array(reads, next(iter(columns)), is_one=is_one)
        if is_ordered:
            reads = _as_many_as(wanted, reads)
        for number, read in enumerate(reads, 1):
            where = f"{UNITS[form]} {number} of {{out}}"
            row = READ_AS[form](read, columns) if form in READ_AS else read
            if is_ordered:
                row = {**row, "index": in_order_of[number - 1]}
            elif read.get(name_field) is None and not is_one:
                others = list(reads) if number == 1 else []
                is_of_all = bool(others) and all(other.get(name_field) is None for other in others)
                said = f"{where} has no {_missing_name(match, row, fields)}"
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
        yield from ({column: scalar(value)} for value in ([array[()]] if is_one else array))


def _missing_name(match: Match | None, row: Values, fields: Collection[str]) -> str:
    """What a row lacks by which its item is found, and how to write it."""
    if match is not None:
        return f"{match.field!r}, which match needs to find its item"
    name = next((name for name in row if name in fields), "FIELD")
    return (
        f"index. Copy the index of the item from {{in}} into each row, or match rows by a field that rows and items "
        f"have and that differs between items: --set match={name}. If there are as many rows as items, in their order, "
        "use --set in_order=true"
    )


def in_order(indices: Sequence[int], rows: Mapping[int, Values]) -> list[Values | ItemError | Retry]:
    """The rows of these items, with an error for an item that has none."""
    missing = "the command wrote no row for this item"
    return [row_of(rows[index]) if index in rows else ItemError(missing) for index in indices]
