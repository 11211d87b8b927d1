"""How a workload uses what its tasks will hold, asked of it before anything is queued; and what GPUs hold by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from slurmgpu.config import Resources, size_bytes
from slurmgpu.errors import SlurmGPUError
from slurmgpu.workloads import Placement, Share, Workload

_MEMORY_GB = """
    gh200 96, b300 288, b200 180, h200 141, h100_nvl 94, h100 80, h800 80,
    a100 40, a800 40, a40 48, a30 24, a10 24, a16 16, a2 16, a6000 48, a5000 24,
    l40s 48, l40 48, l4 24, t4 16, v100 16, p100 16, p40 24,
    rtx_6000 24, rtx6000 24, rtx_6000_ada 48, rtx_pro_6000 96,
    5090 32, 4090 24, 3090 24, 2080ti 11, 2080_ti 11, titan_rtx 24,
    mi300x 192, mi325x 256, mi250 64
"""

GPU_MEMORY_GB = {name: int(size) for name, size in (entry.split() for entry in _MEMORY_GB.split(","))}
"""Memory by words in a GPU's name, of the smallest that is sold under it: an A100 has 40 or 80 GB, a V100 16 or 32.

From NVIDIA's and AMD's data sheets; an MI250 is two GPUs. A name that tells its memory, as a100_80gb, needs no table.
"""


def gpu_memory_of(resources: Resources) -> int | None:
    """Bytes of one GPU, as [resources] tells them; None where neither gpu_memory nor gpu_type does."""
    if resources.gpu_memory is not None:
        return size_bytes(resources.gpu_memory)
    name = re.sub(r"[^a-z0-9]+", "_", (resources.gpu_type or "").lower())
    if said := re.search(r"(\d+)_?gb(?![a-z0-9])", name):
        return int(said[1]) * 10**9
    known = [word for word in GPU_MEMORY_GB if re.search(rf"(?<![0-9]){word}(?![0-9])", name)]
    return GPU_MEMORY_GB[max(known, key=len)] * 10**9 if known else None


def place(workload: Workload, resources: Resources, gpus_per_task: int, name: str) -> Placement:
    """How many processes a task has, and lines on why: what the run file says, else what the workload wants."""
    asked = getattr(workload, "place", None)
    if callable(asked):
        gpus = 0 if resources.device == "cpu" else gpus_per_task
        memory, kind = gpu_memory_of(resources), resources.gpu_type
        found: Placement = asked(Share(gpus, resources.nodes_per_task, memory, kind, resources.processes))
    else:
        found = Placement(resources.processes or str(getattr(workload, "processes", "one")))
    if found.processes not in ("one", "per-gpu"):
        raise SlurmGPUError(f"Workload {name} has processes = {found.processes!r}; expected 'one' or 'per-gpu'.")
    if resources.nodes_per_task > 1 and found.processes == "one":
        raise SlurmGPUError(
            f"nodes_per_task = {resources.nodes_per_task}, but workload {name} runs in one process, which sees the "
            f'GPUs of its own node only. Set processes = "per-gpu" in [resources] if it can run in several.'
        )
    return found


def paths_of(workload: Workload) -> tuple[str, ...]:
    """The absolute paths that a workload reads beside its input, to be bound into an image."""
    paths: Sequence[Path] = getattr(workload, "paths", ())
    return tuple(str(path.absolute()) for path in map(Path, paths))


def environ_of(workload: Workload) -> dict[str, str]:
    """What a workload wants its workers to find in their environment."""
    return {str(name): str(value) for name, value in getattr(workload, "environ", {}).items()}
