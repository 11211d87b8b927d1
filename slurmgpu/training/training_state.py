"""Save and load all changing state of a training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slurmgpu.training import states
from slurmgpu.training.best_weights import BestWeights
from slurmgpu.training.checkpoints import Checkpoint, Checkpoints
from slurmgpu.training.learning_curve import LearningCurve
from slurmgpu.training.metric_monitor import MetricMonitor
from slurmgpu.training.optimizer import Stepper
from slurmgpu.training.progress import Progress
from slurmgpu.training.ranks import on_rank_zero
from slurmgpu.training.strategy import Strategy
from slurmgpu.training.throughput import Throughput


@dataclass
class TrainingState:
    """Saves the changing state of a training, and the constant `given`, in `checkpoints`; all ranks call together."""

    checkpoints: Checkpoints
    progress: Progress
    strategy: Strategy
    stepper: Stepper
    curve: LearningCurve
    monitor: MetricMonitor
    best: BestWeights
    meter: Throughput
    given: Mapping[str, Any]
    _last: tuple[int, int] = (-1, -1)
    """The last checkpoint's step, and the step of the evaluation before it."""

    def save(self) -> float:
        """Save a checkpoint; return the seconds it took."""
        progress, started = self.progress, time.monotonic()
        self.best.write()
        device, place = self.strategy.device, self.checkpoints.place
        progress.peak_memory_bytes = self.strategy.peak_memory(progress.peak_memory_bytes)
        state = states.model_state(self.strategy.model, self.stepper.optimizer, sharded=self.strategy.sharded)
        shared: dict[str, Any] = {
            **self.given,
            "curve": self.curve.state(progress.step),
            "progress": asdict(progress),
            "monitor": self.monitor.state(),
            "best": self.best.state(),
            "stepper": self.stepper.state(),
            "meter": self.meter.state(together=True),
        }
        own = {
            "random": states.random_state(device),
            "buffers": states.buffers(self.strategy.model),
            "curve": self.curve.own(),
        }
        whole, sharded = ({}, state) if self.strategy.sharded else (state, None)
        now = progress.step, progress.evaluated
        # An interrupted evaluation leaves a checkpoint of its step, which the next one replaces.
        replace = now[0] == self._last[0] and now != self._last
        self.checkpoints.save(progress.step, shared=shared | whole, own=own, sharded=sharded, replace=replace)
        self._last = now
        on_rank_zero(place, lambda: self.best.prune(min(self.checkpoints.steps(), default=0)))
        return time.monotonic() - started

    def load(self, checkpoint: Checkpoint, shared: Mapping[str, Any]) -> bool:
        """Restore from a checkpoint with its `shared()`; return whether that has random number generators."""
        own = checkpoint.own()
        model, optimizer = self.strategy.model, self.stepper.optimizer
        if self.strategy.sharded:
            state = states.model_state(model, optimizer, sharded=True)
            checkpoint.load_sharded(state)
        else:
            state = {name: shared[name] for name in ("model", "optimizer")}
        states.load_model_state(model, optimizer, state, sharded=self.strategy.sharded)
        vars(self.progress).update(shared["progress"])
        self._last = self.progress.step, self.progress.evaluated
        self.monitor.load(shared["monitor"])
        self.best.load(shared["best"])
        self.curve.load(shared["curve"], own and own["curve"])
        self.stepper.load(shared["stepper"])
        self.meter.load(shared["meter"])
        if own is not None:
            states.load_buffers(model, own["buffers"])
            states.set_random_state(own["random"], self.strategy.device)
        return own is not None
