"""The interface of a model, and the gradients of examples as parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from slurmgpu.influence.parts import Multiply, Part, bytes_of, exactly

Side = Literal["train", "test"]
"""The side of an example; losses may differ between the two."""


@dataclass(frozen=True)
class Gradients:
    """The gradients of n examples' losses.

    The gradient is the sum of `terms`: a triple whose loss covers two queries has two. Each maps parameters to parts.
    `losses` (n,), and the model's `scores` (n,) of the examples.
    """

    terms: tuple[Mapping[str, Part], ...]
    losses: Tensor
    scores: Tensor

    def __len__(self) -> int:
        return len(self.losses)

    @property
    def n_bytes(self) -> int:
        """Their size."""
        return bytes_of(self.losses, self.scores) + sum(part.n_bytes for term in self.terms for part in term.values())

    def add_products(
        self,
        other: Gradients,
        out: Mapping[str, Tensor],
        *,
        scale: float = 1.0,
        weights: Mapping[str, Tensor] | None = None,
        multiply: Multiply = exactly,
    ) -> None:
        """Add scale × the dot products with `other`'s m gradients to `out` (n, m), by parameter.

        Parameters of one group may share a tensor.
        """
        for mine in self.terms:
            for theirs in other.terms:
                for name, part in mine.items():
                    weight = None if weights is None else weights[name]
                    part.add_products(theirs[name], out[name], scale=scale, weights=weight, multiply=multiply)

    def squares(self, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """The squared length of each gradient (n,), in float64."""
        found = self.losses.new_zeros(len(self), dtype=torch.float64)
        for mine in self.terms:
            for theirs in self.terms:
                for name, part in mine.items():
                    found += part.dots(theirs[name], None if weights is None else weights[name])
        return found

    def scaled(self, exponents: Tensor) -> Gradients:
        """The gradients times 2^exponents (n,), integers; losses and scores are as they were."""
        terms = [{name: part.scaled(exponents) for name, part in term.items()} for term in self.terms]
        return Gradients(tuple(terms), self.losses, self.scores)


class Differentiable(Protocol):
    """A model at one checkpoint, on its device, in evaluation mode. Examples are rows of integers (n, c)."""

    groups: Mapping[str, str]
    """The group of every trainable parameter; influences are split by group."""

    def parameters_by_name(self) -> Mapping[str, Tensor]:
        """The trainable parameters."""

    def gradients(self, examples: Tensor, side: Side, wanted: Collection[str]) -> Gradients:
        """The gradients of examples (n, c) for the `wanted` parameters only; no later call may change them."""

    def losses(self, examples: Tensor, side: Side) -> Tensor:
        """The losses (n,) for autograd, to verify `gradients`."""

    def order(self, examples: Tensor) -> Tensor:
        """A permutation (n,) that groups examples which share work."""

    def bytes_of_work(self, side: Side) -> int:
        """The largest memory of `gradients` for one example, including the result, without shared work."""

    def bytes_of_result(self, side: Side) -> int:
        """The largest memory of the result for one example, without shared work."""
