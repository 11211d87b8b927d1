"""Losses and metrics over a split, on one or several processes, and the best evaluation."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import distributed

from slurmgpu.errors import ItemError, did_you_mean
from slurmgpu.training.loading import EvalReadings, Loader, Reader, to_device
from slurmgpu.training.modes import Mode
from slurmgpu.training.ranks import Place, led, together
from slurmgpu.training.settings import TrainingSettings, goal_of
from slurmgpu.training.states import keeping_buffers, random_state, set_random_state, share_buffers
from slurmgpu.training.weighing import Weigher

log = logging.getLogger(__name__)


class Evaluator:
    """Evaluates a split: the loss and the user's metrics, averaged over the samples.

    With weights, the loss and metrics with one number per batch are averaged by weight.
    """

    def __init__(
        self,
        mode: Mode,
        reader: Reader,
        split: str,
        settings: TrainingSettings,
        batch_size: int,
        place: Place,
        weigher: Weigher,
    ) -> None:
        self.split = split
        self._mode = mode
        self._place = place
        seed = settings.seed or 0
        self._readings = EvalReadings(len(reader), batch_size, split, seed, place.rank, place.world_size)
        self._reader = reader
        self._loader = Loader(reader, self._readings, settings, mode.device)
        self._weigher = weigher
        self._names: list[str] = []  # equal on all ranks, whose sums are added in this order
        self._odd = ""  # what is wrong with this rank's metrics
        self._of_batches: set[str] = set()  # metrics with one number for each batch
        self._warned: set[str] = set()

    def names(self) -> list[str]:
        """The names of the results, found with a batch; ItemError on all ranks as in `evaluate`."""
        with self._undisturbed():
            # The first of several may be the only one of a single sample.
            reading = max(itertools.islice(self._readings, 2), key=lambda each: len(each.indices))
            batch = self._reader.__getitems__(reading)
            self._settle_names(self._measure(to_device(batch, self._mode.device), len(reading.indices)))
            if odd := next(filter(None, together(self._place, lambda: self._odd)), ""):
                raise ItemError(odd)
            return [f"{self.split}_{name}" for name in self._names]

    def evaluate(self, poll: Callable[[], None] = lambda: None) -> dict[str, float]:
        """{"val_loss": …, "val_accuracy": …}; model and random numbers stay unchanged.

        `poll` is called after each batch, equally often on all ranks; its exceptions end the evaluation. ItemError on
        all ranks if the names of metrics differ between batches, or one has another number of values than samples.
        """
        sums: dict[str, torch.Tensor] = {}  # each with its number of samples or total weight
        with self._undisturbed():
            share_buffers(self._mode.model)
            for n, batch in zip(self._readings.counts(), self._loader.read(), strict=True):
                weight = self._weigher.weigh(batch) if n and self._weigher else float(n)
                found = self._measure(self._loader.moved(batch), n)
                self._settle_names(found)
                for name in self._names:
                    total = sums.setdefault(name, torch.zeros(2, dtype=torch.float64, device=self._mode.device))
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
        found, device = self._mode.plain(batch, measure=True), self._mode.device
        measured = {}
        for name, value in found.items():
            n_values = value.numel() if isinstance(value, torch.Tensor) else 1
            if n and n_values not in (1, n):
                self._odd = self._odd or (
                    f"metrics() gave {name!r} as a tensor of {n_values:,} values for a batch of {n:,} samples; "
                    "expected one value for each sample, or one for the batch: give the mean over what belongs to each "
                    "sample"
                )
            is_one = n_values == 1 and (n > 1 or getattr(value, "ndim", 0) == 0 or name in self._of_batches)
            if is_one and n > 1:
                self._of_batches.add(name)  # also in a batch of one sample
            measured[name] = _mean(name, value, device), not is_one
        return measured

    def _settle_names(self, found: Mapping[str, Any]) -> None:
        """Keep the names that rank 0 finds first; other names are reported after the last batch."""
        if not self._names:
            self._names = led(self._place, lambda: sorted(found))
        if found.keys() != set(self._names):
            self._odd = self._odd or (
                f"metrics() gave {_listed(found)} for one batch and {_listed(self._names)} for another; expected "
                "the same names for each batch: they are averaged over all samples"
            )

    def _means(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        why = self._odd or self._weigher.odd
        odd = torch.full((1,), bool(why), dtype=torch.float64, device=self._mode.device)
        totals = torch.cat([odd, *(sums[name] for name in self._names)])
        if self._place.world_size > 1:
            distributed.all_reduce(totals)
        n_odd, *found = totals.tolist()
        if n_odd:
            raise ItemError(next(filter(None, together(self._place, lambda: why))))
        return {name: total / over for name, total, over in zip(self._names, found[::2], found[1::2], strict=True)}

    def _warn(self, means: Mapping[str, float]) -> None:
        for name, value in means.items():
            if math.isnan(value) and name not in self._warned and self._place.leads:
                self._warned.add(name)
                log.warning("%s is NaN: such an evaluation is never the best one", name)

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        model, device = self._mode.model, self._mode.device
        training = [module for module in model.modules() if module.training]
        random = random_state(device)
        model.eval()
        try:
            with torch.no_grad(), keeping_buffers(model):
                yield
        finally:
            for module in training:
                module.training = True
            self._mode.reshard()
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


class Watch:
    """Finds the best evaluation, and when to stop early."""

    def __init__(self, settings: TrainingSettings) -> None:
        self._settings = settings
        self.metric = settings.metric or ""
        self.best: dict[str, float] = {}
        self.best_step = -1
        self.score = math.nan
        self.steps: list[int] = []
        self.curve: list[float] = []
        self._waited = 0
        self._mark = math.nan  # the value to beat by min_delta

    def check(self, names: Iterable[str]) -> None:
        """Choose the metric among the results' names; ItemError if the given one is missing."""
        self.metric = self.metric or ("val_loss" if "val_loss" in names else "train_loss")
        if self.metric not in names:
            missing = self.metric.startswith("val_") and not any(name.startswith("val_") for name in names)
            why = ' data("val") gave None.' if missing else ""
            raise ItemError(f"there is no metric {self.metric!r}.{why}{did_you_mean(self.metric, names)}")

    def see(self, step: int, found: Mapping[str, float]) -> bool:
        """Add an evaluation; whether it is the best so far."""
        self.check(found)
        value = found[self.metric]
        self.steps.append(step)
        self.curve.append(value)
        self._waited += 1
        if self._is_better(value, self._mark, self._settings.min_delta):
            self._mark, self._waited = value, 0
        if better := self._is_better(value, self.score):
            self.best, self.best_step, self.score = dict(found), step, value
        return better

    @property
    def gives_up(self) -> bool:
        """Whether the last `patience` evaluations brought no improvement."""
        return self._settings.patience is not None and self._waited >= self._settings.patience

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        kept = ("metric", "best", "best_step", "score", "steps", "curve", "_waited", "_mark")
        return {name: getattr(self, name) for name in kept}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        for name, value in state.items():
            setattr(self, name, value)

    def _is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        if math.isnan(than):
            return not math.isnan(value)
        is_less = goal_of(self.metric, self._settings.goal) == "min"
        return value < than - by if is_less else value > than + by
