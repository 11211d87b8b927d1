"""The gradients of many examples, kept as factors: all their dot products, and never a gradient formed.

A part is what one parameter contributes. Its rule for dot products is exact: of a matrix, for instance, an example's
gradient is an outer product l ⊗ r, and ⟨l ⊗ r, l' ⊗ r'⟩ = (l·l')(r·r').

Dimensions: n examples on the side of the rows ("self"), m on that of the columns ("other"); u and v unique queries,
which examples may share; d the width of a table; N its rows. Tables, whose rows examples share, are in `tables`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Multiply = Callable[[Tensor, Tensor], Tensor]
"""a (n, d), b (m, d) → a bᵀ (n, m): the one operation whose precision can be chosen."""


ROWS_AT_ONCE = 64
"""Rows that are gathered together."""


def exactly(a: Tensor, b: Tensor) -> Tensor:
    """The products in the precision that the factors have."""
    return a @ b.T


class Part(Protocol):
    """One parameter's share of n gradients.

    `weights`, of the parameter's shape, make ⟨g, g'⟩ into Σ weights·g·g': Adam's diagonal, for instance.
    """

    def add_products(
        self,
        other: Part,
        out: Tensor,
        *,
        scale: float = 1.0,
        weights: Tensor | None = None,
        multiply: Multiply = exactly,
    ) -> None:
        """Add scale × the dot product of each pair to `out` (n, m), which is contiguous."""

    def dots(self, other: Part, weights: Tensor | None = None) -> Tensor:
        """The dot products of like positions (n,), where both have n examples."""

    def dense(self, shape: torch.Size) -> Tensor:
        """The gradients themselves (n, *shape): for tests and small models."""

    @property
    def n_bytes(self) -> int:
        """What the factors take."""


@dataclass(frozen=True)
class Dense:
    """A small parameter's gradients as they are: `values` (n, size), the parameter flattened."""

    values: Tensor

    def add_products(
        self,
        other: Part,
        out: Tensor,
        *,
        scale: float = 1.0,
        weights: Tensor | None = None,
        multiply: Multiply = exactly,
    ) -> None:
        """See Part."""
        assert isinstance(other, Dense)
        values = self.values if weights is None else self.values * weights.flatten()
        out.add_(multiply(values, other.values), alpha=scale)

    def dots(self, other: Part, weights: Tensor | None = None) -> Tensor:
        """See Part."""
        assert isinstance(other, Dense)
        values = self.values if weights is None else self.values * weights.flatten()
        return (values * other.values).sum(1)

    def dense(self, shape: torch.Size) -> Tensor:
        """See Part."""
        return self.values.reshape(-1, *shape)

    @property
    def n_bytes(self) -> int:
        """See Part."""
        return bytes_of(self.values)


@dataclass(frozen=True)
class Outer:
    """The gradients of a matrix (a, b): `left` (n, a) ⊗ `right` (u, b), of which example i has row `of[i]`."""

    left: Tensor
    right: Tensor
    of: Tensor

    def add_products(
        self,
        other: Part,
        out: Tensor,
        *,
        scale: float = 1.0,
        weights: Tensor | None = None,
        multiply: Multiply = exactly,
    ) -> None:
        """See Part. With weights, a product for each example: 2abv operations more."""
        assert isinstance(other, Outer)
        if weights is None:
            of_queries = multiply(self.right, other.right)
            of_pairs = of_queries.index_select(0, self.of).index_select(1, other.of)
            out.addcmul_(multiply(self.left, other.left), of_pairs, value=scale)
            return
        for i, (left, query) in enumerate(zip(self.left, self.of.tolist(), strict=True)):
            weighted = multiply(other.right, weights * left[:, None] * self.right[query])  # (v, a)
            out[i].add_((weighted[other.of] * other.left).sum(1), alpha=scale)

    def dots(self, other: Part, weights: Tensor | None = None) -> Tensor:
        """See Part."""
        assert isinstance(other, Outer)
        left = self.left * other.left
        if weights is None:
            return left.sum(1) * row_dots(self.right, self.of, other.right, other.of)
        return weighted_row_dots(left, weights, self.right, self.of, other.right, other.of)

    def dense(self, shape: torch.Size) -> Tensor:
        """See Part."""
        return (self.left[:, :, None] * self.right[self.of][:, None, :]).reshape(-1, *shape)

    @property
    def n_bytes(self) -> int:
        """See Part."""
        return bytes_of(self.left, self.right, self.of)


def row_dots(a: Tensor, a_of: Tensor, b: Tensor, b_of: Tensor) -> Tensor:
    """a[a_of] · b[b_of] row by row (n,), without ever having all those rows."""
    if a is b and a_of is b_of:
        return torch.linalg.vector_norm(a, dim=1).square()[a_of]
    pieces = zip(a_of.split(ROWS_AT_ONCE), b_of.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([(a[i] * b[j]).sum(1) for i, j in pieces])


def weighted_row_dots(left: Tensor, weights: Tensor, a: Tensor, a_of: Tensor, b: Tensor, b_of: Tensor) -> Tensor:
    """(left @ weights) · (a[a_of] ∘ b[b_of]) row by row (n,), likewise."""
    pieces = zip(*(values.split(ROWS_AT_ONCE) for values in (left, a_of, b_of)), strict=True)
    return torch.cat([((piece @ weights) * a[i] * b[j]).sum(1) for piece, i, j in pieces])


def bytes_of(*tensors: Tensor) -> int:
    """What tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
