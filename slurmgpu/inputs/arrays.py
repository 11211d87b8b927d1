"""NumPy's files: the rows of the array in a .npy, and of the arrays in a .npz."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs.tables import Table, Tables

FIELD = "array"
"""The field of an array without a name."""

MOST_BYTES = 1 << 31
"""The size of the arrays in a .npz, which are in memory while it is read."""


class NpyRows:
    """The rows of the array in a .npy file; a structured array has its fields as columns."""

    def __init__(self, path: str) -> None:
        try:
            mapped = np.lib.format.open_memmap(path, mode="r")  # reads the header; no mapped page is touched
        except ValueError as error:  # of another format, cut, without a row, or with Python objects
            raise SlurmGPUError(
                f"{path} has no array of numbers or texts that is whole: {error}. Write it by np.save, without pickle."
            ) from error
        self._path, self._dtype, self._shape, self._begin = path, mapped.dtype, mapped.shape, mapped.offset
        if not self._shape:
            raise SlurmGPUError(f"{path} has a single value: expected an array, whose rows are the items.")
        if not mapped.flags.c_contiguous:
            raise SlurmGPUError(
                f"{path} has its array in Fortran's order, where a row is spread over the file. Write it by "
                f"np.save(path, np.ascontiguousarray(array))."
            )
        end, size = self._begin + mapped.nbytes, Path(path).stat().st_size
        if size != end:
            raise SlurmGPUError(f"{path} has {size - end} bytes behind its array: expected one array. Write it again.")
        self.columns = self._dtype.names or (FIELD,)
        self._file = open(path, "rb")  # noqa: SIM115 - closed by close

    def __len__(self) -> int:
        return int(self._shape[0])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, start: int, stop: int) -> list[Mapping[str, Any] | ItemError]:
        """Rows start..stop-1."""
        shape = (stop - start, *self._shape[1:])
        # Read, not mapped: a mapped file that is cut, or goes stale on NFS, kills the process.
        content = np.empty(int(np.prod(shape)) * self._dtype.itemsize, np.uint8)
        self._file.seek(self._begin + start * (len(content) // (stop - start)))
        if self._file.readinto(content.data) != len(content):
            raise SlurmGPUError(f"{self._path} was cut while it was read. Put it back as it was.")
        return _rows({FIELD: content.view(self._dtype).reshape(shape)})


class NpzRows:
    """The rows of the arrays in a .npz file, all of which are in memory."""

    def __init__(self, path: str) -> None:
        try:
            with zipfile.ZipFile(path) as archive:
                size = sum(member.file_size for member in archive.infolist())
                odd = [name for name in archive.namelist() if not name.endswith(".npy")]
            if size > MOST_BYTES:
                raise SlurmGPUError(
                    f"{path} has {size} bytes of arrays, and at most {MOST_BYTES} are read into memory. Write each "
                    f"array as a .npy, which is read row by row."
                )
            if odd:
                raise SlurmGPUError(f"{path} has the member {odd[0]!r}: expected arrays alone, as np.savez writes.")
            with np.load(path, allow_pickle=False) as file:
                self._arrays: dict[str, NDArray[Any]] = {name: file[name] for name in file.files}
        except (ValueError, EOFError, KeyError, NotImplementedError, zlib.error, zipfile.BadZipFile) as error:
            raise SlurmGPUError(
                f"{path} has no arrays of numbers or texts that are whole: {error}. Write it by np.savez."
            ) from error
        shapes = {name: array.shape for name, array in self._arrays.items()}
        if len({shape[:1] for shape in shapes.values()}) != 1 or () in shapes.values():
            said = ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "none"
            raise SlurmGPUError(f"{path} has the arrays {said}: expected as many rows in each. Write it again.")
        self.columns = tuple(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays[self.columns[0]])

    def close(self) -> None:
        """Drop the arrays."""
        self._arrays = {}

    def read(self, start: int, stop: int) -> list[Mapping[str, Any] | ItemError]:
        """Rows start..stop-1."""
        return _rows({name: array[start:stop].copy() for name, array in self._arrays.items()}, named=True)


def _rows(arrays: Mapping[str, NDArray[Any]], *, named: bool = False) -> list[Mapping[str, Any] | ItemError]:
    """The rows of arrays of one length; those of a structured array without a name are its fields."""
    names = None if named else arrays[FIELD].dtype.names
    columns = {name: arrays[FIELD][name] for name in names} if names else arrays
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


class Npy(Tables, format="npy"):
    """An array in a file."""

    def table(self, path: str, *, verify: bool = False) -> Table:
        """The rows of a file."""
        return NpyRows(path)


class Npz(Tables, format="npz"):
    """Several arrays in a zip file."""

    def table(self, path: str, *, verify: bool = False) -> Table:
        """The rows of a file."""
        return NpzRows(path)
