"""How a workload uses the GPUs of its tasks, asked before anything is queued; and the memory of GPUs by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from slurmgpu.errors import SlurmGPUError
from slurmgpu.plan.run_file import Resources, size_bytes
from slurmgpu.workload import Adapted, Placement, Share

_MEMORY_GB = """
    gh200 96, b300 288, b200 180, h200 141, h100_nvl 94, h100 80, h800 80,
    a100 40 80, a800 40 80, a40 48, a30 24, a10 24, a16 16, a2 16, a6000 48, a5000 24,
    l40s 48, l40 48, l4 24, t4 16, v100 16 32, p100 12 16, p40 24,
    rtx_6000 24, rtx6000 24, rtx_6000_ada 48, rtx_pro_6000 96,
    5090 32, 4090 24, 3090 24, 2080ti 11, 2080_ti 11, titan_rtx 24,
    mi300x 192, mi325x 256, mi250 64
"""

GPU_MEMORY_GB = {name: (int(sizes[0]), int(sizes[-1])) for name, *sizes in map(str.split, _MEMORY_GB.split(","))}
"""Memory by words in a GPU's name: the smallest and the largest that is sold under it.

From NVIDIA's and AMD's data sheets; an MI250 is two GPUs. A name with its memory, as a100_80gb, needs no table.
"""


def gpu_memory_of(resources: Resources) -> tuple[int, int] | None:
    """The least and the most bytes of one GPU, by [resources]; None if they are not known."""
    if resources.gpu_memory is not None:
        size = size_bytes(resources.gpu_memory)
        return size, size
    name = re.sub(r"[^a-z0-9]+", "_", (resources.gpu_type or "").lower())
    if said := re.search(r"(\d+)_?gb(?![a-z0-9])", name):
        return int(said[1]) * 10**9, int(said[1]) * 10**9
    known = [word for word in GPU_MEMORY_GB if re.search(rf"(?<![0-9]){word}(?![0-9])", name)]
    if not known:
        return None
    least, most = GPU_MEMORY_GB[max(known, key=len)]
    return least * 10**9, most * 10**9


def place(workload: Adapted, resources: Resources, gpus_per_task: int) -> Placement:
    """How many processes a task has, and lines on why: by the run file, else by the workload."""
    name = workload.name
    if workload.place is not None:
        found = _ask(workload.place, resources, gpus_per_task)
    else:
        found = Placement(resources.processes or workload.processes)
    if not isinstance(found, Placement):
        raise SlurmGPUError(f"Workload {name}: place(share) returned {found!r}; expected a Placement.")
    if found.processes not in ("one", "per-gpu"):
        raise SlurmGPUError(f"Workload {name} has processes = {found.processes!r}; expected 'one' or 'per-gpu'.")
    if resources.nodes_per_task > 1 and found.processes == "one":
        raise SlurmGPUError(
            f"nodes_per_task = {resources.nodes_per_task}, but workload {name} runs in one process, which sees the "
            f'GPUs of its own node only. Set processes = "per-gpu" in [resources] if it can run in several.'
        )
    return found


def _ask(asked: Callable[[Share], Placement], resources: Resources, gpus_per_task: int) -> Placement:
    """The workload's answer for the smallest GPU that a gpu_type may stand for; if it refuses, for the largest."""
    memory, kind = gpu_memory_of(resources), resources.gpu_type
    gpus, slots = 0 if resources.device == "cpu" else gpus_per_task, max(1, gpus_per_task)

    def answer(gpu_memory: int | None) -> Placement:
        return asked(Share(gpus, resources.nodes_per_task, gpu_memory, kind, resources.processes, slots))

    if memory is None or resources.gpu_memory is not None:
        return answer(memory and memory[0])
    least, most = memory
    try:
        return answer(least)
    except SlurmGPUError:
        answer(None)  # raises errors that are not about memory
    try:
        found = answer(most)
    except SlurmGPUError as error:
        raise SlurmGPUError(
            f'{error} (gpu_type = "{kind}" is taken for {most // 10**9} GB, the most that is sold under that name; '
            f"set gpu_memory under [resources] if it has more.)"
        ) from error
    warning = (
        f'gpu_type = "{kind}" is sold with {least // 10**9} and with {most // 10**9} GB; this fits the larger only: '
        f'gpu_memory = "{most // 10**9}G" under [resources] says which it is; a task on a smaller one ends at once.'
    )
    return replace(found, lines=(*found.lines, warning))
