"""The executors that a run file may name: built-in ones, and those of packages (entry points `slurmgpu.executors`).

Their classes are in the folder `executors`, on a higher floor: see `executors/interface.py`.
"""

from __future__ import annotations

from slurmgpu.util.plugins import Plugins

DEFAULT = "slurm"
EXECUTORS = Plugins(
    "slurmgpu.executors",
    "executor",
    "slurmgpu.executors.interface.Executor",
    {
        "slurm": "slurmgpu.executors.slurm:Slurm",
        "local": "slurmgpu.executors.local:Local",
        "debug": "slurmgpu.executors.debug:Debug",
    },
)
