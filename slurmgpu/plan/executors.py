"""The executors that a run file may name: built-in ones, and those of packages (entry points `slurmgpu.executors`).

What they do is in `executors`, floors above: `executors/interface.py` says how.
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
