"""Losses and metrics over a split, exact on any number of processes; and which evaluation is the best so far."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import distributed

from slurmgpu.errors import ItemError, did_you_mean
from slurmgpu.training.loading import EvalReadings, Loader, Reader, to_device
from slurmgpu.training.modes import Mode
from slurmgpu.training.places import Place
from slurmgpu.training.settings import TrainingSettings
from slurmgpu.training.states import random_state, set_random_state, share_buffers

LOSSES = ("loss", "error", "perplexity")
"""What a metric is called of which less is better."""


class Evaluator:
    """Evaluates one split: the loss and the user's metrics, each averaged over the samples."""

    def __init__(
        self, mode: Mode, reader: Reader, split: str, settings: TrainingSettings, batch_size: int, place: Place
    ) -> None:
        self.split = split
        self._mode = mode
        self._place = place
        seed = settings.seed or 0
        self._readings = EvalReadings(len(reader), batch_size, split, seed, place.rank, place.world_size)
        self._reader = reader
        self._loader = Loader(reader, self._readings, settings, mode.device)

    def names(self) -> list[str]:
        """What an evaluation gives, found out with its first batch."""
        with self._undisturbed():
            batch = self._reader.__getitems__(next(iter(self._readings)))
            return [f"{self.split}_{name}" for name in self._measure(to_device(batch, self._mode.device))]

    def evaluate(self, poll: Callable[[], None] = lambda: None) -> dict[str, float]:
        """{"val_loss": …, "val_accuracy": …}; leaves the model and all random numbers as they were.

        `poll` is called after each batch, on all ranks as often; what it raises ends the evaluation.
        """
        sums: dict[str, torch.Tensor] = {}
        with self._undisturbed():
            for n, batch in zip(self._readings.counts(), self._loader, strict=True):
                for name, value in self._measure(batch).items():
                    total = sums.setdefault(name, torch.zeros((), dtype=torch.float64, device=self._mode.device))
                    if n:
                        total += value * n
                poll()
        return {f"{self.split}_{name}": value for name, value in self._means(sums).items()}

    def close(self) -> None:
        """End the loader's workers."""
        self._loader.close()

    def _measure(self, batch: Any) -> dict[str, torch.Tensor]:
        """Means over a batch, on the device."""
        found = self._mode.plain(batch, measure=True)
        return {name: _mean(name, value, self._mode.device) for name, value in found.items()}

    def _means(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        if not sums:
            return {}
        names = sorted(sums)
        totals = torch.stack([sums[name] for name in names])
        if self._place.world_size > 1:
            distributed.all_reduce(totals)
        return dict(zip(names, (totals / self._readings.n_samples).tolist(), strict=True))

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        model, device = self._mode.model, self._mode.device
        training = [module for module in model.modules() if module.training]
        random = random_state(device)
        share_buffers(model)
        model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True
            self._mode.reshard()
            set_random_state(random, device)


def _mean(name: str, value: Any, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().to(torch.float64).mean()
    try:
        return torch.tensor(float(value), dtype=torch.float64, device=device)
    except (TypeError, ValueError) as error:
        raise ItemError(
            f"metrics() gave {name!r} as a {type(value).__name__}; it shall be a number, or a tensor of one number for "
            "the batch or for each sample"
        ) from error


def goal_of(metric: str) -> str:
    """Whether less or more of a metric is better, by its name."""
    return "min" if metric.endswith(LOSSES) else "max"


class Watch:
    """Which evaluation is the best, and whether it is time to stop for want of a better one."""

    def __init__(self, settings: TrainingSettings) -> None:
        self._settings = settings
        self.metric = settings.metric or ""
        self.best: dict[str, float] = {}
        self.best_step = -1
        self.score = math.nan
        self.steps: list[int] = []
        self.curve: list[float] = []
        self._waited = 0
        self._mark = math.nan  # what has to be surpassed by min_delta

    def check(self, names: Iterable[str]) -> None:
        """Choose the metric, of those of an evaluation; refuse one that is none of them."""
        self.metric = self.metric or ("val_loss" if "val_loss" in names else "train_loss")
        if self.metric not in names:
            raise ItemError(f"there is no metric {self.metric!r}.{did_you_mean(self.metric, names)}")

    def see(self, step: int, found: Mapping[str, float]) -> bool:
        """Take an evaluation in; whether it is the best so far."""
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
        """Whether `patience` evaluations have brought nothing better."""
        return self._settings.patience is not None and self._waited >= self._settings.patience

    def state(self) -> dict[str, Any]:
        """What is kept with a checkpoint."""
        kept = ("metric", "best", "best_step", "score", "steps", "curve", "_waited", "_mark")
        return {name: getattr(self, name) for name in kept}

    def load(self, state: Mapping[str, Any]) -> None:
        """Put a `state` back."""
        for name, value in state.items():
            setattr(self, name, value)

    def _is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        if math.isnan(than):
            return not math.isnan(value)
        goal = self._settings.goal or goal_of(self.metric)
        return value < than - by if goal == "min" else value > than + by
