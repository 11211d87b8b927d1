"""Whether a model can be computed in continuous batches, and whether these are probably faster than static ones."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slurmgpu.llm.transformers_engine.call_lengths import CallLengths
from slurmgpu.llm.transformers_engine.quantization import is_int8
from slurmgpu.util.exceptions import described

if TYPE_CHECKING:
    from slurmgpu.llm.transformers_engine.loading import Loaded

log = logging.getLogger(__name__)

HOPPER = 9
"""The compute capability of GPUs for flash attention 3."""


def flash_attention(model: Any) -> str | None:
    """The flash attention that a model can use here, as its name in transformers; None if there is none.

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
            log.info("%s cannot be used: %s", name, described(error))
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
    # `kernels` may have a model's own kernel; only trying it shows that.
    if is_flash_attn_2_available() or is_kernels_available():
        yield "flash_attention_2"


def available(loaded: Loaded) -> str | None:
    """Why continuous batching is impossible for this model; None if it is possible."""
    model = loaded.model
    if not hasattr(model, "init_continuous_batching"):
        return f"{type(model).__name__} has no continuous batching"
    devices = set(getattr(model, "hf_device_map", {}).values())
    if len(devices) > 1:
        return f"its layers are on {len(devices)} devices, and the cache must be on one"
    if not CallLengths.of(model.config.get_text_config()).has_two:
        return "its attention counts the columns of all requests"
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) and not _caps_scores(model):
        return "transformers ignores attn_logit_softcapping of its attention there"
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if strange := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"it has layers other than attention: {', '.join(strange)}"
    return None


def _caps_scores(model: Any) -> bool:
    """Whether continuous batches apply the softcap of attention: with flash attention, since transformers 5.19."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    return flash_attention(model) is not None and "k_cache" in inspect.signature(_flash_attention_forward).parameters


def advisable(loaded: Loaded) -> str | None:
    """Why static batches are probably faster for this model here; None if continuous batches are."""
    if reason := available(loaded):
        return reason
    if loaded.model.device.type != "cuda":
        return "the model is on the CPU"
    if is_int8(loaded.model):
        return "8-bit weights of bitsandbytes cannot be captured in CUDA graphs, and it is slow without them"
    # Without flash attention the mask covers all tokens of all requests, 2.3 times slower on long prompts.
    if flash_attention(loaded.model) is None:
        return "flash attention is not installed here, or the model cannot use it"
    return None
