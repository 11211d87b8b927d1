"""slurmgpu maps a GPU workload over a data set on Slurm and loses nothing.

What is public is listed in `__all__`; a name is imported when it is first used, so `import slurmgpu` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Array",
    "Interrupted",
    "Item",
    "ItemError",
    "Json",
    "Merged",
    "Ragged",
    "SlurmGPUError",
    "TaskContext",
    "Text",
    "Workload",
    "__version__",
    "find_batch_size",
    "open",
    "probe",
    "serve",
    "submit",
    "throughput",
]

_HOMES = {
    "Array": "slurmgpu.shards.columns",
    "Json": "slurmgpu.shards.columns",
    "Ragged": "slurmgpu.shards.columns",
    "Text": "slurmgpu.shards.columns",
    "Item": "slurmgpu.workload",
    "TaskContext": "slurmgpu.workload",
    "Workload": "slurmgpu.workload",
    "Interrupted": "slurmgpu.errors",
    "ItemError": "slurmgpu.errors",
    "SlurmGPUError": "slurmgpu.errors",
    "Merged": "slurmgpu.results",
    "open": "slurmgpu.results",
    "probe": "slurmgpu.api",
    "submit": "slurmgpu.api",
    "serve": "slurmgpu.workloads.command.serving",
    "find_batch_size": "slurmgpu.training.fitting",
    "throughput": "slurmgpu.training.throughput",
}

if TYPE_CHECKING:
    from slurmgpu.api import probe, submit
    from slurmgpu.errors import Interrupted, ItemError, SlurmGPUError
    from slurmgpu.results import Merged, open  # noqa: A004
    from slurmgpu.shards.columns import Array, Json, Ragged, Text
    from slurmgpu.training.fitting import find_batch_size
    from slurmgpu.training.throughput import throughput
    from slurmgpu.workload import Item, TaskContext, Workload
    from slurmgpu.workloads.command.serving import serve


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'slurmgpu' has no attribute {name!r}")
