"""The merged file while it is written: its layout is fixed first, then the bytes of shards are verified and copied."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import threading
import zlib
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor, wait
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slurmgpu.code.versions import compact
from slurmgpu.merge.sources import (
    CHUNK,
    Damage,
    Part,
    Source,
    SourceReader,
    Unusable,
    n_rows_of,
    read_twice_if_damaged,
    sizes_of,
)
from slurmgpu.report.build import MOST_LISTED, Errors, count_failed
from slurmgpu.shards.hdf5_layout import Attributes, Skeleton, file_attributes, make_skeleton, unplaced_regions
from slurmgpu.shards.piece_table import BufferedWrites, OffsetsWriter, PieceWriter, Write, lead_bytes, new_table
from slurmgpu.shards.shard_file import Directory, errors_in, read_errors
from slurmgpu.shards.userblock import (
    MERGED,
    Content,
    DamagedShardError,
    new_directory,
    pack_userblock,
    userblock_size,
    write_at,
)

_LIBC = ctypes.CDLL(None, use_errno=True)

Places = NDArray[np.int64]
"""Places of failed items in the plan."""


class Copied(NamedTuple):
    """A copied shard: the checksums of its pieces, its failed items, their number by class, and the note `not_finite`.

    Without the errors themselves, which might not fit in memory.
    """

    shard: int
    crc32s: list[int]
    failed: Places
    n_failed: Mapping[str, int]
    not_finite: Mapping[str, Sequence[int]]


class FirstErrors:
    """The errors of the first failed items, whatever the order of shards; keeps few more than are listed."""

    def __init__(self) -> None:
        self._found: Errors = []
        self._lock = threading.Lock()

    def add(self, errors: Errors) -> None:
        """Add the errors of a shard."""
        with self._lock:
            self._found += errors
            if len(self._found) >= 2 * MOST_LISTED:
                self._found = self.listed()

    def listed(self) -> Errors:
        """The errors of the first MOST_LISTED failed items."""
        return sorted(self._found)[:MOST_LISTED]


class _StoppedError(Exception):
    """The join has ended, by an error or a signal."""


class MergedFile:
    """A merged file of these parts, which are in input order.

    Every piece has a fixed place, so pieces may come in any order. Making it allocates the space.
    """

    def __init__(self, fd: int, reader: SourceReader, parts: Sequence[Part], attributes: Attributes) -> None:
        self._fd, self._reader, self._parts = fd, reader, parts
        self.first_errors = FirstErrors()
        self.code = tuple(compact(stretch for part in parts for stretch in part.code))
        self._stopped = threading.Event()
        empty = unplaced_regions(reader.columns, 0, {})
        itemsizes = [np.dtype(region.dtype).itemsize for region in empty]
        self._table = new_table(len(parts), len(empty))
        for name in ("shard", "start", "stop"):
            self._table[name] = [getattr(part.source, name) for part in parts]
        sizes = np.array([part.sizes for part in parts], np.int64).reshape(len(parts), len(empty))
        n_bytes = self._table["n_bytes"] = sizes - [lead_bytes(region) for region in empty]

        n_rows, n_values = n_rows_of(parts), (n_bytes.sum(axis=0) // itemsizes).tolist()
        paths = [region.path for region in empty]
        regions = unplaced_regions(reader.columns, n_rows, dict(zip(paths, n_values, strict=True)))
        self._directory = new_directory(file_attributes(MERGED, reader.columns, attributes), n_rows, regions)
        self._directory["code"] = self.code
        self._userblock_size = userblock_size(self._directory, n_table_bytes=self._table.nbytes)
        skeleton = make_skeleton(regions, self._directory["attributes"], self._userblock_size)
        _allocate(fd, skeleton.size)
        rest_crc32 = _write_metadata(fd, skeleton)
        self._directory |= {"datasets": skeleton.regions, "file_size": skeleton.size, "rest_crc32": rest_crc32}

        before = np.cumsum(n_bytes, axis=0) - n_bytes
        self._positions = before + [region.offset + lead_bytes(region) for region in skeleton.regions]
        # A part's offsets are raised by the number of values before it; these are in the next dataset.
        self._bases = np.roll(before // itemsizes, -1, axis=1)
        self._rows = {part.source.shard: row for row, part in enumerate(parts)}

    def copy_all(self, pool: Executor, damage: Damage) -> tuple[dict[int, Copied], list[Source]]:
        """Copy all parts; return what was copied, by shard, and older sources to try for the rest, see `damage`."""
        futures = {
            part.source.shard: pool.submit(self._copy_chunk, [part]) for part in self._parts if not part.is_small
        }
        small = [part for part in self._parts if part.is_small]
        found: dict[int, Copied | Unusable] = {}
        try:
            for first in range(0, len(small), CHUNK):
                chunk = small[first : first + CHUNK]
                found |= zip((part.source.shard for part in chunk), self._copy_chunk(chunk), strict=True)
            for shard, future in futures.items():
                [found[shard]] = future.result()
        except BaseException:
            # The file will be closed: no thread may still write to its descriptor, which may be reused.
            self._stopped.set()
            wait([future for future in futures.values() if not future.cancel()])
            raise
        sources = [part.source for part in self._parts]
        copied, older = damage.sift(sources, [found[source.shard] for source in sources])
        return {each.shard: each for each in copied}, older

    def finish(self, copied: Collection[Copied]) -> None:
        """Write the user block, once all parts are copied, in their order."""
        self._table["crc32"] = np.array([part.crc32s for part in copied]).reshape(self._table["crc32"].shape)
        self._directory["n_errors"] = sum(len(part.failed) for part in copied)
        write_at(self._fd, pack_userblock(self._directory, self._userblock_size, self._table.tobytes()), 0)

    def _copy_chunk(self, parts: Sequence[Part]) -> list[Copied | Unusable]:
        """Copy adjacent parts; small ones are written together."""
        buffer = BufferedWrites(self._fd)
        found = [read_twice_if_damaged(functools.partial(self._copy, part, buffer)) for part in parts]
        buffer.flush()
        return found

    def _copy(self, part: Part, buffer: BufferedWrites, again: bool) -> Copied:
        """Copy a part's pieces; DamagedShardError if a byte differs."""
        if part.held is not None and not again:
            return self._copy_held(part, *part.held, buffer)
        with self._reader.open(part.source, is_small=part.is_small, again=again) as reader:
            found = self._reader.examine(reader, part.source)
            if sizes_of(found) != part.sizes:
                raise DamagedShardError("it was replaced while it was being joined")
            if part.is_small and (content := reader.whole()) is not None:
                return self._copy_held(part, content, found, buffer)
            writers = self._writers(part, found, functools.partial(write_at, self._fd))
            found.verify(reader, lambda path, chunk: self._put(writers[path], chunk))
            return self._copied(part, found, writers, read_errors(reader, found))

    def _put(self, writer: PieceWriter, chunk: memoryview) -> None:
        if self._stopped.is_set():
            raise _StoppedError
        writer.write(chunk)

    def _copy_held(self, part: Part, content: memoryview, found: Directory, buffer: BufferedWrites) -> Copied:
        pieces: dict[str, memoryview] = {}
        found.verify(Content(content), pieces.__setitem__)
        writers = self._writers(part, found, buffer.write)
        for path, piece in pieces.items():
            writers[path].write(piece)
        return self._copied(part, found, writers, errors_in(pieces, found))

    def _writers(self, part: Part, found: Directory, write: Write) -> dict[str, PieceWriter]:
        row = self._rows[part.source.shard]
        positions, bases = self._positions[row].tolist(), self._bases[row].tolist()
        return {
            region.path: OffsetsWriter(write, position, base, found.n_values(region.path))
            if lead_bytes(region)
            else PieceWriter(write, position, region.crc32)
            for region, position, base in zip(found.datasets, positions, bases, strict=True)
        }

    def _copied(self, part: Part, found: Directory, writers: Mapping[str, PieceWriter], errors: Errors) -> Copied:
        for writer in writers.values():
            writer.check()
        self.first_errors.add(errors)
        return Copied(
            part.source.shard,
            [writer.crc32 for writer in writers.values()],
            np.array([place for place, _ in errors], np.int64),
            count_failed(error for _, error in errors),
            found.notes["not_finite"],
        )


def _write_metadata(fd: int, skeleton: Skeleton) -> int:
    """Write what belongs to no shard; return its checksum."""
    leads = [(region.offset, bytes(lead_bytes(region))) for region in skeleton.regions]
    crc32 = 0
    for offset, content in sorted([*skeleton.metadata, *leads]):
        write_at(fd, content, offset)
        crc32 = zlib.crc32(content, crc32)
    return crc32


def _allocate(fd: int, size: int) -> None:
    """Reserve the space, so that a full disk is found before copying, on file systems that support it.

    Not os.posix_fallocate: without support (NFSv3, many Lustre versions) glibc reads and writes every page.
    """
    while _LIBC.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        number = ctypes.get_errno()
        if number in (errno.EOPNOTSUPP, errno.ENOSYS):
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
