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
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from slurmgpu.errors import SlurmGPUError
from slurmgpu.training.batches import Cutting, Position, derive_seed, own_pieces, permutation
from slurmgpu.training.ranks import Place, together
from slurmgpu.training.settings import TrainingSettings
from slurmgpu.training.states import seed_everything
from slurmgpu.training.written import UnfitCheckpointError

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
SPLITS = ("train", "val", "test")
EXPECTED = "an object with __len__ and __getitem__, such as a torch.utils.data.Dataset"


class Reading(NamedTuple):
    """A batch to read."""

    seed: int
    indices: Sequence[int]


class Reader:
    """A data set that is read by batches under their seeds; the loader's workers share it."""

    def __init__(self, samples: Any, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self._samples = samples
        self._collate = collate
        self._tensors = samples.tensors if type(samples) is TensorDataset and collate is default_collate else None

    def __len__(self) -> int:
        return len(self._samples)

    def __getitems__(self, reading: Reading) -> Any:
        """The batch; torch's fetcher calls this with a value of the batch sampler."""
        indices = list(reading.indices)
        if self._tensors is not None:
            # As default_collate, without a tensor per sample; this needs no random numbers.
            return [each[indices] for each in self._tensors]
        with seeded(reading.seed):
            read = getattr(self._samples, "__getitems__", None)
            return self._collate(read(indices) if read else [self._samples[index] for index in indices])


class Loader:
    """Batches on the device in the order of `readings`, which can be iterated again; must be closed."""

    def __init__(
        self,
        reader: Reader,
        readings: Iterable[Reading],
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
            reader,
            batch_sampler=readings,
            num_workers=settings.num_workers,
            collate_fn=_as_it_is,
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

    threading.Thread(target=watch, daemon=True, name="the training's word").start()


@dataclasses.dataclass(frozen=True)
class TrainReadings:
    """The batches of one process from a position to the end of the training."""

    cutting: Cutting
    seed: int
    at: Position
    done: int

    def __iter__(self) -> Iterator[Reading]:
        epoch, order = -1, np.empty(0, np.int64)
        for step in self.cutting.plan(self.at, self.done):
            if step.epoch != epoch:
                epoch, order = step.epoch, permutation(self.cutting.n_samples, self.seed, step.epoch)
            for piece in step.micro_batches:
                indices = order[piece.first : piece.first + piece.size].tolist()
                yield Reading(derive_seed(self.seed, "train", epoch, piece.first), indices)


@dataclasses.dataclass(frozen=True)
class EvalReadings:
    """The batches of one process in an evaluation of a split; always the same."""

    n_samples: int
    batch_size: int
    split: str
    seed: int
    rank: int
    world_size: int

    def __iter__(self) -> Iterator[Reading]:
        for first, size, _ in self._pieces():
            yield Reading(derive_seed(self.seed, self.split, first), range(first, first + size))

    def counts(self) -> Iterator[int]:
        """The number of samples that count in each batch: all, or 0 if another process has them."""
        return (size if counts else 0 for _, size, counts in self._pieces())

    def _pieces(self) -> Iterator[tuple[int, int, bool]]:
        return own_pieces(self.n_samples, self.batch_size, self.rank, self.world_size)


def called(user: Any, split: str) -> str:
    """The name of a split's data in errors."""
    return f"{type(user).__name__}.data({split!r})"


def read_split(user: Any, split: str) -> Reader | None:
    """The training class's data for a split, or None; SlurmGPUError for other kinds, empty data, or no "train"."""
    samples = user.data(split)
    name = called(user, split)
    if samples is None:
        if split == "train":
            raise SlurmGPUError(f"{name} is None; expected {EXPECTED}.")
        return None
    if advice := _advice(samples):
        raise SlurmGPUError(f"{name} is a {type(samples).__name__}; expected {EXPECTED}. {advice}")
    if not len(samples):
        raise SlurmGPUError(f"{name} has no samples; expected at least one. Return None if there is no such split.")
    return Reader(samples, getattr(user, "collate", None) or default_collate)


def _advice(samples: Any) -> str:
    """What to return instead; "" for a map-style data set."""
    if isinstance(samples, DataLoader):
        return "Return its data set: the settings define batches, and a method collate(samples) their content."
    if isinstance(samples, IterableDataset):
        return "Training resumes within an epoch, so samples must be numbered."
    if isinstance(samples, (torch.Tensor, tuple)):
        return "Return torch.utils.data.TensorDataset(inputs, targets)."
    if isinstance(samples, Mapping):
        return f"Return one of its values ({', '.join(map(str, list(samples)[:5]))}) for each split."
    if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
        return "Wrap it in a class with these two methods."
    return ""


class Splits:
    """The training class's data for each split; `sizes` are the numbers of samples, -1 for a missing split.

    Random numbers are seeded alike at each call of `data(split)`, so that random splits are the same on each rank, in
    each attempt, and for "train" as for "val".
    """

    def __init__(self, user: Any, seed: int, place: Place) -> None:
        self._user, self._seed = user, derive_seed(seed, "data")
        self._readers: dict[str, Reader | None] = {}
        found = together(place, self._read)
        self.sizes = found[0]
        for rank, sizes in enumerate(found):
            for split in SPLITS:
                if sizes[split] != self.sizes[split]:
                    raise SlurmGPUError(
                        f"{called(user, split)} has {_counted(self.sizes[split])} on rank 0 and "
                        f"{_counted(sizes[split])} on rank {rank}; expected the same on all."
                    )

    @property
    def train(self) -> Reader:
        """The training data."""
        samples = self._readers["train"]
        assert samples is not None  # read_split refuses that
        return samples

    def get(self, split: str) -> Reader | None:
        """The data of a split, if it exists."""
        return self._readers[split]

    def check_unchanged(self, before: Mapping[str, int]) -> None:
        """UnfitCheckpointError if sizes differ from those in the checkpoint."""
        for split in SPLITS:
            if self.sizes[split] != before[split]:
                raise UnfitCheckpointError(
                    f"the data has changed since the checkpoint: {called(self._user, split)} had "
                    f"{_counted(before[split])} then, and has {_counted(self.sizes[split])} now.",
                    "Restore it, or train on the new data in a new run.",
                )

    def _read(self) -> dict[str, int]:
        for split in SPLITS:
            seed_everything(self._seed)
            self._readers[split] = read_split(self._user, split)
        return {split: -1 if reader is None else len(reader) for split, reader in self._readers.items()}


def cut(n_samples: int, batch_size: int, settings: TrainingSettings, place: Place) -> Cutting:
    """The cutting of a training's epochs into steps; SlurmGPUError if there are none."""
    step_size = settings.global_batch_size or batch_size * settings.accumulation * place.world_size
    cutting = Cutting(
        n_samples,
        step_size,
        batch_size,
        epochs=settings.epochs,
        steps=settings.steps,
        drop_last=settings.drop_last,
        rank=place.rank,
        world_size=place.world_size,
    )
    if not cutting.epoch_size:
        raise SlurmGPUError(
            f"the {n_samples} training samples make no step of {step_size}, and drop_last drops incomplete ones: "
            "use a smaller batch_size, or drop_last = false."
        )
    return cutting


def _counted(n: int) -> str:
    return "no data" if n < 0 else f"{n:,} samples"


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
        return moved if type(batch) is dict else type(batch)(moved)  # type: ignore[call-arg]
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
    mtrand.set_bit_generator(_FOR_READING)
    np.random.seed(seed & 0xFFFFFFFF)
    try:
        yield
    finally:
        random.setstate(python)
        torch.default_generator.set_state(torch_cpu)
        mtrand.set_bit_generator(numpy)


_FOR_READING = np.random.MT19937(0)


def _as_it_is(batch: Any) -> Any:
    return batch
