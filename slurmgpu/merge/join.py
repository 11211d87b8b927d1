"""Join shards into one HDF5 file: copy their bytes, verifying each, in bounded memory."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from slurmgpu.merge.merged_file import Copied, MergedFile, Places
from slurmgpu.merge.sources import Damage, Part, Source, SourceReader, n_rows_of
from slurmgpu.report.build import Joined
from slurmgpu.run.lock import checked
from slurmgpu.shards.columns import Column
from slurmgpu.shards.hdf5_layout import Attributes
from slurmgpu.shards.piece_table import pieces_of
from slurmgpu.shards.userblock import MERGED, DamagedShardError, Reader, read_userblock, verify
from slurmgpu.util.atomic_files import fsync_dir, keep_readers, partial_path
from slurmgpu.util.process_wide import without_full_collections
from slurmgpu.util.shared_files import PATIENCE_S, exists, is_transient, list_fresh, remove, replace, retried

_N_THREADS = 4  # one thread keeps up with most disks; more hide the latency of a network
_MAX_ROUNDS = 3  # rounds of joining shards that arrive during the join; later ones are reported missing
_STALE_PATIENCE_S = 5.0

log = logging.getLogger(__name__)

Review = Callable[[Mapping[int, Places], Mapping[Path, str]], Sequence[Source]]
"""Gets the failed items of each copied shard, and what is wrong with damaged files.

Returns sources to join in addition or instead, none of which is damaged: it may have replaced a file.
"""


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
    partial = partial_path(target)
    reader = SourceReader(columns, fingerprints, patience_s)
    about: Attributes = {"fingerprint": fingerprints[0], "n_items": n_items, "complete": False, **attributes}
    try:
        with without_full_collections(), ThreadPoolExecutor(_N_THREADS) as pool:
            joined = _Join(pool, reader, target, partial, about, patience_s, review, check).run(sources)
    except BaseException:
        remove(partial)
        raise
    fsync_dir(target.parent)
    return joined


class _Again(NamedTuple):
    """Why a file is not the last one: the parts that the next one has as well, and sources that it may have besides."""

    kept: Sequence[Part]
    sources: Sequence[Source] = ()


@dataclass
class _Join:
    """A join: writes the whole file again until no shard was left out of it, came since, or may have been lost.

    `partial` is the name of the file until it replaces the target.
    """

    pool: Executor
    reader: SourceReader
    target: Path
    partial: Path
    attributes: Attributes
    patience_s: float
    review: Review
    check: Callable[[], None]
    damage: Damage = field(default_factory=Damage)
    n_reviews: int = 0
    n_vanished: int = 0
    n_lost: int = 0

    def run(self, sources: Sequence[Source]) -> Joined:
        """Write the file of these sources, and of those that a review adds."""
        found: Joined | _Again = _Again((), sources)
        while isinstance(found, _Again):
            parts = {part.source.shard: part for part in found.kept}
            measured = self.reader.measure_all(self.pool, found.sources, self.damage)
            parts |= {part.source.shard: part for part in measured}
            found = self._write_unless_removed([part for _, part in sorted(parts.items())])
        return found

    def _write_unless_removed(self, parts: Sequence[Part]) -> Joined | _Again:
        """As `_write`; again with the same parts if another process has removed the file."""
        try:
            return self._write(parts)
        except OSError as error:
            if self.n_vanished == _MAX_ROUNDS or exists(self.partial):
                raise
            self.n_vanished += 1
            self.check()  # another merge may have removed it
            log.warning("%s was removed by another process and is written again: %s", self.partial, error)
            return _Again(parts)

    def _write(self, parts: Sequence[Part]) -> Joined | _Again:
        """Write the file from these parts, and let it replace the target if it is the last one."""
        is_complete = n_rows_of(parts) == self.attributes["n_items"]
        with retried(lambda: open(self.partial, "wb", buffering=0), self.patience_s) as file:
            keep_readers(file.fileno(), self.target, self.patience_s)
            merged = MergedFile(file.fileno(), self.reader, parts, {**self.attributes, "complete": is_complete})
            copied, older = merged.copy_all(self.pool, self.damage)
            if len(copied) < len(parts):
                return _Again([part for part in parts if part.source.shard in copied], older)
            if more := self._reviewed(copied):
                return _Again(parts, more)
            merged.finish(copied.values())
            if not self._is_synced(file.fileno()):
                return _Again(parts)
        self.check()
        replace(self.partial, self.target)
        return self._outcome(parts, merged, copied)

    def _reviewed(self, copied: Mapping[int, Copied]) -> Sequence[Source]:
        """The sources that a review adds; it may have replaced files that were damaged."""
        self.n_reviews += 1
        if self.n_reviews >= _MAX_ROUNDS:
            return ()
        found = self.review({shard: each.failed for shard, each in copied.items()}, self.damage.of_files)
        for source in found:
            self.damage.of_files.pop(source.path, None)
        return found

    def _is_synced(self, fd: int) -> bool:
        """Sync the file.

        False if the disk may have lost data, so that all must be written again: fsync reports that only once.
        """
        try:
            os.fsync(fd)
        except OSError as error:
            self.n_lost += 1
            if not is_transient(error) or self.n_lost > _MAX_ROUNDS:
                raise
            return False
        return True

    def _outcome(self, parts: Sequence[Part], merged: MergedFile, copied: Mapping[int, Copied]) -> Joined:
        paths, damage = {part.source.path for part in parts}, self.damage
        return Joined(
            n_rows_of(parts),
            frozenset(copied),
            tuple(sorted((shard, why) for shard, why in damage.of_shards.items() if shard not in copied)),
            tuple((path, why) for path, why in damage.of_files.items() if path not in paths),
            sum((Counter(each.n_failed) for each in copied.values()), Counter[str]()),
            merged.first_errors.listed(),
            _summed(each.not_finite for each in copied.values()),
            merged.code,
        )


def _summed(counts: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, dict[str, int]]:
    """The sums of the notes of all shards."""
    found: dict[str, dict[str, int]] = {}
    for count in counts:
        for name, (n_nan, n_infinite) in count.items():
            total = found.setdefault(name, {"nan": 0, "infinite": 0})
            total["nan"] += n_nan
            total["infinite"] += n_infinite
    return dict(sorted(found.items()))


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
