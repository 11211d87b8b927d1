"""Compare the rows of two runs, or of two merged files, by index or by a key."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slurmgpu import results
from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean
from slurmgpu.inputs import open_items
from slurmgpu.merge.differences import distance_of, is_same
from slurmgpu.merge.paired_tests import PairedTest, right_verdicts, tests_of
from slurmgpu.report.report_file import read_report
from slurmgpu.results.published import Block, FileRows, Row, RunRows
from slurmgpu.results.views import without_value
from slurmgpu.run.sweep_file import open_run
from slurmgpu.util.json_values import json_value
from slurmgpu.util.shared_files import is_folder

log = logging.getLogger(__name__)

COMPARISON_FORMAT = "slurmgpu comparison"
COMPARISON_VERSION = 1
N_EXAMPLES = 10

_PART = 2000
"""Reading this part of a block, a few dozen small rows, takes less time than finding a row by itself."""

_PLAIN = frozenset((int, float, str, bool, type(None)))

Source = RunRows | FileRows


@dataclass
class Side:
    """One side of a comparison: its path, its rows, the failed ones among them, and what the other side lacks.

    `n_missing` counts items of a run without a row. `only` are the indices of the first rows that the other side lacks,
    `only_columns` its extra columns. `n_without_key` counts rows that have no key, so no partner. `damaged` names
    shards whose rows could not be read. `summary` is that of the report.
    """

    path: str
    n_rows: int = 0
    n_failed: int = 0
    n_missing: int = 0
    n_only: int = 0
    only: list[int] = field(default_factory=list)
    only_columns: list[str] = field(default_factory=list)
    n_without_key: int = 0
    damaged: list[str] = field(default_factory=list)
    summary: Mapping[str, Any] | None = None


@dataclass
class ColumnDifference:
    """How many rows differ in a column, and the largest difference of numbers; None if no number differs.

    For integers `largest` is an int, which is exact.
    """

    n_rows: int = 0
    largest: float | None = None


class Difference(NamedTuple):
    """A row that differs: its indices on both sides, its key, and both values of each column that differs."""

    a_index: int
    b_index: int
    key: str | None
    columns: Mapping[str, tuple[Any, Any]]


@dataclass
class Comparison:
    """The differences of two runs: `equal` if there are none; `differences` are the first rows with one."""

    a: Side
    b: Side
    key: str | None
    tolerance: float
    n_common: int = 0
    n_different: int = 0
    columns: dict[str, ColumnDifference] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    paired: dict[str, PairedTest] = field(default_factory=dict)
    """By the column that says whether a row is right: which of both is right more often."""
    dtypes: dict[str, tuple[np.dtype[Any], np.dtype[Any]]] = field(default_factory=dict, repr=False)
    """The dtypes of a column on both sides."""

    @property
    def equal(self) -> bool:
        """Whether both have the same columns, the same rows, and the same values in them."""
        sides = self.a, self.b
        return not (self.n_different or any(side.n_only or side.only_columns for side in sides))

    def to_json(self) -> dict[str, Any]:
        """The keys of `slurmgpu compare --json`."""
        found = {"format": COMPARISON_FORMAT, "version": COMPARISON_VERSION, "equal": self.equal, **asdict(self)}
        del found["dtypes"]
        found["paired"] = {name: each.to_json() for name, each in self.paired.items()}
        found["differences"] = [
            {**each._asdict(), "columns": {name: json_value(pair) for name, pair in each.columns.items()}}
            for each in self.differences
        ]
        return found


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    key: str | None = None,
    columns: Sequence[str] = (),
    tolerance: float = 0.0,
    n_examples: int = N_EXAMPLES,
) -> Comparison:
    """The differences between the rows of two run directories, which may be running, or of two merged files.

    Rows are matched by their index, or by `key`: a column or a field of the input whose value is unique in each row.
    `columns` are the columns to compare, by default all common ones and `error`. Numbers x and y are the same if
    `|x - y| <= tolerance * max(1, |x|, |y|)`; NaN is the same as NaN. The result has the first `n_examples` rows that
    differ, or that one side lacks. Raises SlurmGPUError if a path is neither a run nor a merged file, or lacks the key
    or a column.

    By index, memory is bounded by a block of rows; a key takes another 40 bytes per row.
    """
    if not 0 <= tolerance < math.inf:
        raise SlurmGPUError(f"The tolerance is {tolerance}; expected 0 or a positive number.")
    with _opened(Path(a)) as one, _opened(Path(b)) as other:
        found = Comparison(Side(str(a)), Side(str(b)), key, tolerance)
        names = _common(found, one, other, columns)
        found.columns = {name: ColumnDifference() for name in names}
        found.paired = tests_of(names, *((each.columns, _right_verdicts_of(each)) for each in (one, other)))
        found.dtypes = {name: (one.columns[name].dtype, other.columns[name].dtype) for name in names if name != "error"}
        pairs = _by_index(one, other) if key is None else _by_key(found, one, other, key)
        for name_of_pair, row, its in pairs:
            _count(found.a, row, its, n_examples)
            _count(found.b, its, row, n_examples)
            if row is not None and its is not None:
                _compare_rows(found, names, name_of_pair, row, its, n_examples)
                for name, test in found.paired.items():
                    test.add(name, row, its)
        _describe(found.a, one)
        _describe(found.b, other)
    return found


def _count(side: Side, row: Row | None, partner: Row | None, n_examples: int) -> None:
    """Count a row of one side, which the other has as `partner`."""
    if row is None:
        return
    side.n_rows += 1
    side.n_failed += row.error is not None
    if partner is None:
        side.n_only += 1
        if len(side.only) < n_examples:
            side.only.append(row.index)


def _describe(side: Side, source: Source) -> None:
    """Note what a side lacks, once its rows are counted, and its summary, if it is a run."""
    if isinstance(source, RunRows):
        side.n_missing = source.run.plan.n_items - side.n_rows
        side.damaged = list(dict.fromkeys(source.problems))
        report = read_report(source.run)
        side.summary = report["summary"] if report else None


def _right_verdicts_of(source: Source) -> frozenset[str]:
    return right_verdicts(source.run.plan.settings) if isinstance(source, RunRows) else frozenset()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Source]:
    if is_folder(path):
        with RunRows(open_run(path)) as rows:
            yield rows
    else:
        with results.open(path) as merged:
            yield FileRows(merged)


def _common(found: Comparison, one: Source, other: Source, columns: Sequence[str]) -> list[str]:
    """The columns to compare, `error` among them unless others were asked for."""
    both = [name for name in one.columns if name in other.columns]
    for name in columns:
        if name not in (*both, "error"):
            raise SlurmGPUError(
                f"{found.a.path} and {found.b.path} have no common column {name!r}.{did_you_mean(name, both)}"
            )
    if not columns:
        found.a.only_columns = [name for name in one.columns if name not in other.columns]
        found.b.only_columns = [name for name in other.columns if name not in one.columns]
    return [*dict.fromkeys(columns)] or [*both, "error"]


def _compare_rows(
    found: Comparison, names: Sequence[str], key: str | None, row: Row, its: Row, n_examples: int
) -> None:
    found.n_common += 1
    differing = {}
    for name in names:
        one, other = (row.error, its.error) if name == "error" else (row.values[name], its.values[name])
        if type(one) in _PLAIN and type(one) is type(other) and one == other:  # a fast path for most values
            continue
        if not is_same(one, other, found.tolerance):
            differing[name] = one, other
            column = found.columns[name]
            column.n_rows += 1
            if (distance := distance_of(one, other)) is not None:
                column.largest = max(distance, column.largest or 0)
    if differing:
        found.n_different += 1
        if len(found.differences) < n_examples:
            found.differences.append(Difference(row.index, its.index, key, differing))


Pair = tuple[str | None, Row | None, Row | None]


def _by_index(one: Source, other: Source) -> Iterator[Pair]:
    """The rows of both sides by index; None for a row that a side lacks."""
    rows, others = _rows(one), _rows(other)
    row, its = next(rows, None), next(others, None)
    while row is not None or its is not None:
        if its is None or (row is not None and row.index < its.index):
            yield None, row, None
            row = next(rows, None)
        elif row is None or its.index < row.index:
            yield None, None, its
            its = next(others, None)
        else:
            yield None, row, its
            row, its = next(rows, None), next(others, None)


def _rows(source: Source) -> Iterator[Row]:
    for block in source.blocks():
        yield from block.rows()


def _by_key(found: Comparison, one: Source, other: Source, key: str) -> Iterator[Pair]:
    """The rows of both sides by key, in the order of the first side, then those that only the second has."""
    keys_of, keys_of_other = _key_reader(found.a.path, one, key), _key_reader(found.b.path, other, key)
    _table_of(one, keys_of, key, found.a)
    hashes, items = _table_of(other, keys_of_other, key, found.b)
    is_matched = np.zeros(len(items), bool)
    for block in one.blocks():
        keys, rows = keys_of(block), block.rows()
        places = [_place(hashes, each) for each in keys]
        wanted = [int(items[place]) for place in places if place is not None]
        partners = _rows_at(other, keys_of_other, wanted, len(rows) // _PART)
        for name, row, place in zip(keys, rows, places, strict=True):
            its = None
            if place is not None:
                is_matched[place] = True
                its_name, its = partners[int(items[place])]
                if its_name != name:
                    raise SlurmGPUError(f"The keys {name!r} and {its_name!r} have the same hash; compare by index.")
            yield name, row, its
    matched = set(items[is_matched].tolist())
    for row in _rows(other):
        if row.index not in matched:
            yield None, None, row


KeyReader = Callable[[Block], list[str | None]]


def _key_reader(path: str, source: Source, key: str) -> KeyReader:
    """A function that returns the key of each row of a block, from the column, else from the input."""
    is_column, has_input = key in source.columns, isinstance(source, RunRows) and source.run.plan.input["files"]
    if not is_column and not has_input:
        raise SlurmGPUError(f"{path} has no column {key!r}.{did_you_mean(key, source.columns)}")

    def read(block: Block) -> list[str | None]:
        file, start, stop = block
        indices = file["index"].python_values(start, stop)
        if not is_column:
            return list(map(_text, _of_input(source, key, indices)))
        column = file[key]
        found = list(map(_text, column.python_values(start, stop)))
        failed = np.flatnonzero(without_value(column, block.failed, start, stop)).tolist()
        try:
            values = _of_input(source, key, [indices[place] for place in failed]) if has_input and failed else []
        except SlurmGPUError as error:
            log.info("failed items have no %s: %s", key, error)
            values = []
        for number, place in enumerate(failed):
            found[place] = _text(values[number]) if values else None
        return found

    return read


def _of_input(source: Source, key: str, indices: Sequence[int]) -> list[Any]:
    """The field of the input for items, ascending; None where there is none."""
    assert isinstance(source, RunRows)
    with open_items(source.run) as read:
        return [None if isinstance(data, ItemError) else data.get(key) for data in read(indices)]


def _text(value: Any) -> str | None:
    """A key as text, the same for equal numbers, such as 1 and 1.0; None for null, and for NaN."""
    plain = _with_integers(json_value(value))
    return plain if plain is None or isinstance(plain, str) else json.dumps(plain, ensure_ascii=False, sort_keys=True)


def _with_integers(plain: Any) -> Any:
    """A JSON value in which whole numbers are integers."""
    if isinstance(plain, dict):
        return {name: _with_integers(inner) for name, inner in plain.items()}
    if isinstance(plain, list):
        return list(map(_with_integers, plain))
    return int(plain) if isinstance(plain, float) and plain.is_integer() else plain


def _table_of(
    source: Source, keys_of: KeyReader, key: str, side: Side
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Sorted hashes of the keys, and their items; SlurmGPUError if two rows share a key."""
    parts: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    for block in source.blocks():
        keys = keys_of(block)
        indices = block.file["index"][block.start : block.stop]
        is_named = np.array([each is not None for each in keys], bool)
        side.n_without_key += len(keys) - int(is_named.sum())
        parts.append((np.array([hash(each) for each in keys if each is not None], np.int64), indices[is_named]))
    hashes, items = (np.concatenate(each) for each in zip(*parts, strict=True))
    if not len(hashes) and side.n_without_key:
        raise SlurmGPUError(f"No row of {side.path} has a {key!r}: it is neither a column nor a field of the input.")
    order = np.argsort(hashes, kind="stable")
    hashes, items = hashes[order], items[order]
    if len(twice := np.flatnonzero(hashes[1:] == hashes[:-1])):
        at = twice[items[twice].argmin()]  # hashes, and thus their order, differ between processes
        first, second = items[at : at + 2].tolist()
        raise SlurmGPUError(
            f"{side.path} has several rows with the same {key!r}, such as items {first} and {second}. A key must be "
            "unique; without --key rows are compared by index."
        )
    return hashes, items


def _place(hashes: npt.NDArray[np.int64], key: str | None) -> int | None:
    if key is None:
        return None
    place = int(np.searchsorted(hashes, hash(key)))
    return place if place < len(hashes) and hashes[place] == hash(key) else None


def _rows_at(
    source: Source, keys_of: KeyReader, items: Sequence[int], most_between: int
) -> dict[int, tuple[str | None, Row]]:
    """The rows of items with their keys; up to `most_between` rows that lie between two of them are read as well."""
    found: dict[int, tuple[str | None, Row]] = {}
    wanted, ordered = set(items), sorted(items)
    breaks = [place for place, (one, its) in enumerate(pairwise(ordered), 1) if its - one > most_between + 1]
    for first, last in pairwise([0, *breaks, len(ordered)]) if ordered else ():
        for block in source.blocks(ordered[first], ordered[last - 1] + 1):
            pairs = zip(keys_of(block), block.rows(), strict=True)
            found |= {row.index: (name, row) for name, row in pairs if row.index in wanted}
    return found
