"""PyTorch's attention for a step of one token a row, without a copy of keys and values for all heads that share them.

The queries of such heads are those of one: then each key is read once. Transformers does so from 5.23 on, but not in
compiled steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

if TYPE_CHECKING:
    from torch import Tensor

OTHERS = ("dropout", "position_bias", "softcap", "output_attentions")
"""Arguments that are left to transformers."""


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The attention of `query` (row, head, column, dimension): (row, column, head, dimension).

    It is that of transformers for the implementation "sdpa", whose function has the same arguments.
    """
    import torch

    n_rows, n_heads, n_columns, width = query.shape
    n_shared = n_heads // key.shape[1]
    is_step = n_columns == 1 and n_shared > 1 and attention_mask is not None and attention_mask.shape[1] == 1
    if not is_step or any(options.get(name) for name in OTHERS):
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found
    queries = query.reshape(n_rows, key.shape[1], n_shared, width)
    values = torch.nn.functional.scaled_dot_product_attention(
        queries, key, value, attn_mask=attention_mask, scale=options.get("scaling")
    )
    return values.reshape(n_rows, 1, n_heads, values.shape[-1]), None


def register() -> None:
    """Let models whose attention is "sdpa" compute it so."""
    AttentionInterface.register("sdpa", attend)
