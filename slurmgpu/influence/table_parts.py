"""The gradients of a table: an example changes a few rows, or all by an outer product. Dimensions as in `parts`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slurmgpu.influence.parts import (
    Multiply,
    Part,
    by_powers,
    bytes_of,
    exactly,
    in_pieces,
    row_dots,
    weighted_row_dots,
)

MATCH_COST = 50
"""The cost of gathering and multiplying a pair of rows, relative to a product within a matrix."""

MATCHES_AT_ONCE = {"cpu": 4096, "cuda": 1 << 16}
"""Pairs of rows that are gathered at a time: on a CPU, as many as the caches hold."""

MATCHES_FOUND = 1 << 16
"""Matches whose places are computed at a time, or those of one row if it has more."""


@dataclass(frozen=True)
class Spread:
    """Gradients of every row of a table: row k has scale · `delta[q, k]` · `vector[q]`, with q = `of[i]`.

    `delta` (u, N), `vector` (u, d), `of` (n,); `scale` (n,) or None for 1.
    """

    delta: Tensor
    vector: Tensor
    of: Tensor
    scale: Tensor | None = None

    def scaled(self, values: Tensor) -> Tensor:
        """The values of each example (n, …) times its scale."""
        return values if self.scale is None else values * self.scale.reshape(-1, *[1] * (values.ndim - 1))

    def by_powers(self, exponents: Tensor) -> Spread:
        """The gradients times 2^exponents (n,).

        A query's `delta` gets the largest power of its examples, so that its products stay in the dtype's range; the
        examples' `scale` gets the rest.
        """
        largest = exponents.new_zeros(len(self.delta))
        largest.scatter_reduce_(0, self.of, exponents, "amax", include_self=False)
        ones = self.delta.new_ones(len(self.of)) if self.scale is None else self.scale
        scale = by_powers(ones, exponents - largest[self.of])
        return Spread(by_powers(self.delta, largest), self.vector, self.of, scale)

    @property
    def n_bytes(self) -> int:
        """The size of the factors."""
        return bytes_of(*(value for value in vars(self).values() if value is not None))


@dataclass(frozen=True)
class Rows(Part):
    """The gradients of a table (N, d): a few rows of each example, and optionally a spread over all rows.

    Example i has `values[i, s]` in row `index[i, s]`: (n, s, d) and (n, s). Values of a repeated row add up. Index -1
    means no row; its values must be 0.
    """

    index: Tensor
    values: Tensor
    spread: Spread | None = None

    def add_products(
        self, other: Part, out: Tensor, scale: float = 1.0, weights: Tensor | None = None, multiply: Multiply = exactly
    ) -> None:
        """See Part. Only pairs that share a row are computed."""
        assert isinstance(other, Rows)
        mine, theirs = self._weighted(weights), other._weighted(weights)
        _add_matches(mine, other, out, scale)
        # Each of the three is gathered from products of unique queries.
        if other.spread is not None:
            out.add_(_rows_by_spread(mine, other.spread), alpha=scale)
        if self.spread is not None:
            out.add_(_rows_by_spread(theirs, self.spread).T, alpha=scale)
        if self.spread is not None and other.spread is not None:
            out.add_(_spread_by_spread(self.spread, other.spread, weights, multiply), alpha=scale)

    def dots(self, other: Part, weights: Tensor | None = None) -> Tensor:
        """See Part."""
        assert isinstance(other, Rows)
        mine, theirs = self._weighted(weights), other._weighted(weights)
        pieces = [in_pieces(each, self.values) for each in (self.index, other.index, mine.values, other.values)]
        found = torch.cat([_dots_of_matches(*each) for each in zip(*pieces, strict=True)])
        if other.spread is not None:
            found = found + _rows_of_spread(mine, other.spread)
        if self.spread is not None:
            found = found + _rows_of_spread(theirs, self.spread)
        if self.spread is not None and other.spread is not None:
            found = found + _spread_of_spread(self.spread, other.spread, weights)
        return found

    def scaled(self, exponents: Tensor) -> Rows:
        """See Part."""
        spread = None if self.spread is None else self.spread.by_powers(exponents)
        return Rows(self.index, by_powers(self.values, exponents), spread)

    def dense(self, shape: torch.Size) -> Tensor:
        """See Part."""
        n, n_slots, width = self.values.shape
        found = self.values.new_zeros(n, shape[0], width)
        at = self.index.clamp(min=0)[:, :, None].expand(n, n_slots, width)
        found.scatter_add_(1, at, self.values)
        if (spread := self.spread) is not None:
            found += spread.scaled(spread.delta[spread.of][:, :, None] * spread.vector[spread.of][:, None, :])
        return found.reshape(-1, *shape)

    @property
    def n_bytes(self) -> int:
        """See Part."""
        return super().n_bytes + (0 if self.spread is None else self.spread.n_bytes)

    def _weighted(self, weights: Tensor | None) -> Rows:
        if weights is None:
            return self
        return Rows(self.index, self.values * weights.reshape(len(weights), -1)[self.index.clamp(min=0)])


def _add_matches(mine: Rows, theirs: Rows, out: Tensor, scale: float) -> None:
    """Add the products of rows that both sides name, in a fixed order."""
    n_slots, n_their_slots = mine.index.shape[1], theirs.index.shape[1]
    index = mine.index.flatten()
    rows, order = theirs.index.flatten().sort(stable=True)
    first = torch.searchsorted(rows, index)
    counts = (torch.searchsorted(rows, index, right=True) - first).masked_fill_(index < 0, 0)
    n_matches = int(counts.sum())
    if MATCH_COST * n_matches > out.numel() * n_slots * n_their_slots:
        _add_masked(mine, theirs, out, scale)
        return
    at_once = MATCHES_AT_ONCE.get(out.device.type, 4096)
    my_values, their_values = mine.values.flatten(0, 1), theirs.values.flatten(0, 1)
    for rows_of_mine in _pieces(counts, n_matches):
        at, nth = _spelled(counts[rows_of_mine])
        at += rows_of_mine.start
        other_at = order[first[at] + nth]
        # In even smaller pieces, which stay in the caches and bound the memory.
        for i, j in zip(at.split(at_once), other_at.split(at_once), strict=True):
            found = (my_values.index_select(0, i) * their_values.index_select(0, j)).sum(1).mul_(scale)
            pairs = i // n_slots * out.shape[1] + j // n_their_slots
            if out.is_cuda:  # index_add_ has no fixed order there
                out.view(-1).index_put_((pairs,), found, accumulate=True)
            else:
                out.view(-1).index_add_(0, pairs, found)


def _pieces(counts: Tensor, total: int) -> Iterator[slice]:
    """Slices of `counts` with a sum up to MATCHES_FOUND, or of a single larger count."""
    if total <= MATCHES_FOUND:
        yield slice(0, len(counts))
        return
    upto = counts.cumsum(0).cpu()
    start = before = 0
    while start < len(upto):
        stop = max(start + 1, int(torch.searchsorted(upto, before + MATCHES_FOUND, right=True)))
        yield slice(start, stop)
        start, before = stop, int(upto[stop - 1])


def _spelled(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Each place, repeated by its count, and the number of each repetition."""
    at = torch.repeat_interleave(counts)
    return at, torch.arange(len(at), device=at.device) - (counts.cumsum(0) - counts)[at]


def _add_masked(mine: Rows, theirs: Rows, out: Tensor, scale: float) -> None:
    """As `_add_matches`, by the products of all pairs: faster for many matches."""
    for s in range(mine.index.shape[1]):
        for t in range(theirs.index.shape[1]):
            index = mine.index[:, s, None]
            matched = (index == theirs.index[None, :, t]).logical_and_(index >= 0)
            out.add_((mine.values[:, s] @ theirs.values[:, t].T).mul_(matched), alpha=scale)


def _dots_of_matches(index: Tensor, other_index: Tensor, values: Tensor, other_values: Tensor) -> Tensor:
    """The products of rows that equal positions both name (n,), in float64."""
    same = index[:, :, None] == other_index[:, None, :]
    return ((values.double() @ other_values.double().mT) * same).sum((1, 2))


def _rows_by_spread(rows: Rows, spread: Spread) -> Tensor:
    """The products (n, m) of examples that name rows with examples that spread."""
    by_query = rows.values.new_zeros(len(rows.values), len(spread.vector))
    for s in range(rows.index.shape[1]):
        delta = spread.delta[:, rows.index[:, s].clamp(min=0)]
        by_query.addcmul_(rows.values[:, s] @ spread.vector.T, delta.T)
    found = by_query.index_select(1, spread.of)
    return found if spread.scale is None else found * spread.scale


def _rows_of_spread(rows: Rows, spread: Spread) -> Tensor:
    """The same for equal positions (n,), in float64."""
    found = []
    pieces = (in_pieces(each, rows.values) for each in (rows.index, rows.values, spread.of))
    for index, values, of in zip(*pieces, strict=True):
        delta = spread.delta[of[:, None], index.clamp(min=0)].double()
        products = (values.double() @ spread.vector[of].double()[:, :, None])[:, :, 0]
        found.append((products * delta).sum(1))
    return spread.scaled(torch.cat(found))


def _spread_by_spread(mine: Spread, theirs: Spread, weights: Tensor | None, multiply: Multiply) -> Tensor:
    """The products (n, m) of examples that spread; with weights, 2Ndv operations per unique query."""
    if weights is None:
        by_query = multiply(mine.delta, theirs.delta) * multiply(mine.vector, theirs.vector)
    else:
        table = weights.reshape(len(weights), -1)
        by_query = torch.stack(
            [
                ((theirs.delta @ (delta[:, None] * table * vector)) * theirs.vector).sum(1)
                for delta, vector in zip(mine.delta, mine.vector, strict=True)
            ]
        )
    found = mine.scaled(by_query.index_select(0, mine.of).index_select(1, theirs.of))
    return found if theirs.scale is None else found * theirs.scale


def _spread_of_spread(mine: Spread, theirs: Spread, weights: Tensor | None) -> Tensor:
    """The same for equal positions (n,), in float64."""
    if weights is None:
        found = row_dots(mine.delta, mine.of, theirs.delta, theirs.of)
        found *= row_dots(mine.vector, mine.of, theirs.vector, theirs.of)
    else:
        table = weights.reshape(len(weights), -1)
        vectors = mine.vector[mine.of], theirs.vector[theirs.of]
        found = weighted_row_dots(*vectors, table.T, mine.delta, mine.of, theirs.delta, theirs.of)
    return theirs.scaled(mine.scaled(found))
