"""What a model needs as a run wants it: its weights in the precision or variant that is asked for, and a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slurmgpu.llm.memory import Memory
from slurmgpu.llm.sizes import (
    ITEM_BYTES,
    QUANTIZED_BYTES,
    CacheSizes,
    Weights,
    cache_sizes,
    context_of,
    heads_of,
    text_config,
    weights_of,
)
from slurmgpu.llm.splitting import EXPERT_PARALLEL, stored_method

if TYPE_CHECKING:
    from slurmgpu.llm.engine import EngineOptions

ROWS = 8
ROW_TOKENS = 4096
"""The batch that there must be room for, where the run file names none."""

USUAL_LAYERS = 32
"""Layers of a model whose config.json does not say how many it has."""


@dataclass(frozen=True)
class Model:
    """A model as the run wants it, and what is known of it."""

    options: EngineOptions
    weights: Weights
    cache: CacheSizes
    memory: Memory
    batch_tokens: int

    @property
    def name(self) -> str:
        """Its name in the run file."""
        return self.options.model.name

    @property
    def variant(self) -> str:
        """In what it is computed, in words."""
        method = stored_method(self.options.model.config)
        if method:
            return f"as stored ({method})"
        quantization = self.options.model.quantization
        return f"{quantization}, the rest {self.options.precision}" if quantization else self.options.precision

    def with_batch(self, tokens: int) -> Model:
        """The same with another batch."""
        row_tokens = min(tokens, _row_tokens(self.options))
        memory = replace(self.memory, cache=float(self.cache.of(tokens, row_tokens)))
        return replace(self, memory=memory, batch_tokens=tokens)

    def quantized(self, suffix: str) -> Model:
        """The same as a quantised variant; its headers are not read again."""
        source = replace(self.options.model, quantization=suffix)
        return _model(replace(self.options, model=source), self.weights).with_batch(self.batch_tokens)


def look_at(options: EngineOptions) -> Model:
    """What the options' model needs, from its files."""
    return _model(options, weights_of(options.model))


def _model(options: EngineOptions, weights: Weights) -> Model:
    source = options.model
    config, stored = text_config(source.config), stored_method(source.config) is not None
    sizes = _sizes(weights, options.precision, source.quantization, stored=stored)
    by_experts = config.get("model_type") in EXPERT_PARALLEL and options.engine == "transformers"
    split = {"experts"} if by_experts else {"linear", "experts", "head"}
    is_whole = by_experts or bool(config.get("kv_lora_rank"))  # a latent is one for all heads
    memory = Memory(
        split=sum(size for group, size in sizes.items() if group in split),
        whole=sum(size for group, size in sizes.items() if group not in split),
        cache=0.0,
        layers=int(config.get("num_hidden_layers") or config.get("n_layer") or USUAL_LAYERS),
        cache_parts=1 if is_whole else heads_of(config)[1],
    )
    tokens = options.batch_tokens or ROWS * _row_tokens(options)
    return Model(options, weights, cache_sizes(source, options.precision), memory, tokens).with_batch(tokens)


def _row_tokens(options: EngineOptions) -> int:
    return min(ROW_TOKENS, context_of(options.model, options.max_context) or ROW_TOKENS)


def _sizes(weights: Weights, precision: str, quantization: str | None, *, stored: bool) -> Mapping[str, float]:
    """Bytes in memory of each group of weights."""
    if stored:
        return weights.stored_bytes
    width = dict.fromkeys(weights.numbers, float(ITEM_BYTES[precision]))
    if quantization:
        width["linear"] = QUANTIZED_BYTES[quantization]
    return {group: number * width[group] for group, number in weights.numbers.items()}
