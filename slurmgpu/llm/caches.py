"""Rows and columns of a batch's key-value cache: take, join and trim them.

A column is a position in the cache of all rows; a row's mask says which columns hold its tokens. Transformers' caches
can only grow and drop rows; the functions here change the tensors of their layers.
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
    """Whether rows of the model's cache can be taken and joined; recurrent states (Mamba) have no columns."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in new_cache(model).layers)


def window(model: Any) -> int | None:
    """The window of the model's sliding layers, in columns; None for a model without such layers."""
    sizes = [layer.sliding_window for layer in new_cache(model).layers if getattr(layer, "is_sliding", False)]
    return min(sizes) if sizes else None


def takes_holes(model: Any) -> bool:
    """Whether a row may have unused columns between its tokens, as after a shared prefix.

    ALiBi may count columns instead of tokens, as in MPT; Bloom and Falcon in transformers count tokens.
    """
    code = inspect.getmodule(type(model))
    if code is not None and code.__name__.startswith("transformers.models."):
        return bool(model.config.model_type != "mpt")
    try:
        return "alibi" not in inspect.getsource(type(model) if code is None else code).lower()
    except (OSError, TypeError):
        return False


def repeat(cache: Any, n_rows: int) -> Any:
    """A new cache with one row repeated `n_rows` times; the rows share memory until they grow."""
    found = copy.copy(cache)
    found.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in found.layers:
        if layer.is_initialized:
            layer.keys = layer.keys.expand(n_rows, -1, -1, -1)
            layer.values = layer.values.expand(n_rows, -1, -1, -1)
    return found


def copy_rows(cache: Any, rows: Tensor) -> Any:
    """A new cache with these rows, which may repeat."""
    found = copy.copy(cache)
    found.layers = [copy.copy(layer) for layer in cache.layers]
    select(found, rows)
    return found


def select(cache: Any, rows: Tensor) -> None:
    """Keep these rows, in this order; they may repeat."""
    for layer in cache.layers:
        if layer.is_initialized:
            here = rows.to(layer.keys.device)
            layer.keys, layer.values = layer.keys.index_select(0, here), layer.values.index_select(0, here)


def trim(cache: Any, mask: Tensor) -> Tensor:
    """Drop unused columns at the left; returns the new mask."""
    n_unused = int(mask.any(0).long().argmax())
    if n_unused:
        for layer in cache.layers:
            if layer.is_initialized:
                _set_columns(layer, mask.shape[1] - n_unused)
    return mask[:, n_unused:]


def join(first: Any, second: Any, n_first: int, n_second: int) -> None:
    """Append the rows of `second` to those of `first`, padding the one with fewer columns."""
    import torch

    n_columns = max(n_first, n_second)
    for one, other in zip(first.layers, second.layers, strict=True):
        if one.is_initialized:
            _set_columns(one, n_columns)
            _set_columns(other, n_columns)
            one.keys = torch.cat([one.keys, other.keys])
            one.values = torch.cat([one.values, other.values])


def join_masks(first: Tensor, second: Tensor) -> Tensor:
    """The mask of joined rows: (row, column)."""
    import torch
    from torch.nn.functional import pad

    n_columns = max(first.shape[1], second.shape[1])
    return torch.cat([pad(each, (n_columns - each.shape[1], 0)) for each in (first, second)])


def _set_columns(layer: Any, n_columns: int) -> None:
    """Add or remove columns at a layer's left; a sliding layer has only the last ones."""
    from torch.nn.functional import pad

    held = n_columns
    if layer.is_sliding:
        layer.cumulative_length = n_columns
        held = min(n_columns, layer.sliding_window - 1)
    change = held - layer.keys.shape[2]
    # A negative padding removes columns.
    layer.keys, layer.values = (pad(each, (0, 0, change, 0)) for each in (layer.keys, layer.values))
