"""Which samples each process computes at each step: of the seed, the epoch and the position alone.

Epochs are shuffled by (seed, epoch); steps are consecutive pieces of an epoch, cut from a position that is counted in
samples, so that a training goes on in the middle of an epoch on any number of processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Position(NamedTuple):
    """How far a training is: whole epochs, and samples of the present one."""

    epoch: int = 0
    sample: int = 0


START = Position()


@dataclass(frozen=True)
class MicroBatch:
    """What one process computes in one forward and backward pass: `size` samples of an epoch, from `first` on.

    `weight` is that of the mean of their losses in the step's; 0 where nothing was left for this process, which then
    computes in vain what another does: the others wait for it.
    """

    first: int
    size: int
    weight: float = 1.0

    @property
    def n(self) -> int:
        """The samples that count."""
        return self.size if self.weight else 0


@dataclass(frozen=True)
class Step:
    """One step of the optimizer as one process computes it; `after` is the position that it leads to."""

    epoch: int
    n: int
    micro_batches: tuple[MicroBatch, ...]
    after: Position


@dataclass(frozen=True)
class Cutting:
    """How epochs of `n_samples` are cut into steps of `step_size` samples, for one of `world_size` processes.

    No micro-batch is larger than `batch_size`. A training ends after `epochs` or after `steps`, whichever is given.
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
        """The samples that are used in an epoch."""
        return self.n_samples - self.n_samples % self.step_size if self.drop_last else self.n_samples

    def n_steps(self, at: Position = START, done: int = 0) -> int:
        """The steps that are to come from a position on, before which there were `done`."""
        if not self.epoch_size:
            return 0
        if self.steps is not None:
            return max(0, self.steps - done)
        assert self.epochs is not None
        epoch, sample = self._settle(at)
        n_later = (self.epochs - epoch - 1) * _ceil(self.epoch_size, self.step_size)
        return max(0, n_later + _ceil(self.epoch_size - sample, self.step_size))

    def share_done(self, at: Position, done: int) -> float:
        """How much of the training lies before a position, from 0 to 1; the same on any number of processes."""
        if self.steps is not None:
            return done / self.steps if self.steps else 1.0
        assert self.epochs is not None
        return (at.epoch * self.epoch_size + at.sample) / (self.epochs * self.epoch_size)

    @property
    def share_of_step(self) -> float:
        """How much of the training a whole step is."""
        return self.share_of(1)

    def share_of(self, n: int) -> float:
        """How much of the training its first `n` steps are."""
        if self.steps is not None or not self.epoch_size:
            return n / self.steps if self.steps else 1.0
        epoch, step = divmod(n, _ceil(self.epoch_size, self.step_size))
        return self.share_done(Position(epoch, min(step * self.step_size, self.epoch_size)), n)

    def plan(self, at: Position = START, done: int = 0) -> Iterator[Step]:
        """The steps from a position on, to the end."""
        for _ in range(self.n_steps(at, done)):
            epoch, sample = self._settle(at)
            n = min(self.step_size, self.epoch_size - sample)
            at = self._settle(Position(epoch, sample + n))
            yield Step(epoch, n, tuple(self._own(sample, n)), at)

    def _settle(self, at: Position) -> Position:
        """The same position, in the epoch whose samples come next."""
        return Position(at.epoch + 1) if at.sample >= self.epoch_size else at

    def _own(self, start: int, n: int) -> Iterator[MicroBatch]:
        for first, size, counts in own_pieces(n, self.batch_size, self.rank, self.world_size):
            yield MicroBatch(start + first, size, size * self.world_size / n if counts else 0.0)


def own_pieces(n: int, batch_size: int, rank: int, world_size: int) -> Iterator[tuple[int, int, bool]]:
    """The pieces of `n` samples that are a rank's, as (first, size, whether it counts); each rank has as many.

    They are of even sizes, of at least 2 if that can be: batch normalisation cannot train on one. Those for which
    nothing is left are the first piece again, and do not count.
    """
    n_pieces = _ceil(n, batch_size * world_size) * world_size
    n_filled = min(n_pieces, max(n // 2, _ceil(n, batch_size)))
    for piece in range(rank, n_pieces, world_size):
        number = piece if piece < n_filled else 0
        first, end = n * number // n_filled, n * (number + 1) // n_filled
        yield first, end - first, piece < n_filled


def permutation(n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of an epoch's samples, as an array of indices."""
    return np.random.Generator(np.random.PCG64(derive_seed(seed, "epoch", epoch))).permutation(n)


def derive_seed(*parts: object) -> int:
    """A seed of 63 bits for what `parts` name: other parts, other random numbers."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
