"""Pack texts of unequal length into one row of a forward pass, so that no padding is computed.

Everything in a model except attention treats each token alone. Attention is computed for each text separately, by the
same function as for rows. A text may have branches, such as choices: each branch sees the text and itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from slurmgpu.llm.interface.engine import Tokens

if TYPE_CHECKING:
    from torch import Tensor


ATTENTION = "slurmgpu_packed"
"""The name of `_attend` in transformers."""


@dataclass(frozen=True)
class Text:
    """Tokens, perhaps starting with shared ones, and branches that continue from their end."""

    tokens: Tokens
    branches: tuple[Tokens, ...] = ()


@dataclass(frozen=True)
class _Piece:
    """Queries `start` to `stop`; they see the first `n_before` columns of a row of keys, and `first` to `last`.

    `mask` (query, key) is added to the scores; without one, each query sees the columns before it.
    """

    start: int
    stop: int
    row: int
    n_before: int
    first: int
    last: int
    mask: Tensor | None


class Pack:
    """Texts as one row, after the `n_shared` common tokens, whose keys and values are in the cache `shared`.

    `ids` and `positions` are (1, column). `ends` are the columns of the texts' last tokens, `branches` the columns of
    all branches. With an empty `cache`, keys and values are kept there, a row for each text, padded on the left.
    """

    def __init__(
        self, texts: Sequence[Text], model: Any, cache: Any = None, *, n_shared: int = 0, shared: Any = None
    ) -> None:
        import torch

        ids: list[int] = []
        positions: list[int] = []
        self.ends: list[int] = []
        self.branches: list[int] = []
        self.pieces: list[_Piece] = []
        self._model, self._n_shared = model, n_shared
        self._spans: list[tuple[int, int]] = []
        for text in texts:
            start, n_text = len(ids), len(text.tokens)
            ids += text.tokens[n_shared:]
            positions += range(n_shared, n_text)
            self.ends.append(len(ids) - 1)
            for branch in text.branches:
                self.branches += range(len(ids), len(ids) + len(branch))
                ids += branch
                positions += range(n_text, n_text + len(branch))
            self._spans.append((start, len(ids)))
        self.n_columns = n_shared + max(stop - start for start, stop in self._spans)
        self.cache: Any = None
        if cache is not None:
            self.cache = _RowCache(cache, self, shared)
        elif shared is not None:
            self.cache = _SharedCache(shared)
        for number, (text, (start, stop), end) in enumerate(zip(texts, self._spans, self.ends, strict=True)):
            if cache is None:
                row, n_before, first = 0, n_shared, n_shared + start
                n_behind = first - start
            else:
                row, n_before, first = number, 0, self.n_columns - n_shared - (stop - start)
                n_behind = first + n_shared - start
            mask = self._mask(n_shared, [end + 1 - start]) if n_shared else None
            self.pieces.append(_Piece(start, end + 1, row, n_before, first, n_behind + end + 1, mask))
            if text.branches:
                mask = self._mask(len(text.tokens), [*map(len, text.branches)])
                self.pieces.append(_Piece(end + 1, stop, row, n_before, first, n_behind + stop, mask))
        self.ids = torch.tensor([ids], device=model.device)
        self.positions = torch.tensor([positions], device=model.device)

    @property
    def mask(self) -> Tensor:
        """The mask of each text's columns in the cache: int64 (row, column)."""
        import torch

        n_unused = [self.n_columns - self._n_shared - (stop - start) for start, stop in self._spans]
        columns = torch.arange(self.n_columns, device=self.ids.device)
        return (columns >= torch.tensor(n_unused, device=columns.device)[:, None]).long()

    def rows_of(self, packed: Tensor, shared: Tensor | None, n_more: int) -> Tensor:
        """Keys or values as rows, with room for `n_more` columns: (row, head, column, dimension)."""
        _, n_heads, _, width = packed.shape
        found = packed.new_zeros(len(self._spans), n_heads, self.n_columns + n_more, width)
        for row, (start, stop) in enumerate(self._spans):
            own = self.n_columns - (stop - start)
            found[row, :, own : self.n_columns] = packed[0, :, start:stop]
            if shared is not None:
                found[row, :, own - self._n_shared : own] = shared[0]
        return found

    def _mask(self, n_before: int, lengths: Sequence[int]) -> Tensor:
        """Each branch token sees `n_before` columns, and its own branch up to itself: (query, key)."""
        import torch

        branches = torch.block_diag(*(torch.ones(length, length).tril() for length in lengths))
        found = torch.zeros(len(branches), n_before + len(branches), dtype=self._model.dtype)
        found[:, n_before:].masked_fill_(branches == 0, -torch.inf)
        return found.to(self._model.device)


class _SharedCache(DynamicCache):
    """Puts the keys and values of the shared tokens before the pack's, and keeps nothing."""

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self._shared = shared

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """All keys and values: (1, head, column, dimension)."""
        import torch

        layer = self._shared.layers[layer_idx]
        return torch.cat([layer.keys, key_states], 2), torch.cat([layer.values, value_states], 2)


class _RowCache(DynamicCache):
    """Stores the keys and values of a pack in the layers of `cache`, a row for each text."""

    def __init__(self, cache: Any, pack: Pack, shared: Any) -> None:
        super().__init__()
        self.layers = cache.layers
        self._pack, self._shared = pack, shared

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """All keys and values of each text, as rows."""
        layer, shared = self.layers[layer_idx], None if self._shared is None else self._shared.layers[layer_idx]
        layer.lazy_initialization(key_states, value_states)
        keys = self._pack.rows_of(key_states, None if shared is None else shared.keys, layer.growth)
        values = self._pack.rows_of(value_states, None if shared is None else shared.values, layer.growth)
        return layer.adopt(keys, values, self._pack.n_columns)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, pack: Pack, **options: Any
) -> tuple[Tensor, None]:
    """The attention of each piece: (1, column, head, dimension)."""
    import torch

    found = []
    for piece in pack.pieces:
        keys, values = (_columns(each, piece) for each in (key, value))
        mask = None if piece.mask is None else piece.mask[None, None]
        queries = query[:, :, piece.start : piece.stop]
        found.append(sdpa_attention_forward(module, queries, keys, values, mask, **options)[0])
    return torch.cat(found, 1), None


def _columns(packed: Tensor, piece: _Piece) -> Tensor:
    """The keys or values that a piece sees."""
    import torch

    row = packed[piece.row : piece.row + 1]
    own = row[:, :, piece.first : piece.last]
    return torch.cat([row[:, :, : piece.n_before], own], 2) if piece.n_before else own


AttentionInterface.register(ATTENTION, _attend)


def is_possible(model: Any) -> bool:
    """Whether the model computes attention with transformers' function for PyTorch's kernels, which `_attend` calls."""
    return bool(model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation())


@contextlib.contextmanager
def attention_of_packs(model: Any) -> Iterator[None]:
    """Within the context, the model computes the attention of packs."""
    own = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(own)
