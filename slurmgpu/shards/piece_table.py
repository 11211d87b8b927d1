"""Pieces: the bytes of each shard in each dataset of a merged file, listed in the piece table of its user block.

In a dataset of offsets, a shard's piece has one entry per row. The leading 0 belongs to no piece and counts as HDF5
metadata.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmgpu.shards.numbers import OFFSET_DTYPE
from slurmgpu.shards.userblock import MERGED, DamagedShardError, FileDirectory, Piece, Region, in_file_order, write_at

Table = npt.NDArray[Any]


def new_table(n_shards: int, n_datasets: int) -> Table:
    """An empty piece table: one record per shard, in row order."""
    return np.zeros(n_shards, _record(n_datasets))


def read_table(content: bytes, n_datasets: int) -> Table:
    """The piece table of a user block."""
    return np.frombuffer(content, _record(n_datasets))


class Pieces:
    """The pieces of a merged file, by position in its piece table and number of the dataset."""

    def __init__(self, directory: FileDirectory, table: bytes) -> None:
        self.regions = [Region(*region) for region in directory["datasets"]]
        self.table = read_table(table, len(self.regions))

    @cached_property
    def before(self) -> npt.NDArray[np.int64]:
        """The number of bytes of each dataset in earlier pieces."""
        n_bytes: npt.NDArray[np.int64] = self.table["n_bytes"]
        return n_bytes.cumsum(axis=0) - n_bytes

    def piece(self, place: int, number: int) -> Piece:
        """One piece."""
        row, region = self.table[place], self.regions[number]
        begin = region.offset + lead_bytes(region) + int(self.before[place, number])
        name = f"{region.path} of shard {row['shard']}"
        return Piece(name, begin, int(row["n_bytes"][number]), int(row["crc32"][number]))

    def pieces(self, places: Sequence[int], number: int) -> Iterator[Piece]:
        """The pieces at these places, in less time than one by one."""
        region, rows = self.regions[number], self.table[places]
        begins = self.before[places, number] + (region.offset + lead_bytes(region))
        columns = (rows["shard"], begins, rows["n_bytes"][:, number], rows["crc32"][:, number])
        for shard, begin, n_bytes, crc32 in zip(*(column.tolist() for column in columns), strict=True):
            yield Piece(f"{region.path} of shard {shard}", begin, n_bytes, crc32)


def lead_bytes(region: Region) -> int:
    """The number of bytes at the start of a dataset that belong to no shard."""
    return OFFSET_DTYPE.itemsize if region.path.endswith("/offsets") else 0


def pieces(regions: Sequence[Region], table: Table) -> Iterator[Piece]:
    """All pieces of a merged file, in file order."""
    numbers = {region.path: number for number, region in enumerate(regions)}
    shards = table["shard"].tolist()
    for region in in_file_order(regions):
        number = numbers[region.path]
        position = region.offset + lead_bytes(region)
        sizes, crc32s = table["n_bytes"][:, number].tolist(), table["crc32"][:, number].tolist()
        for shard, n_bytes, crc32 in zip(shards, sizes, crc32s, strict=True):
            yield Piece(f"{region.path} of shard {shard}", position, n_bytes, crc32)
            position += n_bytes


def pieces_of(directory: FileDirectory, table: bytes) -> Iterator[Piece]:
    """All pieces of a shard or merged file, in file order; in a shard, each dataset is one piece."""
    regions = [Region(*region) for region in directory["datasets"]]
    if directory["attributes"]["format"] == MERGED:
        return pieces(regions, read_table(table, len(regions)))
    return (Piece(path, *place) for path, _, _, *place in in_file_order(regions))


Write = Callable[[bytes | memoryview, int], None]
"""Writes bytes at an offset of the output file."""


class BufferedWrites:
    """Buffers writes to join adjacent ones: pieces of neighbouring shards lie side by side."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._runs: dict[int, list[bytes | memoryview]] = {}
        self._ends: dict[int, int] = {}

    def write(self, content: bytes | memoryview, offset: int) -> None:
        """Buffer bytes for `offset`; they must not change until `flush`."""
        first = self._ends.pop(offset, offset)
        self._runs.setdefault(first, []).append(content)
        self._ends[offset + len(content)] = first

    def flush(self) -> None:
        """Write all buffered bytes, at the end."""
        for offset, contents in self._runs.items():
            write_at(self._fd, b"".join(contents), offset)


class PieceWriter:
    """Writes the chunks of a piece to its place in the output file; `crc32` is the piece's checksum."""

    def __init__(self, write: Write, position: int, crc32: int) -> None:
        self._write, self._position = write, position
        self.crc32 = crc32

    def write(self, chunk: bytes | memoryview) -> None:
        """Write the next chunk."""
        if chunk:
            self._write(chunk, self._position)
            self._position += len(chunk)

    def check(self) -> None:
        """Raise DamagedShardError if the written content is invalid."""


class OffsetsWriter(PieceWriter):
    """Writes a piece of offsets: without the leading 0, and raised by the number of values in earlier shards.

    Offsets must begin with 0, never fall, and end with `n_values`; otherwise rows would get each other's values.
    """

    def __init__(self, write: Write, position: int, base: int, n_values: int) -> None:
        super().__init__(write, position, crc32=0)
        self._base, self._n_values = base, n_values
        self._last: int | None = None
        self._is_wrong = False

    def write(self, chunk: bytes | memoryview) -> None:
        """Write the next chunk."""
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
        """Raise DamagedShardError unless the offsets are valid."""
        if self._is_wrong or self._last != self._n_values:
            raise DamagedShardError(f"its offsets are not those of {self._n_values} values")


def _record(n_datasets: int) -> np.dtype[Any]:
    shard = [(name, "<i8") for name in ("shard", "start", "stop")]
    return np.dtype([*shard, ("n_bytes", "<i8", (n_datasets,)), ("crc32", "<u4", (n_datasets,))])
