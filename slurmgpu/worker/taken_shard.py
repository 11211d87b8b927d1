"""A shard that a task takes to compute: its crash history, and its items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurmgpu.errors import ItemError
from slurmgpu.run.crash_history import History
from slurmgpu.run.recompute import Spans
from slurmgpu.worker.call_failures import Failure
from slurmgpu.workload import Item

Read = list[Item | tuple[int, ItemError]]
"""Items, an unreadable one as (index, ItemError)."""


@dataclass
class TakenIn:
    """The items of a shard in `batches`, and its `rows` so far: Failures of items that cannot be read or sorted.

    `names` and `kept` are the names and kept fields of items, by index.
    """

    rows: dict[int, Mapping[str, Any] | Failure] = field(default_factory=dict)
    batches: list[list[Item]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    kept: dict[int, Mapping[str, Any]] = field(default_factory=dict)


@dataclass
class Taken:
    """A shard that this task computes: its crash history, and the items to compute.

    If it `is_joined`, another task holds it, and this one computes parts of its item. `taken_in` are the items as the
    computer takes them, once they are read.
    """

    shard: int
    history: History
    spans: Spans
    taken_in: TakenIn | None = None
    is_joined: bool = False
