"""The names of workloads: the class that `use` in a run file names, and its name in messages."""

from __future__ import annotations

import re
from pathlib import Path

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.util.users import expanded, resolved

BUILT_IN = {
    "embed": "slurmgpu.workloads.embed:Embed",
    "generate": "slurmgpu.workloads.generate:Generate",
    "classify": "slurmgpu.workloads.classify:Classify",
    "score": "slurmgpu.workloads.score:Score",
    "perplexity": "slurmgpu.workloads.perplexity:Perplexity",
    "judge": "slurmgpu.workloads.judge:Judge",
    "collect": "slurmgpu.workloads.collect:Collect",
    "tracin": "slurmgpu.workloads.tracin:Tracin",
    "train": "slurmgpu.workloads.train:Train",
    "command": "slurmgpu.workloads.command:Command",
}
"""The built-in workloads by short name. They are listed here because a copy of the package may have no metadata."""

ENTRY_POINTS = "slurmgpu.workloads"
"""The entry-point group in which a package registers short names for its workloads."""

_SHORT_NAMES = {name: short for short, name in BUILT_IN.items()} | {"slurmgpu.workloads.function:Function": "function"}


def title_of(full_name: str, noun: str = "Workload") -> str:
    """The name of a workload in messages: a built-in one's short name, such as "command", or `noun` and full name."""
    return _SHORT_NAMES.get(full_name) or f"{noun} {full_name}"


def installed_workloads() -> dict[str, dict[str, str]]:
    """Workloads of other packages by short name: the full names, each with its distribution."""
    import importlib.metadata  # the import is slow

    found: dict[str, dict[str, str]] = {}
    for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS)):
        full_name = point.value.partition("[")[0].replace(" ", "")
        if BUILT_IN.get(point.name) != full_name:
            found.setdefault(point.name, {})[full_name] = point.dist.name if point.dist else "a package"
    return found


def hidden_by_built_in(use: str) -> list[str]:
    """A note for each installed package that has a workload with the name of the built-in `use`."""
    others = installed_workloads().get(use, {}) if use in BUILT_IN else {}
    return [
        f'use = "{use}" is the built-in workload; {package} has one of the same name: use = "{full_name}".'
        for full_name, package in others.items()
    ]


def _of_a_package(use: str) -> str:
    """The full name of an installed package's workload of this short name."""
    installed = installed_workloads()
    others = installed.get(use)
    if others is None:
        known = {*BUILT_IN, *installed}
        raise SlurmGPUError(
            f"Workload {use!r} is neither built in nor from an installed package, and not of the form "
            f"'package.module:Class' or 'file.py:Class'.{did_you_mean(use, known)}"
        )
    [(full_name, package), *more] = others.items()
    if more:
        offered = " and ".join(f"{name} of {package}" for name, package in others.items())
        raise SlurmGPUError(f"Workload {use!r} may be {offered}. Write the full name of one.")
    if not re.fullmatch(r"[\w.]+:\w+", full_name):
        raise SlurmGPUError(
            f"Workload {use!r}: the entry point of {package} is {full_name!r}; expected 'package.module:Class'."
        )
    return full_name


def resolve_use(use: str, base: Path) -> str:
    """The full name of a workload that a run file in `base` names: `package.module:Class` or `/path/to/file.py:Class`.

    A short name is looked up among the built-in workloads, then among entry points. SlurmGPUError for an unknown name.
    """
    full = BUILT_IN.get(use) or (use if ":" in use else _of_a_package(use))
    module, colon, name = full.rpartition(":")
    if not colon or not module or not name.isidentifier():
        raise SlurmGPUError(
            f"Workload {use!r} is not of the form 'package.module:Class' or 'file.py:Class'."
            + did_you_mean(use, BUILT_IN)
        )
    return with_whole_path(full, base, f"Workload {use!r}")


def with_whole_path(full_name: str, base: Path, what: str) -> str:
    """A name such as `file.py:Class` with the file's whole path, relative to `base`; others as they are.

    SlurmGPUError, which begins with `what`, if there is no such file.
    """
    module, _, name = full_name.rpartition(":")
    if not module.endswith(".py"):
        return full_name
    path = resolved(base / expanded(module))
    if not path.is_file():
        raise SlurmGPUError(f"{what}: there is no file {path}.")
    return f"{path}:{name}"
