"""Copy the bytes of many shards into one HDF5 file, verifying them, in bounded memory."""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from slurmgpu.code.versions import Stretch, compact, stretches_of
from slurmgpu.report.build import MOST_LISTED, Errors, Joined, count_failed
from slurmgpu.run.lock import checked
from slurmgpu.shards.columns import Column
from slurmgpu.shards.hdf5_layout import Attributes, Skeleton, file_attributes, make_skeleton, unplaced_regions
from slurmgpu.shards.piece_table import (
    BufferedWrites,
    OffsetsWriter,
    PieceWriter,
    Table,
    lead_bytes,
    new_table,
    pieces_of,
)
from slurmgpu.shards.shard_file import Directory, Shapes, errors_in, examine, read_errors
from slurmgpu.shards.userblock import (
    BUFFER_BYTES,
    MERGED,
    Content,
    DamagedShardError,
    Reader,
    new_directory,
    pack_userblock,
    read_userblock,
    userblock_size,
    verify,
    write_at,
)
from slurmgpu.util.atomic_files import fsync_dir, keep_readers, partial_path
from slurmgpu.util.process_wide import without_full_collections
from slurmgpu.util.shared_files import PATIENCE_S, exists, is_transient, list_fresh, remove, replace, retried

_N_THREADS = 4  # one thread keeps up with most disks; more hide the latency of a network
_CHUNK = 64  # parts per piece of a thread's work
_SMALL_BYTES = 64 << 10  # smaller files are read whole when measured, and copied from memory
_KEPT_BYTES = 128 << 20  # how much of such files to keep until they are copied
_MAX_ROUNDS = 3  # rounds of joining shards that arrive during the join; later ones are reported missing
_STALE_PATIENCE_S = 5.0
_LIBC = ctypes.CDLL(None, use_errno=True)

log = logging.getLogger(__name__)
_S = TypeVar("_S")
_T = TypeVar("_T")


class Source(NamedTuple):
    """A shard to join; `older` are former revisions, used if the file is damaged."""

    shard: int
    path: Path
    start: int
    stop: int
    older: tuple[Path, ...] = ()


Places = NDArray[np.int64]
"""Places of failed items in the plan."""
Review = Callable[[Mapping[int, Places], Mapping[Path, str]], Sequence[Source]]
"""Gets the failed items of each copied shard, and what is wrong with damaged files.

Returns sources to join in addition or instead, none of which is damaged: it may have replaced a file.
"""


class _Part(NamedTuple):
    """A source, the size of each dataset, the code of its rows, and the content of a small file."""

    source: Source
    sizes: tuple[int, ...]
    code: Sequence[Stretch]
    is_small: bool = False
    held: tuple[memoryview, Directory] | None = None


class _Copied(NamedTuple):
    """The checksums of a copied part's pieces, its failed items and their number by class, and the note `not_finite`.

    Without the errors themselves, which might not fit in memory.
    """

    crc32s: list[int]
    failed: Places
    n_failed: Mapping[str, int]
    not_finite: Mapping[str, Sequence[int]]


class _FirstErrors:
    """The errors of the first failed items, whatever the order of shards; keeps few more than are listed."""

    def __init__(self) -> None:
        self._of_shards: dict[int, Errors] = {}
        self._n = 0
        self._lock = threading.Lock()

    def put(self, shard: int, errors: Errors) -> None:
        """Set the errors of a shard, replacing earlier ones."""
        with self._lock:
            self._n += len(errors) - len(self._of_shards.get(shard, ()))
            self._of_shards[shard] = errors
            if self._n < 2 * MOST_LISTED:
                return
            for last in sorted(self._of_shards, reverse=True):
                n_left = self._n - len(self._of_shards[last])
                if n_left < MOST_LISTED:
                    break
                self._n = n_left
                del self._of_shards[last]

    def listed(self) -> Errors:
        """The errors of the first MOST_LISTED failed items."""
        found = (self._of_shards[shard] for shard in sorted(self._of_shards))
        return list(islice(chain.from_iterable(found), MOST_LISTED))


@dataclass
class _Damage:
    """What is wrong with files, by their paths, and with shards."""

    of_files: dict[Path, str] = field(default_factory=dict)
    of_shards: dict[int, str] = field(default_factory=dict)

    def note(self, source: Source, why: object) -> list[Source]:
        """Record what is wrong with a source (None: it is gone); return the source with its next older file, if any."""
        if isinstance(why, str):
            self.of_files[source.path] = self.of_shards[source.shard] = why
        if not source.older:
            return []
        return [source._replace(path=source.older[0], older=source.older[1:])]

    def review(self, review: Review, copied: Mapping[int, _Copied]) -> list[Source]:
        """The sources that a review adds; it may have replaced files that were damaged."""
        found = list(review({shard: each.failed for shard, each in copied.items()}, self.of_files))
        for source in found:
            self.of_files.pop(source.path, None)
        return found


def join(
    sources: Sequence[Source],
    columns: Mapping[str, Column],
    *,
    fingerprints: Sequence[str],
    n_items: int,
    target: Path,
    attributes: Attributes,
    patience_s: float = PATIENCE_S,
    review: Review = lambda copied, damaged: (),
    check: Callable[[], None] = lambda: None,
) -> Joined:
    """Write the rows of `sources`, which are in input order, to `target`, which is replaced atomically.

    The file carries the first of the fingerprints, each shard one of them. A shard that is damaged in two readings, or
    belongs to another plan, is left out and named; a missing one is left out. A failed read is retried for
    `patience_s`. After that, and on other errors such as a full disk, the OSError is raised and an older `target`
    stays. If another process removes the output file, it is written again.
    `review` may add new shards; `check` is called right before the file replaces the target.
    """
    _remove_stale(target, patience_s, check)
    # A unique name: removing the files of dead joins removes no file of a live one.
    beside = partial_path(target)
    shards, damage = _Shards(columns, fingerprints, patience_s), _Damage()
    n_rounds = n_vanished = 0
    try:
        with without_full_collections(), ThreadPoolExecutor(_N_THREADS) as pool:
            left = shards.measure_all(pool, sources, damage)
            while True:
                n_rows = sum(part.source.stop - part.source.start for part in left)
                about: Attributes = {"fingerprint": fingerprints[0], "n_items": n_items, "complete": n_rows == n_items}
                try:
                    with retried(lambda: open(beside, "wb", buffering=0), patience_s) as file:
                        keep_readers(file.fileno(), target, patience_s)
                        merged = _Merged(file.fileno(), shards, left, {**about, **attributes})
                        copied, again = merged.copy_all(pool, left, damage)
                        is_whole = len(copied) == len(left)
                        if is_whole:
                            n_rounds += 1
                            again = damage.review(review, copied) if n_rounds < _MAX_ROUNDS else []
                            is_whole = not again and merged.finish(list(copied.values()))
                    if is_whole:
                        check()
                        replace(beside, target)
                        break
                except OSError as error:
                    if n_vanished == _MAX_ROUNDS or exists(beside):
                        raise
                    n_vanished += 1
                    check()  # another merge may have removed it
                    log.warning("%s was removed by another process and is written again: %s", beside, error)
                    continue
                kept = {part.source.shard: part for part in left if part.source.shard in copied}
                kept |= {part.source.shard: part for part in shards.measure_all(pool, again, damage)}
                left = [part for _, part in sorted(kept.items())]
    except BaseException:
        remove(beside)
        raise
    fsync_dir(target.parent)
    return _outcome([part.source for part in left], copied, damage, merged.first_errors.listed(), merged.code)


def _outcome(
    sources: Sequence[Source],
    copied: Mapping[int, _Copied],
    damage: _Damage,
    errors: Errors,
    code: tuple[Stretch, ...],
) -> Joined:
    """What was joined, from these sources, and what was left out."""
    paths = {source.path for source in sources}
    return Joined(
        sum(source.stop - source.start for source in sources),
        frozenset(copied),
        tuple(sorted((shard, why) for shard, why in damage.of_shards.items() if shard not in copied)),
        tuple((path, why) for path, why in damage.of_files.items() if path not in paths),
        sum((Counter(each.n_failed) for each in copied.values()), Counter[str]()),
        errors,
        _summed(each.not_finite for each in copied.values()),
        code,
    )


def _remove_stale(target: Path, patience_s: float, check: Callable[[], None]) -> None:
    """Remove the partial files of killed joins; failing to do so does no harm.

    Files that were listed before `check` passed do not belong to a later merge.
    """
    names = sorted(list_fresh(target.parent, patience_s))
    stale = [name for name in names if name.startswith(f".{target.name}.") and name.endswith(".partial")]
    for name in checked(stale, check):
        try:
            remove(target.parent / name, _STALE_PATIENCE_S)
        except OSError as error:
            log.warning("%s was left by a killed merge and cannot be removed: %s", name, error.strerror)


def verify_joined(path: Path) -> list[str]:
    """A sentence for each problem of a merged file; [] if every byte is as written."""
    problems: list[str] = []
    try:
        with Reader(path) as reader:
            directory, table, size = read_userblock(reader)
            if directory["attributes"]["format"] != MERGED:
                return [f"its format is {directory['attributes']['format']!r}, not {MERGED!r}"]
            found = pieces_of(directory, table)
            problems.extend(verify(reader, found, start=size, rest_crc32=directory["rest_crc32"]))
    except FileNotFoundError:
        problems.append(f"{path} does not exist")
    except DamagedShardError as error:
        problems.append(str(error))
    return problems


def _summed(counts: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, dict[str, int]]:
    """The sums of the notes of all shards."""
    found: dict[str, dict[str, int]] = {}
    for count in counts:
        for name, (n_nan, n_infinite) in count.items():
            total = found.setdefault(name, {"nan": 0, "infinite": 0})
            total["nan"] += n_nan
            total["infinite"] += n_infinite
    return dict(sorted(found.items()))


class _Shards:
    """Reads the shards of a join, which share their columns."""

    def __init__(self, columns: Mapping[str, Column], fingerprints: Sequence[str], patience_s: float) -> None:
        self.columns = columns
        self.fingerprints = fingerprints
        self.patience_s = patience_s
        self.regions = unplaced_regions(columns, 0, {})
        self.paths = [region.path for region in self.regions]
        self.itemsizes = [np.dtype(region.dtype).itemsize for region in self.regions]
        self.n_lost = 0
        self._shapes = Shapes(columns)
        self._kept_bytes = 0

    def measure_all(self, pool: Executor, sources: Sequence[Source], damage: _Damage) -> list[_Part]:
        """The parts whose user blocks are intact, in order."""
        left = list(sources)
        parts: list[_Part] = []
        while left:
            found = _each(pool, lambda source: _read_twice_if_damaged(lambda again: self._measure(source, again)), left)
            parts += [part for part in found if isinstance(part, _Part)]
            left = [
                older
                for source, why in zip(left, found, strict=True)
                if not isinstance(why, _Part)
                for older in damage.note(source, why)
            ]
        return sorted(parts, key=lambda part: part.source.shard)

    def _measure(self, source: Source, again: bool) -> _Part:
        with Reader(source.path, buffer_bytes=_SMALL_BYTES, patience_s=self.patience_s) as reader:
            if again:
                reader.forget_cache()
            found = self.examine(reader, source)
            sizes = tuple(region.n_bytes for region in found.datasets)
            is_small = reader.size <= _SMALL_BYTES
            content = reader.whole() if self._kept_bytes < _KEPT_BYTES else None
        code = stretches_of(found.made_by, source.start, source.stop)
        if content is None:
            return _Part(source, sizes, code, is_small)
        self._kept_bytes += len(content)  # threads may race; an approximate sum suffices
        return _Part(source, sizes, code, is_small, (content, found))

    def examine(self, reader: Reader, source: Source) -> Directory:
        """The directory of a shard; ForeignShardError if it is not the planned one."""
        found = examine(reader, fingerprint=self.fingerprints, start=source.start, stop=source.stop)
        self._shapes.check(found)
        return found


def _each(pool: Executor, function: Callable[[_S], _T], values: Sequence[_S]) -> list[_T]:
    """The result of `function` for each value, in order.

    Uses threads only if the first calls mostly wait for a disk or network: otherwise threads would wait for each other.
    """
    chunks = [values[first : first + _CHUNK] for first in range(0, len(values), _CHUNK)]
    started, computed = time.perf_counter(), time.thread_time()
    found = [function(value) for value in values[:_CHUNK]]
    waits = time.perf_counter() - started > 2 * (time.thread_time() - computed)
    do_all = pool.map if waits else map
    return [*found, *(each for chunk in do_all(lambda chunk: list(map(function, chunk)), chunks[1:]) for each in chunk)]


_SENSELESS = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
"""Errors from a directory with a valid checksum and invalid values."""


def _read_twice_if_damaged(read: Callable[[bool], _T]) -> _T | str | None:
    """The result of `read`; what is wrong if two readings find damage; None if the file is gone."""
    try:
        try:
            return read(False)
        except DamagedShardError as error:
            log.debug("read again: %s", error)
            return read(True)
    except DamagedShardError as error:
        return str(error)
    except _SENSELESS as error:
        return f"its directory is invalid ({type(error).__name__}: {error})"
    except FileNotFoundError:
        return None


class _StoppedError(Exception):
    """The join has ended, by an error or a signal."""


class _Merged:
    """A merged file while it is written: every piece has a fixed place, so pieces may come in any order."""

    def __init__(self, fd: int, shards: _Shards, parts: Sequence[_Part], attributes: Attributes) -> None:
        self._fd, self._shards = fd, shards
        self.first_errors = _FirstErrors()
        self._stopped = threading.Event()
        self._table = _fill_table(shards, parts)
        n_bytes = self._table["n_bytes"]
        n_values = dict(zip(shards.paths, (n_bytes.sum(axis=0) // shards.itemsizes).tolist(), strict=True))
        n_rows = sum(part.source.stop - part.source.start for part in parts)
        regions = unplaced_regions(shards.columns, n_rows, n_values)
        self.code = tuple(compact(stretch for part in parts for stretch in part.code))
        attributes = file_attributes(MERGED, shards.columns, attributes)
        self._directory = new_directory(attributes, n_rows, regions)
        self._directory["code"] = self.code
        self._userblock_size = userblock_size(self._directory, n_table_bytes=self._table.nbytes)
        skeleton = make_skeleton(regions, self._directory["attributes"], self._userblock_size)
        _allocate(fd, skeleton.size)
        rest_crc32 = self._write_metadata(skeleton)
        self._directory |= {"datasets": skeleton.regions, "file_size": skeleton.size, "rest_crc32": rest_crc32}

        before = np.cumsum(n_bytes, axis=0) - n_bytes
        firsts = [region.offset + lead_bytes(region) for region in skeleton.regions]
        # A part's offsets are raised by the number of values before it; these are in the next dataset.
        bases = np.roll(before // shards.itemsizes, -1, axis=1)
        self._positions, self._bases = before + firsts, bases
        self._rows = {part.source.shard: row for row, part in enumerate(parts)}

    def copy_all(
        self, pool: Executor, parts: Sequence[_Part], damage: _Damage
    ) -> tuple[dict[int, _Copied], list[Source]]:
        """Copy all parts; return what was copied, by shard, and older sources to try for the rest (see `damage`)."""
        futures = {part.source.shard: pool.submit(self._copy_chunk, [part]) for part in parts if not part.is_small}
        small = [part for part in parts if part.is_small]
        found: dict[int, _Copied | str | None] = {}
        try:
            for first in range(0, len(small), _CHUNK):
                chunk = small[first : first + _CHUNK]
                found |= zip((part.source.shard for part in chunk), self._copy_chunk(chunk), strict=True)
            for shard, future in futures.items():
                [found[shard]] = future.result()
        except BaseException:
            # The file will be closed: no thread may still write to its descriptor, which may be reused.
            self._stopped.set()
            wait([future for future in futures.values() if not future.cancel()])
            raise
        copied: dict[int, _Copied] = {}
        older: list[Source] = []
        for part in parts:
            each = found[part.source.shard]
            if isinstance(each, _Copied):
                copied[part.source.shard] = each
            else:
                older += damage.note(part.source, each)
        return copied, older

    def _copy_chunk(self, parts: Sequence[_Part]) -> list[_Copied | str | None]:
        """Copy adjacent parts; small ones are written together."""
        buffer = BufferedWrites(self._fd)
        found = [_read_twice_if_damaged(functools.partial(self._copy, part, buffer)) for part in parts]
        buffer.flush()
        return found

    def _copy(self, part: _Part, buffer: BufferedWrites, again: bool) -> _Copied:
        """Copy a part's pieces; DamagedShardError if a byte differs."""
        if part.held is not None and not again:
            return self._copy_held(part, *part.held, buffer)
        buffer_bytes = _SMALL_BYTES if part.is_small else BUFFER_BYTES
        with Reader(part.source.path, buffer_bytes, self._shards.patience_s) as reader:
            if again:
                reader.forget_cache()
            found = self._shards.examine(reader, part.source)
            if tuple(region.n_bytes for region in found.datasets) != part.sizes:
                raise DamagedShardError("it was replaced while it was being joined")
            if part.is_small and (content := reader.whole()) is not None:
                return self._copy_held(part, content, found, buffer)
            writers = self._writers(part, found)
            found.verify(reader, lambda path, content: self._put(writers[path], content))
            return self._copied(part, writers, read_errors(reader, found), found)

    def _put(self, writer: PieceWriter, content: memoryview) -> None:
        if self._stopped.is_set():
            raise _StoppedError
        writer.write(content)

    def _copy_held(self, part: _Part, content: memoryview, found: Directory, buffer: BufferedWrites) -> _Copied:
        pieces: dict[str, memoryview] = {}
        found.verify(Content(content), pieces.__setitem__)
        writers = self._writers(part, found, buffer)
        for path, piece in pieces.items():
            writers[path].write(piece)
        return self._copied(part, writers, errors_in(pieces, found), found)

    def _copied(self, part: _Part, writers: Mapping[str, PieceWriter], errors: Errors, found: Directory) -> _Copied:
        self.first_errors.put(part.source.shard, errors)
        failed = np.array([place for place, _ in errors], np.int64)
        n_failed = count_failed(error for _, error in errors)
        return _Copied(_checksums(writers), failed, n_failed, found.notes["not_finite"])

    def _writers(self, part: _Part, found: Directory, buffer: BufferedWrites | None = None) -> dict[str, PieceWriter]:
        row = self._rows[part.source.shard]
        positions, bases = self._positions[row].tolist(), self._bases[row].tolist()
        write = functools.partial(write_at, self._fd) if buffer is None else buffer.write
        return {
            region.path: OffsetsWriter(write, position, base, found.n_values(region.path))
            if lead_bytes(region)
            else PieceWriter(write, position, region.crc32)
            for region, position, base in zip(found.datasets, positions, bases, strict=True)
        }

    def finish(self, copied: Sequence[_Copied]) -> bool:
        """Write the user block after all pieces, and fsync.

        False if the disk may have lost data, so that all must be written again: fsync reports that only once.
        """
        self._table["crc32"] = np.array([part.crc32s for part in copied]).reshape(self._table["crc32"].shape)
        self._directory["n_errors"] = sum(len(part.failed) for part in copied)
        write_at(self._fd, pack_userblock(self._directory, self._userblock_size, self._table.tobytes()), 0)
        try:
            os.fsync(self._fd)
        except OSError as error:
            self._shards.n_lost += 1
            if not is_transient(error) or self._shards.n_lost > _MAX_ROUNDS:
                raise
            return False
        return True

    def _write_metadata(self, skeleton: Skeleton) -> int:
        leads = [(region.offset, bytes(lead_bytes(region))) for region in skeleton.regions]
        crc32 = 0
        for offset, content in sorted([*skeleton.metadata, *leads]):
            write_at(self._fd, content, offset)
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


def _checksums(writers: Mapping[str, PieceWriter]) -> list[int]:
    for writer in writers.values():
        writer.check()
    return [writer.crc32 for writer in writers.values()]


def _fill_table(shards: _Shards, parts: Sequence[_Part]) -> Table:
    table = new_table(len(parts), len(shards.regions))
    for name in ("shard", "start", "stop"):
        table[name] = [getattr(part.source, name) for part in parts]
    sizes = np.array([part.sizes for part in parts], np.int64).reshape(table["n_bytes"].shape)
    table["n_bytes"] = sizes - [lead_bytes(region) for region in shards.regions]
    return table
