"""Count the tokens and operations of batches for the throughput."""

from __future__ import annotations

import logging
from typing import Any

import torch

from slurmgpu.training.batches import MicroBatch
from slurmgpu.training.flops import count_flops, peak_flops
from slurmgpu.training.settings import TrainingSettings
from slurmgpu.training.strategy import Strategy
from slurmgpu.training.throughput import Throughput
from slurmgpu.training.user_methods import counting_method
from slurmgpu.util.exceptions import described

log = logging.getLogger(__name__)


class BatchCounter:
    """Reports the tokens and operations of micro-batches to the meter, as counted by the user's class.

    If it does not count operations and the GPU's peak rate is known, they are counted once in a rehearsal, per sample.
    """

    def __init__(self, user: Any, strategy: Strategy, settings: TrainingSettings, meter: Throughput) -> None:
        self._strategy, self._meter = strategy, meter
        self._tokens = counting_method(user, "tokens", "tokens_per_s")
        self._flops = counting_method(user, "flops", "mfu")
        self._per_sample: float | None = 0.0
        if strategy.device.type == "cuda" and self._flops is None and not strategy.sharded:
            known = peak_flops(torch.cuda.get_device_name(strategy.device), settings.precision)
            self._per_sample = None if known else 0.0

    def count(self, batch: Any, micro_batch: MicroBatch) -> None:
        """Count a micro-batch, before its passes."""
        if self._per_sample is None:
            self._per_sample = flops_per_sample(self._strategy, batch, micro_batch.size)
        n = micro_batch.n
        if n and (self._tokens or self._flops or self._per_sample):
            flops = self._flops(batch) if self._flops else n * self._per_sample
            self._meter.count(tokens=int(self._tokens(batch)) if self._tokens else 0, flops=flops)


def flops_per_sample(strategy: Strategy, batch: Any, n: int) -> float:
    """Operations per sample of forward and backward passes; NaN if they cannot be counted."""
    try:
        with strategy.without_side_effects():
            return count_flops(lambda: strategy.plain(batch).backward()) / n
    except Exception as error:  # models may do anything, and counting must not fail a training
        log.warning("mfu: the model's operations cannot be counted: %s", described(error))
        return float("nan")
