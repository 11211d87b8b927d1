"""Revisions: shards in which rows of some items replace former ones, published beside the former file.

A good row is only replaced by another good row, and the former file stays: no row is lost, whatever happens to a
revision or to the task that computes it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmgpu.errors import ItemError
from slurmgpu.run.directory import Run
from slurmgpu.run.recompute import spans_of
from slurmgpu.shards.columns import Column
from slurmgpu.shards.made_by import LaterMaker, MadeBy, Maker
from slurmgpu.shards.shard_file import publish, read_rows, write_shard
from slurmgpu.shards.userblock import DamagedShardError
from slurmgpu.util.atomic_files import partial_path
from slurmgpu.util.shared_files import remove

Row = Mapping[str, Any] | ItemError


@dataclass(frozen=True)
class Former:
    """The rows, notes and makers of a shard before a revision."""

    rows: Sequence[Row]
    notes: Mapping[str, Any]
    made_by: MadeBy


def former_rows(run: Run, shard: int, before: int, columns: Mapping[str, Column]) -> Former:
    """The content of a shard's newest whole file before revision `before`; DamagedShardError if there is none.

    Files are opened by name, as a listing may be old. A file is damaged only if two readings say so.
    """
    start, stop = run.plan.bounds(shard)
    problems = []
    for revision in reversed(range(before)):
        path = run.revision_path(shard, revision)
        try:
            read = functools.partial(
                read_rows, path, columns, fingerprint=run.plan.fingerprints, start=start, stop=stop
            )
            try:
                rows, found = read()
            except DamagedShardError:
                rows, found = read(again=True)
            return Former(rows, found.notes, found.made_by)
        except FileNotFoundError:
            continue
        except DamagedShardError as error:
            problems.append(f"{path.name}: {error}")
    raise DamagedShardError("; ".join(problems) or f"shard {shard} is not published")


def put_over(former: Sequence[Row], rows: Mapping[int, Row], start: int) -> list[Row]:
    """The former rows of the items from `start` on, replaced by `rows`, by index; no error replaces a good row."""
    combined = list(former)
    for index, row in rows.items():
        if not isinstance(row, ItemError) or isinstance(former[index - start], ItemError):
            combined[index - start] = row
    return combined


def made_again(former: MadeBy, made_by: Maker, indices: Sequence[int]) -> MadeBy:
    """The makers of a revision: those of the former file, and in `revisions` also the maker of `indices`.

    A row was made by the last revision that names its item, else by the maker of the shard.
    """
    entry: LaterMaker = {**made_by, "items": [list(span) for span in spans_of(sorted(indices))]}
    return {**former, "revisions": [*former.get("revisions", ()), entry]}


def publish_rows(
    run: Run,
    shard: int,
    revision: int,
    columns: Mapping[str, Column],
    rows: Sequence[Row],
    notes: Mapping[str, Any],
    made_by: MadeBy,
) -> Path:
    """Publish rows as a revision of a shard; its path, also if another attempt published it first."""
    target = run.revision_path(shard, revision)
    partial = partial_path(target)
    start, stop = run.plan.bounds(shard)
    try:
        write_shard(
            partial,
            columns,
            start=start,
            indices=run.plan.indices(start, stop),
            rows=rows,
            fingerprint=run.plan.fingerprint,
            notes=notes,
            made_by=made_by,
        )
        publish(partial, target)
    finally:
        remove(partial)
    return target
