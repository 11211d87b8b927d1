"""Quantised variants of a model, chosen by a suffix of its name: -8bit, -4bit and -fp8.

In one process bitsandbytes quantises (8-bit; 4-bit as nf4). With tensor parallelism it cannot, and 8-bit uses torchao's
int8. fp8 always uses torchao. Only weights are quantised, which saves memory but no time.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.interface.engine import TORCH_NAMES, EngineOptions, Place
from slurmgpu.util.packages import check_imports

log = logging.getLogger(__name__)

EXTRA = "slurmgpu[quantized]"
"""The extra with the packages that quantise."""


def quantization_config(options: EngineOptions, place: Place) -> Any:
    """The quantization_config for `from_pretrained`; None to load the checkpoint unchanged.

    SlurmGPUError for a variant that is impossible here.
    """
    variant = options.model.quantization
    if variant is None:
        return None
    package = package_for(variant, tensor_parallel=place.world_size > 1)
    if package is None:
        raise SlurmGPUError(
            f"{options.model.name}: 4-bit weights (bitsandbytes) cannot be split over {place.world_size} processes. "
            'Use the -8bit variant, or processes = "one", which spreads the layers over the GPUs in one process.'
        )
    if importlib.util.find_spec(package) is None:
        raise SlurmGPUError(
            f"{options.model.name}: the {variant} variant needs the Python package {package}, which is not installed "
            f"here: pip install '{EXTRA}'; for an image, add `pip install {package}` to its definition. Or remove the "
            "suffix of the model's name."
        )
    log.info("quantising %s to %s with %s", options.model.folder, variant, package)
    return _torchao(variant) if package == "torchao" else _bitsandbytes(variant, options.precision)


def is_int8(model: Any) -> bool:
    """Whether bitsandbytes computes in 8 bits (LLM.int8), which synchronises with the GPU in each layer.

    It computes columns that are large in any row of a call in 16 bits, so a row's result depends on its neighbours.
    """
    return bool(getattr(model, "is_loaded_in_8bit", False))


def check_package(variant: str) -> None:
    """Refuse a machine without any of the packages that make the variant, if tasks run in this Python."""
    able = [package_for(variant, tensor_parallel=is_split) for is_split in (False, True)]
    if not any(importlib.util.find_spec(name) for name in able if name is not None):
        needed = {name: name for name in able[:1] if name is not None}
        check_imports(f"The {variant} variant of a model needs", needed, f"pip install '{EXTRA}'")


def package_for(variant: str, *, tensor_parallel: bool) -> str | None:
    """The package that makes the variant; None if none can."""
    if variant == "fp8":
        return "torchao"
    if not tensor_parallel:
        return "bitsandbytes"
    # bitsandbytes' weights cannot be sharded: 8-bit and 4-bit crash in transformers 5.23; torchao's 4-bit needs kernels
    # for certain GPUs.
    return "torchao" if variant == "8bit" else None


def _bitsandbytes(variant: str, precision: str) -> Any:
    import torch
    from transformers import BitsAndBytesConfig

    if variant == "8bit":
        # It always computes in float16, and warns for each layer of each token.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, TORCH_NAMES[precision]),
    )


def _torchao(variant: str) -> Any:
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig() if variant == "8bit" else Float8WeightOnlyConfig())
