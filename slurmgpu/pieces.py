"""Pieces: what each shard has become in each dataset of a merged file, as the piece table in its user block says.

In a dataset of offsets a shard's piece is an entry for each row. The leading 0 belongs to no piece and counts as
HDF5 metadata.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmgpu.regions import OFFSET_DTYPE, Piece, Region, in_file_order, write_at

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


class Place:
    """Where a piece goes in the file that is being written, chunk by chunk, and the piece's checksum."""

    def __init__(self, fd: int, position: int, crc32: int) -> None:
        self._fd, self._position = fd, position
        self.crc32 = crc32

    def write(self, chunk: bytes | memoryview) -> None:
        """Put the next chunk of a shard's dataset where it belongs."""
        write_at(self._fd, chunk, self._position)
        self._position += len(chunk)


class OffsetsPlace(Place):
    """Where a piece of offsets goes: without the shard's leading 0, and grown by the values of earlier shards."""

    def __init__(self, fd: int, position: int, base: int) -> None:
        super().__init__(fd, position, crc32=0)
        self._base = base
        self._n_lead = 1

    def write(self, chunk: bytes | memoryview) -> None:
        """Put the next chunk of a shard's offsets where it belongs."""
        moved = (np.frombuffer(chunk, OFFSET_DTYPE)[self._n_lead :] + self._base).tobytes()
        self._n_lead = 0
        self.crc32 = zlib.crc32(moved, self.crc32)
        super().write(moved)


def _record(n_datasets: int) -> np.dtype[Any]:
    shard = [(name, "<i8") for name in ("shard", "start", "stop")]
    return np.dtype([*shard, ("n_bytes", "<i8", (n_datasets,)), ("crc32", "<u4", (n_datasets,))])
