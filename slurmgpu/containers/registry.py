"""Container runtimes by name: the built-in ones, and those of installed packages (entry points `slurmgpu.runtimes`)."""

from __future__ import annotations

import functools

from slurmgpu.containers.runtime import Runtime
from slurmgpu.util.plugins import Plugins

DEFAULT = "apptainer"
RUNTIMES = Plugins(
    "slurmgpu.runtimes",
    "container runtime",
    "slurmgpu.containers.runtime.Runtime",
    {
        "apptainer": "slurmgpu.containers.apptainer:Apptainer",
        "singularity": "slurmgpu.containers.apptainer:SingularityCE",
    },
)


@functools.cache
def runtime_named(name: str) -> Runtime:
    """The runtime that [container] runtime, or run.json, names; SlurmGPUError if no package here has it."""
    runtime: Runtime = RUNTIMES.make(name)
    return runtime
