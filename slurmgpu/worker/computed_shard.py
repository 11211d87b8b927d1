"""A shard that a task has computed: its rows or failures, and how it was computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from slurmgpu.worker.call_failures import Failure


@dataclass
class Computed:
    """A shard's rows in item order, converted or Failures, and how its batches changed.

    A sample has rows of some items only, which all failed alike. `kept` are the stored values of the fields that failed
    items keep. `oom_batch` is the batch size that fitted into memory, 0 if it was never short. `noted` are the
    workload's notes.
    """

    rows: dict[int, Mapping[str, Any] | Failure]
    kept: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    is_sample: bool = False
    oom_batch: int = 0
    isolated: int = 0
    noted: Mapping[str, float] = field(default_factory=dict)

    def notes(self) -> dict[str, float]:
        """The shard's notes: the workload's, and changed batches."""
        notes = {"oom_batch": self.oom_batch, "isolated_batches": self.isolated}
        return {**self.noted, **{name: value for name, value in notes.items() if value}}


@dataclass(frozen=True)
class ComputedShard:
    """A computed shard: when it was `started`, in seconds since the epoch, and how many `seconds` it took.

    `code` is the digest of the code that has computed it, None if that is unknown.
    """

    shard: int
    computed: Computed
    started: float
    seconds: float
    code: str | None


def common_failure(shards: Sequence[Computed]) -> Failure | None:
    """The failure of all items of these shards, if all raised at the same place."""
    first: Failure | None = None
    for row in chain.from_iterable(shard.rows.values() for shard in shards):
        if not isinstance(row, Failure) or row.way is None or (first is not None and row.way != first.way):
            return None
        first = first or row
    return first
