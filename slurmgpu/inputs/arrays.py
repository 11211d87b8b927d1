"""NumPy files: rows of the array in a .npy, or of the arrays in a .npz."""

from __future__ import annotations

import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs.tables import Table, Tables

FIELD = "array"
"""The field of an array without a name."""

MOST_BYTES = 1 << 31
"""The largest arrays of a .npz, together in bytes, that are kept in memory; larger ones are read by position."""

_DAMAGE = (
    *(ValueError, OverflowError, SyntaxError, EOFError, KeyError, NotImplementedError),
    *(struct.error, tokenize.TokenError, zlib.error, lzma.LZMAError, zipfile.BadZipFile),
)
"""What NumPy, which reads headers with Python's parser, and zipfile raise for damaged contents."""

_LOCAL_HEADER = struct.Struct("<26xHH")
"""The local header of a zip member: the lengths of its name and of its extra field, after which its bytes begin."""


@dataclass(frozen=True)
class _Place:
    """The place of an array's rows in a file."""

    begin: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def read(self, file: BinaryIO, path: str, start: int, stop: int) -> NDArray[Any]:
        """Rows start..stop-1."""
        # Not mapped into memory: a mapped file that is truncated, or goes stale on NFS, kills the process.
        content = np.empty((stop - start) * self.row_bytes, np.uint8)
        file.seek(self.begin + start * self.row_bytes)
        if file.readinto(content.data) != len(content):  # type: ignore[attr-defined]  # BinaryIO does not tell
            raise SlurmGPUError(f"{path} was truncated while it was read. Restore it.")
        rows: NDArray[Any] = content.view(self.dtype).reshape((stop - start, *self.shape[1:]))
        return rows


class ArrayRows:
    """The rows of arrays of equal length, which are in memory or read from their places in the file.

    The columns of a structured array are its `fields`.
    """

    def __init__(
        self, path: str, arrays: Mapping[str, NDArray[Any] | _Place], fields: Sequence[str] | None = None
    ) -> None:
        self._path, self._arrays, self._fields = path, arrays, fields
        self.columns = tuple(fields or arrays)
        self._file = open(path, "rb")  # noqa: SIM115 - closed by close

    def __len__(self) -> int:
        return int(next(iter(self._arrays.values())).shape[0])

    def close(self) -> None:
        """Drop the arrays and close the file."""
        self._arrays = {}
        self._file.close()

    def read(self, start: int, stop: int) -> list[Mapping[str, Any] | ItemError]:
        """Rows start..stop-1."""
        columns = {
            name: array.read(self._file, self._path, start, stop)
            if isinstance(array, _Place)
            else array[start:stop].copy()
            for name, array in self._arrays.items()
        }
        if self._fields:
            [records] = columns.values()
            columns = {name: records[name] for name in self._fields}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _open_npy(path: str) -> ArrayRows:
    try:
        mapped = np.lib.format.open_memmap(path, mode="r")  # reads the header; no mapped page is touched
    except _DAMAGE as error:  # also another format, or an array without rows or with Python objects
        raise SlurmGPUError(
            f"{path} has no intact array of numbers or texts: {error}. Write it with np.save, without pickle."
        ) from error
    if not mapped.shape:
        raise SlurmGPUError(f"{path} has a single value; expected an array, whose rows are the items.")
    if not mapped.flags.c_contiguous:
        raise SlurmGPUError(
            f"{path} has an array in Fortran order, where a row is spread over the file. Write it with "
            f"np.save(path, np.ascontiguousarray(array))."
        )
    end, size = mapped.offset + mapped.nbytes, Path(path).stat().st_size
    if size != end:
        raise SlurmGPUError(f"{path} has {size - end} bytes after its array; expected one array. Write it again.")
    return ArrayRows(path, {FIELD: _Place(mapped.offset, mapped.dtype, mapped.shape)}, mapped.dtype.names)


def _open_npz(path: str, *, verify: bool) -> ArrayRows:
    try:
        with zipfile.ZipFile(path) as archive:
            if odd := [name for name in archive.namelist() if not name.endswith(".npy")]:
                raise SlurmGPUError(f"{path} has the member {odd[0]!r}; expected only arrays, as np.savez writes.")
            is_large = sum(member.file_size for member in archive.infolist()) > MOST_BYTES
            arrays = _located(path, archive, verify=verify) if is_large else _loaded(path)
    except _DAMAGE as error:
        raise SlurmGPUError(
            f"{path} has no intact arrays of numbers or texts: {error}. Write it with np.savez."
        ) from error
    shapes = {name: array.shape for name, array in arrays.items()}
    if len({shape[:1] for shape in shapes.values()}) != 1 or () in shapes.values():
        said = ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "none"
        raise SlurmGPUError(f"{path} has the arrays {said}; expected the same number of rows in each. Write it again.")
    return ArrayRows(path, arrays)


def _loaded(path: str) -> Mapping[str, NDArray[Any]]:
    """The arrays of a .npz in memory."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    if odd := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
        raise ValueError(f"its member {odd[0]!r} is no array")  # NumPy returns bytes for it
    return arrays


def _located(path: str, archive: zipfile.ZipFile, *, verify: bool) -> Mapping[str, _Place]:
    """The places of the arrays in an uncompressed .npz; with `verify`, the checksums are compared."""
    members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        size = sum(member.file_size for member in members)
        raise SlurmGPUError(
            f"{path} has {size} bytes of compressed arrays, but at most {MOST_BYTES} are read into memory. Write it "
            "with np.savez, or each array as a .npy: these are read row by row."
        )
    if verify and (damaged := archive.testzip()) is not None:
        raise ValueError(f"Bad CRC-32 for file {damaged!r}")
    with open(path, "rb") as file:
        return _places(file, members)


def _places(file: BinaryIO, members: Sequence[zipfile.ZipInfo]) -> dict[str, _Place]:
    """The places of the arrays in a .npz, by name; ValueError for an array without rows."""
    found = {}
    for member in members:
        file.seek(member.header_offset)
        begin = member.header_offset + 30 + sum(_LOCAL_HEADER.unpack(file.read(30)))
        file.seek(begin)
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if read is None or member.flag_bits & 1:
            raise ValueError(f"{member.filename!r} is encrypted, or of NumPy's format {version}")
        shape, is_fortran, dtype = read(file)
        place = _Place(file.tell(), dtype, shape)
        if dtype.hasobject or (is_fortran and len(shape) > 1):
            raise ValueError(f"{member.filename!r} has Python objects, or is in Fortran order")
        if place.begin - begin + math.prod(shape) * dtype.itemsize != member.file_size:
            raise ValueError(f"{member.filename!r} is not as long as it says")
        found[member.filename.removesuffix(".npy")] = place
    return found


class Npy(Tables, format="npy"):
    """An array in a file."""

    def table(self, path: str, *, verify: bool = False) -> Table:
        """The rows of a file."""
        return _open_npy(path)


class Npz(Tables, format="npz"):
    """Several arrays in a zip file."""

    def table(self, path: str, *, verify: bool = False) -> Table:
        """The rows of a file."""
        return _open_npz(path, verify=verify)
