"""Revisions: shards in which rows of some items take the place of former ones, published beside the former file.

A good row is replaced by a good row alone. So nothing that happens to a revision, or to who computes it, takes a row
away: the file before it stays, and holds what it held.
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
from slurmgpu.shards.shard_file import DamagedShardError, publish, read_rows, write_shard
from slurmgpu.util.atomic_files import own_name
from slurmgpu.util.shared_files import remove

Row = Mapping[str, Any] | ItemError


@dataclass(frozen=True)
class Former:
    """The rows of a shard before a revision, its notes, and what it says of its makers."""

    rows: Sequence[Row]
    notes: Mapping[str, Any]
    made_by: Mapping[str, Any]


def former_rows(run: Run, shard: int, before: int, columns: Mapping[str, Column]) -> Former:
    """What a shard's newest whole file before revision `before` holds; DamagedShardError where there is none.

    Each file is asked for by its name, as a listing may be old, and is damaged only if it is so in two readings.
    """
    start, stop = run.plan.bounds(shard)
    problems = []
    for revision in reversed(range(before)):
        path = run.revision_path(shard, revision)
        try:
            read = functools.partial(read_rows, path, columns, fingerprint=run.plan.fingerprint, start=start, stop=stop)
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
    """The former rows of the items from `start` on, with `rows` over them, by index; but no error over a good row."""
    combined = list(former)
    for index, row in rows.items():
        if not isinstance(row, ItemError) or isinstance(former[index - start], ItemError):
            combined[index - start] = row
    return combined


def made_again(former: Mapping[str, Any], made_by: Mapping[str, Any], indices: Sequence[int]) -> dict[str, Any]:
    """What a revision says of its makers: those of the former file, and at the end of `revisions` who made `indices`.

    A row was made by the last revision that names its item, else by the maker of the shard.
    """
    entry = {**made_by, "items": [list(span) for span in spans_of(sorted(indices))]}
    return {**former, "revisions": [*former.get("revisions", ()), entry]}


def publish_rows(
    run: Run,
    shard: int,
    revision: int,
    columns: Mapping[str, Column],
    rows: Sequence[Row],
    notes: Mapping[str, Any],
    made_by: Mapping[str, Any],
) -> Path:
    """Publish rows that are at hand as a revision of a shard; where it lies, also if another was there first."""
    target = run.revision_path(shard, revision)
    partial = own_name(target)
    start, _ = run.plan.bounds(shard)
    try:
        write_shard(
            partial,
            columns,
            start=start,
            rows=rows,
            fingerprint=run.plan.fingerprint,
            notes=notes,
            made_by=made_by,
        )
        publish(partial, target)
    finally:
        remove(partial)
    return target
