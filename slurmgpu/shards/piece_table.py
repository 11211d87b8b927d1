"""Pieces: what each shard has become in each dataset of a merged file, as the piece table in its user block says.

In a dataset of offsets a shard's piece is an entry for each row. The leading 0 belongs to no piece and counts as
HDF5 metadata.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmgpu.shards.userblock import MERGED, OFFSET_DTYPE, DamagedShardError, Piece, Region, in_file_order, write_at

Table = npt.NDArray[Any]


def new_table(n_shards: int, n_datasets: int) -> Table:
    """A piece table to be filled in: a record for each shard, in the order of its rows."""
    return np.zeros(n_shards, _record(n_datasets))


def read_table(content: bytes, n_datasets: int) -> Table:
    """The piece table that a user block holds."""
    return np.frombuffer(content, _record(n_datasets))


def lead_bytes(region: Region) -> int:
    """How many bytes at the beginning of a dataset belong to no shard."""
    return OFFSET_DTYPE.itemsize if region.path.endswith("/offsets") else 0


def pieces(regions: Sequence[Region], table: Table) -> Iterator[Piece]:
    """Every piece of a merged file, in the order of the file."""
    numbers = {region.path: number for number, region in enumerate(regions)}
    shards = table["shard"].tolist()
    for region in in_file_order(regions):
        number = numbers[region.path]
        position = region.offset + lead_bytes(region)
        sizes, crc32s = table["n_bytes"][:, number].tolist(), table["crc32"][:, number].tolist()
        for shard, n_bytes, crc32 in zip(shards, sizes, crc32s, strict=True):
            yield Piece(f"{region.path} of shard {shard}", position, n_bytes, crc32)
            position += n_bytes


def pieces_of(directory: Mapping[str, Any], table: bytes) -> Iterator[Piece]:
    """Every piece of a file, of either kind, in the order of the file; in a shard each dataset is one."""
    regions = [Region(*region) for region in directory["datasets"]]
    if directory["attributes"]["format"] == MERGED:
        return pieces(regions, read_table(table, len(regions)))
    return (Piece(path, *place) for path, _, _, *place in in_file_order(regions))


Write = Callable[[bytes | memoryview, int], None]
"""Puts bytes at an offset of the file that is being written."""


class Gathered:
    """Writes that wait until they can be made together: pieces of neighbours lie side by side in each dataset."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._runs: dict[int, list[bytes | memoryview]] = {}
        self._ends: dict[int, int] = {}

    def write(self, content: bytes | memoryview, offset: int) -> None:
        """Keep bytes that belong at `offset`; their buffer must stay as it is until `flush`."""
        first = self._ends.pop(offset, offset)
        self._runs.setdefault(first, []).append(content)
        self._ends[offset + len(content)] = first

    def flush(self) -> None:
        """Write all that was kept."""
        for offset, contents in self._runs.items():
            write_at(self._fd, b"".join(contents), offset)
        self._runs.clear()
        self._ends.clear()


class Place:
    """Where a piece goes in the file that is being written, chunk by chunk, and the piece's checksum."""

    def __init__(self, write: Write, position: int, crc32: int) -> None:
        self._write, self._position = write, position
        self.crc32 = crc32

    def write(self, chunk: bytes | memoryview) -> None:
        """Put the next chunk of a shard's dataset where it belongs."""
        if chunk:
            self._write(chunk, self._position)
            self._position += len(chunk)

    def check(self) -> None:
        """Raise DamagedShardError if what was put there makes no sense."""


class OffsetsPlace(Place):
    """Where a piece of offsets goes: without the shard's leading 0, and grown by the values of earlier shards.

    They must begin with 0, never fall, and end with `n_values`: else later rows would have each other's values.
    """

    def __init__(self, write: Write, position: int, base: int, n_values: int) -> None:
        super().__init__(write, position, crc32=0)
        self._base, self._n_values = base, n_values
        self._last: int | None = None
        self._is_wrong = False

    def write(self, chunk: bytes | memoryview) -> None:
        """Put the next chunk of a shard's offsets where it belongs."""
        offsets = np.frombuffer(chunk, OFFSET_DTYPE)
        if self._last is None:
            self._last, offsets = int(offsets[0]), offsets[1:]
            self._is_wrong = self._last != 0
        if len(offsets):
            self._is_wrong |= bool(offsets[0] < self._last) or bool((offsets[1:] < offsets[:-1]).any())
            self._last = int(offsets[-1])
            moved = (offsets + self._base).tobytes()
            self.crc32 = zlib.crc32(moved, self.crc32)
            super().write(moved)

    def check(self) -> None:
        """Raise DamagedShardError unless they are offsets into so many values."""
        if self._is_wrong or self._last != self._n_values:
            raise DamagedShardError(f"its offsets are not those of {self._n_values} values")


def _record(n_datasets: int) -> np.dtype[Any]:
    shard = [(name, "<i8") for name in ("shard", "start", "stop")]
    return np.dtype([*shard, ("n_bytes", "<i8", (n_datasets,)), ("crc32", "<u4", (n_datasets,))])
