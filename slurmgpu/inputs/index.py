"""The index of an input: the offset of every `stride`-th item. Layout: docs/reference/inputs.md."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs.spec import InputSpec
from slurmgpu.util.shared_files import open_file, retried

MAGIC = b"slgpuidx"
VERSION = 1
_HEADER = struct.Struct("<8sqqqq32s")  # magic, version, stride, n_files, n_offsets, digest of the input
_OFFSET = struct.Struct("<q")


class IndexWriter:
    """Writes the index while the input is scanned; `publish` renames it to `path`."""

    def __init__(self, path: Path, *, stride: int, n_files: int) -> None:
        self.n_items = 0
        self._path = path
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._stride = stride
        self._n_files = n_files
        self._begins: list[int] = []

    def __enter__(self) -> IndexWriter:
        self._file = open(self._partial, "wb")
        self._file.write(bytes(_HEADER.size + self._n_files * _OFFSET.size))  # filled by publish
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
        self._file.write(kept.astype("<i8").tobytes())
        self.n_items += len(offsets)

    def publish(self, digest: str) -> None:
        """Fill in the header, and rename the file; `create_run` fsyncs it when it moves it into the run directory."""
        n_offsets = -(-self.n_items // self._stride)
        self._file.seek(0)
        self._file.write(_HEADER.pack(MAGIC, VERSION, self._stride, self._n_files, n_offsets, bytes.fromhex(digest)))
        self._file.write(np.array(self._begins, dtype="<i8").tobytes())
        self._file.flush()
        self._partial.replace(self._path)


def _opened(path: Path) -> tuple[BinaryIO, bytes, int]:
    file = open_file(path)
    try:
        return file, file.read(_HEADER.size), os.fstat(file.fileno()).st_size
    except BaseException:
        file.close()
        raise


class Index:
    """Finds the bytes of a range of items; reads two offsets per range and keeps none in memory."""

    def __init__(self, path: Path, spec: InputSpec) -> None:
        try:
            self._file, header, size = retried(lambda: _opened(path))
        except OSError as error:
            raise SlurmGPUError(
                f"The input's index {path} cannot be read: {error.strerror}. Plan the run again."
            ) from error
        try:
            _check_header(header, size, spec)
        except ValueError as error:
            self.close()
            raise SlurmGPUError(f"The input's index {path} cannot be used: {error}. Plan the run again.") from error
        self._stride = spec.stride
        self._n_files = len(spec.files)

    def close(self) -> None:
        """Close the index's file."""
        self._file.close()

    def span(self, number: int, items: range, start: int, stop: int) -> tuple[int, int, int | None]:
        """Where to read items start..stop-1 of the input in file `number`, which holds the items `items`.

        Returns the last indexed item up to `start`, its offset in bytes, and the offset of the first indexed item at
        or after `stop`; None for the latter means the file's end.
        """
        item = start - start % self._stride
        if item in items:
            begin = self._entry(self._n_files + item // self._stride)
        else:
            item, begin = items.start, self._entry(number)
        after = -(-stop // self._stride)
        end = self._entry(self._n_files + after) if after * self._stride in items else None
        return item, begin, end

    def _entry(self, number: int) -> int:
        entry = os.pread(self._file.fileno(), _OFFSET.size, _HEADER.size + number * _OFFSET.size)
        return int(_OFFSET.unpack(entry)[0])


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
    if size != _HEADER.size + _OFFSET.size * (n_files + n_offsets):
        raise ValueError(f"it is damaged: {size} bytes do not hold {n_offsets} offsets")
