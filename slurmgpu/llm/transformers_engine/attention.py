"""PyTorch's attention for a step of one token a row, without copying keys and values for all heads that share them.

The queries of such heads are treated as several queries of one head, so each key is read once. transformers does so
since 5.23, but not in compiled steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

if TYPE_CHECKING:
    from torch import Tensor

OTHERS = ("dropout", "position_bias", "softcap", "output_attentions", "cache")
"""Arguments that are left to transformers, whose attention in 5.19 also writes a paged `cache`."""


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The attention of `query` (row, head, column, dimension): (row, column, head, dimension).

    A replacement for transformers' function for the implementation "sdpa", with the same arguments.
    """
    import torch

    n_heads, n_columns, width = query.shape[1:]
    n_shared = n_heads // key.shape[1]
    is_step = n_columns == 1 and n_shared > 1 and attention_mask is not None and attention_mask.shape[1] == 1
    if not is_step or any(_is_given(options.get(name)) for name in OTHERS):
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found
    queries = query.reshape(-1, key.shape[1], n_shared, width)
    values = torch.nn.functional.scaled_dot_product_attention(
        queries, key, value, attn_mask=attention_mask, scale=options.get("scaling")
    )
    # The rows are those of the keys where a query is for all of them.
    return values.reshape(-1, 1, n_heads, values.shape[-1]), None


def _is_given(argument: Any) -> bool:
    """Whether an argument has an effect: a tensor, an object, or a number that is not 0."""
    return not isinstance(argument, (int, float, type(None))) or bool(argument)


def register() -> None:
    """Let models with "sdpa" attention use `attend`."""
    AttentionInterface.register("sdpa", attend)
