"""Rows of a batch that is generated: their key-value cache, and one step of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from slurmgpu.llm.interface.batching import Load
from slurmgpu.llm.transformers_engine import caches
from slurmgpu.llm.transformers_engine.prefill import Prefill, Prefilled

if TYPE_CHECKING:
    from torch import Tensor


class Decoding(Protocol):
    """Rows in a cache; the last token of each is not in the cache yet.

    `goes_ahead` means that starting a step takes less time than the step, so that the next step may start before its
    tokens are known.
    """

    goes_ahead: bool

    @property
    def columns(self) -> int:
        """The cache's columns in use."""

    def size(self, load: Load) -> int:
        """The tokens of the cache that a load takes."""

    def step(self, latest: Tensor) -> Tensor:
        """The logits of the tokens after `latest` (row,), each row's last: (row, token). The next step reuses them."""

    def keep(self, going_on: Sequence[int]) -> list[int]:
        """Keep these rows, given in ascending order; returns their new order."""

    def join(self, read: Prefilled, most: Sequence[int]) -> None:
        """Append prompts that were read, as rows; each gets at most its number in `most` of tokens."""


class GrowingRows:
    """Rows in a cache that grows by a column with each step.

    A column is a position in the cache of all rows; a row's mask says which columns hold its tokens.
    """

    goes_ahead = False

    def __init__(self, read: Prefilled, prefill: Prefill, context: int) -> None:
        self._prefill = prefill
        self._context = context
        self._cache, self._mask = read.cache, read.mask
        self._lengths = read.mask.sum(1)
        self._is_padded: bool | None = None

    @property
    def columns(self) -> int:
        """The cache's columns in use."""
        return int(self._mask.shape[1])

    def size(self, load: Load) -> int:
        """The tokens of the cache that a load takes."""
        return load.tokens

    def step(self, latest: Tensor) -> Tensor:
        """The logits of the tokens after `latest` (row,), each row's last: (row, token)."""
        import torch

        if self._is_padded is None:
            self._is_padded = not bool(self._mask.all())
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(latest), 1)], 1)
        mask = self._mask if self._is_padded else None  # attention is faster without a mask
        # Ended rows are computed until they are dropped; some models have no further positions.
        positions = self._lengths.clamp(max=self._context - 1)[:, None]
        logits = self._prefill.forward(latest[:, None], mask, positions, self._cache)[:, -1]
        self._lengths = self._lengths + 1
        return logits

    def keep(self, going_on: Sequence[int]) -> list[int]:
        """Keep these rows, given in ascending order; returns their new order."""
        import torch

        order = caches.drop(self._cache, going_on, self._mask.device)
        rows = torch.tensor(order, device=self._mask.device)
        self._mask = caches.trim(self._cache, self._mask[rows])
        self._lengths = self._lengths[rows]
        self._is_padded = None
        return order

    def join(self, read: Prefilled, most: Sequence[int]) -> None:
        """Append prompts that were read, as rows; each gets at most its number in `most` of tokens."""
        import torch

        caches.join(self._cache, read.cache, self.columns, read.mask.shape[1])
        self._lengths = torch.cat([self._lengths, read.mask.sum(1)])
        self._mask = caches.join_masks(self._mask, read.mask)
        self._is_padded = None
