"""The temperatures that vLLM refuses, and its share of a GPU's memory, without importing it."""

from __future__ import annotations

from slurmgpu.llm.interface.engine import HeadMemory
from slurmgpu.llm.placement.needs import RUNTIME_BYTES, USABLE

TEMPERATURES = (0.01, 2.0)
"""The range of temperatures that vLLM computes with, beside 0: `SamplingParams` raises lower ones to its beginning."""


def vllm_refuses(temperature: float) -> str | None:
    """Why vLLM cannot sample at a temperature; None if it can."""
    low, high = TEMPERATURES
    if not temperature or low <= temperature <= high:
        return None
    return f"temperature is {temperature:g}; vLLM computes with 0, or with {low:g} to {high:g}"


def memory_share(other: HeadMemory, n_gpus: int, total: int) -> float:
    """The `gpu_memory_utilization` of vLLM: its share of the `total` bytes of a GPU, with another model beside it."""
    return USABLE - (other.on_each(n_gpus) + RUNTIME_BYTES) / total
