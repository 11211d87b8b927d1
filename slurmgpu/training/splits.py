"""The data of a training, the same on all ranks and in all attempts, and its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.training.batches import Cutting, derive_seed
from slurmgpu.training.loading import Reader, called, read_split
from slurmgpu.training.places import Place
from slurmgpu.training.ranks import together
from slurmgpu.training.settings import TrainingSettings
from slurmgpu.training.states import seed_everything

SPLITS = ("train", "val", "test")


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
        """SlurmGPUError if sizes differ from those in the checkpoint."""
        for split in SPLITS:
            if self.sizes[split] != before[split]:
                raise SlurmGPUError(
                    f"the data has changed since the checkpoint: {called(self._user, split)} had "
                    f"{_counted(before[split])} then, and has {_counted(self.sizes[split])} now. Restore it, "
                    "or train on the new data in a new run."
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
