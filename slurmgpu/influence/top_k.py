"""The largest and the most negative values of many rows, which are added in pieces; exact."""

from __future__ import annotations

import torch
from torch import Tensor

ROOM = 3
"""A row has space for this many times k values: more space means less sorting."""


class TopK:
    """The k most extreme values of one sign in each of n rows so far; in a tie, the lowest line wins.

    `sign` 1: values above 0, the largest first; -1: values below 0, the most negative first. NaN never counts.
    `n_columns` is the final length of a row.
    """

    def __init__(self, n: int, k: int, n_columns: int, n_shares: int, sign: int, like: Tensor) -> None:
        room = min(ROOM * k, max(k, n_columns))
        self._k, self._sign = k, sign
        # Candidates; the first _filled places of a row are used.
        self._sizes = like.new_zeros(n, room)
        self._lines = like.new_full((n, room), -1, dtype=torch.int64)
        self._shares = like.new_zeros(n, room, n_shares)
        self._filled = like.new_zeros(n, dtype=torch.int64)
        zero = like.new_zeros(())
        self._bounds = torch.nextafter(zero, zero + 1).repeat(n)

    def offer(self, first: int, values: Tensor, lines: Tensor, shares: Tensor) -> None:
        """Add the extreme values of the next columns of some rows.

        `values` (m, b) of the rows from `first` on; `lines` (b,), ascending; `shares` (n_shares, m, b).
        """
        rows, room = slice(first, first + len(values)), self._sizes.shape[1]
        bounds = self._bounds[rows, None]
        reached = values >= bounds if self._sign > 0 else values <= -bounds
        counts = reached.sum(1)
        most = int(counts.max())
        if most > self._k:
            reached = _first_top(values, self._k, self._sign).logical_and_(reached)
            counts = reached.sum(1)
            most = self._k
        if not most:
            return
        if int(self._filled[rows].max()) + most > room:
            self._keep_k(rows)
        row, column = reached.nonzero(as_tuple=True)
        nth = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
        at = (row + first) * room + self._filled[rows][row] + nth
        self._sizes.view(-1)[at] = values[row, column] * self._sign
        self._lines.view(-1)[at] = lines[column]
        self._shares.flatten(0, 1)[at] = shares[:, row, column].T
        self._filled[rows] += counts

    def found(self) -> tuple[Tensor, Tensor, Tensor]:
        """Lines (n, k), values (n, k) and shares (n, k, n_shares), in order; padded with -1 and 0."""
        order = _by_size_then_line(self._sizes, self._lines)[:, : self._k]
        sizes = self._sizes.gather(1, order)
        return (
            self._lines.gather(1, order),
            sizes * self._sign + 0.0,  # not -0.0
            self._shares.take_along_dim(order[:, :, None], 1),
        )

    def _keep_k(self, rows: slice) -> None:
        """Keep the k most extreme values so far, and raise the bounds to the last of them."""
        k, sizes, lines, shares = self._k, self._sizes[rows], self._lines[rows], self._shares[rows]
        order = _by_size_then_line(sizes, lines)[:, :k]
        sizes[:, :k], lines[:, :k] = sizes.gather(1, order), lines.gather(1, order)
        shares[:, :k] = shares.take_along_dim(order[:, :, None], 1)
        sizes[:, k:], lines[:, k:] = 0, -1
        self._filled[rows] = self._filled[rows].clamp(max=k)
        self._bounds[rows] = self._bounds[rows].maximum(sizes[:, k - 1])


def _first_top(values: Tensor, k: int, sign: int) -> Tensor:
    """A mask of the k most extreme values of each row (m, b); of ties at the edge, the first."""
    found = torch.topk(values, k, dim=1, largest=sign > 0, sorted=False).values
    edge = found.amin(1, keepdim=True) if sign > 0 else found.amax(1, keepdim=True)
    chosen = values >= edge if sign > 0 else values <= edge
    crowded = (chosen.sum(1) > k).nonzero()[:, 0]
    if len(crowded):
        equal = values[crowded] == edge[crowded]
        beyond = chosen[crowded] & ~equal
        left = k - beyond.sum(1, keepdim=True)
        chosen[crowded] = beyond | (equal & (equal.cumsum(1) <= left))
    return chosen


def _by_size_then_line(sizes: Tensor, lines: Tensor) -> Tensor:
    """The order of each row: largest size first, ties by line."""
    found, order = sizes.sort(dim=1, descending=True, stable=True)
    in_order = lines.gather(1, order)
    if not ((found[:, 1:] == found[:, :-1]) & (in_order[:, 1:] < in_order[:, :-1]) & (found[:, 1:] > 0)).any():
        return order
    by_line = lines.argsort(dim=1)
    return by_line.gather(1, sizes.gather(1, by_line).argsort(dim=1, descending=True, stable=True))
