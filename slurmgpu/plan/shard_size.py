"""How many items a shard has, unless the run file says it: by the input, and for a small one by the tasks."""

from __future__ import annotations

from dataclasses import dataclass

from slurmgpu.util.plurals import count_of

TARGET_SHARDS = 2048
"""The most shards by the input's size: enough for balance over hundreds of GPUs, few enough for one directory."""


@dataclass(frozen=True)
class ShardSize:
    """The items of a shard, and a note for the user if it has fewer than a run with one task would have."""

    n_items: int
    note: str | None = None


def default_shard_items(n_items: int, batch_size: int, most_shards: int = TARGET_SHARDS) -> int:
    """Items in a shard by the input's size alone: whole batches, for at most so many shards."""
    return batch_size * -(-n_items // (batch_size * most_shards))


def shard_size(n_items: int, batch_size: int, n_tasks: int, most_shards: int = TARGET_SHARDS) -> ShardSize:
    """The default size of a shard, but an equal part for each of the tasks where they are more than such shards."""
    size = default_shard_items(n_items, batch_size, most_shards)
    part = -(-n_items // n_tasks)
    n_shards, n_parts = -(-n_items // size), -(-n_items // part)
    if n_shards >= n_tasks or n_parts <= n_shards:
        return ShardSize(size)
    return ShardSize(
        part,
        f"{count_of(n_items, 'item')} are cut into {count_of(n_parts, 'shard')} of {part:,}, in place of "
        f"{n_shards:,} of {size:,}, so that {n_parts:,} tasks have one each; shard_items sets another size.",
    )


def parts_of(n_items: int, n_tasks: int, most_parts: int) -> tuple[int, str | None]:
    """Into how many parts tasks divide each item of a shard of its own, and a note if they do.

    Never into more parts than there are tasks for: an item in parts takes a GPU longer than in one.
    """
    parts = max(1, min(n_tasks // n_items, most_parts))
    if parts == 1:
        return 1, None
    each = "The item is" if n_items == 1 else f"Each of {n_items:,} items is"
    return parts, (
        f"{each} computed in {parts} parts, so that {n_items * parts:,} tasks have one each; shard_items = 1 computes "
        f"{'it' if n_items == 1 else 'them'} whole, which takes less time on few tasks."
    )
