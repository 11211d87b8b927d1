"""The learning curve: losses are summed on the device and read rarely, so that no step waits for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from slurmgpu.errors import ItemError
from slurmgpu.training.ranks import Place, on_all_ranks


class LearningCurve:
    """The mean training loss between points; `steps` and `values` are the points read so far.

    On each process, `why` may explain a loss that is not finite.
    """

    def __init__(self, log_steps: int, device: torch.device, place: Place, why: Callable[[], str]) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self._log_steps = log_steps
        self._place, self._why = place, why
        # This process's running sum; points are its differences.
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._n = 0
        self._open: list[tuple[int, int, torch.Tensor]] = []
        self._point = (0, 0.0)  # samples and sum of all processes at the last point
        self._evaluation = (0, 0.0)  # the same at the last evaluation
        self._read = (-1, 0.0)  # the same at the last reading

    def add(self, loss: torch.Tensor, n: float | torch.Tensor) -> None:
        """Add this process's mean loss of `n` of the step's samples."""
        if isinstance(n, torch.Tensor):
            self._sum.add_(loss.detach() * n)
        elif n:
            self._sum.add_(loss.detach(), alpha=n)

    def end_step(self, step: int, n: int, *, last: bool) -> None:
        """End a step of `n` samples over all processes."""
        self._n += n
        if last or step % self._log_steps == 0:
            self._open.append((step, self._n, self._sum.clone()))

    def read(self, step: int, extras: Sequence[float] = ()) -> list[float]:
        """Add the points up to now, on all ranks together; an ItemError if the loss is not finite.

        Returns the sums over the ranks of `extras`, which share the collective.
        """
        sums = self.summed(extras, *(each for _, _, each in self._open), self._sum)
        try:
            for (at, n, _), total in zip(self._open, sums[len(extras) : -1], strict=True):
                self.steps.append(at)
                self.values.append(_mean(self._point, (n, total), at))
                self._point = n, total
            self._open.clear()
            self._read = self._n, sums[-1]
            _mean(self._point, self._read, step)
        except ItemError as error:
            raise ItemError(next(filter(None, on_all_ranks(self._place, self._why)), str(error))) from error
        return sums[: len(extras)]

    def summed(self, extras: Sequence[float], *sums: torch.Tensor) -> list[float]:
        """The sums over the ranks of `extras` and `sums`; called by all ranks."""
        if self._place.world_size == 1:
            return [*extras, *(torch.stack(sums).tolist() if sums else ())]
        own = torch.tensor(extras, dtype=torch.float64, device=self._sum.device)
        every = torch.cat([own, torch.stack(sums)]) if sums else own
        distributed.all_reduce(every)
        found: list[float] = every.tolist()
        return found

    def mean_since_evaluation(self, step: int) -> float:
        """The mean loss since the last call, up to the last reading."""
        mean = _mean(self._evaluation, self._read, step)
        self._evaluation = self._read
        return mean

    def state(self, step: int) -> dict[str, Any]:
        """The state for a checkpoint; called by all ranks, since all points are read."""
        if self._read[0] != self._n:
            self.read(step)
        kept = {name: getattr(self, name) for name in ("steps", "values", "_n", "_point", "_evaluation")}
        return kept | {"total": self._read[1]}

    def own(self) -> torch.Tensor:
        """The sum of this process, which makes the next values exact."""
        return self._sum.cpu()

    def load(self, state: Mapping[str, Any], own: torch.Tensor | None) -> None:
        """Restore a `state`; without `own`, rank 0 takes the sum of all."""
        for name in ("steps", "values", "_n", "_point", "_evaluation"):
            setattr(self, name, state[name])
        self._sum.fill_(own if own is not None else state["total"] if self._place.is_rank_zero else 0.0)


def _mean(before: tuple[int, float], now: tuple[int, float], step: int) -> float:
    n = now[0] - before[0]
    mean = (now[1] - before[1]) / n if n else 0.0
    if not math.isfinite(mean):
        raise ItemError(
            f"the loss is {mean} at step {step:,}: try a smaller learning rate, a warm-up, clip, or another precision"
        )
    return mean if n else math.nan
