"""The default size of shards, from the size of the input, and for a small input from the number of tasks."""

from __future__ import annotations

from dataclasses import dataclass

from slurmgpu.util.amounts import count_of

TARGET_SHARDS = 2048
"""The most shards by default: enough for balance over hundreds of GPUs, few enough for one directory."""


@dataclass(frozen=True)
class ShardSize:
    """The items per shard, the parts per item, and a note for the user if they depend on the number of tasks."""

    n_items: int
    parts: int = 1
    note: str | None = None


def default_shard_items(n_items: int, batch_size: int, most_shards: int = TARGET_SHARDS) -> int:
    """The items per shard by the input's size alone: whole batches, for at most `most_shards` shards."""
    return batch_size * -(-n_items // (batch_size * most_shards))


def shard_size(
    n_items: int, batch_size: int, n_tasks: int, most_shards: int = TARGET_SHARDS, most_parts: int = 1
) -> ShardSize:
    """The default size of a shard; if there are more tasks than such shards, an equal share of items for each task.

    If even shards of one item are too few, each item is computed in several parts: only as many as there are tasks for,
    because an item in parts takes more GPU time in total.
    """
    size = default_shard_items(n_items, batch_size, most_shards)
    part = -(-n_items // n_tasks)
    n_shards, n_shares = -(-n_items // size), -(-n_items // part)
    note = None
    if n_shares > n_shards:  # at most n_tasks
        note = (
            f"{count_of(n_items, 'item')} are cut into {count_of(n_shares, 'shard')} of {part:,} (instead of "
            f"{n_shards:,} of {size:,}), so that {n_shares:,} tasks have one each; shard_items sets another size."
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
