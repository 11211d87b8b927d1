"""Computed shards that a worker holds back until one shows that the workload works."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from slurmgpu.worker.assignment import WorkerFailedError
from slurmgpu.worker.call_failures import Failure
from slurmgpu.worker.computed_shard import ComputedShard, common_failure

FEW, MANY, LONG_S = 8, 100, 60.0
"""The workload is at fault if MANY items failed alike before any was computed, or FEW once that has taken LONG_S: of
two shards, if there are more. If 95 of 100 items fail alike, MANY do so in fewer than one of a hundred runs."""


def is_enough(n_items: int, seconds: float) -> bool:
    """Whether the workload is at fault, if `n_items` failed in the same way in these seconds and none was computed."""
    return n_items >= MANY or (n_items >= FEW and seconds >= LONG_S)


@dataclass
class Unpublished:
    """Computed shards that are held back: all of their items failed alike, so the workload may be at fault.

    `is_any_published()` says whether any task of the run has published a shard; `is_trusted` whether the workload is
    known to work.
    """

    is_any_published: Callable[[], bool]
    is_trusted: bool = False
    _shards: list[ComputedShard] = field(default_factory=list)
    _began: float = 0.0

    def begin(self) -> None:
        """A shard begins to be computed."""
        if not self._shards:
            self._began = time.monotonic()

    def add(self, one: ComputedShard) -> None:
        """A shard is computed."""
        self._shards.append(one)

    def doubts(self) -> bool:
        """Whether no shard shows yet that the workload works, neither one of this worker nor one of the run."""
        self.is_trusted = self.is_trusted or self.is_any_published()
        return not self.is_trusted

    def is_enough(self, n_failed: int = 0) -> bool:
        """Whether the workload is at fault, if `n_failed` items of the current shard fail like those held back."""
        return is_enough(n_failed + self._n_items, time.monotonic() - self._began)

    def wants_another(self) -> bool:
        """Whether items of another shard, drawn at random, are needed to decide whether the workload is at fault."""
        is_decided = len(self._shards) > 1 and self.is_enough()
        return not is_decided and self._common_failure() is not None and self.doubts()

    def take(self, *, weighed: bool) -> list[ComputedShard]:
        """The shards, to be published.

        With `weighed`, WorkerFailedError if enough items failed in the same way, and no shard shows that the workload
        works.
        """
        alike = self._common_failure() if weighed else None
        is_much, shards, self._shards = self._n_items >= FEW, self._shards, []
        if alike is not None and is_much and self.doubts():
            raise WorkerFailedError("workload_error", alike.message, alike.trace)
        self.is_trusted = self.is_trusted or bool(shards)
        return shards

    @property
    def _n_items(self) -> int:
        return sum(len(one.computed.rows) for one in self._shards)

    def _common_failure(self) -> Failure | None:
        return common_failure([one.computed for one in self._shards])
