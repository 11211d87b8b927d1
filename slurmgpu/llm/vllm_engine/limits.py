"""What vLLM refuses, known without it."""

from __future__ import annotations

TEMPERATURES = (0.01, 2.0)
"""The range of temperatures that vLLM computes with, beside 0: `SamplingParams` raises lower ones to its beginning."""


def vllm_refuses(temperature: float) -> str | None:
    """Why vLLM cannot sample at a temperature; None if it can."""
    low, high = TEMPERATURES
    if not temperature or low <= temperature <= high:
        return None
    return f"temperature is {temperature:g}; vLLM computes with 0, or with {low:g} to {high:g}"
