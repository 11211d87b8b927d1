"""Views: the values of one column, read from the mapped file when rows are asked for."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt


class ArrayData:
    """The values of an Array column, indexed like the NumPy array of all rows; what comes out is a copy."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self.values = values
        self.dtype = values.dtype
        self.shape = values.shape

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, key: Any) -> Any:
        found = self.values[key]
        return found.copy() if isinstance(found, np.ndarray) and not found.flags.owndata else found

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.values, dtype)

    @property
    def is_numbers(self) -> bool:
        """Whether each row is a single number."""
        return self.values.ndim == 1 and self.dtype.kind != "S"

    def python_values(self, start: int = 0, stop: int | None = None) -> list[Any]:
        """Python's own numbers for the rows from `start` to `stop`; arrays where the column has a shape."""
        return self[start:stop].tolist() if self.values.ndim == 1 else list(self[start:stop])


class _ListData:
    """The values of a column with offsets: one for each row, of any length."""

    def __init__(self, offsets: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> None:
        self.offsets = offsets
        self.values = values

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, key: Any) -> Any:
        """One value for an integer; a list for a slice, for integers, and for a mask of booleans."""
        if isinstance(key, slice):
            rows = range(len(self))[key]
            if rows.step == 1:
                return self._read(rows.start, rows.stop)
            return [self._one(row) for row in rows]
        try:
            return self._one(operator.index(key))
        except TypeError:
            return [self._one(row) for row in self._rows(np.asarray(key))]

    def python_values(self, start: int = 0, stop: int | None = None) -> list[Any]:
        """The values of the rows from `start` to `stop`."""
        found: list[Any] = self[start:stop]
        return found

    def _rows(self, key: npt.NDArray[Any]) -> list[int]:
        if key.dtype == bool and key.shape == (len(self),):
            key = np.flatnonzero(key)
        if key.ndim != 1 or (key.size and key.dtype.kind not in "iu"):
            raise IndexError(f"rows are chosen by an integer, a slice, integers or a mask of {len(self)} booleans")
        rows: list[int] = key.tolist()
        return rows

    def _one(self, row: int) -> Any:
        row = range(len(self))[row]
        return self._read(row, row + 1)[0]

    def _read(self, start: int, stop: int) -> Sequence[Any]:
        raise NotImplementedError

    def _block(self, start: int, stop: int) -> tuple[npt.NDArray[Any], list[int]]:
        """A copy of the values of the rows from `start` to `stop`, and where each row begins and ends in it."""
        offsets = self.offsets[start : max(start, stop) + 1]
        return self.values[offsets[0] : offsets[-1]].copy(), (offsets - offsets[0]).tolist()


class TextData(_ListData):
    """The values of a Text column: str for a row, a list of str for several."""

    def _read(self, start: int, stop: int) -> list[str]:
        block, bounds = self._block(start, stop)
        content = block.tobytes()
        return [content[first:last].decode() for first, last in pairwise(bounds)]


class JsonData(TextData):
    """The values of a Json column, as `json.loads` has them; None for a failed item. `text` has the JSON itself."""

    @property
    def text(self) -> TextData:
        """The column as text: compact JSON, and "" for a failed item."""
        return TextData(self.offsets, self.values)

    def _read(self, start: int, stop: int) -> list[Any]:
        return [json.loads(text) if text else None for text in super()._read(start, stop)]


class RaggedData(_ListData):
    """The values of a Ragged column: an array for a row, a list of arrays, views of one, for several."""

    def _read(self, start: int, stop: int) -> list[npt.NDArray[Any]]:
        block, bounds = self._block(start, stop)
        return [block[first:last] for first, last in pairwise(bounds)]


ColumnData: TypeAlias = ArrayData | TextData | JsonData | RaggedData
