"""The index of an input: the offset of every `stride`-th item. Layout: docs/reference/inputs.md."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs.spec import InputSpec
from slurmgpu.shards.open_file import OpenFile, ReplacedFileError
from slurmgpu.util.shared_files import PATIENCE_S

MAGIC = b"slgpuidx"
VERSION = 2
_HEADER = struct.Struct("<8sqqqq32s")  # magic, version, stride, n_files, n_offsets, digest of the input
_ENTRY = struct.Struct("<Q")
_OFFSET_BITS = 48
_FACTOR = 0x9E3779B97F4A7C15  # odd, of many ones: a bit more or less in an offset changes the upper bits of the product
_MODULUS = 1 << 64


def packed(offsets: NDArray[np.intp], place: int) -> bytes:
    """The entries of offsets, the first of which is at `place` among all: each offset, and 16 bits that check it.

    A worker reads two entries for a shard, so a checksum of the whole index would be too much to read.
    """
    values = offsets.astype("<u8")
    places = np.arange(place + 1, place + 1 + len(values), dtype="<u8")
    factor = np.uint64(_FACTOR)
    checks = (values + places * factor) * factor >> np.uint64(_OFFSET_BITS)
    entries: NDArray[np.uint64] = checks << np.uint64(_OFFSET_BITS) | values
    return entries.astype("<u8").tobytes()


def _unpacked(entry: bytes, place: int) -> int:
    """The offset in the entry at `place`; ValueError if it is not as it was written."""
    if len(entry) < _ENTRY.size:
        raise ValueError(f"it ends before offset {place}")
    check, offset = divmod(int(_ENTRY.unpack(entry)[0]), 1 << _OFFSET_BITS)
    if (offset + (place + 1) * _FACTOR) * _FACTOR % _MODULUS >> _OFFSET_BITS != check:
        raise ValueError(f"offset {place} is not what was written")
    return offset


class IndexWriter:
    """Writes the index while the input is scanned; `publish` renames it to `path`."""

    def __init__(self, path: Path, *, stride: int, n_files: int) -> None:
        self.n_items = 0
        self._n_offsets = 0
        self._path = path
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._stride = stride
        self._n_files = n_files
        self._begins: list[int] = []

    def __enter__(self) -> IndexWriter:
        self._file = open(self._partial, "wb")
        self._file.write(bytes(_HEADER.size + self._n_files * _ENTRY.size))  # filled by publish
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def begin_file(self, offset: int) -> None:
        """Start the next file, whose first item is at byte `offset`."""
        self._begins.append(offset)
        self.add(np.array([offset]))

    def add(self, offsets: NDArray[np.intp]) -> None:
        """Add the byte offsets of the next items of this file."""
        kept = offsets[-self.n_items % self._stride :: self._stride]
        self._file.write(packed(kept, self._n_files + self._n_offsets))
        self._n_offsets += len(kept)
        self.n_items += len(offsets)

    def publish(self, digest: str) -> None:
        """Fill in the header, and rename the file; `create_run` fsyncs it when it moves it into the run directory."""
        counts = self._stride, self._n_files, self._n_offsets
        self._file.seek(0)
        self._file.write(_HEADER.pack(MAGIC, VERSION, *counts, bytes.fromhex(digest)))
        self._file.write(packed(np.array(self._begins, np.intp), 0))
        self._file.flush()
        self._partial.replace(self._path)


class Index:
    """Finds the bytes of a range of items; reads two offsets per range and keeps none in memory."""

    def __init__(self, path: Path, spec: InputSpec) -> None:
        try:
            self._file = OpenFile(path, PATIENCE_S, lambda before, now: before.size == now.size)
        except OSError as error:
            raise SlurmGPUError(
                f"The input's index {path} cannot be read: {error.strerror}. Plan the run again."
            ) from error
        try:
            _check_header(self._read(0, _HEADER.size), self._file.identity.size, spec)
        except ValueError as error:
            self.close()
            raise self._refusal(error) from error
        self._stride = spec.stride
        self._n_files = len(spec.files)
        self._sizes = [file.size_bytes for file in spec.files]

    def close(self) -> None:
        """Close the index's file."""
        self._file.close()

    def span(self, number: int, items: range, start: int, stop: int) -> tuple[int, int, int]:
        """Where to read items start..stop-1 of the input in file `number`, which holds the items `items`.

        Returns the last indexed item up to `start`, its offset in bytes, and the offset of the first indexed item at
        or after `stop`, or the file's size.
        """
        item = start - start % self._stride
        if item in items:
            begin = self._entry(self._n_files + item // self._stride)
        else:
            item, begin = items.start, self._entry(number)
        after = -(-stop // self._stride)
        end = self._entry(self._n_files + after) if after * self._stride in items else self._sizes[number]
        return item, begin, end

    def _entry(self, place: int) -> int:
        try:
            try:
                return self._offset(place)
            except ValueError:
                self._file.forget_cache()  # only the reading may be at fault
                return self._offset(place)
        except ValueError as error:
            raise self._refusal(error) from error

    def _offset(self, place: int) -> int:
        return _unpacked(self._read(_HEADER.size + place * _ENTRY.size, _ENTRY.size), place)

    def _read(self, start: int, n_bytes: int) -> bytes:
        found = bytearray(n_bytes)
        try:
            return bytes(found[: self._file.read_into(memoryview(found), start)])
        except ReplacedFileError as error:
            raise ValueError(str(error)) from error

    def _refusal(self, error: ValueError) -> SlurmGPUError:
        return SlurmGPUError(f"The input's index {self._file.path} cannot be used: {error}. Plan the run again.")


def _check_header(header: bytes, size: int, spec: InputSpec) -> None:
    """Raise ValueError if the header or the file size is wrong."""
    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        raise ValueError("it is not an index")
    _, version, stride, n_files, n_offsets, digest = _HEADER.unpack(header)
    if version != VERSION:
        raise ValueError(f"it has version {version}; this slurmgpu reads version {VERSION}")
    n_items = sum(file.n_items for file in spec.files)
    # The index of an input whose items are found without offsets has no files and no offsets.
    counts = (len(spec.files), -(-n_items // max(spec.stride, 1))) if n_files else (0, 0)
    if (stride, digest.hex(), n_files, n_offsets) != (spec.stride, spec.digest, *counts):
        raise ValueError("it belongs to another plan")
    if size != _HEADER.size + _ENTRY.size * (n_files + n_offsets):
        raise ValueError(f"it is damaged: {size} bytes do not hold {n_offsets} offsets")
