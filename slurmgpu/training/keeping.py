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


@dataclass(frozen=True)
class Parts:
    """The changing parts of a training."""

    standing: Standing
    mode: Mode
    stepper: Stepper
    curve: Curve
    watch: Watch
    best: BestWeights
    meter: Throughput


class Keeping:
    """Saves the `parts` of a training in `checkpoints`, with the constant `given`; all ranks call it together."""

    def __init__(self, checkpoints: Checkpoints, parts: Parts, given: Mapping[str, Any]) -> None:
        self._checkpoints, self._parts, self._given = checkpoints, parts, given
        self._last = (-1, -1)  # the last checkpoint's step, and the step of the evaluation before it

    def save(self) -> float:
        """Save a checkpoint; the seconds it took."""
        parts, standing = self._parts, self._parts.standing
        started = time.monotonic()
        parts.best.write()
        device, place = parts.mode.device, self._checkpoints.place
        standing.peak_memory_bytes = peak_memory(device, place, standing.peak_memory_bytes)
        state = states.model_state(parts.mode.model, parts.stepper.optimizer, sharded=parts.mode.sharded)
        shared: dict[str, Any] = {
            **self._given,
            "curve": parts.curve.state(standing.step),
            "standing": asdict(standing),
            "watch": parts.watch.state(),
            "best": parts.best.state(),
            "stepper": parts.stepper.state(),
            "meter": parts.meter.state(together=True),
        }
        own = {
            "random": states.random_state(device),
            "buffers": states.buffers(parts.mode.model),
            "curve": parts.curve.own(),
        }
        whole, sharded = ({}, state) if parts.mode.sharded else (state, None)
        now = standing.step, standing.evaluated
        # An interrupted evaluation leaves a checkpoint of its step, which the next one replaces.
        replace = now[0] == self._last[0] and now != self._last
        self._checkpoints.save(standing.step, shared=shared | whole, own=own, sharded=sharded, replace=replace)
        self._last = now
        led(place, lambda: parts.best.prune(min(self._checkpoints.steps(), default=0)))
        return time.monotonic() - started

    def load(self, checkpoint: Checkpoint, shared: Mapping[str, Any]) -> bool:
        """Restore from a checkpoint with its `shared()`; whether that includes random number generators."""
        parts, own = self._parts, checkpoint.own()
        model, optimizer = parts.mode.model, parts.stepper.optimizer
        if parts.mode.sharded:
            state = states.model_state(model, optimizer, sharded=True)
            checkpoint.load_sharded(state)
        else:
            state = {name: shared[name] for name in ("model", "optimizer")}
        states.load_model_state(model, optimizer, state, sharded=parts.mode.sharded)
        vars(parts.standing).update(shared["standing"])
        self._last = parts.standing.step, parts.standing.evaluated
        parts.watch.load(shared["watch"])
        parts.best.load(shared["best"])
        parts.curve.load(shared["curve"], own and own["curve"])
        parts.stepper.load(shared["stepper"])
        parts.meter.load(shared["meter"])
        if own is not None:
            states.load_buffers(model, own["buffers"])
            states.set_random_state(own["random"], parts.mode.device)
        return own is not None
