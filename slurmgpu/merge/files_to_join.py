"""The files that a merge joins: the newest of each shard, so that no good row of the former merged.h5 is lost."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurmgpu.code.versions import Stretch, makers_of
from slurmgpu.merge.former_rows import FormerRows
from slurmgpu.merge.merged_file import Places
from slurmgpu.merge.shards_folder import Check, set_aside
from slurmgpu.merge.sources import Source
from slurmgpu.run.directory import Run
from slurmgpu.run.revisions import former_rows, made_again, publish_rows, put_over
from slurmgpu.shards.columns import Column, columns_from_json
from slurmgpu.shards.made_by import MadeBy, Maker
from slurmgpu.shards.shard_file import read_directory
from slurmgpu.shards.userblock import DamagedShardError
from slurmgpu.util.shared_files import PATIENCE_S, exists, replace

log = logging.getLogger(__name__)


@dataclass
class FilesToJoin:
    """The files to join: the newest revision of each shard, and rows that only the former merged.h5 has."""

    run: Run
    check: Check
    columns: Mapping[str, Column] = field(init=False)
    patience_s: float = field(init=False)
    damaged: str = ""

    def __post_init__(self) -> None:
        self.columns = columns_from_json(self.run.plan.columns)
        self.patience_s = max(PATIENCE_S, self.run.plan.lease_s)

    def look(self) -> list[Source]:
        """All published shards, listed again; rows that only merged.h5 has become shards again."""
        files = self.run.shard_files(fresh=True)
        with self.former() as former:
            if former is not None:
                for shard in sorted(former.shards.keys() - files.keys()):
                    if self._restore(former, shard):
                        files[shard] = [0]
        return [self._source(shard, revisions) for shard, revisions in sorted(files.items())]

    def review(self, copied: Mapping[int, Places], damaged: Mapping[Path, str]) -> list[Source]:
        """New shards, and files with good rows that merged.h5 would lose otherwise."""
        more = [source for source in self.look() if source.shard not in copied and source.path not in damaged]
        more = [source for source in more if exists(source.path)]
        suspects = {shard for shard, failed in copied.items() if len(failed)}
        suspects |= {numbers[0] for path in damaged if (numbers := Run.revision_of(path.name)) is not None}
        files = self.run.shard_files()
        with self.former() as former:
            if former is None:
                return more
            for shard in sorted(suspects & former.shards.keys()):
                if shard not in copied:
                    source = self._replace(former, shard, damaged)
                else:
                    source = self._keep(former, shard, files.get(shard, [0]), copied[shard], damaged)
                if source is not None:
                    more.append(source)
        return more

    def keep_damaged(self) -> None:
        """Rename a damaged merged.h5 instead of replacing it, if it may have rows to save that are nowhere else."""
        if self.damaged:
            aside = self.run.merged.with_suffix(".damaged.h5")
            log.error("the former merged.h5 is damaged (%s) and was renamed to %s", self.damaged, aside)
            with contextlib.suppress(FileNotFoundError):
                replace(self.run.merged, aside)

    def _source(self, shard: int, revisions: Sequence[int]) -> Source:
        newest, *older = [self.run.revision_path(shard, revision) for revision in reversed(revisions)]
        return Source(shard, newest, *self.run.plan.bounds(shard), tuple(older))

    @contextlib.contextmanager
    def former(self) -> Iterator[FormerRows | None]:
        """The rows of the present merged.h5; None if it is missing or unreadable."""
        try:
            rows = FormerRows(self.run.merged, self.columns, self.run.plan.fingerprint, self.patience_s)
        except FileNotFoundError:
            yield None
        except DamagedShardError as error:
            if not self.damaged:
                log.warning("%s is damaged and will be written again from the shards: %s", self.run.merged, error)
            self.damaged = str(error)
            yield None
        else:
            with contextlib.closing(rows):
                yield rows

    def _restore(self, former: FormerRows, shard: int, damage: str | None = None) -> bool:
        """Publish a shard from its rows in merged.h5, replacing a file with `damage`; False if they are damaged."""
        what = "missing" if damage is None else "damaged"
        try:
            rows = former.rows(shard)
        except DamagedShardError as error:
            log.error("shard %d is %s, and its rows in merged.h5 are damaged: %s", shard, what, error)
            self.damaged = self.damaged or str(error)
            return False
        if damage is not None:
            self.check()
            set_aside(self.run.revision_path(shard, 0), damage)
        log.warning("shard %d is %s; its rows are taken from merged.h5", shard, what)
        publish_rows(self.run, shard, 0, self.columns, rows, {}, _made_by(former.code(shard)))
        return True

    def _replace(self, former: FormerRows, shard: int, damaged: Mapping[Path, str]) -> Source | None:
        """A shard without an intact file, from its rows in merged.h5; None if they are damaged."""
        restored = self._restore(former, shard, damaged.get(self.run.revision_path(shard, 0)))
        return self._source(shard, [0]) if restored else None

    def _keep(
        self,
        former: FormerRows,
        shard: int,
        revisions: Sequence[int],
        failed: Places,
        damaged: Mapping[Path, str],
    ) -> Source | None:
        """A shard's next revision, in which good rows of merged.h5 replace errors; None if there are none.

        If the shard's newest file is damaged and merged.h5 has its rows, these replace all older rows.
        """
        *older, newest = revisions
        is_damaged = self.run.revision_path(shard, newest) in damaged
        start, stop = self.run.plan.bounds(shard)
        try:
            good: set[int] = {*failed.tolist()}
            if is_damaged and not any(self._has_same(former, shard, revision) for revision in older):
                good = set(range(start, stop))  # merged.h5 took them from the damaged file
            good -= former.failed(shard)
            if not good:
                return None
            rows = former.rows(shard)
            now = former_rows(self.run, shard, newest + 1, self.columns)
        except DamagedShardError as error:
            log.error("rows of shard %d in merged.h5 cannot be kept: %s", shard, error)
            self.damaged = self.damaged or str(error)
            return None
        why = "its newest file is damaged" if is_damaged else "recomputing them failed"
        log.warning("shard %d: %d rows of merged.h5 are kept, because %s", shard, len(good), why)
        combined = put_over(now.rows, {index: rows[index - start] for index in good}, start)
        made_by = now.made_by
        for stretch in former.code(shard):
            if kept := sorted(index for index in good if stretch.start <= index < stretch.stop):
                made_by = made_again(made_by, {**_maker(), "code": stretch.digest}, kept)
        publish_rows(self.run, shard, newest + 1, self.columns, combined, now.notes, made_by)
        return self._source(shard, [*revisions, newest + 1])

    def _has_same(self, former: FormerRows, shard: int, revision: int) -> bool:
        """Whether merged.h5 has the rows of this file."""
        try:
            directory = read_directory(self.run.revision_path(shard, revision))
        except (DamagedShardError, FileNotFoundError):
            return False
        return former.are_of(shard, directory)


def _maker() -> Maker:
    """The maker of rows that a merge took from an earlier merged.h5."""
    return {"attempt": "merge", "started": time.time(), "seconds": 0.0}


def _made_by(code: Sequence[Stretch]) -> MadeBy:
    """The makers of rows that a merge took from an earlier merged.h5, given the code that computed them."""
    found = makers_of(code)
    return {**_maker(), **found, "revisions": [{**_maker(), **each} for each in found.get("revisions", ())]}
