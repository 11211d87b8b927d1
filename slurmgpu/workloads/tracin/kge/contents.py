"""What lies where in a checkpoint's content: the state dict, the config, the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.workloads.tracin.kge.peeking import WEIGHTS

SECTIONS = ("model_state_dict", "state_dict")
"""Where a checkpoint keeps the model's state dict, if it is not one itself."""


def state_of(content: Mapping[str, Any], path: str | Path) -> Mapping[str, Any]:
    """The state dict in a checkpoint's content, whichever of its shapes that has."""
    state = next((content[key] for key in SECTIONS if isinstance(content.get(key), Mapping)), content)
    others = [key for key, value in state.items() if not hasattr(value, "shape")]
    if not state or others:
        keys = ", ".join(map(str, list(content)[:8])) or "nothing"
        raise SlurmGPUError(
            f"{path}: expected a model's state dict, or one under {' or '.join(SECTIONS)}, found {keys}. "
            f"Write it with {WEIGHTS}."
        )
    return state


def told_in(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a checkpoint's content says of its model and training."""
    found = [content[key] for key in ("config", "model_config") if isinstance(content.get(key), Mapping)]
    return {key: value for config in found for key, value in config.items()}


def learning_rate_in(content: Mapping[str, Any]) -> float | None:
    """The learning rate that a checkpoint's optimizer has, or else its config."""
    optimizer = content.get("optimizer_state_dict")
    groups = optimizer.get("param_groups", ()) if isinstance(optimizer, Mapping) else ()
    rates = {group["lr"] for group in groups if isinstance(group.get("lr"), float)}
    rate = rates.pop() if len(rates) == 1 else told_in(content).get("learning_rate")
    return float(rate) if isinstance(rate, (int, float)) else None
