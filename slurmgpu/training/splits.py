"""The training, validation and test data of a user's class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from slurmgpu.errors import SlurmGPUError
from slurmgpu.training.batches import derive_seed
from slurmgpu.training.checkpoint_files import CheckpointMismatchError
from slurmgpu.training.data_loader import SeededDataset
from slurmgpu.training.ranks import Place, on_all_ranks
from slurmgpu.training.states import seed_everything
from slurmgpu.training.user_methods import optional_method

SPLITS = ("train", "val", "test")
EXPECTED = "an object with __len__ and __getitem__, such as a torch.utils.data.Dataset"


def called(user: Any, split: str) -> str:
    """The name of a split's data in errors."""
    return f"{type(user).__name__}.data({split!r})"


def read_split(user: Any, split: str) -> SeededDataset | None:
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
    return SeededDataset(samples, optional_method(user, "collate") or default_collate)


def _advice(samples: Any) -> str:
    """Advice for other kinds of data; "" for a map-style data set."""
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

    Random numbers are seeded with the same value at each call of `data(split)`, so that a random split is the same on
    each rank, in each attempt, and for "train" and "val".
    """

    def __init__(self, user: Any, seed: int, place: Place) -> None:
        self._user, self._seed = user, derive_seed(seed, "data")
        self._datasets: dict[str, SeededDataset | None] = {}
        found = on_all_ranks(place, self._read)
        self.sizes = found[0]
        for rank, sizes in enumerate(found):
            for split in SPLITS:
                if sizes[split] != self.sizes[split]:
                    raise SlurmGPUError(
                        f"{called(user, split)} has {_counted(self.sizes[split])} on rank 0 and "
                        f"{_counted(sizes[split])} on rank {rank}; expected the same on all."
                    )

    @property
    def train(self) -> SeededDataset:
        """The training data."""
        samples = self._datasets["train"]
        assert samples is not None  # read_split refuses that
        return samples

    def get(self, split: str) -> SeededDataset | None:
        """The data of a split, if it exists."""
        return self._datasets[split]

    def check_unchanged(self, before: Mapping[str, int]) -> None:
        """CheckpointMismatchError if sizes differ from those in the checkpoint."""
        for split in SPLITS:
            if self.sizes[split] != before[split]:
                raise CheckpointMismatchError(
                    f"the data has changed since the checkpoint: {called(self._user, split)} had "
                    f"{_counted(before[split])} then, and has {_counted(self.sizes[split])} now.",
                    "Restore it, or train on the new data in a new run.",
                )

    def _read(self) -> dict[str, int]:
        for split in SPLITS:
            seed_everything(self._seed)
            self._datasets[split] = read_split(self._user, split)
        return {split: -1 if dataset is None else len(dataset) for split, dataset in self._datasets.items()}


def _counted(n: int) -> str:
    return "no data" if n < 0 else f"{n:,} samples"
