"""The data of a training: the same on all ranks, in all attempts, and for all splits; and its cutting into steps."""

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
    """What the training class has for each split; `sizes` are their numbers of samples, -1 of one that it has not.

    Random numbers are the same whenever `data(split)` is called, so that a split which is drawn there is drawn alike on
    each rank, by each attempt, and for "train" as for "val".
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
                        f"{_counted(sizes[split])} on rank {rank}; it shall be the same on all."
                    )

    @property
    def train(self) -> Reader:
        """What is trained on."""
        samples = self._readers["train"]
        assert samples is not None  # read_split refuses that
        return samples

    def get(self, split: str) -> Reader | None:
        """A split, if there is one."""
        return self._readers[split]

    def check_unchanged(self, before: Mapping[str, int]) -> None:
        """Refuse other sizes than those of the checkpoint that is taken up."""
        for split in SPLITS:
            if self.sizes[split] != before[split]:
                raise SlurmGPUError(
                    f"the data has changed since the checkpoint: {called(self._user, split)} had "
                    f"{_counted(before[split])} then, and has {_counted(self.sizes[split])} now. Put it back as it "
                    "was, or train on the new data in a new run."
                )

    def _read(self) -> dict[str, int]:
        for split in SPLITS:
            seed_everything(self._seed)
            self._readers[split] = read_split(self._user, split)
        return {split: -1 if reader is None else len(reader) for split, reader in self._readers.items()}


def cut(n_samples: int, batch_size: int, settings: TrainingSettings, place: Place) -> Cutting:
    """How the epochs of a training are cut into steps; a SlurmGPUError if they make none."""
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
            f"the {n_samples} training samples make no step of {step_size}, and drop_last leaves out what makes none: "
            "take a smaller batch_size, or drop_last = false."
        )
    return cutting


def _counted(n: int) -> str:
    return "no data" if n < 0 else f"{n:,} samples"
