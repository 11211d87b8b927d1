"""The datasets of an open file, read by position.

They are not mapped into memory: if a mapped page cannot be read, because the file was truncated or another NFS client
replaced it, the process dies of SIGBUS.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from slurmgpu.errors import SlurmGPUError
from slurmgpu.shards.open_file import OpenFile, ReplacedFileError

PART_BYTES = 1 << 20
NEAR_BYTES = 1 << 14  # a gap of this size between two rows is read, too, instead of a second call


class Results:
    """The bytes of an open file of results; SlurmGPUError if it cannot be read, or was truncated or replaced."""

    def __init__(self, path: Path, file: OpenFile) -> None:
        self._path, self._file = path, file

    def read(self, start: int, n_bytes: int) -> npt.NDArray[np.uint8]:
        """The bytes from `start` on."""
        found = np.empty(n_bytes, np.uint8)
        self.read_into(found.data, start)
        return found

    def read_into(self, found: memoryview, start: int) -> None:
        """Fill `found` with the bytes from `start` on."""
        try:
            n_read = self._file.read_into(found, start)
        except ReplacedFileError as error:  # a stale handle: an export starts over if it sees this cause
            raise SlurmGPUError(f"{self._path} was replaced while it was open. Open the new file.") from error.__cause__
        except OSError as error:
            raise SlurmGPUError(f"{self._path} cannot be read: {error.strerror}.") from error
        if n_read < len(found):
            raise SlurmGPUError(
                f"{self._path} was truncated while it was open: it ends before byte {start + len(found)}."
                f" {how_to_go_on(self._path)}"
            )


class Dataset:
    """An array in a file; a slice without a step is read into a new array."""

    def __init__(self, file: Results, dtype: str, shape: tuple[int, ...], offset: int) -> None:
        self._file, self._offset = file, offset
        self._dtype, self._shape = np.dtype(dtype), tuple(shape)
        self._row_bytes = int(np.prod(self._shape[1:])) * self._dtype.itemsize

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, rows: slice) -> npt.NDArray[Any]:
        start, stop, _ = rows.indices(len(self))
        n_rows = max(0, stop - start)
        found = self._file.read(self._offset + start * self._row_bytes, n_rows * self._row_bytes)
        return found.view(self._dtype).reshape(n_rows, *self._shape[1:])

    def take(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """The rows with these numbers, in this order; neighbouring rows are read together."""
        found, order = np.empty((len(rows), *self._shape[1:]), self._dtype), np.argsort(rows)
        placed, row_bytes = rows[order], max(1, self._row_bytes)
        is_far = (np.diff(placed) * row_bytes > NEAR_BYTES) | (np.diff(placed * row_bytes // PART_BYTES) > 0)
        for part in np.split(order, np.flatnonzero(is_far) + 1):
            if len(part):
                first, last = rows[part[0]], rows[part[-1]]
                found[part] = self[first : last + 1][rows[part] - first]
        return found


Stored: TypeAlias = Dataset | npt.NDArray[Any]
"""A dataset of a file, or an array in memory."""


def how_to_go_on(path: Path) -> str:
    """A sentence on what to do about a damaged file."""
    run = shlex.quote(str(path.parent)) if path.with_name("run.json").exists() else "RUN"
    return f"`slurmgpu merge {run}` rewrites merged.h5 from the run's shards."


def missing(path: Path) -> str:
    """A message about a file, or a run, that does not exist."""
    if path.suffix != ".h5":
        return (
            f"There is neither a run nor a file {path}. `slurmgpu list {shlex.quote(str(path.parent))}` shows the runs."
        )
    said = f"There is no file {path}."
    if path.with_name("run.json").exists():
        run = shlex.quote(str(path.parent))
        said += f" The run's merge writes it; `slurmgpu status {run}` shows the state of the run."
    return said
