"""The engines by their names."""

from __future__ import annotations

from slurmgpu.llm.engine import Engine, EngineOptions, Place


def open_engine(options: EngineOptions, place: Place) -> Engine:
    """The engine that the options name, its model loaded."""
    if options.engine == "vllm":
        from slurmgpu.llm.vllm_engine import VllmEngine

        return VllmEngine(options, place)
    from slurmgpu.llm.transformers_engine import TransformersEngine

    return TransformersEngine(options, place)
