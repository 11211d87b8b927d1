"""slurmgpu maps a GPU workload over a data set on Slurm and loses nothing.

`__all__` lists the public names. A name is imported when it is first used, so `import slurmgpu` costs nothing.
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
    "Rates",
    "Retry",
    "RunHandle",
    "SlurmGPUError",
    "TaskContext",
    "Text",
    "Throughput",
    "Workload",
    "__version__",
    "compare",
    "find_batch_size",
    "map",
    "open",
    "open_run",
    "probe",
    "serve",
    "submit",
    "submit_all",
    "throughput",
]

_HOMES = {
    "slurmgpu.api": ("RunHandle", "open_run", "probe", "submit", "submit_all"),
    "slurmgpu.errors": ("Interrupted", "ItemError", "Retry", "SlurmGPUError"),
    "slurmgpu.mapping.map": ("map",),
    "slurmgpu.merge.compare": ("compare",),
    "slurmgpu.results": ("Merged", "open"),
    "slurmgpu.shards.columns": ("Array", "Json", "Ragged", "Text"),
    "slurmgpu.training.batch_size": ("find_batch_size",),
    "slurmgpu.training.throughput": ("Rates", "Throughput", "throughput"),
    "slurmgpu.workload": ("Item", "TaskContext", "Workload"),
    "slurmgpu.workloads.command.serve": ("serve",),
}

if TYPE_CHECKING:
    from slurmgpu.api import RunHandle, open_run, probe, submit, submit_all
    from slurmgpu.errors import Interrupted, ItemError, Retry, SlurmGPUError
    from slurmgpu.mapping.map import map  # noqa: A004
    from slurmgpu.merge.compare import compare
    from slurmgpu.results import Merged, open  # noqa: A004
    from slurmgpu.shards.columns import Array, Json, Ragged, Text
    from slurmgpu.training.batch_size import find_batch_size
    from slurmgpu.training.throughput import Rates, Throughput, throughput
    from slurmgpu.workload import Item, TaskContext, Workload
    from slurmgpu.workloads.command.serve import serve


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'slurmgpu' has no attribute {name!r}")
