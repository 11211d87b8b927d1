"""A batch's key-value cache, as rows and columns: rows that come and go, columns that no row uses.

A column is a place in the cache, for all rows the same; which of them hold a row's tokens is what its mask says.
Transformers' caches can only grow and drop rows; the rest is done on the tensors of their layers.
"""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def new_cache(model: Any) -> Any:
    """An empty cache for the model."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def has_rows(model: Any) -> bool:
    """Whether the model's cache is attention's alone, of which rows can be taken out and put together.

    States of recurrent layers (Mamba, linear attention) have no columns.
    """
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in new_cache(model).layers)


def window(model: Any) -> int | None:
    """How far the model's sliding layers look back, in columns; None for a model without such layers."""
    sizes = [layer.sliding_window for layer in new_cache(model).layers if getattr(layer, "is_sliding", False)]
    return min(sizes) if sizes else None


def takes_holes(model: Any) -> bool:
    """Whether a row may have unused columns between its tokens, as it has behind a shared beginning.

    ALiBi may count columns and not tokens, as MPT's does; Bloom's and Falcon's in transformers count tokens.
    """
    code = inspect.getmodule(type(model))
    if code is not None and code.__name__.startswith("transformers.models."):
        return bool(model.config.model_type != "mpt")
    try:
        return "alibi" not in inspect.getsource(type(model) if code is None else code).lower()
    except (OSError, TypeError):
        return False


def repeat(cache: Any, n_rows: int) -> Any:
    """A cache of one row, `n_rows` times, in a cache of its own. The rows share memory until they grow."""
    found = copy.copy(cache)
    found.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in found.layers:
        if layer.is_initialized:
            layer.keys = layer.keys.expand(n_rows, -1, -1, -1)
            layer.values = layer.values.expand(n_rows, -1, -1, -1)
    return found


def copy_rows(cache: Any, rows: Tensor) -> Any:
    """These rows, in a cache of their own; one may come more than once."""
    found = copy.copy(cache)
    found.layers = [copy.copy(layer) for layer in cache.layers]
    select(found, rows)
    return found


def select(cache: Any, rows: Tensor) -> None:
    """Keep these rows, in this order; one may come more than once."""
    for layer in cache.layers:
        if layer.is_initialized:
            here = rows.to(layer.keys.device)
            layer.keys, layer.values = layer.keys.index_select(0, here), layer.values.index_select(0, here)


def trim(cache: Any, mask: Tensor) -> Tensor:
    """Drop the columns before the first that a row uses; the mask that is left."""
    n_unused = int(mask.any(0).long().argmax())
    if n_unused:
        for layer in cache.layers:
            if layer.is_initialized:
                _set_columns(layer, mask.shape[1] - n_unused)
    return mask[:, n_unused:]


def join(first: Any, second: Any, n_first: int, n_second: int) -> None:
    """Put the rows of `second` behind those of `first`; each has so many columns, and the shorter gets empty ones."""
    import torch

    n_columns = max(n_first, n_second)
    for one, other in zip(first.layers, second.layers, strict=True):
        if one.is_initialized:
            _set_columns(one, n_columns)
            _set_columns(other, n_columns)
            one.keys = torch.cat([one.keys, other.keys])
            one.values = torch.cat([one.values, other.values])


def join_masks(first: Tensor, second: Tensor) -> Tensor:
    """The mask of rows that were joined: (row, column)."""
    import torch
    from torch.nn.functional import pad

    n_columns = max(first.shape[1], second.shape[1])
    return torch.cat([pad(each, (n_columns - each.shape[1], 0)) for each in (first, second)])


def _set_columns(layer: Any, n_columns: int) -> None:
    """Give a layer columns, or take some, at its left. A sliding layer holds the last of them only."""
    from torch.nn.functional import pad

    held = n_columns
    if layer.is_sliding:
        layer.cumulative_length = n_columns
        held = min(n_columns, layer.sliding_window - 1)
    change = held - layer.keys.shape[2]
    # A negative padding takes away.
    layer.keys, layer.values = (pad(each, (0, 0, change, 0)) for each in (layer.keys, layer.values))
