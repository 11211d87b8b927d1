"""Train one configuration in this process, one of its task's processes, and make its row. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slurmgpu.training.checkpoints import Checkpoints
from slurmgpu.training.loop import Training
from slurmgpu.training.ranks import Place, on_all_ranks, on_rank_zero
from slurmgpu.training.resumption import Version
from slurmgpu.training.settings import TrainingSettings
from slurmgpu.training.states import seed_everything
from slurmgpu.training.strategy import init_process_group
from slurmgpu.util.exceptions import message_of
from slurmgpu.util.gpus import visible_ids
from slurmgpu.util.nvml import Cards, open_cards
from slurmgpu.util.out_of_memory import free_memory
from slurmgpu.workload import Row, TaskContext
from slurmgpu.workloads.train.rows import read_result, row_of, write_result


def row(
    make: Callable[[], Any], settings: TrainingSettings, task: TaskContext, folder: Path, config: Mapping[str, Any]
) -> Row:
    """Train, unless `result.json` already has the finished row from the same code; returns the row on all ranks.

    Leaves `result.json` and weights in the folder, and removes checkpoints. Raises Interrupted after writing a
    checkpoint, and any error from the user's class.
    """
    ways = task.stopping, task.progress, task.tell, task.log
    place = Place(task.device, task.rank, task.world_size, task.local_rank, *ways)
    init_process_group(place)
    kept = on_rank_zero(place, lambda: read_result(folder, task.code))
    if kept is None:
        _free_memory(settings)
        with _energy(place) as used_j, _advised(settings):
            seed_everything(settings.seed or 0)  # __init__ may draw random numbers
            version = Version(task.code, is_again=on_rank_zero(place, task.is_again))
            outcome = Training(make(), settings, place, folder, version).run()
            energy_j = sum(on_all_ranks(place, used_j))
        kept = row_of(outcome, config=config, weights=_weights(folder), seed=settings.seed, energy_j=energy_j)
        on_rank_zero(place, lambda: write_result(folder, kept, task.code))
    Checkpoints(folder, place).clear()  # only after the result, which replaces them, is written
    return kept


def _free_memory(settings: TrainingSettings) -> None:
    free_memory()
    if settings.compile:
        torch.compiler.reset()  # all models share code, and torch limits its recompilations


@contextmanager
def _energy(place: Place) -> Iterator[Callable[[], float]]:
    """The joules that this process's GPU has used so far; NaN if unknown."""
    cards = open_cards(visible_ids()) if place.device != "cpu" else None
    before = _joules(cards, place.local_rank)
    try:
        yield lambda: _joules(cards, place.local_rank) - before
    finally:
        if cards is not None:
            cards.close()


def _joules(cards: Cards | None, number: int) -> float:
    if cards is None or number >= len(cards.cards):
        return math.nan
    found = cards.cards[number].read().energy_j
    return math.nan if found is None else found


@contextmanager
def _advised(settings: TrainingSettings) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = message_of(error).partition("\n")[0]
        raise torch.OutOfMemoryError(
            f'batch_size = {settings.batch_size} needs more memory than the GPU has. Set batch_size = "auto", or a '
            f"smaller one with more accumulation, or gradient_checkpointing = true. {said}"
        ) from error


def _weights(folder: Path) -> str:
    name = next((name for name in ("best.pt", "last.pt") if (folder / name).exists()), "")
    return f"{folder.parent.name}/{folder.name}/{name}" if name else ""
