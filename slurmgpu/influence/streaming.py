"""The gradients of training examples, chunk by chunk, on a grid that is the same for every call."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from slurmgpu.errors import SlurmGPUError
from slurmgpu.influence.models import Differentiable, Gradients

MAX_CHUNK = {"cpu": 1024, "cuda": 16384}
"""More examples at once are no faster, and blocks of pairs leave the caches."""


@dataclass(frozen=True)
class Checkpoint:
    """A model as it was at one time of its training, and the learning rate of that time.

    `weights`, a tensor of each wanted parameter's shape, make the dot product Σ weights·g·g'.
    """

    model: Differentiable
    learning_rate: float
    weights: Mapping[str, Tensor] | None = None

    def squares(self, gradients: Gradients) -> Tensor:
        """η |g|² of each gradient (n,)."""
        return gradients.squares(self.weights) * self.learning_rate


class Streamed(NamedTuple):
    """What there is of a chunk at a checkpoint: the gradients, and η |g|² if it is wanted."""

    gradients: Gradients
    squares: Tensor | None


class Stream:
    """The training examples `train` (n_train, c) in chunks of as many as `work_bytes` suffice for.

    What is computed of the first chunks is kept for the next time, in `keep_bytes`.
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
            raise SlurmGPUError("There is no training example, and so there are no influences.")
        self._checkpoints, self._train, self._wanted = checkpoints, train, wanted
        self._with_squares = with_squares
        work = max(checkpoint.model.bytes_of_work("train") for checkpoint in checkpoints)
        most = max(1, min(work_bytes // work, MAX_CHUNK.get(train.device.type, 1024)))
        self.chunk_size = math.ceil(len(train) / math.ceil(len(train) / most))
        self._order = checkpoints[0].model.order(train)
        self._left_bytes = keep_bytes
        self._kept: dict[tuple[int, int], Streamed] = {}

    def __len__(self) -> int:
        """How many chunks there are."""
        return math.ceil(len(self._train) / self.chunk_size)

    def lines(self, chunk: int) -> Tensor:
        """The lines of a chunk, ascending: of equal values, the first is that of the lowest line."""
        first = chunk * self.chunk_size
        return self._order[first : first + self.chunk_size].sort().values

    def chunk(self, chunk: int) -> Iterator[Streamed]:
        """What there is of a chunk at each checkpoint, one after another."""
        return (self._found(chunk, at) for at in range(len(self._checkpoints)))

    def _found(self, chunk: int, at: int) -> Streamed:
        if (kept := self._kept.get((chunk, at))) is not None:
            return kept
        found = self._compute(self._checkpoints[at], self.lines(chunk))
        if (n_bytes := found.gradients.n_bytes) <= self._left_bytes:
            self._kept[chunk, at] = found
            self._left_bytes -= n_bytes
        return found

    def sample(self, n: int) -> list[Tensor]:
        """The lines of n training examples spread over the grid, in pieces no larger than a chunk."""
        n = min(n, len(self._train))
        at = [i * len(self._train) // n for i in range(n)]
        return list(self._order[at].split(self.chunk_size))

    def at(self, lines: Tensor) -> Iterator[Streamed]:
        """What there is of any training examples at each checkpoint."""
        return (self._compute(checkpoint, lines) for checkpoint in self._checkpoints)

    def _compute(self, checkpoint: Checkpoint, lines: Tensor) -> Streamed:
        gradients = checkpoint.model.gradients(self._train[lines], "train", self._wanted)
        return Streamed(gradients, checkpoint.squares(gradients) if self._with_squares else None)
