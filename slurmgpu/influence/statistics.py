"""Facts about rows that go by in pieces."""

from __future__ import annotations

import torch
from torch import Tensor


class Statistics:
    """How many values each of n rows had so far, their sums and norms, in float64, and what is no number among them."""

    def __init__(self, n: int, like: Tensor) -> None:
        self.count = like.new_zeros(n, dtype=torch.int64)
        self.n_positive = like.new_zeros(n, dtype=torch.int64)
        self.sum, self.abs_sum, self._squares = like.new_zeros(3, n, dtype=torch.float64)

    def add(self, first: int, values: Tensor, counts: Tensor | int) -> None:
        """The next columns (m, b) of the rows from `first` on, of which `counts` (m,) count; the others are 0."""
        rows = slice(first, first + len(values))
        exact = values.double()
        self.count[rows] += counts
        self.n_positive[rows] += (values > 0).sum(1)
        self.sum[rows] += exact.sum(1)
        self.abs_sum[rows] += torch.linalg.vector_norm(exact, 1, dim=1)
        self._squares[rows] += torch.linalg.vector_norm(exact, 2, dim=1).square()

    @property
    def std(self) -> Tensor:
        """The standard deviation (n,); NaN of no values."""
        return (self._squares / self.count - (self.sum / self.count).square()).clamp(min=0).sqrt()

    @property
    def positive_share(self) -> Tensor:
        """The share of values above 0 (n,); NaN of no values."""
        return self.n_positive.double() / self.count
