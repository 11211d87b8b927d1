"""Where a process of a training stands among the others, and how it hears of and tells the world outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """One process of a training: its device, and its rank as torchrun counts.

    `stopping()` is true, on rank 0, when the training shall leave a checkpoint and end; `progress(text)` tells that it
    has got further than ever before, so that whatever kills it next has killed it again; `tell(text)` tells, every few
    seconds, where it is, whether that is kept or not.
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
        """Whether this is rank 0, which writes what all share."""
        return self.rank == 0
