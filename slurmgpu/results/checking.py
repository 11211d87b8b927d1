"""Checking: the bytes of a merged file's rows are compared with their checksums as rows are read, each piece once."""

from __future__ import annotations

import mmap
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmgpu.shards.piece_table import lead_bytes, read_table
from slurmgpu.shards.userblock import Region

_CHUNK_BYTES = 1 << 20


class Checking:
    """Which bytes of a mapped merged file have been compared with their checksums."""

    def __init__(self, directory: Mapping[str, Any], table: bytes, content: mmap.mmap) -> None:
        self._regions = [Region(*region) for region in directory["datasets"]]
        self._content = content
        self._table = read_table(table, len(self._regions))
        self._todo: set[int] | None = None

    def problems(self, start: int, stop: int) -> list[str]:
        """What differs in the bytes of the rows from `start` to `stop` - 1, as far as they were not found right yet."""
        if self._todo is None:
            if found := [*self._leads(), *self._compare(range(len(self._table)), _is_whole)]:
                return found
            self._todo = set(range(len(self._table)))
        if start >= stop:
            return []
        numbers = range(bisect_right(self._ends, start), bisect_left(self._ends, stop) + 1)
        if not (todo := sorted(self._todo.intersection(numbers))):
            return []
        # A shard's first value begins where the last offset of the shard before it says.
        before = range(max(numbers.start - 1, 0), numbers.start)
        found = [*self._compare(before, _is_offsets), *self._compare(todo, lambda path: not _is_whole(path))]
        if not found:
            self._todo.difference_update(numbers)
        return found

    @cached_property
    def _ends(self) -> list[int]:
        """The rows at which the shards' rows end."""
        ends: list[int] = (self._table["stop"] - self._table["start"]).cumsum().tolist()
        return ends

    @cached_property
    def _begins(self) -> npt.NDArray[np.int64]:
        """Where each piece begins, behind the first one of its dataset."""
        sizes: npt.NDArray[np.int64] = self._table["n_bytes"]
        return sizes.cumsum(axis=0) - sizes

    def _leads(self) -> Iterator[str]:
        for region in self._regions:
            if any(self._content[region.offset : region.offset + lead_bytes(region)]):
                yield f"the first entry of {region.path} differs"

    def _compare(self, numbers: Iterable[int], of_interest: Callable[[str], bool]) -> Iterator[str]:
        for number in numbers:
            piece = self._table[number]
            for i, region in enumerate(self._regions):
                if of_interest(region.path):
                    begin = region.offset + lead_bytes(region) + int(self._begins[number, i])
                    if self._crc32(begin, int(piece["n_bytes"][i])) != piece["crc32"][i]:
                        yield f"the checksum of {region.path} of shard {piece['shard']} differs"

    def _crc32(self, begin: int, n_bytes: int) -> int:
        crc32 = 0
        with memoryview(self._content) as view:
            for first in range(begin, begin + n_bytes, _CHUNK_BYTES):
                crc32 = zlib.crc32(view[first : min(first + _CHUNK_BYTES, begin + n_bytes)], crc32)
        return crc32


def _is_whole(path: str) -> bool:
    """Whether a dataset is read as a whole, whichever rows are asked for."""
    return path in ("index", "error/offsets", "error/values")


def _is_offsets(path: str) -> bool:
    return path.endswith("/offsets") and not _is_whole(path)
