"""How much memory a model needs, from the headers of its safetensors files and its config.json. No weights are read.

Header: 8 bytes, little-endian, the length of the JSON that follows; per tensor dtype, shape and byte range in it
(https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.defaults import with_defaults
from slurmgpu.llm.models import ModelSource, read_json

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

QUANTIZED_BYTES = {"8bit": 1.0, "fp8": 1.0, "4bit": 0.516}
"""A weight's bytes in a linear layer. nf4: 4 bits, and .127 for scales that are quantised too (QLoRA, section 3)."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MOST_HEADER_BYTES = 100_000_000
"""The format's own limit."""

GROUPS = ("linear", "experts", "head", "embedding", "rest")
"""Weights by what becomes of them: only linear layers are quantised; embeddings and norms are not split over GPUs."""


@dataclass(frozen=True)
class Weights:
    """A model's weights: how many there are in each group of `GROUPS`, and the bytes that they take on disk.

    `missing` are the files that are not here, `is_estimate` says that the numbers come from config.json alone.
    """

    numbers: Mapping[str, int]
    stored_bytes: Mapping[str, int]
    missing: tuple[str, ...] = ()
    is_estimate: bool = False

    @property
    def parameters(self) -> int:
        """How many weights there are; of a checkpoint that packs several into a byte, how many bytes."""
        return sum(self.numbers.values())


@dataclass(frozen=True)
class CacheSizes:
    """Bytes of the KV cache for a token: in layers that keep all tokens, and in those that keep `window` of them.

    Of a config that does not say enough they are 0, and not known.
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
        """Bytes for so many tokens, in rows of `row_tokens`."""
        kept = min(row_tokens, self.window) / row_tokens
        return self.full * tokens + math.ceil(self.sliding * tokens * kept)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model, of one that can see or hear, too; with its defaults."""
    inner = config.get("text_config")
    return with_defaults(inner if isinstance(inner, Mapping) else config)


def context_of(source: ModelSource, max_context: int | None) -> int | None:
    """The most tokens that a prompt and its answer may have; None if nothing says it."""
    config = text_config(source.config)
    said = [config.get("max_position_embeddings") or config.get("n_positions"), max_context]
    return min((int(each) for each in said if each), default=None)


def has_known_layers(config: Mapping[str, Any]) -> bool:
    """Whether a text config says how many layers there are, and how wide their heads."""
    alternatives = (
        ("num_hidden_layers", "n_layer", "layer_types"),
        ("num_attention_heads", "n_head"),
        ("hidden_size", "n_embd", "head_dim"),
    )
    return all(any(config.get(name) for name in names) for names in alternatives)


def cache_sizes(source: ModelSource, precision: str) -> CacheSizes:
    """What a token costs in the KV cache."""
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
    """Of a text config: attention heads, those of keys and values, and the width of one."""
    n_heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    n_kv = int(config.get("num_key_value_heads") or (1 if config.get("multi_query") else n_heads))
    width = int(config.get("head_dim") or _hidden(config) // n_heads)
    return n_heads, n_kv, width


def experts_of(config: Mapping[str, Any]) -> int:
    """How many experts a layer of a mixture has; 0 in a model that is none."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _hidden(config: Mapping[str, Any]) -> int:
    return int(config.get("hidden_size") or config.get("n_embd") or 0)


def _kv_numbers(config: Mapping[str, Any]) -> int:
    """How many numbers a layer caches for a token."""
    if config.get("kv_lora_rank"):
        # Multi-head latent attention: the latent is cached, from which all heads' keys and values are made.
        return int(config["kv_lora_rank"]) + int(config.get("qk_rope_head_dim") or 0)
    _, n_kv, width = heads_of(config)
    return 2 * n_kv * width


def weights_of(source: ModelSource) -> Weights:
    """The weights of a model, from its safetensors' headers; where there are none, an estimate from its config."""
    names, missing = _files(source.folder)
    if names and not missing:
        return _counted([source.folder / name for name in names])
    estimate = _estimate(text_config(source.config))
    if names:
        return Weights(estimate.numbers, estimate.stored_bytes, missing, True)
    pickled = [path.stat().st_size for path in source.folder.glob("pytorch_model*.bin")]
    if not pickled:
        return Weights(estimate.numbers, estimate.stored_bytes, (SINGLE,), True)
    # How large they are together is known, and of what kind is guessed; of an unknown kind all may be anything.
    config = text_config(source.config)
    width = 4 if "float32" in (config.get("dtype"), config.get("torch_dtype")) else 2
    scale = sum(pickled) / width / max(1, estimate.parameters) or 1.0
    numbers = {group: round(number * scale) for group, number in estimate.numbers.items()}
    if not estimate.parameters:
        numbers["linear"] = round(sum(pickled) / width)
    return Weights(numbers, {group: width * number for group, number in numbers.items()}, (), True)


def _files(folder: Path) -> tuple[list[str], tuple[str, ...]]:
    """The names of the safetensors files of a model, and of those among them that are not there."""
    if (folder / SINGLE).is_file():
        return [SINGLE], ()
    names = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
    return names, tuple(name for name in names if not (folder / name).is_file())


@dataclass
class _Tally:
    numbers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GROUPS, 0))
    stored_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GROUPS, 0))

    def add(self, group: str, number: int, stored_bytes: int) -> None:
        self.numbers[group] += number
        self.stored_bytes[group] += stored_bytes


def _counted(paths: list[Path]) -> Weights:
    tally = _Tally()
    for path in paths:
        for name, shape, stored_bytes in _tensors(path):
            tally.add(_group(name, len(shape)), math.prod(shape), stored_bytes)
    return Weights(tally.numbers, tally.stored_bytes)


def _group(name: str, n_dimensions: int) -> str:
    if "embed" in name or ".wte." in name or ".wpe." in name:
        return "embedding"
    if "lm_head" in name or "embed_out" in name:
        return "head"
    if ".experts." in name:
        return "experts"  # one tensor for all of a layer's, and no linear layer, in transformers 5
    return "linear" if n_dimensions >= 2 else "rest"


def _tensors(path: Path) -> Iterator[tuple[str, list[int], int]]:
    """Name, shape and bytes of every tensor in a safetensors file."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length)) if length <= MOST_HEADER_BYTES else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise SlurmGPUError(f"{path} is no safetensors file: it has no header. Download it again.")
    header.pop("__metadata__", None)
    end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if (size := path.stat().st_size) < end:
        raise SlurmGPUError(f"{path} has {size:,} bytes and its header says {end:,}. Download it again.")
    for name, tensor in header.items():
        start, stop = tensor["data_offsets"]
        yield name, tensor["shape"], stop - start


def _estimate(config: Mapping[str, Any]) -> Weights:
    """The weights of a decoder of today's usual kind: gated MLP, grouped queries, perhaps experts; 2 bytes each."""
    hidden, vocabulary = _hidden(config), int(config.get("vocab_size") or 0)
    n_layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 0)
    n_heads, n_kv, width = heads_of(config)
    inner = config.get("intermediate_size") or 4 * hidden
    inner = int(max(inner) if isinstance(inner, list) else inner)  # of Gemma 3n each layer has its own
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
