"""Which models can be split over GPUs by matrices or by experts, with a process for each GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.models.sizes import experts_of, has_known_layers, heads_of, text_config

if TYPE_CHECKING:
    from slurmgpu.llm.interface.engine import EngineOptions

_BY_MATRICES = """
    apertus arcee cohere cohere2 dots1 ernie4_5 ernie4_5_moe exaone4 flex_olmo gemma gemma2 gemma3_text glm glm4
    glm4_moe gpt_neox granite helium internlm3 llama ministral mistral mixtral olmo olmo2 olmo3 olmoe phi phi3 qwen2
    qwen2_moe qwen3 qwen3_moe qwen3_next seed_oss smollm3 starcoder2
"""

TENSOR_PARALLEL = frozenset(_BY_MATRICES.split())
"""Model types whose `base_model_tp_plan` also splits the attention, in transformers 5.20 and 5.23; a test compares."""

EXPERT_PARALLEL = frozenset({"gpt_oss"})
"""Model types with a `base_model_ep_plan` only: experts are distributed, and the rest is on every GPU."""

SPLIT_AS_STORED = frozenset({"fp8"})
"""Quantisation methods of checkpoints that can be split; others are spread by layers."""

VLLM_QUANTIZATIONS = {"fp8": "fp8", "8bit": "int8_per_channel_weight_only"}
"""Quantisations that vLLM supports while loading; none in 4 bits works on every GPU."""


def obstacle_to(options: EngineOptions, n_gpus: int, *, is_asked: bool = False) -> str | None:
    """Why a model cannot be split over `n_gpus` GPUs, with a process for each; None if it can.

    With `is_asked`, when the run file asks for splitting, untested cases are not an obstacle.
    """
    source, n_gpus = options.model, max(1, n_gpus)
    config = text_config(source.config)
    if options.engine == "vllm":
        return "the engine vllm starts its processes itself" if n_gpus > 1 else None
    if options.images:
        return "a model with images runs in one process"
    if options.beside is not None:
        return f"{options.beside.name} runs in the same process"
    if options.adapters.sources:
        return "a model with adapters runs in one process"
    if source.quantization == "4bit" or stored_method(source.config) == "bitsandbytes":
        return "weights quantised by bitsandbytes cannot be split"
    if not is_asked and (untested := _untested(source.config)) is not None:
        return untested
    if (n_experts := experts_of(config)) % n_gpus:
        return f"its {n_experts} experts do not divide by {n_gpus}"
    n_heads, n_kv, _ = heads_of(config)
    is_by_heads = config.get("model_type") not in EXPERT_PARALLEL and has_known_layers(config)
    if is_by_heads and (n_kv % n_gpus or n_heads % n_gpus):
        return f"its {n_heads} heads and {n_kv} key-value heads do not divide by {n_gpus}"
    return None


def _untested(config: Mapping[str, Any]) -> str | None:
    """Why it is unknown whether a model with this config.json can be split; None if it can."""
    kind, method = str(text_config(config).get("model_type")), stored_method(config)
    if method and method not in SPLIT_AS_STORED:
        return f"weights stored as {method} are not known to split"
    if kind not in TENSOR_PARALLEL | EXPERT_PARALLEL:
        return f"transformers has no known tensor-parallel plan for models of type {kind}"
    return None if has_known_layers(text_config(config)) else "its config.json does not have the number of heads"


def check_vllm(options: EngineOptions, n_gpus: int, *, is_asked: bool) -> None:
    """Refuse what vLLM would refuse in the task: an unsupported quantisation, or heads that do not divide."""
    source = options.model
    if source.quantization is not None and source.quantization not in VLLM_QUANTIZATIONS:
        raise SlurmGPUError(
            f"{source.name}: vLLM cannot quantise to {source.quantization} while loading. Use a suffix "
            f"{' or '.join(f'-{each}' for each in VLLM_QUANTIZATIONS)}, a quantised checkpoint (AWQ, GPTQ), or "
            f'engine = "transformers".'
        )
    n_heads, n_kv, _ = heads_of(text_config(source.config))
    if n_gpus < 2 or is_asked or not has_known_layers(text_config(source.config)) or _divides(n_heads, n_kv, n_gpus):
        return
    good = [str(n) for n in range(1, 9) if _divides(n_heads, n_kv, n)]
    raise SlurmGPUError(
        f"{source.name} cannot be split over {n_gpus} GPUs by vLLM: its {n_heads} heads and {n_kv} key-value heads do "
        f"not divide by {n_gpus}. Give each task {' or '.join(good)} of them."
    )


def _divides(n_heads: int, n_kv: int, n_gpus: int) -> bool:
    """Whether vLLM can distribute the heads; fewer key-value heads than GPUs must divide the GPUs."""
    return n_heads % n_gpus == 0 and (n_kv % n_gpus == 0 or n_gpus % n_kv == 0)


def stored_method(config: Mapping[str, Any]) -> str | None:
    """The quantisation method of a checkpoint; None if it is not quantised."""
    found = config.get("quantization_config") or text_config(config).get("quantization_config")
    return str(found.get("quant_method", "quantised")) if found else None
