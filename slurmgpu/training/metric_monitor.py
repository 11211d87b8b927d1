"""The best evaluation by the monitored metric, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from slurmgpu.errors import ItemError, did_you_mean
from slurmgpu.training.settings import TrainingSettings, goal_of


class MetricMonitor:
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

    def choose_metric(self, names: Iterable[str]) -> None:
        """Choose the metric among the results' names; ItemError if the given one is missing."""
        self.metric = self.metric or ("val_loss" if "val_loss" in names else "train_loss")
        if self.metric not in names:
            missing = self.metric.startswith("val_") and not any(name.startswith("val_") for name in names)
            why = ' data("val") gave None.' if missing else ""
            raise ItemError(f"there is no metric {self.metric!r}.{why}{did_you_mean(self.metric, names)}")

    def update(self, step: int, found: Mapping[str, float]) -> bool:
        """Add an evaluation; whether it is the best so far."""
        self.choose_metric(found)
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
    def should_stop(self) -> bool:
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
