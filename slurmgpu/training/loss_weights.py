"""Weights of batches whose loss is not a mean over samples, over all processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from slurmgpu.training.batches import Step
from slurmgpu.training.ranks import Place
from slurmgpu.training.user_methods import optional_method


class LossWeights:
    """Calls `user.weight(batch)`, if it exists: the number of tokens or other units that the batch's loss averages.

    Falsy without this method: batches then weigh as much as they have samples.
    """

    def __init__(self, user: Any, place: Place, device: torch.device) -> None:
        self._weight = optional_method(user, "weight")
        self._place, self._device = place, device
        self.problem = ""
        """What is wrong with a weight of this process, which counts as NaN until all processes synchronise."""

    def __bool__(self) -> bool:
        return self._weight is not None

    def weigh(self, batch: Any) -> float:
        """The weight of a batch; NaN if it is not positive and finite."""
        assert self._weight is not None
        given = self._weight(batch)
        try:
            found = float(given)
        except (TypeError, ValueError, RuntimeError):  # of a tensor of several numbers
            found = math.nan
        if math.isfinite(found) and found > 0:
            return found
        self.problem = self.problem or (
            f"weight(batch) gave {_describe(given)}; expected a positive finite number: the number of tokens, "
            "or other units, the loss of the batch is a mean"
        )
        return math.nan

    def factors(self, step: Step, batches: Sequence[Any]) -> list[Any]:
        """The factors for the losses of a step's micro-batches that make gradients those of the step's mean loss.

        Over all processes the factors add up to the number of processes, since gradients are averaged over processes.
        On several GPUs they are tensors, to avoid waiting for the device. Called by all processes.
        """
        weights = [
            self.weigh(batch) if each.weight else 0.0 for each, batch in zip(step.micro_batches, batches, strict=True)
        ]
        n = self._place.world_size
        if n == 1:
            return [weight / math.fsum(weights) for weight in weights]
        total = torch.tensor(math.fsum(weights), dtype=torch.float64, device=self._device)
        distributed.all_reduce(total)
        over = total if total.is_cuda else total.item()
        return [n * weight / over for weight in weights]


def _describe(given: Any) -> str:
    if isinstance(given, torch.Tensor):
        return str(given.item()) if given.numel() == 1 else f"a tensor of shape {tuple(given.shape)}"
    return repr(given) if isinstance(given, int | float | str) else f"a {type(given).__name__}"
