"""Padding masks for encoders, made without waiting for the GPU."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slurmgpu.util.exceptions import described

log = logging.getLogger(__name__)

WORDS = ["the", "second", "of", "two", "texts", "which", "is", "longer", "than", "first"]
N_LONG = 1500
"""Words in a text longer than the windows of local layers: 128 tokens in ModernBERT, 512 in Gemma."""


def masked_ahead(batch: Mapping[str, Any], *, is_padded: bool) -> dict[str, Any]:
    """The inputs of a model with the mask that transformers makes of `attention_mask` for PyTorch's attention.

    transformers asks the GPU whether there is any padding, and so waits for all earlier work (transformers 5.23,
    `masking_utils`). It takes a mask of four dimensions (text, head, token, token) as it is, and None for no padding.
    """
    mask = batch["attention_mask"]
    n_texts, n_tokens = mask.shape
    made = mask.bool()[:, None, None, :].expand(n_texts, 1, n_tokens, n_tokens) if is_padded else None
    return {**batch, "attention_mask": made}


def takes_masks(model: Any, tokens_of: Callable[[Sequence[str]], Mapping[str, Any]]) -> bool:
    """Whether a model computes the same bits with `masked_ahead`, for short texts and for long ones.

    Local layers would use such a mask instead of their own, and then attend to the whole text.
    """
    brief, *others = WORDS[:2], WORDS, random.Random(0).choices(WORDS, k=N_LONG)
    batches = (tokens_of([" ".join(brief), " ".join(other)]) for other in others)
    return all(_takes_masks(model, {name: each.to(model.device) for name, each in batch.items()}) for batch in batches)


def _takes_masks(model: Any, batch: Mapping[str, Any]) -> bool:
    """The same for a batch with padding, and for its first text alone."""
    if getattr(model.config, "_attn_implementation", None) != "sdpa" or "attention_mask" not in batch:
        return False
    n_tokens = int(batch["attention_mask"][0].sum())
    alone = {name: each[:1, :n_tokens] for name, each in batch.items()}
    try:
        return all(
            model(**given).last_hidden_state.equal(model(**masked_ahead(given, is_padded=padded)).last_hidden_state)
            for given, padded in ((batch, True), (alone, False))
        )
    except Exception as error:  # a model with any code, which takes no such mask
        log.debug("the masks are left to the model: %s", described(error))
        return False
