"""Factored gradients of many examples, and their dot products without forming any gradient.

A part is the share of one parameter. Its dot products are exact: an example's gradient by a matrix, for instance, is
an outer product l ⊗ r, and ⟨l ⊗ r, l' ⊗ r'⟩ = (l·l')(r·r').

Dimensions: n examples on the side of the rows ("self"), m on that of the columns ("other"); u and v unique queries,
which examples may share; d the width of a table; N its rows. `tables` has tables, whose rows examples share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Multiply = Callable[[Tensor, Tensor], Tensor]
"""a (n, d), b (m, d) → a bᵀ (n, m): the operation with a selectable precision."""


ROWS_AT_ONCE = 64
"""Rows that are gathered at a time."""


def exactly(a: Tensor, b: Tensor) -> Tensor:
    """The products in the precision of the factors."""
    return a @ b.T


class Part(ABC):
    """One parameter's share of n gradients.

    `weights`, of the parameter's shape, change ⟨g, g'⟩ to Σ weights·g·g', e.g. for Adam.
    """

    @abstractmethod
    def add_products(
        self, other: Part, out: Tensor, scale: float = 1.0, weights: Tensor | None = None, multiply: Multiply = exactly
    ) -> None:
        """Add scale × the dot product of each pair to `out` (n, m), which is contiguous."""

    @abstractmethod
    def dots(self, other: Part, weights: Tensor | None = None) -> Tensor:
        """The dot products of equal positions (n,), for two parts of n examples."""

    @abstractmethod
    def dense(self, shape: torch.Size) -> Tensor:
        """The full gradients (n, *shape), for tests and small models."""

    @property
    def n_bytes(self) -> int:
        """The size of the factors."""
        return bytes_of(*(value for value in vars(self).values() if isinstance(value, Tensor)))


@dataclass(frozen=True)
class Dense(Part):
    """A small parameter's full gradients: `values` (n, size), flattened."""

    values: Tensor

    def add_products(
        self, other: Part, out: Tensor, scale: float = 1.0, weights: Tensor | None = None, multiply: Multiply = exactly
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


@dataclass(frozen=True)
class Outer(Part):
    """The gradients of a matrix (a, b): `left` (n, a) ⊗ `right` (u, b); example i has row `of[i]`."""

    left: Tensor
    right: Tensor
    of: Tensor

    def add_products(
        self, other: Part, out: Tensor, scale: float = 1.0, weights: Tensor | None = None, multiply: Multiply = exactly
    ) -> None:
        """See Part. With weights, 2abv more operations per example."""
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


def row_dots(a: Tensor, a_of: Tensor, b: Tensor, b_of: Tensor) -> Tensor:
    """a[a_of] · b[b_of] row by row (n,), gathering few rows at a time."""
    if a is b and a_of is b_of:
        return torch.linalg.vector_norm(a, dim=1).square()[a_of]
    pieces = zip(a_of.split(ROWS_AT_ONCE), b_of.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([(a[i] * b[j]).sum(1) for i, j in pieces])


def weighted_row_dots(left: Tensor, weights: Tensor, a: Tensor, a_of: Tensor, b: Tensor, b_of: Tensor) -> Tensor:
    """(left @ weights) · (a[a_of] ∘ b[b_of]) row by row (n,), gathering few rows at a time."""
    pieces = zip(*(values.split(ROWS_AT_ONCE) for values in (left, a_of, b_of)), strict=True)
    return torch.cat([((piece @ weights) * a[i] * b[j]).sum(1) for piece, i, j in pieces])


def bytes_of(*tensors: Tensor) -> int:
    """The size of tensors."""
    return sum(tensor.nbytes for tensor in tensors)
