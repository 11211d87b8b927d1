"""Which models can be split over GPUs, one process for each: by their matrices, or by their experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slurmgpu.llm.sizes import experts_of, heads_of, text_config

if TYPE_CHECKING:
    from slurmgpu.llm.engine import EngineOptions

_BY_MATRICES = """
    apertus arcee cohere cohere2 dots1 ernie4_5 ernie4_5_moe exaone4 flex_olmo gemma gemma2 gemma3_text glm glm4
    glm4_moe gpt_neox granite helium internlm3 llama ministral mistral mixtral nemotron olmo olmo2 olmo3 olmoe phi phi3
    qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next seed_oss smollm3 starcoder2
"""

TENSOR_PARALLEL = frozenset(_BY_MATRICES.split())
"""Model types whose `base_model_tp_plan` splits the attention, too, as in transformers 5.23; a test compares them."""

EXPERT_PARALLEL = frozenset({"gpt_oss"})
"""Model types that have a `base_model_ep_plan` alone: experts are handed out, and the rest is on every GPU."""

SPLIT_AS_STORED = frozenset({"fp8"})
"""Methods of quantised checkpoints whose weights are known to split; the others are spread by layers."""


def obstacle_to(options: EngineOptions, n_gpus: int, *, is_asked: bool = False) -> str | None:
    """Why a model cannot be split over so many processes, one for each GPU; None if it can.

    Of what is merely not known to work nothing is said where the run file asks for it.
    """
    source, n_gpus = options.model, max(1, n_gpus)
    config = text_config(source.config)
    kind, method = str(config.get("model_type")), stored_method(source.config)
    if options.engine == "vllm":
        return "the engine vllm starts its processes itself" if n_gpus > 1 else None
    if source.quantization == "4bit" or method == "bitsandbytes":
        return "weights quantised by bitsandbytes have no split form"
    if method and method not in SPLIT_AS_STORED and not is_asked:
        return f"weights stored as {method} are not known to split"
    if kind not in TENSOR_PARALLEL | EXPERT_PARALLEL and not is_asked:
        return f"transformers is not known to have a tensor-parallel plan for models of type {kind}"
    if (n_experts := experts_of(config)) % n_gpus:
        return f"its {n_experts} experts do not divide by {n_gpus}"
    n_heads, n_kv, _ = heads_of(config)
    if kind not in EXPERT_PARALLEL and (n_kv % n_gpus or n_heads % n_gpus):
        return f"its {n_heads} heads and {n_kv} key-value heads do not divide by {n_gpus}"
    return None


def stored_method(config: Mapping[str, Any]) -> str | None:
    """How a checkpoint that is quantised already was quantised; None for one that is not."""
    found = config.get("quantization_config") or text_config(config).get("quantization_config")
    return str(found.get("quant_method", "quantised")) if found else None
