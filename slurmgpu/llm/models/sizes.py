"""The sizes of a model's weights and cache, from the headers of its safetensors files and its config.json.

Header: 8 bytes, little-endian, with the length of the JSON that follows, which has dtype, shape and byte range of each
tensor (https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.models.source import ModelSource, named_in, read_json
from slurmgpu.util.regular_files import open_given

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

QUANTIZED_BYTES = {"8bit": 1.0, "fp8": 1.0, "4bit": 0.516}
"""Bytes for a weight in a linear layer. nf4: 4 bits, and .127 bits for quantised scales (QLoRA, section 3)."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MOST_HEADER_BYTES = 100_000_000
"""The format's own limit."""

GROUPS = ("linear", "experts", "head", "embedding", "rest")
"""Groups of weights: only linear layers are quantised; embeddings and norms are not split over GPUs."""

NAMES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window", "every", "tie_word_embeddings"),
)

_TABLE = """
    cohere      256000 8192 22528 40 64  -   -   8192    - - 1
    cohere2     256000 8192 22528 40 64  -   -   8192 4096 4 1
    gemma       256000 3072 24576 28 16 16 256   8192    - - 1
    gemma2      256000 2304  9216 26  8  4 256   8192 4096 2 1
    gemma3_text 262208 2304  9216 26  8  4 256 131072 4096 6 1
    glm         151552 4096 13696 40 32  2 128 131072    - - 0
    glm4        151552 4096 13696 40 32  2 128 131072    - - 0
    granite      32000 4096 11008 32 32  -   -   2048    - - 0
    llama        32000 4096 11008 32 32  -   -   2048    - - 0
    ministral    32000 4096 14336 32 32  8   - 131072 4096 - 0
    ministral3  131072 4096 14336 34 32  8 128 262144    - - 0
    mistral      32000 4096 14336 32 32  8   - 131072 4096 - 0
    mixtral      32000 4096 14336 32 32  8   - 131072    - - 0
    olmo2        50304 4096 11008 32 32  -   -   2048    - - 0
    phi          51200 2048  8192 24 32  -   -   2048    - - 0
    phi3         32064 3072  8192 32 32  -   -   4096    - - 0
    qwen2       151936 4096 22016 32 32 32   -  32768    - - 0
    qwen3       151936 4096 22016 32 32 32 128  32768    - - 0
"""

DEFAULTS: Mapping[str, Mapping[str, int]] = {
    kind: {name: int(value) for name, value in zip(NAMES, values, strict=True) if value != "-"}
    for kind, *values in map(str.split, _TABLE.strip().splitlines())
}
"""Defaults by model type, which a config.json may omit, as in transformers 5.23; a test compares them.

One of `every` layers keeps all tokens.
"""


@dataclass(frozen=True)
class Weights:
    """A model's weights: their number in each group of `GROUPS`, and their bytes on disk.

    `missing` are files that are not here; `is_estimate` means that the numbers come only from config.json.
    """

    numbers: Mapping[str, int]
    stored_bytes: Mapping[str, int]
    missing: tuple[str, ...] = ()
    is_estimate: bool = False

    @property
    def parameters(self) -> int:
        """The number of weights; for a checkpoint that packs several into a byte, the number of bytes."""
        return sum(self.numbers.values())


@dataclass(frozen=True)
class CacheSizes:
    """Bytes of the KV cache for a token, in layers that keep all tokens, and in layers that keep `window` tokens.

    `is_known` is False if the config does not have them.
    """

    full: int
    sliding: int = 0
    window: int = 0
    is_known: bool = True

    @property
    def a_token(self) -> int:
        """Bytes for a token that all layers keep."""
        return self.full + self.sliding

    def of(self, tokens: int, row_tokens: int) -> int:
        """Bytes for `tokens` tokens, in rows of `row_tokens`."""
        kept = min(row_tokens, self.window) / row_tokens
        return self.full * tokens + math.ceil(self.sliding * tokens * kept)


def with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A text config with the defaults of its model type; null in the config also overrides a default.

    If only some layers keep all tokens, `layer_types` is set.
    """
    defaults = DEFAULTS.get(str(config.get("model_type")), {})
    found = {**defaults, **config}
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or defaults.get("every")
    if every and "every" in defaults and not found.get("layer_types"):
        n_layers = int(found["num_hidden_layers"])
        found["layer_types"] = [
            "full_attention" if layer % int(every) == 0 else "sliding_attention" for layer in range(1, n_layers + 1)
        ]
    return found


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config, which may also describe images or audio; with defaults."""
    inner = config.get("text_config")
    return with_defaults(inner if isinstance(inner, Mapping) else config)


def context_of(source: ModelSource, max_context: int | None) -> int | None:
    """The most tokens of a prompt with its answer; None if unknown."""
    config = text_config(source.config)
    said = [config.get("max_position_embeddings") or config.get("n_positions"), max_context]
    return min((int(each) for each in said if each), default=None)


def has_known_layers(config: Mapping[str, Any]) -> bool:
    """Whether a text config has the number of layers and the width of their heads."""
    alternatives = (
        ("num_hidden_layers", "n_layer", "layer_types"),
        ("num_attention_heads", "n_head"),
        ("hidden_size", "n_embd", "head_dim"),
    )
    return all(any(config.get(name) for name in names) for names in alternatives)


def cache_sizes(source: ModelSource, precision: str) -> CacheSizes:
    """The sizes of a token in the KV cache."""
    config = text_config(source.config)
    if not has_known_layers(config):
        return CacheSizes(0, is_known=False)
    n_layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 0)
    layer = _kv_numbers(config) * ITEM_BYTES[precision]
    types = config.get("layer_types") or ["full_attention"] * n_layers
    n_full = sum(kind == "full_attention" for kind in types)
    n_sliding = sum(kind in ("sliding_attention", "chunked_attention") for kind in types)
    window = int(config.get("sliding_window") or config.get("attention_chunk_size") or 0)
    if not window:
        return CacheSizes((n_full + n_sliding) * layer)
    return CacheSizes(n_full * layer, n_sliding * layer, window)


def heads_of(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """The number of attention heads and of key-value heads in a text config, and the width of a head."""
    n_heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    n_kv = int(config.get("num_key_value_heads") or (1 if config.get("multi_query") else n_heads))
    width = int(config.get("head_dim") or _hidden(config) // n_heads)
    return n_heads, n_kv, width


def inner_size(config: Mapping[str, Any], hidden: int) -> int:
    """The largest MLP width of all layers, in a model with hidden size `hidden`."""
    found = config.get("intermediate_size") or 4 * hidden
    return int(max(found) if isinstance(found, list) else found)  # Gemma 3n has a list, by layer


def experts_of(config: Mapping[str, Any]) -> int:
    """The number of experts in a layer; 0 for a model without experts."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _hidden(config: Mapping[str, Any]) -> int:
    return int(config.get("hidden_size") or config.get("n_embd") or 0)


def _kv_numbers(config: Mapping[str, Any]) -> int:
    if config.get("kv_lora_rank"):
        # Multi-head latent attention caches the latent; all heads' keys and values are computed from it.
        return int(config["kv_lora_rank"]) + int(config.get("qk_rope_head_dim") or 0)
    _, n_kv, width = heads_of(config)
    return 2 * n_kv * width


def weights_of(source: ModelSource) -> Weights:
    """The weights of a model, from its safetensors headers, or else estimated from its config."""
    names, missing = _files(source.folder)
    if names and not missing:
        return _counted([source.folder / name for name in names])
    estimate = _estimate(text_config(source.config))
    if names:
        return Weights(estimate.numbers, estimate.stored_bytes, missing, True)
    pickled = [path.stat().st_size for path in named_in(source.folder, ["pytorch_model*.bin"])]
    if not pickled:
        return Weights(estimate.numbers, estimate.stored_bytes, (SINGLE,), True)
    # The total is known, and the groups are estimated; for an unknown architecture all weights count as linear.
    config = text_config(source.config)
    width = 4 if "float32" in (config.get("dtype"), config.get("torch_dtype")) else 2
    scale = sum(pickled) / width / max(1, estimate.parameters) or 1.0
    numbers = {group: round(number * scale) for group, number in estimate.numbers.items()}
    if not estimate.parameters:
        numbers["linear"] = round(sum(pickled) / width)
    return Weights(numbers, {group: width * number for group, number in numbers.items()}, (), True)


def _files(folder: Path) -> tuple[list[str], tuple[str, ...]]:
    if (folder / SINGLE).is_file():
        return [SINGLE], ()
    names = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
    return names, tuple(name for name in names if not (folder / name).is_file())


def _counted(paths: list[Path]) -> Weights:
    numbers, stored_bytes = dict.fromkeys(GROUPS, 0), dict.fromkeys(GROUPS, 0)
    for path in paths:
        for name, shape, size_bytes in _tensors(path):
            group = _group(name, len(shape))
            numbers[group] += math.prod(shape)
            stored_bytes[group] += size_bytes
    return Weights(numbers, stored_bytes)


def _group(name: str, n_dimensions: int) -> str:
    if "embed" in name or ".wte." in name or ".wpe." in name:
        return "embedding"
    if "lm_head" in name or "embed_out" in name:
        return "head"
    if ".experts." in name:
        return "experts"  # in transformers 5 one tensor for all experts of a layer, not a linear layer
    return "linear" if n_dimensions >= 2 else "rest"


def _tensors(path: Path) -> Iterator[tuple[str, list[int], int]]:
    with open_given(path) as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length)) if length <= MOST_HEADER_BYTES else None
        except (ValueError, RecursionError):
            header = None
    if not isinstance(header, dict):
        raise SlurmGPUError(f"{path} has no safetensors header. Download it again.")
    header.pop("__metadata__", None)
    end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if (size := path.stat().st_size) < end:
        raise SlurmGPUError(f"{path} has {size:,} bytes; expected {end:,} by its header. Download it again.")
    for name, tensor in header.items():
        start, stop = tensor["data_offsets"]
        yield name, tensor["shape"], stop - start


def _estimate(config: Mapping[str, Any]) -> Weights:
    """The weights of a usual decoder with gated MLP, grouped-query attention and perhaps experts; 2 bytes each."""
    hidden, vocabulary = _hidden(config), int(config.get("vocab_size") or 0)
    n_layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 0)
    n_heads, n_kv, width = heads_of(config)
    inner = inner_size(config, hidden)
    n_experts = experts_of(config)
    attention = 2 * hidden * (n_heads + n_kv) * width
    expert = 3 * hidden * int(config.get("moe_intermediate_size") or inner)
    tied = config.get("tie_word_embeddings", False)
    numbers = {
        "linear": n_layers * (attention + (hidden * n_experts if n_experts else 3 * hidden * inner)),
        "experts": n_layers * n_experts * expert,
        "head": 0 if tied else vocabulary * hidden,
        "embedding": vocabulary * hidden,
        "rest": (2 * n_layers + 1) * hidden,
    }
    return Weights(numbers, {group: 2 * number for group, number in numbers.items()}, is_estimate=True)
