"""Factored gradients of many examples, and their dot products without forming any gradient.

A part holds the gradients for one parameter. Its dot products are exact: an example's gradient for a matrix, for
instance, is an outer product l ⊗ r, and ⟨l ⊗ r, l' ⊗ r'⟩ = (l·l')(r·r').

Dimensions: n examples are the rows ("self"), m the columns ("other"); u and v are unique queries, which examples may
share; d is the width of a table, N the number of its rows. `table_parts` has tables, whose rows examples share.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Multiply = Callable[[Tensor, Tensor], Tensor]
"""a (n, d), b (m, d) → a bᵀ (n, m): the operation with a selectable precision."""


NUMBERS_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Numbers that are gathered, or made float64, at a time: on a CPU, as many as the caches hold."""


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
        """The dot products of equal positions (n,), for two parts of n examples; in float64.

        The square of 10⁻²⁰ is 0 in float32, and a model that is sure of a triple has such small gradients.
        """

    @abstractmethod
    def scaled(self, exponents: Tensor) -> Part:
        """The gradients times 2^exponents (n,), integers; exact unless numbers leave the dtype's range."""

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
        if weights is None:
            return row_dots(self.values, None, other.values, None)
        table = weights.flatten().double()
        pieces = zip(*(in_pieces(each, self.values) for each in (self.values, other.values)), strict=True)
        return torch.cat([(mine.double() * table * theirs.double()).sum(1) for mine, theirs in pieces])

    def scaled(self, exponents: Tensor) -> Dense:
        """See Part."""
        return Dense(by_powers(self.values, exponents))

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
        if weights is None:
            left = row_dots(self.left, None, other.left, None)
            return left.mul_(row_dots(self.right, self.of, other.right, other.of))
        return weighted_row_dots(self.left, other.left, weights, self.right, self.of, other.right, other.of)

    def scaled(self, exponents: Tensor) -> Outer:
        """See Part."""
        return Outer(by_powers(self.left, exponents), self.right, self.of)

    def dense(self, shape: torch.Size) -> Tensor:
        """See Part."""
        return (self.left[:, :, None] * self.right[self.of][:, None, :]).reshape(-1, *shape)


def row_dots(a: Tensor, a_of: Tensor | None, b: Tensor, b_of: Tensor | None) -> Tensor:
    """a[a_of] · b[b_of] row by row (n,), in float64; None for all rows in order."""
    if a is b and a_of is b_of:
        return squares_of(a) if a_of is None else squares_of(a)[a_of]
    pieces = zip(_gathered(a, a_of), _gathered(b, b_of), strict=True)
    return torch.cat([(mine * theirs).sum(1) for mine, theirs in pieces])


def squares_of(values: Tensor) -> Tensor:
    """The squared length of each row (n,), in float64.

    On a CPU, lengths whose squares are exact enough are computed in the values' own dtype, in a fifth of the time. On a
    GPU it takes longer to find out which ones: the CPU would wait for the GPU.
    """
    if values.is_cuda:
        return torch.cat(
            [torch.linalg.vector_norm(piece.double(), dim=1) for piece in in_pieces(values, values)]
        ).square_()
    lengths: Tensor = torch.linalg.vector_norm(values, dim=1).double()
    beyond = ~((lengths > 1e-15) & (lengths < 1e15))  # float32 has squares from 1e-38 to 1e38
    if (rows := beyond.nonzero()[:, 0]).numel():
        exact = [torch.linalg.vector_norm(values[piece].double(), dim=1) for piece in in_pieces(rows, values)]
        lengths[rows] = torch.cat(exact)
    return lengths.square_()


def weighted_row_dots(
    left: Tensor, other_left: Tensor, weights: Tensor, a: Tensor, a_of: Tensor, b: Tensor, b_of: Tensor
) -> Tensor:
    """((left ∘ other_left) @ weights) · (a[a_of] ∘ b[b_of]) row by row (n,), in float64.

    The matrix is multiplied in its own dtype, by rows of at most 1.
    """
    found = []
    lefts = (in_pieces(each, a) for each in (left, other_left))
    for mine, theirs, i, j in zip(*lefts, _gathered(a, a_of), _gathered(b, b_of, a), strict=True):
        largest, their_largest = (each.abs().amax(1, keepdim=True) for each in (mine, theirs))
        products = (mine / largest.where(largest > 0, 1)) * (theirs / their_largest.where(their_largest > 0, 1))
        sums = ((products @ weights) * i * j).sum(1)
        found.append(sums * (largest.double() * their_largest.double())[:, 0])
    return torch.cat(found)


def _gathered(values: Tensor, of: Tensor | None, like: Tensor | None = None) -> Iterator[Tensor]:
    """The rows values[of] in float64, a few at a time."""
    if of is None:
        return (piece.double() for piece in in_pieces(values, values))
    return (values[piece].double() for piece in in_pieces(of, values if like is None else like))


def in_pieces(values: Tensor, like: Tensor) -> tuple[Tensor, ...]:
    """Slices of `values` (n, …), as long as those of `like` (m, …) that have NUMBERS_AT_ONCE numbers."""
    most = NUMBERS_AT_ONCE.get(like.device.type, 1 << 16)
    found: tuple[Tensor, ...] = values.split(max(1, most // max(1, math.prod(like.shape[1:]))))
    return found


def by_powers(values: Tensor, exponents: Tensor) -> Tensor:
    """The values (n, …) times 2^exponents (n,), in two steps, as a power may be beyond the dtype's range."""
    shape = -1, *[1] * (values.ndim - 1)
    first = exponents // 2
    powers = torch.exp2(torch.stack([first, exponents - first]).double()).to(values.dtype)
    return values.mul(powers[0].view(shape)).mul_(powers[1].view(shape))


def bytes_of(*tensors: Tensor) -> int:
    """The size of tensors."""
    return sum(tensor.nbytes for tensor in tensors)
