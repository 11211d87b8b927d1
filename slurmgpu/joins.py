"""Joins: the bytes of many shards copied into one HDF5 file, verified on their way, in bounded memory."""

from __future__ import annotations

import ctypes
import errno
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from slurmgpu.columns import Column
from slurmgpu.files import fsync_dir
from slurmgpu.pieces import OffsetsPlace, Place, Table, lead_bytes, new_table, pieces, read_table
from slurmgpu.regions import (
    MERGED,
    DamagedShardError,
    Reader,
    Region,
    new_directory,
    pack_userblock,
    read_userblock,
    userblock_size,
    verify,
    write_at,
)
from slurmgpu.shards import HEAD_BYTES, Directory, ForeignShardError, examine, read_errors
from slurmgpu.skeletons import Attributes, Skeleton, draw, file_attributes, unplaced_regions

_N_THREADS = 4  # one keeps up with most disks; the others hide how long a network takes to answer
_LIBC = ctypes.CDLL(None, use_errno=True)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Joined:
    """What a join made: `damaged` has the shards that were left out, and why; `errors` the failed items."""

    n_rows: int
    n_errors: int
    damaged: tuple[tuple[int, str], ...]
    errors: list[tuple[int, str]]


class _Part(NamedTuple):
    """A shard that is to be joined; `sizes` has the bytes of each of its datasets, once they are known."""

    shard: int
    path: Path
    start: int
    stop: int
    sizes: tuple[int, ...] = ()


class _Copied(NamedTuple):
    """The checksum of each piece that a part has become, and the part's failed items."""

    crc32s: list[int]
    errors: list[tuple[int, str]]


def join(
    parts: Sequence[tuple[int, Path, int, int]],
    columns: Mapping[str, Column],
    *,
    fingerprint: str,
    n_items: int,
    target: Path,
    attributes: Attributes,
) -> Joined:
    """Put the rows of `parts` (shard, path, start, stop; in the order of the input) at `target`, in one step.

    A shard that is damaged, or of another plan, is left out and named. On a full disk, as on any error, the
    OSError is raised and an older `target` stays as it was. What a join that was killed left beside it is
    removed, so two joins into one target must not run at a time.
    """
    for stale in target.parent.glob(f".{target.name}.*.partial"):
        stale.unlink()
    beside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    source = _Source(columns, fingerprint)
    damaged: dict[int, str] = {}
    try:
        with ThreadPoolExecutor(_N_THREADS) as pool:
            left = _undamaged(pool, source.measure, [_Part(*part) for part in parts], damaged)
            while True:
                n_rows = sum(part.stop - part.start for part in left)
                identity: Attributes = {"fingerprint": fingerprint, "n_items": n_items, "complete": n_rows == n_items}
                with open(beside, "wb", buffering=0) as file:
                    merged = _Merged(file.fileno(), source, left, {**identity, **attributes})
                    copied = _undamaged(pool, merged.copy, left, damaged)
                    if len(copied) == len(left):
                        merged.finish(copied)
                        break
                left = [part for part in left if part.shard not in damaged]
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    fsync_dir(target.parent)
    errors = [error for part in copied for error in part.errors]
    return Joined(n_rows, len(errors), tuple(sorted(damaged.items())), errors)


def verify_joined(path: Path) -> list[str]:
    """What is wrong with a merged file, a sentence for each problem; [] when every byte of it is as written."""
    problems: list[str] = []
    try:
        with Reader(path) as reader:
            directory, table, size = read_userblock(reader)
            if directory["attributes"]["format"] != MERGED:
                return [f"it is a {directory['attributes']['format']!r}, not a {MERGED!r}"]
            regions = [Region(*region) for region in directory["datasets"]]
            found = pieces(regions, read_table(table, len(regions)))
            problems.extend(verify(reader, found, start=size, rest_crc32=directory["rest_crc32"]))
    except DamagedShardError as error:
        problems.append(str(error))
    return problems


def _undamaged(
    pool: ThreadPoolExecutor, function: Callable[[_Part], _T], parts: list[_Part], damaged: dict[int, str]
) -> list[_T]:
    """What `function` returns for each part, in order, without those that it finds damaged; these are named."""

    def attempt(part: _Part) -> _T | None:
        try:
            return function(part)
        except DamagedShardError as error:
            damaged[part.shard] = str(error)
            return None

    return [result for result in pool.map(attempt, parts) if result is not None]


class _Source:
    """What all shards of a join have in common."""

    def __init__(self, columns: Mapping[str, Column], fingerprint: str) -> None:
        self.columns = columns
        self.fingerprint = fingerprint
        self.regions = unplaced_regions(columns, 0, {})
        self.paths = [region.path for region in self.regions]
        self.itemsizes = [np.dtype(region.dtype).itemsize for region in self.regions]

    def measure(self, part: _Part) -> _Part:
        """The part with the sizes of its datasets, from its user block alone."""
        with Reader(part.path, buffer_bytes=HEAD_BYTES) as reader:
            found = self.examine(reader, part)
            return part._replace(sizes=tuple(region.n_bytes for region in found.datasets))

    def examine(self, reader: Reader, part: _Part) -> Directory:
        """The part's directory; ForeignShardError when it is not the shard that was planned."""
        found = examine(reader, fingerprint=self.fingerprint, start=part.start, stop=part.stop)
        if list(map(_kind, found.datasets)) != list(map(_kind, self.regions)):
            raise ForeignShardError("its datasets are not those of the plan's columns")
        return found


class _Merged:
    """A merged file being written: every piece has its place from the beginning, whichever comes first."""

    def __init__(self, fd: int, source: _Source, parts: Sequence[_Part], attributes: Attributes) -> None:
        self._fd, self._source = fd, source
        self._table = _fill_table(source, parts)
        n_bytes = self._table["n_bytes"]
        n_values = dict(zip(source.paths, (n_bytes.sum(axis=0) // source.itemsizes).tolist(), strict=True))
        n_rows = sum(part.stop - part.start for part in parts)
        regions = unplaced_regions(source.columns, n_rows, n_values)
        self._directory = new_directory(file_attributes(MERGED, source.columns, attributes), n_rows, regions)
        self._userblock_size = userblock_size(self._directory, n_table_bytes=self._table.nbytes)
        skeleton = draw(regions, self._directory["attributes"], self._userblock_size)
        _allocate(fd, skeleton.size)
        rest_crc32 = self._write_metadata(skeleton)
        self._directory |= {"datasets": skeleton.regions, "file_size": skeleton.size, "rest_crc32": rest_crc32}

        before = np.cumsum(n_bytes, axis=0) - n_bytes
        firsts = [region.offset + lead_bytes(region) for region in skeleton.regions]
        # A part's offsets grow by the number of values before it, which lie in the dataset that comes next.
        bases = np.roll(before // source.itemsizes, -1, axis=1)
        shards = [part.shard for part in parts]
        self._positions = dict(zip(shards, (before + firsts).tolist(), strict=True))
        self._bases = dict(zip(shards, bases.tolist(), strict=True))

    def copy(self, part: _Part) -> _Copied:
        """Put a part's pieces into their places; DamagedShardError unless all its bytes are as they were written."""
        with Reader(part.path) as reader:
            found = self._source.examine(reader, part)
            if tuple(region.n_bytes for region in found.datasets) != part.sizes:
                raise DamagedShardError("it was replaced while it was joined")
            positions, bases = self._positions[part.shard], self._bases[part.shard]
            places = {
                region.path: OffsetsPlace(self._fd, position, base)
                if lead_bytes(region)
                else Place(self._fd, position, region.crc32)
                for region, position, base in zip(found.datasets, positions, bases, strict=True)
            }
            problems = list(
                verify(
                    reader,
                    found.pieces,
                    start=found.userblock_size,
                    rest_crc32=found.rest_crc32,
                    sink=lambda path, content: places[path].write(content),
                )
            )
            if problems:
                raise DamagedShardError("; ".join(problems))
            return _Copied([place.crc32 for place in places.values()], read_errors(reader, found))

    def finish(self, copied: Sequence[_Copied]) -> None:
        """Write the user block, once all pieces are in their places, and wait until the disk has everything."""
        self._table["crc32"] = np.array([part.crc32s for part in copied]).reshape(self._table["crc32"].shape)
        self._directory["n_errors"] = sum(len(part.errors) for part in copied)
        write_at(self._fd, pack_userblock(self._directory, self._userblock_size, self._table.tobytes()), 0)
        os.fsync(self._fd)

    def _write_metadata(self, skeleton: Skeleton) -> int:
        """The checksum of what belongs to no piece."""
        leads = [(region.offset, bytes(lead_bytes(region))) for region in skeleton.regions]
        crc32 = 0
        for offset, content in sorted([*skeleton.metadata, *leads]):
            write_at(self._fd, content, offset)
            crc32 = zlib.crc32(content, crc32)
        return crc32


def _allocate(fd: int, size: int) -> None:
    """Reserve the space, so that a full disk is found before the copy, on file systems that can do so.

    Not os.posix_fallocate: on a file system that cannot (NFSv3, many a Lustre) glibc reads and writes every page.
    """
    while _LIBC.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        number = ctypes.get_errno()
        if number in (errno.EOPNOTSUPP, errno.ENOSYS):
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def _kind(region: Region) -> tuple[str, str, tuple[int, ...]]:
    """What a dataset has in common with that of any other shard of the plan."""
    return region.path, region.dtype, region.shape[1:]


def _fill_table(source: _Source, parts: Sequence[_Part]) -> Table:
    """The piece table, but for the checksums."""
    table = new_table(len(parts), len(source.regions))
    for name in ("shard", "start", "stop"):
        table[name] = [getattr(part, name) for part in parts]
    sizes = np.array([part.sizes for part in parts], np.int64).reshape(table["n_bytes"].shape)
    table["n_bytes"] = sizes - [lead_bytes(region) for region in source.regions]
    return table
