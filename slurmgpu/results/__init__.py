"""Results: a merged file or a shard as columns of NumPy arrays and strings, read on demand.

Bytes are read by the offsets in the file's user block, without libhdf5. So indexing works as in NumPy, reading needs no
lock, and an open file may be used after a fork, for example in the workers of a torch DataLoader.

May import: code, run, shards, util.
"""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slurmgpu.code.versions import Stretch, stretches_of
from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.results.stored import Dataset, Results, how_to_go_on, missing
from slurmgpu.results.verifier import Verifier
from slurmgpu.results.views import ArrayData, ColumnData, ListData, without_value
from slurmgpu.shards.columns import Column, columns_from_json, stored_columns
from slurmgpu.shards.piece_table import pieces_of
from slurmgpu.shards.userblock import (
    MERGED,
    SHARD,
    DamagedShardError,
    FileDirectory,
    OtherHDF5Error,
    Reader,
    read_userblock,
)
from slurmgpu.shards.userblock import verify as differences
from slurmgpu.util.amounts import count_of
from slurmgpu.util.packages import check_pyarrow
from slurmgpu.util.shared_files import is_folder

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


_MOST_PROBLEMS = 3
_LEAST_SEEN = 512
BLOCK_BYTES = 4 << 20
"""Approximate size of a block of rows in the file; as Python objects it takes ten times as much."""


def open(  # noqa: A001 - slurmgpu.open, as h5py and gzip do it
    path: str | os.PathLike[str], *, verify: bool = False
) -> Merged:
    """Open a merged file or a shard, to read columns and rows; SlurmGPUError for other or damaged files.

    With `verify`, every byte is first read, in little memory, and compared with its checksum; an error names the
    dataset and shard that differ. Without it, only the user block and the file's length are checked, and a flipped bit
    in the rows is read as another value.

    Later changes to the bytes of the open file are not noticed. Reading raises SlurmGPUError if the file is truncated,
    if its disk fails for a minute, or if another machine replaces it on NFS. `complete` says whether every item has a
    row.
    """
    return Merged(path, verify=verify)


class Merged:
    """The rows of a file: `merged["score"][10:20]`, `merged.row(3)`, `merged.errors`; a context manager.

    A failed item has a row too, with blank columns and a message in `errors`.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = False) -> None:
        self.path = Path(path)
        directory, self._data, self._checking = _open(self.path, verify)
        self.attributes: dict[str, str | int | bool] = directory["attributes"]
        self.columns: dict[str, Column] = columns_from_json(json.loads(directory["attributes"]["columns"]))
        self._columns = stored_columns(self.columns)
        self.size_bytes: int = directory["file_size"]
        self._n_rows: int = directory["n_rows"]
        self._code = _code(directory)

    def __enter__(self) -> Merged:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; values that were read stay valid."""
        self._data, self._checking = {}, None

    def __len__(self) -> int:
        return self._n_rows

    def __repr__(self) -> str:
        return f"<{count_of(len(self), 'row')} of {', '.join(self.columns)} in {self.path}>"

    def __getitem__(self, name: str) -> ColumnData:
        if column := self._columns.get(name):
            if column.shape is not None:
                return ArrayData(column, self._dataset(name))
            return ListData(column, self._dataset(f"{name}/values"), self._dataset(f"{name}/offsets"))
        if not isinstance(name, str):  # also raised by iteration
            raise TypeError(
                f"{name!r} is not a column's name; use row({name!r}) or rows() for rows, [name] for columns."
            )
        raise SlurmGPUError(f"{self.path} has no column {name!r}.{did_you_mean(name, self._columns)}")

    @property
    def complete(self) -> bool:
        """Whether every item of the input has a row; False for a shard, which cannot know."""
        return bool(self.attributes.get("complete", False))

    @cached_property
    def index(self) -> npt.NDArray[np.int64]:
        """The input index of each row's item."""
        index: npt.NDArray[np.int64] = self["index"][:]
        return index

    @cached_property
    def code(self) -> npt.NDArray[np.object_]:
        """The digest of the code that computed each row, as `code` in the report; None if unknown."""
        # Stretches count the run's items, whose indices in the input may differ; but they cover the rows in order.
        found, first = np.full(len(self), None, object), 0
        for start, stop, digest in self._code:
            found[first : first + stop - start] = digest
            first += stop - start
        return found

    @cached_property
    def failed(self) -> npt.NDArray[np.bool_]:
        """A mask of the rows of failed items."""
        return np.diff(self._dataset("error/offsets")[:]) > 0

    @cached_property
    def errors(self) -> dict[int, str]:
        """The error of each failed item, by its input index."""
        rows = np.flatnonzero(self.failed)
        return dict(zip(self.index[rows].tolist(), self["error"][rows], strict=True))

    def check_rows(self, start: int, stop: int) -> None:
        """Compare the bytes of rows `start` to `stop` - 1 of a merged file with their checksums.

        Reads the whole shards of these rows, and the index and error of all rows, each once. SlurmGPUError names the
        dataset and shard that differ.
        """
        if self._checking is not None and (problems := self._checking.problems(start, stop)):
            raise SlurmGPUError(_damaged(self.path, MERGED, problems))

    def row(self, number: int) -> dict[str, Any]:
        """One row: `index` and the value of each column, as Python numbers, strings and arrays."""
        number = range(len(self))[number]
        return self.rows(number, number + 1)[0]

    def rows(self, start: int = 0, stop: int | None = None) -> list[dict[str, Any]]:
        """The rows from `start` to `stop` - 1, as from `row`."""
        names = ("index", *self.columns)
        values = [self[name].python_values(start, stop) for name in names]
        return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]

    def to_pandas(self) -> pd.DataFrame:
        """All rows as a data frame: `index`, the columns, and `error`, None for good rows.

        The values of failed items are missing, except fields that they keep. With a failed item, columns of integers
        and booleans have pandas' nullable types. SlurmGPUError without pandas.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise SlurmGPUError("to_pandas() needs pandas: pip install 'slurmgpu[pandas]'") from error
        frame, any_failed = {}, bool(self.failed.any())
        for name in ("index", *self.columns):
            column, dtype = self[name], self._columns[name].pandas
            failed = without_value(column, self.failed, 0, len(self))
            values = column[:] if dtype is None else column.python_values()
            if name == "index" or not any_failed:
                frame[name] = pd.Series(values, dtype=dtype)
            elif isinstance(values, np.ndarray) and values.dtype.kind in "iu":
                frame[name] = pd.Series(pd.arrays.IntegerArray(values, failed.copy()))
            elif isinstance(values, np.ndarray) and values.dtype.kind == "b":
                frame[name] = pd.Series(pd.arrays.BooleanArray(values, failed.copy()))
            else:
                frame[name] = pd.Series(values, dtype=dtype).mask(failed, None)
        frame["error"] = pd.Series([message or None for message in self["error"][:]], dtype=object)
        data_frame: pd.DataFrame = pd.DataFrame(frame)
        return data_frame

    def to_arrow(self, start: int = 0, stop: int | None = None) -> pa.Table:
        """The rows as a table in memory; failed items have null columns, except for fields that they keep.

        A JSON column has the common type of all its values in the file; without one it is JSON text, and null stays
        null. SlurmGPUError without pyarrow.
        """
        check_pyarrow("to_arrow() needs")
        from slurmgpu.results.arrow import to_arrow

        start, stop, _ = slice(start, stop).indices(len(self))
        columns = {name: self[name] for name in ("index", *self.columns, "error")}
        return to_arrow(columns, self.failed[start : max(start, stop)], start, max(start, stop), self._value_types)

    def ranges(self, n_bytes: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """The rows from `start` to `stop` - 1 as ranges (start, stop) of at most `n_bytes`, or of one larger row."""
        start, stop, _ = slice(start, stop).indices(len(self))
        fixed, lists = 0, list[tuple[Dataset, int]]()
        for name, column in self._columns.items():
            if column.shape is None:
                lists.append((self._dataset(f"{name}/offsets"), column.dtype.itemsize))
            fixed += column.dtype.itemsize * math.prod(column.shape) if column.shape is not None else 8
        n_rows = len(self) * n_bytes // max(1, self.size_bytes)  # by the average row; later by the previous range
        while start < stop:
            # Look at more rows than are likely to fit; the offsets of those that do not fit are read again.
            n_seen = min(max(_LEAST_SEEN, 2 * n_rows), n_bytes // fixed + 1, stop - start)
            ends = fixed * np.arange(1, n_seen + 1)
            for offsets, size in lists:
                found = offsets[start : start + len(ends) + 1]
                ends += size * (found[1:] - found[0])
            n_rows = max(1, int(np.searchsorted(ends, n_bytes, side="right")))
            yield start, start + n_rows
            start += n_rows

    @cached_property
    def _value_types(self) -> Mapping[str, pa.DataType | None]:
        from slurmgpu.results.arrow import value_types

        def of(rows: tuple[int, int]) -> Callable[[str], Sequence[Any]]:
            return lambda name: self[name].python_values(*rows)

        return value_types(self.columns, map(of, self.ranges(BLOCK_BYTES)))

    def _dataset(self, path: str) -> Dataset:
        if not self._data:
            raise SlurmGPUError(f"{self.path} was closed before {path!r} was read; open it again.")
        return self._data[path]


def _code(directory: FileDirectory) -> list[Stretch]:
    attributes = directory["attributes"]
    if attributes["format"] == SHARD:
        return stretches_of(directory["made_by"], attributes["start"], attributes["stop"])
    return [Stretch(*each) for each in directory["code"]]


def _open(path: Path, verify: bool) -> tuple[FileDirectory, dict[str, Dataset], Verifier | None]:
    """The directory, the datasets, and the checker of a merged file."""
    if is_folder(path):
        raise SlurmGPUError(
            f"{path} is a folder; expected a merged file or a shard. For a run, open({str(path / 'merged.h5')!r})."
        )
    try:
        reader = Reader(path, same=operator.eq)
        directory, table, size = read_userblock(reader)
        if verify:
            pieces = pieces_of(directory, table)
            problems = list(differences(reader, pieces, start=size, rest_crc32=directory["rest_crc32"]))
            if problems:
                raise SlurmGPUError(_damaged(path, directory["attributes"]["format"], problems))
        file = Results(path, reader.file)
    except OtherHDF5Error as error:
        raise SlurmGPUError(
            f"{path} is an HDF5 file of another program; expected a merged file or a shard of a run. Read it with "
            f"h5py; to make its rows items, write its arrays with np.savez."
        ) from error
    except DamagedShardError as error:
        raise SlurmGPUError(f"{path} is not an intact file of slurmgpu: {error}. {how_to_go_on(path)}") from error
    except FileNotFoundError:
        raise SlurmGPUError(missing(path)) from None
    except OSError as error:
        raise SlurmGPUError(f"{path} cannot be read: {error.strerror}.") from error
    data = {name: Dataset(file, dtype, shape, offset) for name, dtype, shape, offset, *_ in directory["datasets"]}
    is_merged = not verify and directory["attributes"]["format"] == MERGED
    return directory, data, Verifier(directory, table, file) if is_merged else None


def _damaged(path: Path, kind: str, problems: list[str]) -> str:
    n_more = len(problems) - _MOST_PROBLEMS
    named = "; ".join(problems[:_MOST_PROBLEMS]) + (f"; and {n_more} more" if n_more > 0 else "")
    if kind == SHARD:
        how = "`slurmgpu merge` leaves it out of the merged file, and `slurmgpu resubmit` recomputes it."
    else:
        how = how_to_go_on(path)
    return f"{path} has changed since it was written: {named}. {how}"
