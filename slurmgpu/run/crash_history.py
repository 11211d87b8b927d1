"""Deaths of workers in a shard, kept next to its claim for the next worker, whichever task runs it.

A worker may die because of an item, or because it was killed from outside. It is not known which, so deaths have
weights: a death of the process itself (a segfault, an exit) counts 1, a kill from outside 1/2. A batch that weighs 1 is
computed item by item; an item that weighs 1 alone, and 2 together with the batch it came from, is quarantined. So an
item that segfaults costs two workers, and one or two accidental kills change nothing in the results.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slurmgpu.util.atomic_files import write_json
from slurmgpu.util.shared_files import FULL, read_bytes

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
"""More than the history of a shard of a million items has."""


@dataclass
class History:
    """Deaths of workers in one shard: weights by the first item of the call, and by item where it was alone.

    A call has a batch, or a part of one that failed or was too large. `quarantined` maps an item's index to the `error`
    of its row. `parked_by` is the submission that left the shard to one with more memory.
    """

    batch_weights: dict[int, float] = field(default_factory=dict)
    item_weights: dict[int, float] = field(default_factory=dict)
    quarantined: dict[int, str] = field(default_factory=dict)
    parked_by: int | None = None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> History:
        """A history from the JSON of its `asdict`, whose keys are texts."""
        return cls(
            batch_weights=_by_index(value["batch_weights"]),
            item_weights=_by_index(value["item_weights"]),
            quarantined={int(index): str(error) for index, error in value["quarantined"].items()},
            parked_by=None if value["parked_by"] is None else int(value["parked_by"]),
        )

    def record(
        self,
        items: Sequence[int],
        *,
        isolated: bool,
        weight: float,
        error: str,
        is_sole: bool = True,
        is_sure: bool = False,
    ) -> int | None:
        """Count a death with `items` in flight; return the item that is quarantined by it, if any.

        If other items were being prepared, the items are not `is_sole`, and none is blamed alone. `is_sure`: the items
        caused the death, so a sole one is quarantined by its first.
        """
        first = items[0]
        if not isolated:
            self.suspect(first, weight)
        if len(items) > 1 or not is_sole:
            return None
        alone = self.item_weights[first] = self.item_weights.get(first, 0.0) + weight
        # A batch of one adds no evidence to the item's own.
        batch = max(self.batch_weights.values(), default=0.0) if isolated else 0.0
        if is_sure or (alone >= 1 and alone + min(batch, 1.0) >= 2):
            self.quarantined[first] = error
            return first
        return None

    def suspect(self, first: int, weight: float) -> None:
        """Count a death while the call that begins with the item `first` was computed or prepared."""
        self.batch_weights[first] = self.batch_weights.get(first, 0.0) + weight

    def forget(self, items: Sequence[int]) -> bool:
        """Forget deaths with `items`, which have progressed since; return whether there were any."""
        both = (self.batch_weights, self.item_weights)
        weights = [weights.pop(item, None) for weights in both for item in items]
        return any(weight is not None for weight in weights)

    def isolates(self, items: Iterable[int]) -> bool:
        """Whether to compute the batch of these items item by item."""
        if not (self.batch_weights or self.quarantined):
            return False
        batch = list(items)
        # The call that killed a worker may have begun in the middle: the next worker begins with the whole batch.
        weight = sum(self.batch_weights.get(index, 0.0) for index in batch)
        return weight >= 1 or any(index in self.quarantined for index in batch)


def history_path(claims: Path, shard: int) -> Path:
    """The path of a shard's history, which few shards have."""
    return claims / f"{shard:05d}.history"


def read_history(claims: Path, shard: int) -> History:
    """The history of a shard; an empty one without a file, and if that is damaged or cannot be read."""
    path = history_path(claims, shard)
    try:
        content = read_bytes(path, max_bytes=MAX_BYTES)
        return History.from_json(json.loads(content))
    except FileNotFoundError:
        return History()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        # The item may kill a few more workers, which is better than not to compute the shard.
        log.warning("%s is damaged and treated as empty: %s: %s", path, type(error).__name__, error)
        return History()


def write_history(claims: Path, shard: int, history: History) -> None:
    """Write a shard's history; an error is logged, except that of a full disk, which is raised."""
    path = history_path(claims, shard)
    try:
        write_json(path, asdict(history))
    except OSError as error:
        if error.errno in FULL:
            raise
        log.warning("%s cannot be written: %s", path, error)


def _by_index(weights: Mapping[str, float]) -> dict[int, float]:
    return {int(index): float(weight) for index, weight in weights.items()}
