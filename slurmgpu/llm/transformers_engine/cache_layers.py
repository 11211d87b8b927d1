"""Layers of a key-value cache that grow in place, and layers of fixed size.

transformers' own layers copy all keys and values of the batch for each token, and again for rows that end. These layers
have tensors with spare room: `keys` and `values` are views, (row, head, column, dimension), of the columns in use.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

GROWTH = 32
"""The spare columns in new tensors: everything is copied once for this many tokens."""


class _InPlace:
    """The base of both kinds. `_views` are the latest views; any other tensors are not in `_buffers`.

    transformers' code and `expand` may replace `keys` and `values` by other tensors, which are then copied to grow.
    """

    keys: Any
    values: Any
    is_initialized: bool
    growth: int = GROWTH

    _buffers: tuple[Tensor, Tensor]
    _first = 0
    _views: tuple[Tensor, Tensor] | None = None

    def set_columns(self, n_columns: int) -> None:
        """Add unused columns on the left, or remove columns there."""
        n_more = n_columns - self.keys.shape[2]
        self._reserve(len(self.keys), max(0, n_more), 0)
        self._view(len(self.keys), self._first - n_more, n_columns)
        if n_more > 0:
            # A masked column contributes 0 times its content, which must be finite.
            self.keys[:, :, :n_more] = 0
            self.values[:, :, :n_more] = 0

    def move_rows(self, sources: Tensor, targets: Tensor, n_rows: int) -> None:
        """Write some rows over others, and keep the first `n_rows`."""
        self._reserve(len(self.keys), 0, 0)
        for each in (self.keys, self.values):
            each[targets] = each[sources]
        self._view(n_rows, self._first, self.keys.shape[2])

    def add_rows(self, other: _InPlace) -> None:
        """Append the rows of a layer with as many columns."""
        n_rows = len(self.keys)
        self.growth = max(self.growth, other.growth)
        self._reserve(n_rows + len(other.keys), 0, 0)
        self._view(n_rows + len(other.keys), self._first, self.keys.shape[2])
        self.keys[n_rows:] = other.keys
        self.values[n_rows:] = other.values

    def adopt(self, keys: Tensor, values: Tensor, n_columns: int) -> tuple[Tensor, Tensor]:
        """Take tensors with `n_columns` columns in use and spare room after them; returns the columns in use."""
        self._buffers = keys, values
        self._view(len(keys), 0, n_columns)
        return self.keys, self.values

    def _append(self, keys: Tensor, values: Tensor) -> None:
        """Write new columns to the right of the others."""
        if self.keys.numel() == 0:
            self.keys, self.values = keys[:, :, :0], values[:, :, :0]
        n_columns, n_new = self.keys.shape[2], keys.shape[2]
        self._reserve(len(keys), 0, n_new)
        self._view(len(keys), self._first, n_columns + n_new)
        self.keys[:, :, n_columns:] = keys
        self.values[:, :, n_columns:] = values

    def _reserve(self, n_rows: int, n_left: int, n_right: int) -> None:
        """Move to larger tensors unless there is room for `n_rows` rows, and for the new columns on both sides."""
        if self._views is not None and self.keys is self._views[0] and self.values is self._views[1]:
            last = self._first + self.keys.shape[2]
            held = self._buffers[0]
            if len(held) >= n_rows and self._first >= n_left and held.shape[2] - last >= n_right:
                return
        old = self.keys, self.values
        (n_held, _, n_columns, _), n_all = old[0].shape, n_left + old[0].shape[2] + n_right + self.growth
        keys, values = (each.new_empty(n_rows, each.shape[1], n_all, each.shape[3]) for each in old)
        self._buffers = keys, values
        self._view(n_held, n_left, n_columns)
        self.keys.copy_(old[0])
        self.values.copy_(old[1])

    def _view(self, n_rows: int, first: int, n_columns: int) -> None:
        self._first = first
        keys, values = self._buffers
        self.keys = keys[:n_rows, :, first : first + n_columns]
        self.values = values[:n_rows, :, first : first + n_columns]
        self._views = self.keys, self.values


class GrowingLayer(_InPlace, DynamicLayer):
    """A layer that attends to all tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All keys and values, with the new ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._append(key_states, value_states)
        return self.keys, self.values


class GrowingSlidingLayer(_InPlace, DynamicSlidingWindowLayer):
    """A layer that attends to the last tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The keys and values that the new tokens attend to; only the last of them are kept."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[2]
        self._append(key_states, value_states)
        return self._slide()

    def adopt(self, keys: Tensor, values: Tensor, n_columns: int) -> tuple[Tensor, Tensor]:
        """Take tensors with spare room, and keep the last columns; returns all columns in use."""
        super().adopt(keys, values, n_columns)
        self.cumulative_length = n_columns
        return self._slide()

    def _slide(self) -> tuple[Tensor, Tensor]:
        """Keep the last columns of the window; returns the previous keys and values."""
        seen = self.keys, self.values
        n_over = self.keys.shape[2] - (self.sliding_window - 1)
        if n_over > 0:
            self._view(len(self.keys), self._first + n_over, self.sliding_window - 1)
        return seen


class FixedLayer(CacheLayerMixin):
    """A layer that attends to all tokens, in tensors with fixed addresses, for steps of one token.

    `cursors` (row,) has the column that each of the `rows` (row,) writes; the mask of a step has what it attends to.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor, cursors: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self._rows, self._cursors = rows, cursors
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the tensors exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All keys and values, including the new ones for one token in each row."""
        self.keys[self._rows, :, self._cursors] = key_states[:, :, 0]
        self.values[self._rows, :, self._cursors] = value_states[:, :, 0]
        return self.keys, self.values

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """All columns, from the first."""
        return self.get_max_length(), 0

    def get_seq_length(self) -> int:
        """One less than all columns: by its position, the last, a token may attend to every column."""
        return self.get_max_length() - 1

    def get_max_length(self) -> int:
        """All columns."""
        return int(self.keys.shape[2])
