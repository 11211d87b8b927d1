"""Views of one column's values, read from the mapped file on demand."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from slurmgpu.shards.columns import Column


class ArrayData:
    """Rows of one shape, indexed like one NumPy array; results are copies."""

    def __init__(self, column: Column, content: npt.NDArray[Any]) -> None:
        self.column, self.content = column, content
        self.values: npt.NDArray[Any] = column.read(content)
        self.dtype = self.values.dtype
        self.shape = self.values.shape

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, key: Any) -> Any:
        found = self.values[key]
        return found.copy() if isinstance(found, np.ndarray) and not found.flags.owndata else found

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.values, dtype)

    def stored(self, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """The rows from `start` to `stop` as stored."""
        return self.content[start:stop]

    def python_values(self, start: int = 0, stop: int | None = None) -> list[Any]:
        """The rows from `start` to `stop` as Python numbers, or arrays if the column has a shape."""
        return self[start:stop].tolist() if self.values.ndim == 1 else list(self[start:stop])


class ListData:
    """Rows of any length."""

    def __init__(self, column: Column, values: npt.NDArray[Any], offsets: npt.NDArray[np.int64]) -> None:
        self.column = column
        self.offsets = offsets
        self.values = values

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, key: Any) -> Any:
        """One value for an integer; a list for a slice, integers or a boolean mask."""
        if isinstance(key, slice):
            rows = range(len(self))[key]
            if rows.step == 1:
                return self.column.read(self.stored(rows.start, rows.stop))
            return [self._one(row) for row in rows]
        try:
            return self._one(operator.index(key))
        except TypeError:
            return [self._one(row) for row in self._rows(np.asarray(key))]

    def stored(self, start: int = 0, stop: int | None = None) -> Sequence[Any]:
        """The rows from `start` to `stop` as stored, from a copy of the file's bytes."""
        start, stop, _ = slice(start, stop).indices(len(self))
        offsets = self.offsets[start : max(start, stop) + 1]
        return self.column.split(self.values[offsets[0] : offsets[-1]].copy(), (offsets - offsets[0]).tolist())

    def python_values(self, start: int = 0, stop: int | None = None) -> list[Any]:
        """The values of the rows from `start` to `stop`."""
        found: list[Any] = self[start:stop]
        return found

    def _rows(self, key: npt.NDArray[Any]) -> list[int]:
        if key.dtype == bool and key.shape == (len(self),):
            key = np.flatnonzero(key)
        if key.ndim != 1 or (key.size and key.dtype.kind not in "iu"):
            raise IndexError(f"expected an integer, a slice, integers or a mask of {len(self)} booleans to choose rows")
        rows: list[int] = key.tolist()
        return rows

    def _one(self, row: int) -> Any:
        row = range(len(self))[row]
        return self.column.read(self.stored(row, row + 1))[0]


ColumnData: TypeAlias = ArrayData | ListData
