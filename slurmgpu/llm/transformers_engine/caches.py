"""Take, join and trim rows and columns of a batch's key-value cache.

A column is a position in the cache of all rows; a row's mask says which columns hold its tokens.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


ARGUMENTS = ("past_key_values", "cache_params", "cache")
"""Names of the cache argument in forward passes: the last since transformers 5.24, the others before."""


def new_cache(model: Any, n_more: int = 0) -> Any:
    """An empty cache for the model, for prompts and `n_more` tokens after them."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    from slurmgpu.llm.transformers_engine.cache_layers import GrowingLayer, GrowingSlidingLayer

    found = DynamicCache(config=model.config)
    for place, layer in enumerate(found.layers):
        if type(layer) is DynamicLayer:
            found.layers[place] = GrowingLayer()
        elif type(layer) is DynamicSlidingWindowLayer:
            found.layers[place] = GrowingSlidingLayer(layer.sliding_window)
    _make_room(found, n_more)
    return found


def argument_of(model: Any) -> str | None:
    """The name of the cache argument in the model's forward pass; None if it names none.

    Mamba's classes call it `cache_params` before transformers 5.24, and ignore `past_key_values` in their keywords. A
    forward pass with keywords may pass the cache on to a parent's forward pass; then the parent's name counts.
    """
    return _argument_of(type(model))


def keyword_of(model: Any) -> str:
    """The keyword for passing the model a cache: its own name, or else transformers' name as one of its keywords."""
    from transformers import LlamaForCausalLM

    return argument_of(model) or _argument_of(LlamaForCausalLM) or ARGUMENTS[0]


def _argument_of(kind: type) -> str | None:
    for each in kind.__mro__:
        if "forward" in vars(each):
            named = inspect.signature(vars(each)["forward"]).parameters
            found = next((name for name in ARGUMENTS if name in named), None)
            if found is not None or not _has_keywords(named):
                return found
    return None


def takes_keywords(model: Any) -> bool:
    """Whether the model's forward pass takes arbitrary keywords, which may include a cache that it does not name."""
    return _has_keywords(inspect.signature(type(model).forward).parameters)


def _has_keywords(named: Mapping[str, inspect.Parameter]) -> bool:
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in named.values())


def _make_room(cache: Any, n_more: int) -> None:
    from slurmgpu.llm.transformers_engine.cache_layers import GROWTH, GrowingLayer, GrowingSlidingLayer

    for layer in cache.layers:
        if isinstance(layer, GrowingLayer | GrowingSlidingLayer):
            layer.growth = min(n_more, GROWTH)


def has_columns(model: Any) -> bool:
    """Whether a layer of the model's cache has a column for each token; a state (Mamba) has none."""
    from transformers.cache_utils import CacheLayerMixin

    return any(isinstance(layer, CacheLayerMixin) for layer in new_cache(model).layers)


def has_rows(model: Any) -> bool:
    """Whether rows of the model's cache can be taken and joined; recurrent states (Mamba) have no columns."""
    from slurmgpu.llm.transformers_engine.cache_layers import GrowingLayer, GrowingSlidingLayer

    return all(isinstance(layer, GrowingLayer | GrowingSlidingLayer) for layer in new_cache(model).layers)


def window(model: Any) -> int | None:
    """The window of the model's sliding layers, in columns; None for a model without such layers."""
    sizes = [layer.sliding_window for layer in new_cache(model).layers if getattr(layer, "is_sliding", False)]
    return min(sizes) if sizes else None


COLUMN_WINDOWS = ("gpt_neo",)
"""Model types with local layers that look back by columns of the whole cache, which does not slide."""
COLUMN_COUNTERS = ("mpt", *COLUMN_WINDOWS)
"""Model types with attention that counts columns; Bloom and Falcon in transformers count tokens."""


def takes_holes(model: Any) -> bool:
    """Whether a row may have unused columns between its tokens, as after a shared prefix.

    ALiBi may count columns instead of tokens, as in MPT; so does the local attention of GPT-Neo.
    """
    code = inspect.getmodule(type(model))
    if code is not None and code.__name__.startswith("transformers.models."):
        return model.config.model_type not in COLUMN_COUNTERS
    try:
        return "alibi" not in inspect.getsource(type(model) if code is None else code).lower()
    except (OSError, TypeError):
        return False


def repeat(cache: Any, n_rows: int, n_more: int = 0) -> Any:
    """A new cache with one row repeated `n_rows` times, for `n_more` tokens after the next ones.

    The rows share memory until they grow.
    """
    found = copy.copy(cache)
    found.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in found.layers:
        if layer.is_initialized:
            layer.keys = layer.keys.expand(n_rows, -1, -1, -1)
            layer.values = layer.values.expand(n_rows, -1, -1, -1)
    _make_room(found, n_more)
    return found


def copy_rows(cache: Any, rows: Tensor) -> Any:
    """A new cache with these rows (n,), which may repeat."""
    found = copy.copy(cache)
    found.layers = [copy.copy(layer) for layer in cache.layers]
    select(found, rows)
    return found


def select(cache: Any, rows: Tensor) -> None:
    """Keep these rows (n,), in this order; they may repeat."""
    for layer in cache.layers:
        if layer.is_initialized:
            here = rows.to(layer.keys.device)
            layer.keys, layer.values = layer.keys.index_select(0, here), layer.values.index_select(0, here)


def drop(cache: Any, going_on: Sequence[int], device: Any) -> list[int]:
    """Keep these rows, given in ascending order, and move as few as possible; returns their new order."""
    import torch

    n_rows, moved = len(going_on), moves(going_on)
    targets, sources = (torch.tensor([*each], dtype=torch.int64, device=device) for each in (moved, moved.values()))
    for layer in cache.layers:
        if layer.is_initialized:
            here = layer.keys.device
            layer.move_rows(sources.to(here), targets.to(here), n_rows)
    return [moved.get(row, row) for row in range(n_rows)]


def moves(going_on: Sequence[int]) -> dict[int, int]:
    """The row that replaces each ended row, so that the continuing rows come first."""
    n_rows, kept = len(going_on), set(going_on)
    holes = (row for row in range(n_rows) if row not in kept)
    return dict(zip(holes, (row for row in going_on if row >= n_rows), strict=True))


def trim(cache: Any, mask: Tensor) -> Tensor:
    """Drop columns that no row uses, on the left; returns the new mask (row, column)."""
    n_unused = int(mask.any(0).long().argmax())
    if n_unused:
        for layer in cache.layers:
            if layer.is_initialized:
                _set_columns(layer, mask.shape[1] - n_unused)
    return mask[:, n_unused:]


def join(first: Any, second: Any, n_first: int, n_second: int) -> None:
    """Append the rows of `second` to those of `first`, padding the cache with fewer columns."""
    n_columns = max(n_first, n_second)
    for one, other in zip(first.layers, second.layers, strict=True):
        if one.is_initialized:
            _set_columns(one, n_columns)
            _set_columns(other, n_columns)
            one.add_rows(other)


def join_masks(first: Tensor, second: Tensor) -> Tensor:
    """The mask of joined rows: (row, column)."""
    import torch
    from torch.nn.functional import pad

    n_columns = max(first.shape[1], second.shape[1])
    return torch.cat([pad(each, (n_columns - each.shape[1], 0)) for each in (first, second)])


def _set_columns(layer: Any, n_columns: int) -> None:
    """Add or remove columns at a layer's left; a sliding layer has only the last ones."""
    held = n_columns
    if layer.is_sliding:
        layer.cumulative_length = n_columns
        held = min(n_columns, layer.sliding_window - 1)
    layer.set_columns(held)
