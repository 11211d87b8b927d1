"""Where a model goes: onto one GPU, split or spread over several, or nowhere. Computed before anything is queued."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm import hub
from slurmgpu.llm.memory import RUNTIME_BYTES, USABLE, Memory, usable
from slurmgpu.llm.sizes import (
    ITEM_BYTES,
    QUANTIZED_BYTES,
    CacheSizes,
    Weights,
    cache_sizes,
    context_of,
    text_config,
    weights_of,
)
from slurmgpu.llm.splitting import EXPERT_PARALLEL, obstacle_to, stored_method

if TYPE_CHECKING:
    from slurmgpu.llm.engine import EngineOptions
    from slurmgpu.workloads import Share

ROWS = 8
ROW_TOKENS = 4096
"""The batch that there must be room for, where the run file names none."""

SPLITS = (1, 2, 4, 8, 16, 32)
"""How many GPUs are tried."""


@dataclass(frozen=True)
class _Model:
    """A model as the run wants it, and what is known of it."""

    options: EngineOptions
    weights: Weights
    cache: CacheSizes
    memory: Memory
    batch_tokens: int

    @property
    def variant(self) -> str:
        method = stored_method(self.options.model.config)
        if method:
            return f"as stored ({method})"
        quantization = self.options.model.quantization
        return f"{quantization}, the rest {self.options.precision}" if quantization else self.options.precision


def place(options: EngineOptions, share: Share) -> tuple[str, tuple[str, ...]]:
    """How many processes a task needs for the model ("one" or "per-gpu"), and lines that say why, with numbers.

    SlurmGPUError where it does not fit, says what would; and where its weights are not here.
    """
    model = _look_at(options)
    processes, lines = _decide(model, share)
    _refuse_missing(model)
    return processes, (_describe(model), *lines, *_unpacking(model))


def check_fits(options: EngineOptions, gpu_bytes: int, n_gpus: int = 1, *, tensor_parallel: bool = False) -> None:
    """Refuse, before weights are read, a model that has no room on this machine's GPUs; the batch may be small."""
    model = _look_at(options)
    tokens = min(model.batch_tokens, ROW_TOKENS)
    least = replace(model.memory, cache=float(model.cache.of(tokens, tokens)))
    if not least.fits(n_gpus, gpu_bytes, tensor_parallel=tensor_parallel):
        model = replace(model, memory=least, batch_tokens=tokens)
        raise _too_large(model, n_gpus, gpu_bytes, tensor_parallel=tensor_parallel)


def memory_of(options: EngineOptions) -> Memory:
    """What the model needs, as the options want it."""
    return _look_at(options).memory


def _look_at(options: EngineOptions) -> _Model:
    source = options.model
    weights, cache = weights_of(source), cache_sizes(source, options.precision)
    row_tokens = min(ROW_TOKENS, context_of(source, options.max_context))
    batch_tokens = options.batch_tokens or ROWS * row_tokens
    config = text_config(source.config)
    sizes = _sizes(weights, options.precision, source.quantization, stored=stored_method(source.config) is not None)
    splits_cache = config.get("model_type") not in EXPERT_PARALLEL
    split = {"linear", "experts", "head"} if splits_cache else {"experts"}
    memory = Memory(
        split=sum(size for group, size in sizes.items() if group in split),
        whole=sum(size for group, size in sizes.items() if group not in split),
        cache=cache.of(batch_tokens, min(row_tokens, batch_tokens)),
        layers=int(config.get("num_hidden_layers") or 1),
        splits_cache=splits_cache,
    )
    return _Model(options, weights, cache, memory, batch_tokens)


def _sizes(weights: Weights, precision: str, quantization: str | None, *, stored: bool) -> Mapping[str, float]:
    """Bytes in memory of each group of weights."""
    if stored:
        return weights.stored_bytes
    width = dict.fromkeys(weights.numbers, float(ITEM_BYTES[precision]))
    if quantization:
        width["linear"] = QUANTIZED_BYTES[quantization]
    return {group: number * width[group] for group, number in weights.numbers.items()}


# Deciding.


def _decide(model: _Model, share: Share) -> tuple[str, list[str]]:
    is_asked = share.processes == "per-gpu"
    obstacle = obstacle_to(model.options, share.gpus, is_asked=is_asked)
    if is_asked and share.gpus > 1 and obstacle:
        raise SlurmGPUError(
            f'{model.options.model.name} cannot be split over {share.gpus} GPUs (processes = "per-gpu"): {obstacle}. '
            f"Leave processes out: its layers are then spread over the GPUs, in one process."
        )
    if share.gpus == 0:
        return share.processes or "one", [_on_cpus(model)]
    if share.nodes > 1 and (obstacle or share.processes == "one"):
        raise SlurmGPUError(
            f"{model.options.model.name} cannot be spread over {share.nodes} nodes: "
            f"{obstacle or 'one process sees the GPUs of its own node only'}. Ask for one node's GPUs."
        )
    if share.gpu_memory is None:
        return _without_memory(model, share, obstacle)
    one_suffices = model.memory.fits(1, share.gpu_memory, tensor_parallel=False)
    splits = share.gpus > 1 and not obstacle and (not one_suffices or share.nodes > 1)
    processes = share.processes or ("per-gpu" if splits else "one")
    tensor_parallel = _is_split(model, processes)
    if not model.memory.fits(share.gpus, share.gpu_memory, tensor_parallel=tensor_parallel):
        raise _too_large(model, share.gpus, share.gpu_memory, tensor_parallel=tensor_parallel)
    lines = [_on_gpus(model, share, share.gpu_memory, processes)]
    if share.gpus > 1 and one_suffices:
        lines.append(
            f"One GPU suffices: --array makes {share.gpus} replicas of it, each of which takes shards. "
            f"Several GPUs for one copy are slower than as many copies."
        )
    elif share.gpus > 1 and not splits and obstacle and share.processes is None:
        lines.append(f"Spread by layers, only one GPU computes at a time; it cannot be split, since {obstacle}.")
    return processes, lines


def _is_split(model: _Model, processes: str) -> bool:
    return processes == "per-gpu" or (model.options.engine == "vllm" and obstacle_to(model.options, 1) is None)


def _without_memory(model: _Model, share: Share, obstacle: str | None) -> tuple[str, list[str]]:
    processes = share.processes or ("per-gpu" if share.gpus > 1 and not obstacle else "one")
    each = sum(model.memory.on_each(share.gpus, tensor_parallel=_is_split(model, processes)))
    how = _how(share.gpus, processes)
    return processes, [
        f"{how}: needs GPUs of at least {_gb((each + RUNTIME_BYTES) / USABLE)}. Whether these are is not known before "
        f'tasks start: gpu_memory under [resources], as "80G", or a gpu_type that tells it has it checked here.'
    ]


# Saying it.


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"


def _describe(model: _Model) -> str:
    about = "about " if model.weights.is_estimate else ""
    is_packed = stored_method(model.options.model.config) is not None
    count = "" if is_packed else f"{about}{_count(model.weights.parameters)} parameters, "
    cache = f"{model.cache.a_token:,} bytes a token, {_gb(model.memory.cache)} for a batch of {model.batch_tokens:,}"
    return (
        f"{model.options.model.name}, {model.variant}: {count}{about}{_gb(model.memory.weights)} of weights; KV cache "
        f"{cache} tokens."
    )


def _unpacking(model: _Model) -> Iterable[str]:
    """What becomes of MXFP4 weights, as gpt-oss has them, in an image that cannot compute with them."""
    if stored_method(model.options.model.config) == "mxfp4" and model.options.engine == "transformers":
        # 32 weights are 16 bytes, and one for their scale; as bf16 they are 64.
        stored = model.weights.stored_bytes
        size = sum(stored.values()) + stored["experts"] * (64 / 17 - 1)
        yield f"In an image without the packages triton and kernels MXFP4 weights become bf16: {_gb(size)} of weights."


def _count(number: int) -> str:
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.1f} {word}"
    return f"{number:,}"


def _how(n_gpus: int, processes: str) -> str:
    if n_gpus == 1:
        return "On one GPU"
    return f"Split over {n_gpus} GPUs" if processes == "per-gpu" else f"Spread over {n_gpus} GPUs"


def _on_gpus(model: _Model, share: Share, gpu_memory: int, processes: str) -> str:
    weights, cache = model.memory.on_each(share.gpus, tensor_parallel=_is_split(model, processes))
    left = usable(gpu_memory) - weights - cache
    return (
        f"{_how(share.gpus, processes)} of {_gb(gpu_memory)}: {_gb(weights)} of weights and {_gb(cache)} of cache of "
        f"the {_gb(usable(gpu_memory))} that can be used on each; {_gb(left)} are left."
    )


def _on_cpus(model: _Model) -> str:
    return f"On CPUs: each task needs some {_gb(model.memory.weights + model.memory.cache + RUNTIME_BYTES)} of memory."


def _refuse_missing(model: _Model) -> None:
    source, missing = model.options.model, model.weights.missing
    if not missing:
        return
    first = f"{missing[0]}{f' and {len(missing) - 1} others' if len(missing) > 1 else ''}"
    if source.repository is None:
        raise SlurmGPUError(
            f"model {source.name!r}: the weights are not all in {source.folder}: {first} is missing. Copy the folder "
            f"again, whole."
        )
    raise SlurmGPUError(
        f"model {source.name!r}: of the weights, about {_gb(sum(model.weights.stored_bytes.values()))}, {first} is not "
        f"in the hub's cache, {hub.cache_folder()}, and tasks do not download. {hub.FETCH}."
    )


def _too_large(model: _Model, n_gpus: int, gpu_memory: float, *, tensor_parallel: bool) -> SlurmGPUError:
    weights, cache = model.memory.on_each(n_gpus, tensor_parallel=tensor_parallel)
    options = "; or ".join(_options(model, n_gpus, gpu_memory)) or "nothing that is known here"
    gpus = f"{n_gpus} GPUs" if n_gpus > 1 else "one GPU"
    return SlurmGPUError(
        f"{_describe(model)} That does not fit {gpus} of {_gb(gpu_memory)}: on each, "
        f"{_gb(weights)} of weights and {_gb(cache)} of cache, and {_gb(usable(gpu_memory))} can be used. "
        f"What fits: {options}."
    )


def _options(model: _Model, n_gpus: int, gpu_memory: float) -> Iterable[str]:
    """What would fit, to choose from."""
    more = next((n for n in SPLITS if n > n_gpus and _fits_somehow(model, n, gpu_memory)), None)
    if more:
        yield f"--gpus {more} (gpus_per_task = {more} with --array)"
    source = model.options.model
    if source.quantization is None and stored_method(source.config) is None:
        for suffix in ("8bit", "4bit"):
            smaller = _look_at(replace(model.options, model=replace(source, quantization=suffix)))
            if _fits_somehow(smaller, n_gpus, gpu_memory):
                yield f'model = "{source.name}-{suffix}" on the same GPUs ({_gb(smaller.memory.weights)} of weights)'
                break
    for card in (48e9, 80e9, 141e9):
        if card > gpu_memory and _fits_somehow(model, n_gpus, card):
            yield f"GPUs of {card / 1e9:.0f} GB"
            break
    tokens = _most_tokens(model, n_gpus, gpu_memory)
    if tokens >= min(1024, model.batch_tokens):
        yield f"batch_tokens = {tokens} in place of {model.batch_tokens}"


def _fits_somehow(model: _Model, n_gpus: int, gpu_memory: float) -> bool:
    splits = n_gpus > 1 and obstacle_to(model.options, n_gpus) is None
    return model.memory.fits(n_gpus, gpu_memory, tensor_parallel=_is_split(model, "per-gpu" if splits else "one"))


def _most_tokens(model: _Model, n_gpus: int, gpu_memory: float) -> int:
    """The largest batch that has room beside the weights, in whole thousands of tokens."""
    processes = "one" if n_gpus == 1 or obstacle_to(model.options, n_gpus) else "per-gpu"
    weights, cache = model.memory.on_each(n_gpus, tensor_parallel=_is_split(model, processes))
    a_token = cache / model.batch_tokens
    return max(0, int((usable(gpu_memory) - weights) / a_token) // 1024 * 1024) if a_token else 0
