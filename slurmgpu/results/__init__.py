"""Results: a merged file, or a shard, as columns of NumPy arrays and strings that are read when they are asked for.

The bytes are mapped into memory where the file's user block says that they lie, without libhdf5. So indexing is
NumPy's own, reading needs no lock, and an open file survives a fork, as into the workers of a torch DataLoader.
"""

from __future__ import annotations

import json
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slurmgpu.columns import Array, Column, Json, Ragged, Text, columns_from_json, stored_columns
from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.regions import DamagedShardError, Reader, read_userblock
from slurmgpu.results.views import ArrayData, ColumnData, JsonData, RaggedData, TextData

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


def open(path: str | os.PathLike[str]) -> Merged:  # noqa: A001 - slurmgpu.open, as h5py and gzip do it
    """A merged file or a shard, to be read by column and row; SlurmGPUError when it is neither, or damaged.

    What is checked is the user block; `slurmgpu merge --verify` checks every byte.
    """
    return Merged(path)


class Merged:
    """The rows of a file: `merged["score"][10:20]`, `merged.row(3)`, `merged.errors`; a context manager.

    A failed item has a row, too: its columns are blank, and what went wrong is in `errors`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        directory, self._data = _open(self.path)
        self.attributes: dict[str, str | int | bool] = directory["attributes"]
        self.columns: dict[str, Column] = columns_from_json(json.loads(directory["attributes"]["columns"]))
        self._columns = stored_columns(self.columns)
        self._n_rows: int = directory["n_rows"]

    def __enter__(self) -> Merged:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; what was read from it remains."""
        self._data = {}

    def __len__(self) -> int:
        return self._n_rows

    def __getitem__(self, name: str) -> ColumnData:
        match self._columns.get(name):
            case Array():
                return ArrayData(self._dataset(name))
            case Json():
                return JsonData(self._dataset(f"{name}/offsets"), self._dataset(f"{name}/values"))
            case Text():
                return TextData(self._dataset(f"{name}/offsets"), self._dataset(f"{name}/values"))
            case Ragged():
                return RaggedData(self._dataset(f"{name}/offsets"), self._dataset(f"{name}/values"))
        if not isinstance(name, str):  # also what iterating comes to
            raise TypeError(f"{name!r} names no column; rows are in row({name!r}) and rows(), columns in [name].")
        raise SlurmGPUError(f"{self.path} has no column {name!r}.{did_you_mean(name, self._columns)}")

    @property
    def complete(self) -> bool:
        """Whether every item of the input has a row; False for a shard, which cannot know."""
        return bool(self.attributes.get("complete", False))

    @cached_property
    def index(self) -> npt.NDArray[np.int64]:
        """The index in the input of each row's item."""
        index: npt.NDArray[np.int64] = self["index"][:]
        return index

    @cached_property
    def failed(self) -> npt.NDArray[np.bool_]:
        """Which rows belong to items that failed."""
        failed: npt.NDArray[np.bool_] = np.diff(self._dataset("error/offsets")) > 0
        return failed

    @cached_property
    def errors(self) -> dict[int, str]:
        """What went wrong with each failed item, by its index in the input."""
        rows = np.flatnonzero(self.failed)
        return dict(zip(self.index[rows].tolist(), self["error"][rows], strict=True))

    def row(self, number: int) -> dict[str, Any]:
        """One row: `index` and the value of each column; numbers, strings and lists' arrays as Python has them."""
        number = range(len(self))[number]
        return self.rows(number, number + 1)[0]

    def rows(self, start: int = 0, stop: int | None = None) -> list[dict[str, Any]]:
        """The rows from `start` to `stop` - 1, each as `row` has it."""
        names = ("index", *self.columns)
        values = [self[name].python_values(start, stop) for name in names]
        return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]

    def to_pandas(self) -> pd.DataFrame:
        """All rows as a data frame: `index`, the columns as they are stored, and `error`, None where there was none."""
        try:
            import pandas as pd
        except ImportError as error:
            raise SlurmGPUError("to_pandas() needs pandas: pip install 'slurmgpu[pandas]'") from error
        frame = {}
        for name in ("index", *self.columns):
            column = self[name]
            if isinstance(column, JsonData | RaggedData) or (isinstance(column, ArrayData) and not column.is_numbers):
                frame[name] = pd.Series(column.python_values(), dtype=object)
            else:
                frame[name] = pd.Series(column[:])
        frame["error"] = pd.Series([message or None for message in self["error"][:]], dtype=object)
        data_frame: pd.DataFrame = pd.DataFrame(frame)
        return data_frame

    def to_arrow(self, start: int = 0, stop: int | None = None) -> pa.Table:
        """The rows as a table that shares the file's bytes; the columns of failed items are null in it."""
        try:
            from slurmgpu.results.arrow import to_arrow
        except ImportError as error:
            raise SlurmGPUError("to_arrow() needs pyarrow: pip install 'slurmgpu[parquet]'") from error
        columns = {name: self[name] for name in ("index", *self.columns, "error")}
        return to_arrow(columns, self.failed, start, stop)

    def _dataset(self, path: str) -> npt.NDArray[Any]:
        if not self._data:
            raise SlurmGPUError(f"{self.path} was closed before {path!r} was read; open it again.")
        return self._data[path]


def _open(path: Path) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """The directory of a file, and each dataset as a read-only array over the file's bytes."""
    try:
        with Reader(path) as reader:
            directory, _, _ = read_userblock(reader)
            content = reader.map()
    except DamagedShardError as error:
        raise SlurmGPUError(
            f"{path} is not a whole file of slurmgpu's: {error}. `slurmgpu merge` writes a run's merged.h5 anew."
        ) from error
    except OSError as error:
        raise SlurmGPUError(f"{path} cannot be opened: {error.strerror}.") from error
    return directory, {
        name: np.ndarray(shape, dtype, content, offset) if n_bytes else np.empty(shape, dtype)
        for name, dtype, shape, offset, n_bytes, _ in directory["datasets"]
    }
