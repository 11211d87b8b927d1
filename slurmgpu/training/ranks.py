"""The ranks of a training: their places, and collectives of results and errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.util.exceptions import message_of

T = TypeVar("T")
Told = tuple[str, int | None, str]
"""An exception as sent to other ranks: its kind, errno and text."""

KINDS: dict[str, type[Exception]] = {"ItemError": ItemError, "SlurmGPUError": SlurmGPUError}


@dataclass(frozen=True)
class Place:
    """One process of a training: its device, and its rank as torchrun counts.

    On rank 0, `stopping()` is true when the training must save a checkpoint and end. `progress(text)` reports saved
    progress beyond all earlier attempts: if the process dies later, the cause is new. `tell(text)` reports the current
    state every few seconds, saved or not. `log(step, **values)` logs numbers of a step.
    """

    device: str = "cpu"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    stopping: Callable[[], bool] = lambda: False
    progress: Callable[[str], None] = lambda text: None
    tell: Callable[[str], None] = lambda text: None
    log: Callable[..., None] = lambda step, **values: None

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0, which writes shared files."""
        return self.rank == 0


def on_all_ranks(place: Place, action: Callable[[], T]) -> list[T]:
    """The results of `action` on all ranks, in rank order; raises on all ranks if it raises on any."""
    value: T | None = None
    error: BaseException | None = None
    try:
        value = action()
    except KeyboardInterrupt:
        raise
    except BaseException as found:  # the other ranks must hear of it
        error = found
    own = value, None if error is None else _tell(error)
    outcomes: list[Any] = [own] * place.world_size
    if place.world_size > 1:
        dist.all_gather_object(outcomes, own)
    if error is not None:
        raise error
    for rank, (_, told) in enumerate(outcomes):
        if told is not None:
            raise _retell(rank, told)
    return [outcome for outcome, _ in outcomes]


def on_rank_zero(place: Place, action: Callable[[], T]) -> T:
    """The result of `action` on rank 0, which alone calls it; its exceptions are raised on all ranks."""
    return on_all_ranks(place, lambda: action() if place.is_rank_zero else None)[0]  # type: ignore[return-value]  # rank 0 has called it


def _tell(error: BaseException) -> Told:
    kind = next((name for name, each in KINDS.items() if isinstance(error, each)), type(error).__name__)
    return kind, error.errno if isinstance(error, OSError) else None, message_of(error)


def _retell(rank: int, told: Told) -> Exception:
    kind, number, text = told
    if number is not None:
        return OSError(number, f"rank {rank}: {text}")
    if kind in KINDS:
        return KINDS[kind](text)
    return RuntimeError(f"rank {rank}: {kind}: {text}")
