"""Container runtimes by name: the built-in ones, and those of installed packages (entry points `slurmgpu.runtimes`)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from slurmgpu.containers.apptainer import Apptainer, SingularityCE
from slurmgpu.containers.runtime import Runtime
from slurmgpu.errors import SlurmGPUError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "slurmgpu.runtimes"
BUILT_IN: dict[str, type[Runtime]] = {each.name: each for each in (Apptainer, SingularityCE)}
DEFAULT = Apptainer.name


@functools.cache
def runtime_named(name: str) -> Runtime:
    """The runtime that [container] runtime, or run.json, names; SlurmGPUError if no package here has it."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    for entry in _entries():
        if entry.name == name:
            return _load(entry)
    raise SlurmGPUError(
        f"No container runtime {name!r} is known in this Python; known are {', '.join(runtime_names())}. "
        f"Install the package that brings it ({GROUP} in its entry points)."
    )


def runtime_names() -> list[str]:
    """The names of all runtimes that are known here, built-in ones first."""
    found = {entry.name for entry in _entries()}
    return [*BUILT_IN, *sorted(found - BUILT_IN.keys())]


def _entries() -> list[EntryPoint]:
    from importlib.metadata import entry_points  # 15 ms, and most runs name a built-in one

    return list(entry_points(group=GROUP))


def _load(entry: EntryPoint) -> Runtime:
    try:
        made = entry.load()()
    except Exception as error:
        raise SlurmGPUError(
            f"The container runtime {entry.name!r} cannot be loaded from {entry.value}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, Runtime):
        raise SlurmGPUError(
            f"{entry.value} is no container runtime: it is no subclass of {Runtime.__module__}.Runtime."
        )
    return made
