"""Write computed shards to files and publish them; if others are claimed ahead, in a second thread."""

from __future__ import annotations

import errno
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from slurmgpu.run.directory import Run
from slurmgpu.run.failures import FILES, class_of
from slurmgpu.run.revisions import Former, Row, former_rows, made_again, put_over
from slurmgpu.run.worker_events import Report
from slurmgpu.shards.columns import Column
from slurmgpu.shards.made_by import MadeBy
from slurmgpu.shards.names import partial_name
from slurmgpu.shards.shard_file import publish, sync_names, write_shard
from slurmgpu.util.atomic_files import once_more_if_full
from slurmgpu.util.shared_files import retried
from slurmgpu.worker.assignment import Assignment, WorkerFailedError
from slurmgpu.worker.call_failures import Failure
from slurmgpu.worker.computed_shard import ComputedShard
from slurmgpu.worker.side_thread import SideThread

log = logging.getLogger("slurmgpu.worker")

SYNC_S = 1.0
"""The shortest time between two syncs of the names of published shards, in seconds. A power failure may lose the names
since the last one; those shards are computed again."""


@dataclass
class Publisher:
    """Publishes the shards of one worker, one after another.

    `begin` writes in a thread if `is_beside` is set, and `end` waits for that; otherwise `begin` does all of it.
    `on_published` is called in the thread that computes, after each shard; `report` may be called in the other one if
    `reports_in_threads`. `slowest_s` is the longest time that a published shard took.
    """

    run: Run
    assignment: Assignment
    columns: Mapping[str, Column]
    report: Report
    on_published: Callable[[], None]
    reports_in_threads: bool
    is_beside: bool = False
    slowest_s: float = 0.0
    _former: dict[int, Former] = field(default_factory=dict)
    _writing: tuple[ComputedShard, Future[bool]] | None = None
    _thread: SideThread = field(default_factory=lambda: SideThread("publish"))
    _synced: float = -math.inf
    _is_synced: bool = True

    def read_former(self, shard: int, revision: int) -> None:
        """Read a shard's former revision, of which new rows replace some; raises DamagedShardError."""
        self._former[shard] = retried(
            lambda: former_rows(self.run, shard, revision, self.columns), self.run.plan.lease_s
        )

    def begin(self, one: ComputedShard) -> None:
        """Publish a shard; with `is_beside` it is published by the next `end`. Raises WorkerFailedError."""
        if not self.is_beside:
            won = self._write_patiently(one)
            self._note(one)
            self._report(one, won)
        else:
            self.end()
            self._writing = one, self._thread.begin(lambda: self._write_beside(one))

    def end(self, *, waits: bool = True) -> None:
        """Wait until the last shard is published, and note it; without `waits`, only if it is. WorkerFailedError."""
        if self._writing is not None and (waits or self._writing[1].done()):
            (one, future), self._writing = self._writing, None
            won = future.result()
            self._note(one)
            if not self.reports_in_threads:
                self._report(one, won)

    def close(self) -> None:
        """End the thread, and sync the names of published shards."""
        self._thread.close()
        self._sync_names()

    def _write_beside(self, one: ComputedShard) -> bool:
        won = self._write_patiently(one)
        if self.reports_in_threads:  # at once, because this process may die in the current call
            self._report(one, won)
        return won

    def _write_patiently(self, one: ComputedShard) -> bool:
        try:
            # After a failure, write everything again: it is unknown which bytes arrived.
            return once_more_if_full(lambda: retried(lambda: self._write(one), self.run.plan.lease_s))
        except OSError as error:
            where = "" if error.filename else f" in {self.run.shards}"
            raise WorkerFailedError(
                class_of(error, FILES), f"shard {one.shard} cannot be written{where}: {error}"
            ) from error

    def _write(self, one: ComputedShard) -> bool:
        """Write a shard's file and publish it; False if another task published it first."""
        rows, notes, made_by = self._contents(one)
        partial = self.run.shards / partial_name(one.shard, self.assignment.attempt)
        write_shard(
            partial,
            self.columns,
            start=self.run.plan.bounds(one.shard)[0],
            indices=self.run.plan.indices(*self.run.plan.bounds(one.shard)),
            rows=rows,
            fingerprint=self.run.plan.fingerprint,
            notes=notes,
            made_by=made_by,
        )
        try:
            return publish(partial, self.run.shard_path(one.shard), sync=False)
        except FileNotFoundError as error:  # removed by a merge that took this task for dead
            raise OSError(errno.ESTALE, "removed before it was published", str(partial)) from error

    def _contents(self, one: ComputedShard) -> tuple[list[Row], dict[str, Any], MadeBy]:
        places = (place for span in self.run.items_of(one.shard) for place in range(*span))
        computed = (
            row.to_row(one.computed.kept.get(index, {})) if isinstance(row, Failure) else row
            for index, row in one.computed.rows.items()
        )
        made_by: MadeBy = {
            "attempt": self.assignment.attempt,
            "started": one.started,
            "seconds": one.seconds,
            "code": one.code,
        }
        if (former := self._former.get(one.shard)) is None:
            return list(computed), one.computed.notes(), made_by
        start, _ = self.run.plan.bounds(one.shard)
        rows = dict(zip(places, computed, strict=True))
        combined = put_over(former.rows, rows, start)
        replaced = [index for index, row in rows.items() if combined[index - start] is row]
        notes = {**former.notes, **one.computed.notes()}
        return combined, notes, made_again(former.made_by, made_by, replaced)

    def _note(self, one: ComputedShard) -> None:
        self._former.pop(one.shard, None)
        self._is_synced = False
        if time.monotonic() - self._synced >= SYNC_S:
            self._sync_names()
        self.on_published()
        self.slowest_s = max(self.slowest_s, one.seconds)

    def _report(self, one: ComputedShard, won: bool) -> None:
        shard, computed = one.shard, one.computed
        failures = {index: row for index, row in computed.rows.items() if isinstance(row, Failure)}
        errors = Counter(row.kind for row in failures.values())
        last_failed = None
        if failures:
            index, row = [*failures.items()][-1]
            last_failed = f"item {index}: {row.kind}: {row.first_line}"
        how = "published" if won else "computed, but another task published it first"
        n_rows = len(computed.rows)
        log.info("shard %d: %s after %.1f s; %d of %d items failed", shard, how, one.seconds, errors.total(), n_rows)
        self.report(
            {
                "event": "published",
                "shard": shard,
                "items": n_rows,
                "errors": dict(errors),
                "last_failed": last_failed,
                "started": one.started,
                "won": won,
                "revision": self.run.revision_to_make(shard),
                "seconds": one.seconds,
            }
        )

    def _sync_names(self) -> None:
        """Sync the names of the shards that were published since the last time."""
        if not self._is_synced:
            sync_names(self.run.shards)
            self._is_synced, self._synced = True, time.monotonic()
