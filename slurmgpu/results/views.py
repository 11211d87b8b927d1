"""Views of one column's values, read from the file on demand."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from slurmgpu.results.stored import NEAR_BYTES, PART_BYTES, Dataset, Stored
from slurmgpu.shards.columns import Column

_BLOCK_BYTES = 1 << 20


class ArrayData:
    """Rows of one shape, indexed like a NumPy array; results are copies."""

    def __init__(self, column: Column, content: Stored) -> None:
        self.column, self.content = column, content
        none: npt.NDArray[Any] = column.read(content[:0])
        self.dtype, self.shape = none.dtype, (len(content), *none.shape[1:])

    @property
    def values(self) -> npt.NDArray[Any]:
        """All rows, in memory."""
        values: npt.NDArray[Any] = self.column.read(self.content[:])
        return values

    def __len__(self) -> int:
        return len(self.content)

    def __iter__(self) -> Iterator[Any]:
        return _by_blocks(self, self.dtype.itemsize * math.prod(self.shape))

    def __getitem__(self, key: Any) -> Any:
        stored, rest = self._read(key)
        values = self.column.read(stored)
        found = values[rest]
        is_part = isinstance(found, np.ndarray) and found.nbytes < values.nbytes
        return found.copy() if is_part else found  # a copy, so that the other rows read with it can be freed

    def _read(self, key: Any) -> tuple[npt.NDArray[Any], Any]:
        """The rows that `key` may need, and the key into those rows."""
        first, *rest = key if isinstance(key, tuple) and key else (key,)
        every = (slice(None), *rest)
        if isinstance(first, slice):
            rows = range(len(self))[first]
            return (self.content[rows.start : rows.stop], every) if rows.step == 1 else (self._take(rows), every)
        if isinstance(first, int | np.integer) and not isinstance(first, bool):
            row = range(len(self))[first]
            return self.content[row : row + 1], (0, *rest)
        chosen = np.asarray(first) if isinstance(first, list | np.ndarray) else None
        if chosen is not None and chosen.ndim == 1 and all(isinstance(each, int | slice) for each in rest):
            if chosen.dtype == bool and chosen.shape == (len(self),):
                return self._take(np.flatnonzero(chosen)), every
            if chosen.dtype.kind in "iu" and chosen.size and -len(self) <= chosen.min() <= chosen.max() < len(self):
                numbers = chosen.astype(np.int64)  # a narrow type may not hold the number of rows
                return self._take(np.where(numbers < 0, numbers + len(self), numbers)), every
        return self.content[:], key  # NumPy handles any other key, or raises

    def _take(self, rows: npt.ArrayLike) -> npt.NDArray[Any]:
        return _taken(self.content, np.asarray(rows, np.int64))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self.values, dtype)

    def stored(self, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """The rows from `start` to `stop` as stored."""
        return self.content[start:stop]

    def python_values(self, start: int = 0, stop: int | None = None) -> list[Any]:
        """The rows from `start` to `stop` as Python numbers, or arrays if the column has a shape."""
        return self[start:stop].tolist() if len(self.shape) == 1 else list(self[start:stop])


class ListData:
    """Rows of any length."""

    def __init__(self, column: Column, values: Stored, offsets: Stored) -> None:
        self.column = column
        self.offsets = offsets
        self.values = values

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[Any]:
        return _by_blocks(self, self.column.dtype.itemsize * len(self.values))

    def __getitem__(self, key: Any) -> Any:
        """One value for an integer; a list for a slice, integers or a boolean mask."""
        if isinstance(key, slice):
            rows = range(len(self))[key]
            if rows.step == 1:
                return self.column.read(self.stored(rows.start, rows.stop))
            return self._take(np.arange(rows.start, rows.stop, rows.step))
        try:
            row = range(len(self))[operator.index(key)]
        except TypeError:
            return self._take(self._rows(np.asarray(key)))
        return self.column.read(self.stored(row, row + 1))[0]

    def stored(self, start: int = 0, stop: int | None = None) -> Sequence[Any]:
        """The rows from `start` to `stop` as stored."""
        start, stop, _ = slice(start, stop).indices(len(self))
        offsets = self.offsets[start : max(start, stop) + 1]
        return self.column.split(self.values[offsets[0] : offsets[-1]], (offsets - offsets[0]).tolist())

    def python_values(self, start: int = 0, stop: int | None = None) -> list[Any]:
        """The values of the rows from `start` to `stop`."""
        found: list[Any] = self[start:stop]
        return found

    def _rows(self, key: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        if key.dtype == bool and key.shape == (len(self),):
            key = np.flatnonzero(key)
        if key.ndim != 1 or (key.size and key.dtype.kind not in "iu"):
            raise IndexError(f"expected an integer, a slice, integers or a mask of {len(self)} booleans to choose rows")
        if key.size and not -len(self) <= key.min() <= key.max() < len(self):
            raise IndexError(f"a row is not among the {len(self)}")
        numbers = key.astype(np.int64)  # a narrow type may not hold the number of rows
        return np.where(numbers < 0, numbers + len(self), numbers)

    def _take(self, rows: npt.NDArray[np.int64]) -> list[Any]:
        """The rows with these numbers, in this order; rows near each other in the file are read together."""
        order = np.argsort(rows)
        starts, stops = (_taken(self.offsets, rows[order] + step).astype(np.int64) for step in (0, 1))
        size = self.column.dtype.itemsize
        is_far = (starts[1:] - stops[:-1]) * size > NEAR_BYTES
        is_far |= np.diff(starts * size // PART_BYTES) > 0
        found: list[Any] = [None] * len(rows)
        for part in np.split(np.arange(len(rows)), np.flatnonzero(is_far) + 1) if len(rows) else ():
            first = int(starts[part[0]])
            values = self.values[first : int(stops[part[-1]])]
            bounds = zip(
                order[part].tolist(), (starts[part] - first).tolist(), (stops[part] - first).tolist(), strict=True
            )
            for place, start, stop in bounds:
                [found[place]] = self.column.split(values[start:stop].copy(), (0, stop - start))
        read: list[Any] = self.column.read(found)
        return read


def _taken(content: Stored, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    return content.take(rows) if isinstance(content, Dataset) else content[rows]


def without_value(data: ColumnData, failed: npt.NDArray[np.bool_], start: int, stop: int) -> npt.NDArray[np.bool_]:
    """A mask of the rows from `start` to `stop` without a value: failed items, except for fields that they keep."""
    if not isinstance(data, ListData) or not data.column.blank_is_none or not failed.any():
        return failed
    blank: npt.NDArray[np.bool_] = np.diff(data.offsets[start : stop + 1]) == 0
    return failed & blank


def _by_blocks(data: ColumnData, n_bytes: int) -> Iterator[Any]:
    step = max(1, _BLOCK_BYTES * len(data) // max(1, n_bytes, len(data)))
    return (row for start in range(0, len(data), step) for row in data[start : start + step])


ColumnData: TypeAlias = ArrayData | ListData
