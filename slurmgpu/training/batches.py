"""The samples that each process computes at each step, as a function of seed, epoch and position.

Epochs are shuffled by (seed, epoch). Steps are consecutive pieces of an epoch, cut from a position counted in samples,
so that a training can resume within an epoch on any number of processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slurmgpu.errors import SlurmGPUError
from slurmgpu.training.ranks import Place
from slurmgpu.training.settings import TrainingSettings


class Position(NamedTuple):
    """The progress of a training: whole epochs, and samples of the current one."""

    epoch: int = 0
    sample: int = 0


START = Position()


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass of one process: `size` samples of an epoch, from `first` on.

    `weight` is the weight of their mean loss in the step. If no samples are left for this process, it is 0: the process
    repeats another's samples, since the others wait for it.
    """

    first: int
    size: int
    weight: float = 1.0

    @property
    def n(self) -> int:
        """The number of samples that count."""
        return self.size if self.weight else 0


@dataclass(frozen=True)
class Step:
    """One optimizer step of one process; `after` is the position after it."""

    epoch: int
    n: int
    micro_batches: tuple[MicroBatch, ...]
    after: Position


@dataclass(frozen=True)
class StepPlan:
    """Epochs of `n_samples` in steps of `step_size` samples, for one of `world_size` processes.

    No micro-batch is larger than `batch_size`. A training ends after `epochs` or `steps`, whichever is given.
    """

    n_samples: int
    step_size: int
    batch_size: int
    epochs: int | None = None
    steps: int | None = None
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1

    @property
    def epoch_size(self) -> int:
        """The number of samples used per epoch."""
        return self.n_samples - self.n_samples % self.step_size if self.drop_last else self.n_samples

    def n_steps(self, at: Position = START, done: int = 0) -> int:
        """The number of steps left at a position, after `done` steps."""
        if not self.epoch_size:
            return 0
        if self.steps is not None:
            return max(0, self.steps - done)
        assert self.epochs is not None
        epoch, sample = self._settle(at)
        n_later = (self.epochs - epoch - 1) * _ceil(self.epoch_size, self.step_size)
        return max(0, n_later + _ceil(self.epoch_size - sample, self.step_size))

    def n_done(self, at: Position, done: int) -> int:
        """The number of whole steps before a position, after `done` steps of any size."""
        return self.n_steps() - self.n_steps(at, done)

    def share_done(self, at: Position, done: int) -> float:
        """The finished share of the training at a position, from 0 to 1; equal for any number of processes."""
        if self.steps is not None:
            return done / self.steps if self.steps else 1.0
        assert self.epochs is not None
        return (at.epoch * self.epoch_size + at.sample) / (self.epochs * self.epoch_size)

    def share_of(self, n: int) -> float:
        """The share of the training in its first `n` steps."""
        if self.steps is not None or not self.epoch_size:
            return n / self.steps if self.steps else 1.0
        epoch, step = divmod(n, _ceil(self.epoch_size, self.step_size))
        return self.share_done(Position(epoch, min(step * self.step_size, self.epoch_size)), n)

    def remaining(self, at: Position = START, done: int = 0) -> Iterator[Step]:
        """The steps from a position to the end, after `done` steps."""
        for _ in range(self.n_steps(at, done)):
            epoch, sample = self._settle(at)
            n = min(self.step_size, self.epoch_size - sample)
            at = self._settle(Position(epoch, sample + n))
            pieces = own_pieces(n, self.batch_size, self.rank, self.world_size)
            own = (
                MicroBatch(sample + first, size, size * self.world_size / n if counts else 0.0)
                for first, size, counts in pieces
            )
            yield Step(epoch, n, tuple(own), at)

    def _settle(self, at: Position) -> Position:
        """The same position, in the epoch of the next sample."""
        return Position(at.epoch + 1) if at.sample >= self.epoch_size else at


def plan_steps(n_samples: int, batch_size: int, settings: TrainingSettings, place: Place) -> StepPlan:
    """The steps of a training; SlurmGPUError if there are none."""
    step_size = settings.global_batch_size or batch_size * settings.accumulation * place.world_size
    step_plan = StepPlan(
        n_samples,
        step_size,
        batch_size,
        epochs=settings.epochs,
        steps=settings.steps,
        drop_last=settings.drop_last,
        rank=place.rank,
        world_size=place.world_size,
    )
    if not step_plan.epoch_size:
        raise SlurmGPUError(
            f"the {n_samples} training samples do not fill a step of {step_size}, and drop_last = true drops "
            "incomplete steps: use a smaller batch_size, or drop_last = false."
        )
    return step_plan


def own_pieces(n: int, batch_size: int, rank: int, world_size: int) -> Iterator[tuple[int, int, bool]]:
    """A rank's pieces of `n` samples as (first, size, whether it counts); all ranks have the same number.

    Sizes are even, and at least 2 if possible: batch normalisation cannot train on one sample. Surplus pieces repeat
    the first one and do not count.
    """
    n_pieces = _ceil(n, batch_size * world_size) * world_size
    n_filled = min(n_pieces, max(n // 2, _ceil(n, batch_size)))
    for piece in range(rank, n_pieces, world_size):
        number = piece if piece < n_filled else 0
        first, end = n * number // n_filled, n * (number + 1) // n_filled
        yield first, end - first, piece < n_filled


def permutation(n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of the `n` samples in an epoch, as indices (n,)."""
    return np.random.Generator(np.random.PCG64(derive_seed(seed, "epoch", epoch))).permutation(n)


def derive_seed(*parts: object) -> int:
    """A seed of 63 bits derived from `parts`."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
