"""The learning rate in a checkpoint, from the time when it was saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

from slurmgpu.workloads.tracin.kge.torch_archive import Shape, number_in, told_in


@dataclass(frozen=True)
class Rate:
    """A learning rate; None if there is none, and then `found` describes what is there instead, if anything."""

    value: float | None = None
    found: str | None = None


NO_RATE = Rate()


def learning_rate_in(content: Mapping[str, Any], path: str | Path) -> Rate:
    """The learning rate from the optimizer in a checkpoint's content, or else from its config.

    An optimizer with different rates for its groups counts as having none.
    """
    optimizer = content.get("optimizer_state_dict")
    groups = optimizer.get("param_groups", ()) if isinstance(optimizer, Mapping) else ()
    values = [group["lr"] for group in groups if isinstance(group, Mapping) and group.get("lr") is not None]
    if not values:
        value = told_in(content).get("learning_rate")
        return NO_RATE if value is None else _one(value, "its config", path)
    rates = [_one(value, "its optimizer", path) for value in values]
    if unread := next((rate for rate in rates if rate.value is None), None):
        return unread
    if len(set(rates)) == 1:
        return rates[0]
    said = " and ".join(f"{rate.value:.9g}" for rate in dict.fromkeys(rates))
    return Rate(None, f"{said} in its optimizer's {len(values)} parameter groups")


def _one(value: object, where: str, path: str | Path) -> Rate:
    number = _number(value, path)
    return Rate(None, f"{_said(value)} in {where}") if number is None else Rate(number)


def _number(value: Any, path: str | Path) -> float | None:
    if isinstance(value, Shape):
        return number_in(path, value)
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        return None
    return float(value) if _size(value) == 1 else None


def _size(value: object) -> int:
    """The number of elements of a number, a tensor or its stand-in."""
    return math.prod(value.shape) if hasattr(value, "shape") else 1


def _said(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"a tensor {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return repr(value) if isinstance(value, (str, bool, list, tuple, dict)) else f"a {type(value).__name__}"
