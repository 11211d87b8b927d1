"""Open an engine by its name."""

from __future__ import annotations

from slurmgpu.llm.interface.engine import Engine, EngineOptions, Place


def open_engine(options: EngineOptions, place: Place) -> Engine:
    """The engine named in the options, with its model loaded."""
    if options.engine == "vllm":
        from slurmgpu.llm.vllm_engine.engine import VllmEngine

        return VllmEngine(options, place)
    if options.engine == "server":
        from slurmgpu.llm.server_engine.engine import ServerEngine

        return ServerEngine(options, place)
    if options.images:
        from slurmgpu.llm.transformers_engine.image_engine import ImageEngine

        return ImageEngine(options, place)
    from slurmgpu.llm.transformers_engine.engine import TransformersEngine

    return TransformersEngine(options, place)
