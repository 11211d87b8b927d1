"""The memory of a model in a run: its weights in the run's precision or variant, and the cache of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slurmgpu.llm.models.sizes import (
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
from slurmgpu.llm.placement.parallelism import EXPERT_PARALLEL, stored_method

if TYPE_CHECKING:
    from slurmgpu.llm.interface.engine import EngineOptions, HeadMemory

ROWS = 8
ROW_TOKENS = 4096
"""The planned batch if the run file sets none; if it does not fit, fewer rows are enough, but at least one."""

USUAL_LAYERS = 32
"""The assumed number of layers if config.json does not have it."""

USABLE = 0.92
RUNTIME_BYTES = 1.5e9
"""The share of a GPU's memory for weights and cache, less RUNTIME_BYTES; CUDA, graphs and fragments need the rest."""
GRAPHS_BYTES = 0.5e9
"""The part of RUNTIME_BYTES for CUDA graphs; if they hold more, the engine frees them. They use the batch's cache."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a model: weights that can be split over GPUs, weights that cannot, and the cache of the batch.

    The cache is split by key-value heads into at most `cache_parts`; further GPUs hold copies. `beside` is another
    model on the same GPUs, which counts neither as weights nor as cache.
    """

    split: float
    whole: float
    cache: float
    layers: int
    cache_parts: int = 1_000
    beside: HeadMemory | None = None

    @property
    def weights(self) -> float:
        """Bytes of all weights."""
        return self.split + self.whole

    def on_each(self, n_gpus: int, *, tensor_parallel: bool) -> tuple[float, float]:
        """Weights and cache on the fullest of `n_gpus`."""
        if n_gpus == 1:
            return self.weights, self.cache
        if tensor_parallel:
            return self.split / n_gpus + self.whole, self.cache / min(n_gpus, self.cache_parts)
        # Layers stay whole, so one GPU may have one more than its share.
        layers = min(1.0, 1 / n_gpus + 1 / max(1, self.layers))
        return self.weights * layers, self.cache * layers

    def fits(self, n_gpus: int, gpu_memory: float, *, tensor_parallel: bool) -> bool:
        """Whether it fits on `n_gpus` GPUs."""
        return self.needed_on_each(n_gpus, tensor_parallel=tensor_parallel) <= usable(gpu_memory)

    def needed_on_each(self, n_gpus: int, *, tensor_parallel: bool) -> float:
        """Weights, cache and the other model on the fullest of `n_gpus`."""
        other = 0.0 if self.beside is None else self.beside.on_each(n_gpus)
        return sum(self.on_each(n_gpus, tensor_parallel=tensor_parallel)) + other


def usable(gpu_memory: float) -> float:
    """Bytes of a GPU's memory for weights and cache."""
    return max(0.0, USABLE * gpu_memory - RUNTIME_BYTES)


@dataclass(frozen=True)
class Model:
    """A model as the run uses it, with its sizes."""

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
        """The precision or quantisation, as text."""
        method = stored_method(self.options.model.config)
        if method:
            return f"as stored ({method})"
        quantization = self.options.model.quantization
        return f"{quantization}, the rest {self.options.precision}" if quantization else self.options.precision

    @property
    def leaves_experts(self) -> bool:
        """Whether it is a quantised variant that leaves the experts unquantised.

        In transformers 5 the experts of a layer are one tensor, while bitsandbytes and torchao only quantise linear
        layers. A model's own code may have its experts as linear layers.
        """
        options = self.options
        own_code = options.trust_remote_code and "auto_map" in options.model.config
        is_asked = options.model.quantization is not None and options.engine == "transformers"
        return is_asked and not own_code and self.weights.numbers["experts"] > 0

    def with_batch(self, tokens: int) -> Model:
        """The model with another batch."""
        cache = self.cache.of(tokens, min(tokens, row_tokens(self.options)))
        memory = replace(self.memory, cache=float(cache))
        return replace(self, memory=memory, batch_tokens=tokens)

    def quantized(self, suffix: str | None) -> Model:
        """The model as a quantised variant, or unquantised, without reading its files again."""
        source = replace(self.options.model, quantization=suffix)
        return _model(replace(self.options, model=source), self.weights).with_batch(self.batch_tokens)


def look_at(options: EngineOptions) -> Model:
    """The model of the options, from its files."""
    return _model(options, weights_of(options.model))


def _model(options: EngineOptions, weights: Weights) -> Model:
    source = options.model
    config, stored = text_config(source.config), stored_method(source.config) is not None
    sizes = _sizes(weights, options.precision, source.quantization, stored=stored)
    by_experts = config.get("model_type") in EXPERT_PARALLEL and options.engine == "transformers"
    split = {"experts"} if by_experts else {"linear", "experts", "head"}
    is_whole = by_experts or bool(config.get("kv_lora_rank"))  # MLA: all heads share a latent
    memory = Memory(
        split=sum(size for group, size in sizes.items() if group in split),
        whole=sum(size for group, size in sizes.items() if group not in split),
        cache=0.0,
        layers=int(config.get("num_hidden_layers") or config.get("n_layer") or USUAL_LAYERS),
        cache_parts=1 if is_whole else heads_of(config)[1],
        beside=options.beside,
    )
    tokens = options.batch_tokens or ROWS * row_tokens(options)
    return Model(options, weights, cache_sizes(source, options.precision), memory, tokens).with_batch(tokens)


def row_tokens(options: EngineOptions) -> int:
    """The tokens of a row in the batch that must fit."""
    return min(ROW_TOKENS, context_of(options.model, options.max_context) or ROW_TOKENS)


def _sizes(weights: Weights, precision: str, quantization: str | None, *, stored: bool) -> Mapping[str, float]:
    if stored:
        return weights.stored_bytes
    width = dict.fromkeys(weights.numbers, float(ITEM_BYTES[precision]))
    if quantization:
        width["linear"] = QUANTIZED_BYTES[quantization]
    return {group: number * width[group] for group, number in weights.numbers.items()}
