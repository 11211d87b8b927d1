"""The size of shards, unless the run file sets it: by the input, and for a small one by the tasks."""

from __future__ import annotations

from dataclasses import dataclass

from slurmgpu.util.amounts import count_of

TARGET_SHARDS = 2048
"""The most shards by the input's size: enough for balance over hundreds of GPUs, few enough for one directory."""


@dataclass(frozen=True)
class ShardSize:
    """The items of a shard, the parts of each item, and a note for the user if a run with one task has others."""

    n_items: int
    parts: int = 1
    note: str | None = None


def default_shard_items(n_items: int, batch_size: int, most_shards: int = TARGET_SHARDS) -> int:
    """Items in a shard by the input's size alone: whole batches, for at most so many shards."""
    return batch_size * -(-n_items // (batch_size * most_shards))


def shard_size(
    n_items: int, batch_size: int, n_tasks: int, most_shards: int = TARGET_SHARDS, most_parts: int = 1
) -> ShardSize:
    """The default size of a shard, but an equal part for each of the tasks where they are more than such shards.

    Each item of a shard of its own is computed in several parts where there are tasks for them: never in more, since an
    item in parts takes a GPU longer than in one.
    """
    size = default_shard_items(n_items, batch_size, most_shards)
    part = -(-n_items // n_tasks)
    n_shards, n_shares = -(-n_items // size), -(-n_items // part)
    note = None
    if n_shards < n_tasks and n_shares > n_shards:
        note = (
            f"{count_of(n_items, 'item')} are cut into {count_of(n_shares, 'shard')} of {part:,}, in place of "
            f"{n_shards:,} of {size:,}, so that {n_shares:,} tasks have one each; shard_items sets another size."
        )
        size = part
    parts = max(1, min(n_tasks // n_items, most_parts)) if min(size, n_items) == 1 else 1
    if parts > 1:
        each = "The item is" if n_items == 1 else f"Each of {n_items:,} items is"
        note = (
            f"{each} computed in {parts} parts, so that {n_items * parts:,} tasks have one each; shard_items = 1 "
            f"computes {'it' if n_items == 1 else 'them'} whole, which takes less time on few tasks."
        )
    return ShardSize(size, parts, note)
