"""Save and load all changing state of a training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slurmgpu.training import states
from slurmgpu.training.best import BestWeights
from slurmgpu.training.checkpoints import Checkpoint, Checkpoints
from slurmgpu.training.curves import Curve
from slurmgpu.training.evaluating import Watch
from slurmgpu.training.modes import Mode
from slurmgpu.training.optimizing import Stepper
from slurmgpu.training.outcome import Standing
from slurmgpu.training.ranks import led
from slurmgpu.training.sizing import peak_memory
from slurmgpu.training.throughput import Throughput


@dataclass
class Keeping:
    """Saves all that changes in a training, and the constant `given`, in `checkpoints`; all ranks call it together."""

    checkpoints: Checkpoints
    standing: Standing
    mode: Mode
    stepper: Stepper
    curve: Curve
    watch: Watch
    best: BestWeights
    meter: Throughput
    given: Mapping[str, Any]
    _last: tuple[int, int] = (-1, -1)
    """The last checkpoint's step, and the step of the evaluation before it."""

    def save(self) -> float:
        """Save a checkpoint; the seconds it took."""
        standing, started = self.standing, time.monotonic()
        self.best.write()
        device, place = self.mode.device, self.checkpoints.place
        standing.peak_memory_bytes = peak_memory(device, place, standing.peak_memory_bytes)
        state = states.model_state(self.mode.model, self.stepper.optimizer, sharded=self.mode.sharded)
        shared: dict[str, Any] = {
            **self.given,
            "curve": self.curve.state(standing.step),
            "standing": asdict(standing),
            "watch": self.watch.state(),
            "best": self.best.state(),
            "stepper": self.stepper.state(),
            "meter": self.meter.state(together=True),
        }
        own = {
            "random": states.random_state(device),
            "buffers": states.buffers(self.mode.model),
            "curve": self.curve.own(),
        }
        whole, sharded = ({}, state) if self.mode.sharded else (state, None)
        now = standing.step, standing.evaluated
        # An interrupted evaluation leaves a checkpoint of its step, which the next one replaces.
        replace = now[0] == self._last[0] and now != self._last
        self.checkpoints.save(standing.step, shared=shared | whole, own=own, sharded=sharded, replace=replace)
        self._last = now
        led(place, lambda: self.best.prune(min(self.checkpoints.steps(), default=0)))
        return time.monotonic() - started

    def load(self, checkpoint: Checkpoint, shared: Mapping[str, Any]) -> bool:
        """Restore from a checkpoint with its `shared()`; whether that includes random number generators."""
        own = checkpoint.own()
        model, optimizer = self.mode.model, self.stepper.optimizer
        if self.mode.sharded:
            state = states.model_state(model, optimizer, sharded=True)
            checkpoint.load_sharded(state)
        else:
            state = {name: shared[name] for name in ("model", "optimizer")}
        states.load_model_state(model, optimizer, state, sharded=self.mode.sharded)
        vars(self.standing).update(shared["standing"])
        self._last = self.standing.step, self.standing.evaluated
        self.watch.load(shared["watch"])
        self.best.load(shared["best"])
        self.curve.load(shared["curve"], own and own["curve"])
        self.stepper.load(shared["stepper"])
        self.meter.load(shared["meter"])
        if own is not None:
            states.load_buffers(model, own["buffers"])
            states.set_random_state(own["random"], self.mode.device)
        return own is not None
