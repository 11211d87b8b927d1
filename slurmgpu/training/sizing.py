"""The needs of a training: the batch that fits, operations per sample, peak memory."""

from __future__ import annotations

import logging
import resource
from typing import Any

import torch
from torch import distributed

from slurmgpu.errors import SlurmGPUError
from slurmgpu.training.batches import MicroBatch
from slurmgpu.training.fitting import find_batch_size
from slurmgpu.training.flops import count_flops, peak_flops
from slurmgpu.training.loading import Reader, Reading, to_device
from slurmgpu.training.modes import Mode
from slurmgpu.training.optimizing import make_optimizer
from slurmgpu.training.ranks import Place
from slurmgpu.training.settings import TrainingSettings
from slurmgpu.training.throughput import Throughput
from slurmgpu.util.exceptions import described

log = logging.getLogger(__name__)


def fit_batch_size(user: Any, mode: Mode, samples: Reader, settings: TrainingSettings, place: Place) -> int:
    """The largest batch size at which a step fits on all processes; with a global batch, a divisor of their share.

    Tries the first samples; model and random numbers stay unchanged.
    """
    if mode.sharded or (settings.sync_batchnorm and place.world_size > 1):
        # A rank that runs out of memory between two collectives would block the others.
        what = 'strategy = "fsdp"' if mode.sharded else "sync_batchnorm"
        raise SlurmGPUError(f'batch_size = "auto" does not work with {what} on several processes; give a number.')
    kept = {name: value.detach().to("cpu", copy=True) for name, value in _tensors(mode).items()}
    optimizer = make_optimizer(user, mode.model, settings)

    def attempt(n: int) -> None:
        batch = samples.__getitems__(Reading(0, [number % len(samples) for number in range(n)]))
        mode.plain(to_device(batch, mode.device)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def agree(fits: bool) -> bool:
        if place.world_size == 1:
            return fits
        told = torch.tensor(int(fits), device=mode.device)
        distributed.all_reduce(told, distributed.ReduceOp.MIN)
        return bool(told)

    try:
        found = find_batch_size(attempt, device=mode.device, agree=agree, **_sizes(samples, settings, place))
    finally:
        with torch.no_grad():
            for name, value in _tensors(mode).items():
                value.copy_(kept[name])
        mode.model.zero_grad(set_to_none=True)
    if place.leads:
        log.info("batch_size: %d", found)
    return found


class Counter:
    """Reports the tokens and operations of micro-batches to the meter, as counted by the user's class.

    If it does not count operations and the GPU's peak rate is known, they are counted once in a rehearsal, per sample.
    """

    def __init__(self, user: Any, mode: Mode, settings: TrainingSettings, meter: Throughput) -> None:
        self._mode, self._meter = mode, meter
        self._tokens, self._flops = getattr(user, "tokens", None), getattr(user, "flops", None)
        self._per_sample: float | None = 0.0
        if mode.device.type == "cuda" and self._flops is None and not mode.sharded:
            known = peak_flops(torch.cuda.get_device_name(mode.device), settings.precision)
            self._per_sample = None if known else 0.0

    def count(self, batch: Any, micro_batch: MicroBatch) -> None:
        """Count a micro-batch, before its passes."""
        if self._per_sample is None:
            self._per_sample = flops_per_sample(self._mode, batch, micro_batch.size)
        n = micro_batch.n
        if n and (self._tokens or self._flops or self._per_sample):
            flops = self._flops(batch) if self._flops else n * self._per_sample
            self._meter.count(tokens=int(self._tokens(batch)) if self._tokens else 0, flops=float(flops))


def flops_per_sample(mode: Mode, batch: Any, n: int) -> float:
    """Operations per sample of forward and backward passes; NaN if they cannot be counted."""
    try:
        with mode.rehearsal():
            return count_flops(lambda: mode.plain(batch).backward()) / n
    except Exception as error:  # models may do anything, and counting must not fail a training
        log.warning("mfu: the model's operations cannot be counted: %s", described(error))
        return float("nan")


def peak_memory(device: torch.device, place: Place, before: int) -> int:
    """The largest memory of any process, and of `before`: GPU memory, or a CPU's resident set; called by all ranks."""
    if device.type == "cuda":
        own = torch.cuda.max_memory_allocated(device)
    else:
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    most = torch.tensor(max(own, before), device=device)
    if place.world_size > 1:
        distributed.all_reduce(most, distributed.ReduceOp.MAX)
    return int(most)


def _sizes(samples: Reader, settings: TrainingSettings, place: Place) -> dict[str, Any]:
    """The arguments of the search. It starts at 2 if possible: batch normalisation cannot train on one sample."""
    if settings.global_batch_size is None:
        return {"start": 2, "limit": max(1, len(samples) // (place.world_size * settings.accumulation))}
    share = -(-settings.global_batch_size // place.world_size)
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    return {"start": sizes[min(1, len(sizes) - 1)], "sizes": sizes}


def _tensors(mode: Mode) -> dict[str, torch.Tensor]:
    return {**dict(mode.model.named_parameters()), **dict(mode.model.named_buffers())}
