"""Flash attention for continuous batches; static batches, whose rows are padded, are faster without it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

log = logging.getLogger(__name__)

HOPPER = 9
"""The compute capability of GPUs for flash attention 3."""


def flash_attention(model: Any) -> str | None:
    """The flash attention that a model can use here, by its name in transformers; None if there is none.

    Each candidate is tried, since a model may replace it by its own kernel; the model's attention is restored.
    """
    own = model.config._attn_implementation
    if "flash" in str(own):
        return str(own)
    if model.device.type != "cuda" or model.dtype.itemsize > 2:
        return None
    for name in _installed(model.device):
        try:
            model.set_attn_implementation(name)
            found = str(model.config._attn_implementation)
            if "flash" in found:
                return found
        except Exception as error:  # a kernel from the hub can raise any error
            log.info("%s cannot be used: %s", name, error)
        finally:
            model.set_attn_implementation(own)
    return None


def _installed(device: Any) -> Iterator[str]:
    import torch
    from transformers.utils.import_utils import (
        is_flash_attn_2_available,
        is_flash_attn_3_available,
        is_kernels_available,
    )

    if torch.cuda.get_device_capability(device)[0] == HOPPER and is_flash_attn_3_available():
        yield "flash_attention_3"
    # `kernels` may have a model's own kernel, which only a try shows.
    if is_flash_attn_2_available() or is_kernels_available():
        yield "flash_attention_2"
