"""Decide how a model uses a task's GPUs, whether it fits, and which changes would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.placement.needs import Model
from slurmgpu.llm.placement.parallelism import check_vllm, obstacle_to, stored_method

NODE_GPUS = (1, 2, 4, 8)
"""Numbers of GPUs per node that errors propose."""

CARDS = {24: 23.8e9, 48: 48.3e9, 80: 85e9, 141: 150e9}
"""GPUs that errors propose: their nominal gigabytes, and the bytes that programs find."""

LEAST_BATCH = 1024
"""The smallest batch that errors propose, in tokens."""


@dataclass(frozen=True)
class Offer:
    """A task's GPUs, nodes, bytes of memory per GPU if known, and the setting `processes`."""

    gpus: int
    nodes: int = 1
    gpu_memory: int | None = None
    processes: str | None = None


@dataclass(frozen=True)
class Choice:
    """How a model uses an offer; `fits` is None if the GPUs' memory is unknown.

    `obstacle` says why it cannot be split, if it cannot; `is_last_resort` means that it is spread only for that reason.
    """

    processes: str
    tensor_parallel: bool = False
    one_suffices: bool = False
    obstacle: str | None = None
    is_last_resort: bool = False
    fits: bool | None = None


def choose(model: Model, offer: Offer) -> Choice:
    """How the model uses the offer; SlurmGPUError if it cannot, for reasons other than memory."""
    is_asked = offer.processes == "per-gpu"
    if model.options.engine == "vllm":
        check_vllm(model.options, offer.gpus, is_asked=is_asked)
    obstacle = obstacle_to(model.options, offer.gpus, is_asked=is_asked)
    if is_asked and offer.gpus > 1 and obstacle:
        raise SlurmGPUError(
            f'{model.name} cannot be split over {offer.gpus} GPUs (processes = "per-gpu"): {obstacle}. '
            f"Remove processes: one process then spreads the layers over the GPUs."
        )
    if offer.gpus == 0:
        return Choice(offer.processes or "one")
    if offer.nodes > 1 and (obstacle or offer.processes == "one"):
        raise SlurmGPUError(
            f"{model.name} cannot be spread over {offer.nodes} nodes: "
            f"{obstacle or 'one process sees only the GPUs of its own node'}. Request GPUs on one node only."
        )
    memory = offer.gpu_memory
    one_suffices = memory is not None and model.memory.fits(1, memory, tensor_parallel=False)
    splits = offer.gpus > 1 and not obstacle and (not one_suffices or offer.nodes > 1)
    processes = offer.processes or ("per-gpu" if splits else "one")
    tensor_parallel = processes == "per-gpu" or model.options.engine == "vllm"
    fits = None if memory is None else model.memory.fits(offer.gpus, memory, tensor_parallel=tensor_parallel)
    is_spread = offer.gpus > 1 and not tensor_parallel and not one_suffices
    is_last_resort = is_spread and obstacle is not None and offer.processes is None
    return Choice(processes, tensor_parallel, one_suffices, obstacle, is_last_resort, fits)


def fits(model: Model, offer: Offer) -> bool:
    """Whether planning accepts the model on this offer."""
    try:
        return choose(model, offer).fits is not False
    except SlurmGPUError:
        return False


def what_fits(model: Model, offer: Offer) -> Iterator[str]:
    """Changes of the run file that each make the model fit."""
    gpu_memory = offer.gpu_memory or 0
    for n_gpus in (each * offer.nodes for each in NODE_GPUS):
        if n_gpus > offer.gpus and fits(model, replace(offer, gpus=n_gpus)):
            yield f"--gpus {n_gpus} (gpus_per_task = {n_gpus} with --array)"
            break
    if offer.processes is not None and fits(model, replace(offer, processes=None)):
        yield f"no processes = {offer.processes!r}".replace("'", '"')
    source = model.options.model
    if source.quantization is None and stored_method(source.config) is None:
        for suffix in ("8bit", "4bit"):
            smaller = model.quantized(suffix)
            if not smaller.leaves_experts and fits(smaller, offer):
                size = f"{smaller.memory.weights / 1e9:.1f} GB of weights"
                yield f'model = "{source.name}-{suffix}" on the same GPUs ({size})'
                break
    for sold, card in CARDS.items():
        if card > gpu_memory and fits(model, replace(offer, gpu_memory=int(card))):
            yield f"GPUs of {sold} GB"
            break
    if tokens := most_tokens(model, offer):
        yield f"batch_tokens = {tokens} instead of {model.batch_tokens}"


def most_tokens(model: Model, offer: Offer) -> int:
    """The largest batch below the model's own that fits, in multiples of LEAST_BATCH; 0 if none does."""
    low, high = 0, -(-model.batch_tokens // LEAST_BATCH)  # in multiples of LEAST_BATCH; the model's own does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(model.with_batch(middle * LEAST_BATCH), offer) else (low, middle)
    return low * LEAST_BATCH
