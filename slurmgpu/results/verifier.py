"""Verify the bytes of a merged file as its rows are read, each piece once."""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from slurmgpu.results.stored import Results
from slurmgpu.shards.piece_table import Pieces, lead_bytes
from slurmgpu.shards.userblock import FileDirectory

_CHUNK_BYTES = 1 << 18  # fits the L2 cache, so the checksum finds the bytes there


class Verifier:
    """Compares the bytes of an open merged file with their checksums, each piece once."""

    def __init__(self, directory: FileDirectory, table: bytes, file: Results) -> None:
        self._pieces = Pieces(directory, table)
        self._file = file
        self._todo: set[int] | None = None

    def problems(self, start: int, stop: int) -> list[str]:
        """The differences in the bytes of rows `start` to `stop` - 1 that were not verified before."""
        if self._todo is None:
            if found := [*self._leads(), *self._compare(range(len(self._pieces.table)), _is_whole)]:
                return found
            self._todo = set(range(len(self._pieces.table)))
        if start >= stop:
            return []
        numbers = range(bisect_right(self._ends, start), bisect_left(self._ends, stop) + 1)
        if not (todo := sorted(self._todo.intersection(numbers))):
            return []
        # A shard's first value begins at the last offset of the shard before it.
        before = range(max(numbers.start - 1, 0), numbers.start)
        found = [*self._compare(before, _is_offsets), *self._compare(todo, lambda path: not _is_whole(path))]
        if not found:
            self._todo.difference_update(numbers)
        return found

    @cached_property
    def _ends(self) -> list[int]:
        table = self._pieces.table
        ends: list[int] = (table["stop"] - table["start"]).cumsum().tolist()
        return ends

    def _leads(self) -> Iterator[str]:
        for region in self._pieces.regions:
            if self._file.read(region.offset, lead_bytes(region)).any():
                yield f"the first entry of {region.path} differs"

    def _compare(self, numbers: Sequence[int], of_interest: Callable[[str], bool]) -> Iterator[str]:
        """What differs in the pieces with these numbers, ascending, of some datasets."""
        for i, region in enumerate(self._pieces.regions):
            if numbers and of_interest(region.path):
                pieces = list(self._pieces.pieces(numbers, i))
                window = _Window(self._file, pieces[0].offset, pieces[-1].offset + pieces[-1].n_bytes)
                for name, begin, n_bytes, crc32 in pieces:
                    if window.crc32(begin, begin + n_bytes) != crc32:
                        yield f"the checksum of {name} differs"


class _Window:
    """The bytes of a file from `start` to `stop`, read in chunks: each may have the pieces of many small shards."""

    def __init__(self, file: Results, start: int, stop: int) -> None:
        self._file, self._stop = file, stop
        self._buffer = memoryview(bytearray(min(_CHUNK_BYTES, stop - start)))
        self._start = self._end = start

    def crc32(self, begin: int, end: int) -> int:
        """The checksum of the bytes from `begin` to `end`; `begin` is not before that of the last call."""
        crc32 = 0
        while begin < end:
            if begin >= self._end:
                self._start, self._end = begin, min(begin + len(self._buffer), self._stop)
                self._file.read_into(self._buffer[: self._end - begin], begin)
            last = min(end, self._end)
            crc32 = zlib.crc32(self._buffer[begin - self._start : last - self._start], crc32)
            begin = last
        return crc32


def _is_whole(path: str) -> bool:
    """Whether a dataset is always read completely."""
    return path in ("index", "error/offsets", "error/values")


def _is_offsets(path: str) -> bool:
    return path.endswith("/offsets") and not _is_whole(path)
