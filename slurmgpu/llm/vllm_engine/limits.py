"""The temperatures and adapters that vLLM rejects, and its share of a GPU's memory, without importing it."""

from __future__ import annotations

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.interface.engine import HeadMemory
from slurmgpu.llm.models.adapters import Adapters, rank_of
from slurmgpu.llm.placement.needs import RUNTIME_BYTES, USABLE

TEMPERATURES = (0.01, 2.0)
"""The range of temperatures in vLLM, besides 0: `SamplingParams` raises lower ones to the range's start."""

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's `max_lora_rank`."""


def vllm_refuses(temperature: float) -> str | None:
    """Why vLLM cannot sample at a temperature; None if it can."""
    low, high = TEMPERATURES
    if not temperature or low <= temperature <= high:
        return None
    return f"temperature is {temperature:g}; expected 0, or {low:g} to {high:g}, for vLLM"


def check_adapters(adapters: Adapters) -> None:
    """Refuse adapters that vLLM does not support: with a rank that is too large, with biases, or with DoRA."""
    for source in adapters.sources.values():
        config = source.config
        if rank_of(source) > LORA_RANKS[-1] or config.get("use_dora") or config.get("bias", "none") != "none":
            found = "DoRA" if config.get("use_dora") else f"a rank of {rank_of(source)} and bias {config.get('bias')!r}"
            raise SlurmGPUError(
                f"adapter {source.name!r} has {found}; vLLM takes a rank of at most {LORA_RANKS[-1]}, without biases "
                f'or DoRA. Remove engine = "vllm", or merge the adapter into its model with peft.'
            )


def memory_share(other: HeadMemory, n_gpus: int, total: int) -> float:
    """The `gpu_memory_utilization` for vLLM: its share of a GPU's `total` bytes, when another model needs the rest."""
    return USABLE - (other.on_each(n_gpus) + RUNTIME_BYTES) / total
