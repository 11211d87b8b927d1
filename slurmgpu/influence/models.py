"""What influences need of a model, and what it gives: the gradients of examples, as parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from slurmgpu.influence.parts import Multiply, Part, bytes_of, exactly

Side = Literal["train", "test"]
"""Whose loss: the two may differ."""


@dataclass(frozen=True)
class Gradients:
    """The gradients of n examples' losses.

    `terms` are summed: a triple whose loss is that of two queries has two. Each maps parameters to parts.
    `losses` (n,), and `scores` (n,), the model's score of what each example says.
    """

    terms: tuple[Mapping[str, Part], ...]
    losses: Tensor
    scores: Tensor

    def __len__(self) -> int:
        return len(self.losses)

    @property
    def n_bytes(self) -> int:
        """What they take."""
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
        """Add scale × the dot products with `other`'s m gradients to `out` (n, m), a tensor for each parameter.

        Parameters of a group may have the same tensor.
        """
        for mine in self.terms:
            for theirs in other.terms:
                for name, part in mine.items():
                    weight = None if weights is None else weights[name]
                    part.add_products(theirs[name], out[name], scale=scale, weights=weight, multiply=multiply)

    def squares(self, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """The squared length of each gradient (n,)."""
        found = self.losses.new_zeros(len(self))
        for mine in self.terms:
            for theirs in self.terms:
                for name, part in mine.items():
                    found += part.dots(theirs[name], None if weights is None else weights[name])
        return found


class Differentiable(Protocol):
    """A model at one checkpoint, on its device and in evaluation mode. An example is a row of whole numbers (n, c)."""

    groups: Mapping[str, str]
    """The group of each of the model's trainable parameters, by which influences are split; every one is there."""

    def parameters_by_name(self) -> Mapping[str, Tensor]:
        """The trainable parameters."""

    def gradients(self, examples: Tensor, side: Side, wanted: Collection[str]) -> Gradients:
        """The gradients of examples (n, c) with regard to the `wanted` parameters, and to no others.

        They are the caller's to keep: no later call changes them.
        """

    def losses(self, examples: Tensor, side: Side) -> Tensor:
        """The same losses (n,) by the plain way, for autograd: what `gradients` is compared with."""

    def order(self, examples: Tensor) -> Tensor:
        """A permutation (n,) that puts examples together that share work."""

    def bytes_of_work(self, side: Side) -> int:
        """What `gradients` takes at most for one example, its result included, where no two share work."""

    def bytes_of_result(self, side: Side) -> int:
        """What the result takes at most for one example, where no two share work."""
