"""Flash attention: continuous batches need it, while static batches, whose rows are padded, are better without."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

log = logging.getLogger(__name__)

HOPPER = 9
"""The GPUs, by their compute capability, for which flash attention 3 is made."""


def flash_attention(model: Any) -> str | None:
    """The flash attention that a model can use here, by transformers' name for it; None if there is none.

    Each candidate is tried, as a model may exchange it for a kernel of its own; the model is left as it was.
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
        except Exception as error:  # a kernel that is fetched from the hub can fail in any way
            log.info("%s cannot be used: %s", name, error)
        finally:
            model.set_attn_implementation(own)
    return None


def _installed(device: Any) -> Iterator[str]:
    """What there is, as a package or through `kernels`, the fastest first."""
    import torch
    from transformers.utils.import_utils import (
        is_flash_attn_2_available,
        is_flash_attn_3_available,
        is_kernels_available,
    )

    if torch.cuda.get_device_capability(device)[0] == HOPPER and is_flash_attn_3_available():
        yield "flash_attention_3"
    # By `kernels` it may be a kernel of the model's own, which is had or not as it is tried.
    if is_flash_attn_2_available() or is_kernels_available():
        yield "flash_attention_2"
