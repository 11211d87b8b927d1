"""Place a model on one GPU, or split or spread it over several, before anything is queued."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.interface.batching import cpu_tokens
from slurmgpu.llm.models import hub
from slurmgpu.llm.models.sizes import text_config
from slurmgpu.llm.placement.choice import Choice, Offer, choose, most_tokens, what_fits
from slurmgpu.llm.placement.needs import ROW_TOKENS, ROWS, RUNTIME_BYTES, USABLE, Model, look_at, row_tokens, usable
from slurmgpu.llm.placement.parallelism import stored_method
from slurmgpu.util.amounts import gb, some_of

if TYPE_CHECKING:
    from slurmgpu.llm.interface.engine import EngineOptions
    from slurmgpu.workload import Share


_SMALL_BATCH = (
    f"The batch has room for fewer than {ROWS} rows, which is slow: more or larger GPUs, or a quantised variant, leave "
    f"more."
)


def place(options: EngineOptions, share: Share) -> tuple[str, tuple[str, ...]]:
    """The processes of a task for the model ("one" or "per-gpu"), and lines that explain this with numbers.

    SlurmGPUError, with proposals, if it does not fit, if weights are missing, or if a variant saves next to nothing.
    """
    model = look_at(options)
    if model.leaves_experts:
        raise _unquantised(model)
    if share.gpus == 0:
        model = model.with_batch(options.batch_tokens or cpu_tokens(model.cache.a_token))
    offer = Offer(share.gpus, share.nodes, share.gpu_memory, share.processes)
    choice, fewer = choose(model, offer), 0
    if choice.fits is False and options.batch_tokens is None:
        fewer = most_tokens(model, offer)
        if fewer >= row_tokens(options):
            model = model.with_batch(fewer)
            choice = choose(model, offer)
    if choice.fits is False:
        raise _too_large(model, offer, choice)
    refuse_missing(model)
    return choice.processes, (
        _describe(model),
        *_lines(model, offer, choice),
        *_unpacking(model),
        *([_SMALL_BATCH] if fewer else []),
    )


def check_fits(options: EngineOptions, gpu_bytes: int, n_gpus: int, *, tensor_parallel: bool) -> None:
    """Refuse a model that does not fit on this machine's GPUs with a small batch, before weights are read."""
    model = look_at(options)
    model = model.with_batch(min(model.batch_tokens, ROW_TOKENS))
    if not model.memory.fits(n_gpus, gpu_bytes, tensor_parallel=tensor_parallel):
        choice = Choice("per-gpu" if tensor_parallel else "one", tensor_parallel, fits=False)
        raise _too_large(model, Offer(n_gpus, gpu_memory=gpu_bytes), choice)


def _lines(model: Model, offer: Offer, choice: Choice) -> Iterable[str]:
    if offer.gpus == 0:
        size = gb(model.memory.needed_on_each(1, tensor_parallel=False) + RUNTIME_BYTES)
        yield f"On CPUs: each task needs about {size} of memory."
        return
    yield _without_memory(model, offer, choice) if offer.gpu_memory is None else _on_gpus(model, offer, choice)
    if offer.gpus > 1 and choice.one_suffices:
        yield f"One GPU suffices: --array makes {offer.gpus} replicas, which is faster than one copy on several GPUs."
    elif choice.is_last_resort:
        yield f"Spread by layers, so only one GPU computes at a time; the model cannot be split: {choice.obstacle}."
    vocabulary = int(text_config(model.options.model.config).get("vocab_size") or 0)
    if choice.processes == "per-gpu" and vocabulary % offer.gpus:
        yield (
            f"Its vocabulary of {vocabulary:,} does not divide by {offer.gpus}, which transformers before 5.23 may "
            f'refuse: with an older one set processes = "one".'
        )


def _describe(model: Model) -> str:
    about = "about " if model.weights.is_estimate else ""
    is_packed = stored_method(model.options.model.config) is not None
    count = "" if is_packed else f"{about}{_count(model.weights.parameters)} parameters, "
    weights = f"{model.name}, {model.variant}: {count}{about}{gb(model.memory.weights)} of weights"
    if not model.cache.is_known:
        return f"{weights}, without the KV cache: config.json does not give its size."
    cache = f"{model.cache.a_token:,} bytes a token, {gb(model.memory.cache)} for a batch of {model.batch_tokens:,}"
    return f"{weights}; KV cache {cache} tokens."


def _unpacking(model: Model) -> Iterable[str]:
    """A note on MXFP4 weights, as in gpt-oss, in an image that cannot compute with them."""
    if stored_method(model.options.model.config) == "mxfp4" and model.options.engine == "transformers":
        # 32 weights take 16 bytes and one for their scale; in bf16 64 bytes.
        stored = model.weights.stored_bytes
        size = sum(stored.values()) + stored["experts"] * (64 / 17 - 1)
        yield f"In an image without the packages triton and kernels, MXFP4 weights become bf16: {gb(size)} of weights."


def _count(number: int) -> str:
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.1f} {word}"
    return f"{number:,}"


def _how(model: Model, n_gpus: int, choice: Choice) -> tuple[str, str]:
    if n_gpus == 1:
        return "On one GPU", ""
    by = ", by vLLM" if model.options.engine == "vllm" else ""
    return f"{'Split' if choice.tensor_parallel else 'Spread'} over {n_gpus} GPUs", by


def _without_memory(model: Model, offer: Offer, choice: Choice) -> str:
    each = model.memory.needed_on_each(offer.gpus, tensor_parallel=choice.tensor_parallel)
    return (
        f"{''.join(_how(model, offer.gpus, choice))}: needs GPUs of at least {gb((each + RUNTIME_BYTES) / USABLE)}. "
        f'To check that before tasks start, set gpu_memory under [resources], such as "80G", or a gpu_type with its '
        f"memory."
    )


def _on_gpus(model: Model, offer: Offer, choice: Choice) -> str:
    gpu_memory = offer.gpu_memory or 0
    needed = model.memory.needed_on_each(offer.gpus, tensor_parallel=choice.tensor_parallel)
    how, by = _how(model, offer.gpus, choice)
    return (
        f"{how} of {gb(gpu_memory)}{by}: {_on_each(model, offer, choice)} of the {gb(usable(gpu_memory))} that can be "
        f"used on each; "
        f"{gb(usable(gpu_memory) - needed)} are left."
    )


def _on_each(model: Model, offer: Offer, choice: Choice) -> str:
    """Weights and cache on each GPU, and the other model if there is one, as text up to a comma."""
    weights, cache = model.memory.on_each(offer.gpus, tensor_parallel=choice.tensor_parallel)
    found, other = f"{gb(weights)} of weights and {gb(cache)} of cache", model.memory.beside
    return found if other is None else f"{found}, and {gb(other.on_each(offer.gpus))} of {other.name},"


def refuse_missing(model: Model) -> None:
    """Refuse a model whose weights are not all here."""
    source, missing = model.options.model, model.weights.missing
    if not missing:
        return
    first = some_of(missing, 1)
    if source.repository is None:
        raise SlurmGPUError(
            f"model {source.name!r}: {source.folder} lacks weights: {first} is missing. Copy the whole folder again."
        )
    raise SlurmGPUError(
        f"model {source.name!r}: {first}, of about {gb(sum(model.weights.stored_bytes.values()))} of weights, is "
        f"not in the hub's cache, {hub.cache_folder()}, and tasks do not download. {hub.FETCH}."
    )


def _unquantised(model: Model) -> SlurmGPUError:
    whole = model.quantized(None).memory.weights
    saved, share = whole - model.memory.weights, model.weights.numbers["experts"] / model.weights.parameters
    return SlurmGPUError(
        f"{model.name} would save {gb(saved)} of {gb(whole)} of weights "
        f"({saved / whole:.0%}): {share:.0%} of them are experts, which bitsandbytes and torchao do not quantise in "
        f"transformers. Use a checkpoint that is stored quantised (FP8, MXFP4, AWQ, GPTQ) without a suffix, or remove "
        f"the suffix."
    )


def _too_large(model: Model, offer: Offer, choice: Choice) -> SlurmGPUError:
    gpu_memory = offer.gpu_memory or 0
    options = "; or ".join(what_fits(model, offer)) or "no change that slurmgpu knows"
    gpus = f"{offer.gpus} GPUs" if offer.gpus > 1 else "one GPU"
    return SlurmGPUError(
        f"{_describe(model)} That does not fit {gpus} of {gb(gpu_memory)}: on each, "
        f"{_on_each(model, offer, choice).removesuffix(',')}, and {gb(usable(gpu_memory))} can be used. What fits: "
        f"{options}."
    )
