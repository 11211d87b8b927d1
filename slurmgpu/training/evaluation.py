"""Losses and metrics over a split, on one or several processes."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import distributed

from slurmgpu.errors import ItemError
from slurmgpu.training.data_loader import BatchLoader, EvalBatchSampler, SeededDataset, to_device
from slurmgpu.training.loss_weights import LossWeights
from slurmgpu.training.ranks import Place, on_all_ranks, on_rank_zero
from slurmgpu.training.settings import TrainingSettings
from slurmgpu.training.states import random_state, restored_buffers, set_random_state, share_buffers
from slurmgpu.training.strategy import Strategy

log = logging.getLogger(__name__)


class Evaluator:
    """Evaluates a split: the loss and the user's metrics, averaged over the samples.

    With weights, the loss and metrics with one number per batch are averaged by weight.
    """

    def __init__(
        self,
        strategy: Strategy,
        dataset: SeededDataset,
        split: str,
        settings: TrainingSettings,
        batch_size: int,
        place: Place,
        loss_weights: LossWeights,
    ) -> None:
        self.split = split
        self._strategy = strategy
        self._place = place
        seed = settings.seed or 0
        self._sampler = EvalBatchSampler(len(dataset), batch_size, split, seed, place.rank, place.world_size)
        self._dataset = dataset
        self._loader = BatchLoader(dataset, self._sampler, settings, strategy.device)
        self._loss_weights = loss_weights
        self._names: list[str] = []  # equal on all ranks, whose sums are added in this order
        self._problem = ""  # what is wrong with this rank's metrics
        self._of_batches: set[str] = set()  # metrics with one number for each batch
        self._warned: set[str] = set()

    def names(self) -> list[str]:
        """The names of the results, found with a batch; ItemError on all ranks as in `evaluate`."""
        with self._undisturbed():
            # The first of several may be the only one of a single sample.
            first = max(itertools.islice(self._sampler, 2), key=lambda each: len(each.indices))
            batch = self._dataset.__getitems__(first)
            self._settle_names(self._measure(to_device(batch, self._strategy.device), len(first.indices)))
            if problem := next(filter(None, on_all_ranks(self._place, lambda: self._problem)), ""):
                raise ItemError(problem)
            return [f"{self.split}_{name}" for name in self._names]

    def evaluate(self, poll: Callable[[], None] = lambda: None) -> dict[str, float]:
        """{"val_loss": …, "val_accuracy": …}; model and random numbers stay unchanged.

        `poll` is called after each batch, equally often on all ranks; its exceptions end the evaluation. ItemError on
        all ranks if the names of metrics differ between batches, or one has another number of values than samples.
        """
        sums: dict[str, torch.Tensor] = {}  # each with its number of samples or total weight
        with self._undisturbed():
            share_buffers(self._strategy.model)
            for n, batch in zip(self._sampler.counts(), self._loader.read(), strict=True):
                weight = self._loss_weights.weigh(batch) if n and self._loss_weights else float(n)
                found = self._measure(self._loader.moved(batch), n)
                self._settle_names(found)
                for name in self._names:
                    total = sums.setdefault(name, torch.zeros(2, dtype=torch.float64, device=self._strategy.device))
                    if n and name in found:
                        mean, over_samples = found[name]
                        total += torch.stack([mean, torch.ones_like(mean)]) * (n if over_samples else weight)
                poll()
        means = {f"{self.split}_{name}": value for name, value in self._means(sums).items()}
        self._warn(means)
        return means

    def close(self) -> None:
        """Stop the loader's workers."""
        self._loader.close()

    def _measure(self, batch: Any, n: int) -> dict[str, tuple[torch.Tensor, bool]]:
        """Means over a batch of `n` samples, on the device, and whether each is one over values for the samples.

        A tensor with another number of values is reported after the last batch. `n` is 0 if the batch does not count.
        """
        found, device = self._strategy.plain(batch, measure=True), self._strategy.device
        measured = {}
        for name, value in found.items():
            n_values = value.numel() if isinstance(value, torch.Tensor) else 1
            if n and n_values not in (1, n):
                self._problem = self._problem or (
                    f"metrics() gave {name!r} as a tensor of {n_values:,} values for a batch of {n:,} samples; "
                    "expected one value for each sample, or one for the batch: return the mean over what belongs to "
                    "each sample"
                )
            is_one = n_values == 1 and (n > 1 or getattr(value, "ndim", 0) == 0 or name in self._of_batches)
            if is_one and n > 1:
                self._of_batches.add(name)  # also in a batch of one sample
            measured[name] = _mean(name, value, device), not is_one
        return measured

    def _settle_names(self, found: Mapping[str, Any]) -> None:
        """Keep the names that rank 0 finds first; other names are reported after the last batch."""
        if not self._names:
            self._names = on_rank_zero(self._place, lambda: sorted(found))
        if found.keys() != set(self._names):
            self._problem = self._problem or (
                f"metrics() gave {_listed(found)} for one batch and {_listed(self._names)} for another; expected "
                "the same names for each batch: they are averaged over all samples"
            )

    def _means(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        problem = self._problem or self._loss_weights.problem
        has_problem = torch.full((1,), bool(problem), dtype=torch.float64, device=self._strategy.device)
        totals = torch.cat([has_problem, *(sums[name] for name in self._names)])
        if self._place.world_size > 1:
            distributed.all_reduce(totals)
        n_problems, *found = totals.tolist()
        if n_problems:
            raise ItemError(next(filter(None, on_all_ranks(self._place, lambda: problem))))
        return {name: total / over for name, total, over in zip(self._names, found[::2], found[1::2], strict=True)}

    def _warn(self, means: Mapping[str, float]) -> None:
        for name, value in means.items():
            if math.isnan(value) and name not in self._warned and self._place.is_rank_zero:
                self._warned.add(name)
                log.warning("%s is NaN: an evaluation with NaN is never the best one", name)

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        model, device = self._strategy.model, self._strategy.device
        training = [module for module in model.modules() if module.training]
        random = random_state(device)
        model.eval()
        try:
            with torch.no_grad(), restored_buffers(model):
                yield
        finally:
            for module in training:
                module.training = True
            self._strategy.reshard()
            set_random_state(random, device)


def _mean(name: str, value: Any, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, torch.float64).mean()
    try:
        return torch.tensor(float(value), dtype=torch.float64, device=device)
    except (TypeError, ValueError) as error:
        raise ItemError(
            f"metrics() gave {name!r} as a {type(value).__name__}; expected a number, or a tensor of one number for "
            "the batch or for each sample"
        ) from error


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(map(str, names)) - {"loss"})) or "none"
