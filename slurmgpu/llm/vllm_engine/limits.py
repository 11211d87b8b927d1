"""The temperatures and adapters that vLLM refuses, and its share of a GPU's memory, without importing it."""

from __future__ import annotations

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.interface.engine import HeadMemory
from slurmgpu.llm.models.adapters import Adapters, rank_of
from slurmgpu.llm.placement.needs import RUNTIME_BYTES, USABLE

TEMPERATURES = (0.01, 2.0)
"""The range of temperatures that vLLM computes with, beside 0: `SamplingParams` raises lower ones to its beginning."""

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's `max_lora_rank`."""


def vllm_refuses(temperature: float) -> str | None:
    """Why vLLM cannot sample at a temperature; None if it can."""
    low, high = TEMPERATURES
    if not temperature or low <= temperature <= high:
        return None
    return f"temperature is {temperature:g}; vLLM computes with 0, or with {low:g} to {high:g}"


def check_adapters(adapters: Adapters) -> None:
    """Refuse what vLLM does not compute: adapters with larger matrices than it has, with biases, or by DoRA."""
    for source in adapters.sources.values():
        config = source.config
        if rank_of(source) > LORA_RANKS[-1] or config.get("use_dora") or config.get("bias", "none") != "none":
            found = "DoRA" if config.get("use_dora") else f"a rank of {rank_of(source)} and bias {config.get('bias')!r}"
            raise SlurmGPUError(
                f"adapter {source.name!r} has {found}; vLLM takes a rank of at most {LORA_RANKS[-1]}, without biases "
                f'and DoRA. Remove engine = "vllm", or merge the adapter into its model with peft.'
            )


def memory_share(other: HeadMemory, n_gpus: int, total: int) -> float:
    """The `gpu_memory_utilization` of vLLM: its share of the `total` bytes of a GPU, with another model beside it."""
    return USABLE - (other.on_each(n_gpus) + RUNTIME_BYTES) / total
