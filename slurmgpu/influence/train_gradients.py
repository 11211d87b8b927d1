"""The gradients of training examples in chunks on a fixed grid."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from slurmgpu.errors import SlurmGPUError
from slurmgpu.influence.gradients import Differentiable, Gradients

MAX_CHUNK = {"cpu": 1024, "cuda": 16384}
"""Larger chunks are no faster, and blocks of pairs leave the caches."""


@dataclass(frozen=True)
class Checkpoint:
    """A model at one point of its training, and the learning rate at that point.

    `weights`, of each wanted parameter's shape, change the dot product to Σ weights·g·g'.
    """

    model: Differentiable
    learning_rate: float
    weights: Mapping[str, Tensor] | None = None

    def squares(self, gradients: Gradients) -> Tensor:
        """η |g|² of each gradient (n,), in float64."""
        return gradients.squares(self.weights) * self.learning_rate


class ChunkGradients(NamedTuple):
    """The gradients of a chunk at a checkpoint, and η |g|² if wanted."""

    gradients: Gradients
    squares: Tensor | None


class TrainGradients:
    """The training examples `train` (n_train, c) in the largest chunks that `work_bytes` allows.

    The gradients of the first chunks are kept for later calls, in `keep_bytes`.
    """

    def __init__(
        self,
        checkpoints: Sequence[Checkpoint],
        train: Tensor,
        wanted: Collection[str],
        *,
        work_bytes: int,
        keep_bytes: int,
        with_squares: bool,
    ) -> None:
        if not len(train):
            raise SlurmGPUError("There are no training examples, so there are no influences.")
        self._checkpoints, self._train, self._wanted = checkpoints, train, wanted
        self._with_squares = with_squares
        work = max(checkpoint.model.bytes_of_work("train") for checkpoint in checkpoints)
        most = max(1, min(work_bytes // work, MAX_CHUNK.get(train.device.type, 1024)))
        self.chunk_size = math.ceil(len(train) / math.ceil(len(train) / most))
        self._order = checkpoints[0].model.order(train)
        self._left_bytes = keep_bytes
        self._kept: dict[tuple[int, int], ChunkGradients] = {}

    def __len__(self) -> int:
        """The number of chunks."""
        return math.ceil(len(self._train) / self.chunk_size)

    def lines(self, chunk: int) -> Tensor:
        """The lines of a chunk, ascending, so that the lowest line wins ties."""
        first = chunk * self.chunk_size
        return self._order[first : first + self.chunk_size].sort().values

    def chunk(self, chunk: int) -> Iterator[ChunkGradients]:
        """The gradients of a chunk at each checkpoint in turn."""
        return (self._found(chunk, at) for at in range(len(self._checkpoints)))

    def _found(self, chunk: int, at: int) -> ChunkGradients:
        if (kept := self._kept.get((chunk, at))) is not None:
            return kept
        found = self._compute(self._checkpoints[at], self.lines(chunk))
        if (n_bytes := found.gradients.n_bytes) <= self._left_bytes:
            self._kept[chunk, at] = found
            self._left_bytes -= n_bytes
        return found

    def sample(self, n: int) -> list[Tensor]:
        """The lines of n training examples spread over the grid, in pieces up to a chunk's size."""
        n = min(n, len(self._train))
        at = [i * len(self._train) // n for i in range(n)]
        return list(self._order[at].split(self.chunk_size))

    def at(self, lines: Tensor) -> Iterator[ChunkGradients]:
        """The gradients of any training examples at each checkpoint in turn."""
        return (self._compute(checkpoint, lines) for checkpoint in self._checkpoints)

    def _compute(self, checkpoint: Checkpoint, lines: Tensor) -> ChunkGradients:
        gradients = checkpoint.model.gradients(self._train[lines], "train", self._wanted)
        return ChunkGradients(gradients, checkpoint.squares(gradients) if self._with_squares else None)
