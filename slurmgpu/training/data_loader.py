"""Make batches on the device, the same after a resumption and with any number of loader workers.

While a batch is read, the generators of Python, NumPy and PyTorch's CPU are seeded by its position; their states are
restored afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import DataLoader, TensorDataset, default_collate

from slurmgpu.training.batches import Position, StepPlan, derive_seed, own_pieces, permutation
from slurmgpu.training.settings import TrainingSettings

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


class BatchIndices(NamedTuple):
    """A batch to read."""

    seed: int
    indices: Sequence[int]


class SeededDataset:
    """A data set that is read by batches under their seeds; the loader's workers share it."""

    def __init__(self, samples: Any, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self._samples = samples
        self._collate = collate
        self._tensors = samples.tensors if type(samples) is TensorDataset and collate is default_collate else None

    def __len__(self) -> int:
        return len(self._samples)

    def __getitems__(self, batch: BatchIndices) -> Any:
        """The batch; torch's fetcher calls this with a value of the batch sampler."""
        indices = list(batch.indices)
        if self._tensors is not None:
            # As default_collate, without a tensor per sample; this needs no random numbers.
            return [each[indices] for each in self._tensors]
        with seeded(batch.seed):
            read = getattr(self._samples, "__getitems__", None)
            return self._collate(read(indices) if read else [self._samples[index] for index in indices])


class BatchLoader:
    """Batches on the device in the order of `batch_sampler`, which can be iterated again; must be closed."""

    def __init__(
        self,
        dataset: SeededDataset,
        batch_sampler: Iterable[BatchIndices],
        settings: TrainingSettings,
        device: torch.device,
    ) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._pinned = on_gpu if settings.pin_memory is None else settings.pin_memory and on_gpu
        workers: dict[str, Any] = {}
        if settings.num_workers:
            # fork: a class loaded from a file cannot be pickled for a new process.
            workers = {"persistent_workers": True, "multiprocessing_context": "fork"}
            workers["prefetch_factor"] = settings.prefetch_factor
            workers["worker_init_fn"] = _outlive_signals
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=batch_sampler,
            num_workers=settings.num_workers,
            collate_fn=_identity,
            pin_memory=self._pinned,
            generator=torch.Generator(),  # otherwise it draws from dropout's generator
            **workers,
        )

    def moved(self, batch: Any) -> Any:
        """A batch on the device."""
        return to_device(batch, self._device, non_blocking=self._pinned)

    def read(self) -> Iterator[Any]:
        """The batches in the host's memory."""
        # Forked processes inherit the mask: signals wait until they can watch for them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            batches = iter(self._loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield from batches

    def close(self) -> None:
        """Stop the workers."""
        workers = getattr(self._loader, "_iterator", None)
        if workers is not None:
            workers._shutdown_workers()


def _outlive_signals(worker: int) -> None:
    """Let only the parent's SIGTERM end a worker: Slurm may signal all processes of a job."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def watch() -> None:
        while signal.sigwaitinfo(STOP_SIGNALS).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="stop-signals").start()


@dataclasses.dataclass(frozen=True)
class TrainBatchSampler:
    """The batches of one process from a position to the end of the training."""

    step_plan: StepPlan
    seed: int
    at: Position
    done: int

    def __iter__(self) -> Iterator[BatchIndices]:
        epoch, order = -1, np.empty(0, np.int64)
        for step in self.step_plan.remaining(self.at, self.done):
            if step.epoch != epoch:
                epoch, order = step.epoch, permutation(self.step_plan.n_samples, self.seed, step.epoch)
            for piece in step.micro_batches:
                indices = order[piece.first : piece.first + piece.size].tolist()
                yield BatchIndices(derive_seed(self.seed, "train", epoch, piece.first), indices)


@dataclasses.dataclass(frozen=True)
class EvalBatchSampler:
    """The batches of one process in an evaluation of a split; always the same."""

    n_samples: int
    batch_size: int
    split: str
    seed: int
    rank: int
    world_size: int

    def __iter__(self) -> Iterator[BatchIndices]:
        for first, size, _ in self._pieces():
            yield BatchIndices(derive_seed(self.seed, self.split, first), range(first, first + size))

    def counts(self) -> Iterator[int]:
        """The number of samples that count in each batch: all, or 0 if another process has them."""
        return (size if counts else 0 for _, size, counts in self._pieces())

    def _pieces(self) -> Iterator[tuple[int, int, bool]]:
        return own_pieces(self.n_samples, self.batch_size, self.rank, self.world_size)


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """The batch with all tensors moved, in tuples, lists, mappings, dataclasses and objects with `to`."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device, non_blocking=non_blocking) for key, value in batch.items()}
        return moved if type(batch) is dict else type(batch)(moved)  # type: ignore[call-arg]  # as PyTorch does
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device, non_blocking=non_blocking) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(to_device(value, device, non_blocking=non_blocking) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [field.name for field in dataclasses.fields(batch) if field.init]
        moved = {name: to_device(getattr(batch, name), device, non_blocking=non_blocking) for name in fields}
        return dataclasses.replace(batch, **moved)
    return batch


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of Python, NumPy and PyTorch's CPU; restore their states afterwards."""
    python, torch_cpu, numpy = random.getstate(), torch.default_generator.get_state(), mtrand.get_bit_generator()
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    # Replacing NumPy's generator takes 2 µs, saving and restoring its state 70 µs. Only the second of two normal
    # numbers is lost, which `randn` caches for its next call.
    mtrand.set_bit_generator(_DATA_GENERATOR)
    np.random.seed(seed & 0xFFFFFFFF)
    try:
        yield
    finally:
        random.setstate(python)
        torch.default_generator.set_state(torch_cpu)
        mtrand.set_bit_generator(numpy)


_DATA_GENERATOR = np.random.MT19937(0)


def _identity(batch: Any) -> Any:
    return batch
