"""A process of a training: its rank, its device, and callbacks to the outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """One process of a training: its device, and its rank as torchrun counts.

    On rank 0, `stopping()` is true when the training shall save a checkpoint and end. `progress(text)` reports saved
    progress beyond all earlier attempts: a process that dies later has died of something new. `tell(text)` reports the
    present state every few seconds, saved or not.
    """

    device: str = "cpu"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    stopping: Callable[[], bool] = lambda: False
    progress: Callable[[str], None] = lambda text: None
    tell: Callable[[str], None] = lambda text: None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes shared files."""
        return self.rank == 0
