"""The shard files that a join copies: measure them, note what is damaged, and fall back on older files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from slurmgpu.code.versions import Stretch, stretches_of
from slurmgpu.shards.columns import Column
from slurmgpu.shards.shard_file import Directory, Shapes, examine
from slurmgpu.shards.userblock import BUFFER_BYTES, DamagedShardError, Reader

CHUNK = 64
"""How many files a thread reads at a time."""
_SMALL_BYTES = 64 << 10  # smaller files are read whole when measured, and copied from memory
_KEPT_BYTES = 128 << 20  # how much of such files to keep until they are copied

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


class Part(NamedTuple):
    """A source, the size of each dataset, the code of its rows, and the content of a small file."""

    source: Source
    sizes: tuple[int, ...]
    code: Sequence[Stretch]
    is_small: bool = False
    held: tuple[memoryview, Directory] | None = None


def sizes_of(directory: Directory) -> tuple[int, ...]:
    """The size of each dataset."""
    return tuple(region.n_bytes for region in directory.datasets)


def n_rows_of(parts: Sequence[Part]) -> int:
    """The number of rows of all parts."""
    return sum(part.source.stop - part.source.start for part in parts)


class Unusable(NamedTuple):
    """What is wrong with a file that cannot be joined; None if it is gone."""

    why: str | None


@dataclass
class Damage:
    """What is wrong with files, by their paths, and with shards."""

    of_files: dict[Path, str] = field(default_factory=dict)
    of_shards: dict[int, str] = field(default_factory=dict)

    def sift(self, sources: Sequence[Source], found: Sequence[_T | Unusable]) -> tuple[list[_T], list[Source]]:
        """What was found in usable files, and the next older files of the others, whose damage is noted."""
        usable: list[_T] = []
        older: list[Source] = []
        for source, each in zip(sources, found, strict=True):
            if not isinstance(each, Unusable):
                usable.append(each)
                continue
            if each.why is not None:
                self.of_files[source.path] = self.of_shards[source.shard] = each.why
            if source.older:
                older.append(source._replace(path=source.older[0], older=source.older[1:]))
        return usable, older


class SourceReader:
    """Reads the shards of a join, which share their columns."""

    def __init__(self, columns: Mapping[str, Column], fingerprints: Sequence[str], patience_s: float) -> None:
        self.columns = columns
        self._fingerprints, self._patience_s = fingerprints, patience_s
        self._shapes = Shapes(columns)
        self._kept_bytes = 0

    def measure_all(self, pool: Executor, sources: Sequence[Source], damage: Damage) -> list[Part]:
        """The parts whose user blocks are intact."""
        parts: list[Part] = []
        while sources:
            usable, sources = damage.sift(sources, _each(pool, self._measure_twice, sources))
            parts += usable
        return parts

    def _measure_twice(self, source: Source) -> Part | Unusable:
        return read_twice_if_damaged(lambda again: self._measure(source, again))

    def _measure(self, source: Source, again: bool) -> Part:
        with self.open(source, is_small=True, again=again) as reader:
            found = self.examine(reader, source)
            content = reader.whole() if self._kept_bytes < _KEPT_BYTES else None
        if content is not None:
            self._kept_bytes += len(content)  # threads may race; an approximate sum suffices
        return Part(
            source,
            sizes_of(found),
            stretches_of(found.made_by, source.start, source.stop),
            reader.size <= _SMALL_BYTES,
            None if content is None else (content, found),
        )

    def open(self, source: Source, *, is_small: bool, again: bool) -> Reader:
        """A reader, whose buffer holds a small file whole; `again` is for a second reading, not from a cache."""
        reader = Reader(source.path, _SMALL_BYTES if is_small else BUFFER_BYTES, self._patience_s)
        if again:
            reader.forget_cache()
        return reader

    def examine(self, reader: Reader, source: Source) -> Directory:
        """The directory of a shard; ForeignShardError if it is not the planned one."""
        found = examine(reader, fingerprint=self._fingerprints, start=source.start, stop=source.stop)
        self._shapes.check(found)
        return found


def _each(pool: Executor, function: Callable[[_S], _T], values: Sequence[_S]) -> list[_T]:
    """The result of `function` for each value, in order.

    Uses threads only if the first calls mostly wait for a disk or network: otherwise threads would wait for each other.
    """
    chunks = [values[first : first + CHUNK] for first in range(0, len(values), CHUNK)]
    started, computed = time.perf_counter(), time.thread_time()
    found = [function(value) for value in values[:CHUNK]]
    waits = time.perf_counter() - started > 2 * (time.thread_time() - computed)
    do_all = pool.map if waits else map
    return [*found, *(each for chunk in do_all(lambda chunk: list(map(function, chunk)), chunks[1:]) for each in chunk)]


_SENSELESS = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
"""Errors from a directory with a valid checksum and invalid values."""


def read_twice_if_damaged(read: Callable[[bool], _T]) -> _T | Unusable:
    """The result of `read(again)`; what is wrong if two readings find damage, or if the file is gone."""
    try:
        try:
            return read(False)
        except DamagedShardError as error:
            log.debug("read again: %s", error)
            return read(True)
    except DamagedShardError as error:
        return Unusable(str(error))
    except _SENSELESS as error:
        return Unusable(f"its directory is invalid ({type(error).__name__}: {error})")
    except FileNotFoundError:
        return Unusable(None)
