"""Collectives of results and errors among the ranks of a training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.training.places import Place

T = TypeVar("T")
Told = tuple[str, int | None, str]
"""An exception as sent to other ranks: its kind, errno and text."""

KINDS: dict[str, type[Exception]] = {"ItemError": ItemError, "SlurmGPUError": SlurmGPUError}


def together(place: Place, action: Callable[[], T]) -> list[T]:
    """The results of `action` on all ranks, in rank order; raises on all ranks if it raises on any."""
    value: T | None = None
    error: Exception | None = None
    try:
        value = action()
    except Exception as found:
        error = found
    outcomes = _gather(place, (value, None if error is None else _tell(error)))
    if error is not None:
        raise error
    for rank, (_, told) in enumerate(outcomes):
        if told is not None:
            raise _retell(rank, told)
    return [outcome for outcome, _ in outcomes]  # type: ignore[misc]


def led(place: Place, action: Callable[[], T]) -> T:
    """The result of `action` on rank 0, which alone calls it; its exceptions are raised on all ranks."""
    return together(place, lambda: action() if place.leads else None)[0]  # type: ignore[return-value]


def _gather(place: Place, value: T) -> list[T]:
    if place.world_size == 1:
        return [value]
    values: list[T | None] = [None] * place.world_size
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def _tell(error: Exception) -> Told:
    kind = next((name for name, each in KINDS.items() if isinstance(error, each)), type(error).__name__)
    return kind, error.errno if isinstance(error, OSError) else None, str(error)


def _retell(rank: int, told: Told) -> Exception:
    kind, number, text = told
    if number is not None:
        return OSError(number, f"rank {rank}: {text}")
    if kind in KINDS:
        return KINDS[kind](text)
    return RuntimeError(f"rank {rank}: {kind}: {text}")
