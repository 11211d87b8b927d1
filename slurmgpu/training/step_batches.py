"""The micro-batches of each step on the device, with the factors of their losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slurmgpu.training.batches import MicroBatch, Step
from slurmgpu.training.data_loader import BatchLoader
from slurmgpu.training.loss_weights import LossWeights
from slurmgpu.training.throughput import Throughput


class StepBatches:
    """Reads the batches of a loader, step by step in the order of its plan; `meter` times the reading."""

    def __init__(self, loader: BatchLoader, loss_weights: LossWeights, meter: Throughput) -> None:
        self._loader, self._loss_weights, self._meter = loader, loss_weights, meter
        self._batches = loader.read()

    def of(self, step: Step) -> Iterator[tuple[MicroBatch, Any, Any]]:
        """The micro-batches of the next step, each with its batch and the factor of its loss."""
        if not self._loss_weights:
            for each in step.micro_batches:
                with self._meter.data():
                    batch = self._loader.moved(next(self._batches))
                yield each, batch, each.weight
            return
        # Read all of them first: their weights in the step depend on all processes.
        with self._meter.data():
            batches = [next(self._batches) for _ in step.micro_batches]
        factors = self._loss_weights.factors(step, batches)
        for each, factor in zip(step.micro_batches, factors, strict=True):
            with self._meter.data():
                batch = self._loader.moved(batches.pop(0))
            yield each, batch, factor
