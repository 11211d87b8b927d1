"""The sampling settings of each row of a batch, as tensors, and the kinds of sampling in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from slurmgpu.llm.interface.engine import Sampling

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Kinds:
    """The kinds of sampling in a batch, known without reading a tensor.

    A row is `greedy`, or `free` (no top_k and top_p), or has a top_k, or has only top_p (`nucleus`); `top_k` is the
    greatest of all rows. Rows may also have a min_p, and be `scaled` by a temperature other than 1.
    """

    greedy: bool = False
    free: bool = False
    top_k: int = 0
    nucleus: bool = False
    min_p: bool = False
    scaled: bool = False

    @classmethod
    def of(cls, samplings: Sequence[Sampling]) -> Kinds:
        """The kinds of these rows."""
        sampled = [each for each in samplings if each.temperature > 0]
        return cls(
            greedy=len(sampled) < len(samplings),
            free=any(each.top_k == 0 and each.top_p == 1 for each in sampled),
            top_k=max((each.top_k for each in sampled), default=0),
            nucleus=any(each.top_k == 0 and each.top_p < 1 for each in sampled),
            min_p=any(each.min_p > 0 for each in sampled),
            scaled=any(each.temperature != 1 for each in sampled),
        )

    def __or__(self, other: Kinds) -> Kinds:
        """The kinds of the rows of both."""
        return Kinds(*(max(pair) for pair in zip(astuple(self), astuple(other), strict=True)))

    @property
    def sampled(self) -> bool:
        """Whether some row may be sampled."""
        return self.free or self.top_k > 0 or self.nucleus


@dataclass(frozen=True)
class Rules:
    """The sampling of a batch's rows: tensors with one value for each row, and their `kinds`."""

    kinds: Kinds
    keys: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, samplings: Sequence[Sampling], keys: Sequence[int], device: object = None) -> Rules:
        """The rules of rows with these settings and keys."""
        import torch

        return cls(
            Kinds.of(samplings),
            torch.tensor(keys, dtype=torch.int64, device=device),
            torch.tensor([each.temperature for each in samplings], dtype=torch.float32, device=device),
            torch.tensor([each.top_k for each in samplings], dtype=torch.int64, device=device),
            torch.tensor([each.top_p for each in samplings], dtype=torch.float32, device=device),
            torch.tensor([each.min_p for each in samplings], dtype=torch.float32, device=device),
        )

    def select(self, rows: Tensor) -> Rules:
        """The rules of the rows with these indices (n,), in this order."""
        return Rules(self.kinds, *(each[rows] for each in self._tensors()))

    def join(self, other: Rules) -> Rules:
        """The rules of these rows and then of others."""
        import torch

        pairs = zip(self._tensors(), other._tensors(), strict=True)
        return Rules(self.kinds | other.kinds, *(torch.cat(pair) for pair in pairs))

    def _tensors(self) -> list[Tensor]:
        return [self.keys, self.temperature, self.top_k, self.top_p, self.min_p]
