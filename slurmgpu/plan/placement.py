"""How a workload uses the GPUs of a task, asked before anything is queued; and the memory of GPUs by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from slurmgpu.errors import SlurmGPUError
from slurmgpu.loader.adapted import Adapted
from slurmgpu.loader.names import title_of
from slurmgpu.plan.run_file import Resources, size_bytes
from slurmgpu.workload import Placement, Share

_MEMORY_GB = """
    gh200 96:101.5, b300 288:287, b200 180:191, h200 141:150, h100_nvl 94:100, h100 80:85, h800 80:85,
    a100 40:42.4 80:85, a800 40:42.4 80:85, a40 48:48.3, a30 24:25.3, a10 24:24, a16 16:15.7, a2 16:15.7, a6000 48:48.3,
    a5000 24:24.1, l40s 48:48.3, l40 48:48.3, l4 24:24, t4 16:15.7, v100 16:16.9 32:34, p100 12:12.7 16:17, p40 24:24,
    rtx_6000 24:23.8, rtx6000 24:23.8, rtx_6000_ada 48:48.3, rtx_pro_6000 96:101.8,
    5090 32:33.6, 4090 24:25.2, 3090 24:25.2, 2080ti 11:11.5, 2080_ti 11:11.5, titan_rtx 24:25.2,
    mi300x 192:206, mi325x 256:274, mi250 64:68.6
"""


def _sizes_of(card: str) -> tuple[str, dict[int, float]]:
    name, *sizes = card.split()
    return name, {int(sold): float(real) for sold, real in (size.split(":") for size in sizes)}


GPU_MEMORY_GB = dict(map(_sizes_of, _MEMORY_GB.split(",")))
"""Memory by words in a GPU's name, as pairs: gigabytes on the data sheet, and gigabytes that programs find.

A data sheet's gigabyte is usually 1024³ bytes, of which error correction and the driver take some. An MI250 is two
GPUs.
"""


def gpu_memory_of(resources: Resources) -> tuple[int, int] | None:
    """The least and the most bytes of one GPU that [resources] imply; None if they are unknown."""
    name = _name_of(resources)
    if resources.gpu_memory is not None:
        size = _really(size_bytes(resources.gpu_memory), name)
        return size, size
    if said := re.search(r"(\d+)_?gb(?![a-z0-9])", name):
        size = _really(int(said[1]) * 10**9, name)
        return size, size
    card = _card(name)
    return None if card is None else (int(min(card.values()) * 1e9), int(max(card.values()) * 1e9))


def _name_of(resources: Resources) -> str:
    return re.sub(r"[^a-z0-9]+", "_", (resources.gpu_type or "").lower())


def _card(name: str) -> dict[int, float] | None:
    known = [word for word in GPU_MEMORY_GB if re.search(rf"(?<![0-9]){word}(?![0-9])", name)]
    return GPU_MEMORY_GB[max(known, key=len)] if known else None


def _really(size: int, name: str) -> int:
    """The usable bytes of a GPU with this size on its data sheet; the size itself if no data sheet has it."""
    card = _card(name)
    cards = GPU_MEMORY_GB.values() if card is None else [card]
    return int(min((each[size // 10**9] * 1e9 for each in cards if size in (n * 10**9 for n in each)), default=size))


def place(workload: Adapted, resources: Resources, gpus_per_task: int) -> Placement:
    """How many processes a task has, and lines that say why: from the run file, else from the workload."""
    name = workload.name
    if workload.place is not None:
        found = _ask(workload.place, resources, gpus_per_task)
    else:
        found = Placement(resources.processes or workload.processes)
    if not isinstance(found, Placement):
        raise SlurmGPUError(f"{title_of(name)}: place(share) returned {found!r}; expected a Placement.")
    if found.processes not in ("one", "per-gpu"):
        raise SlurmGPUError(f"{title_of(name)} has processes = {found.processes!r}; expected 'one' or 'per-gpu'.")
    if resources.nodes_per_task > 1 and found.processes == "one":
        raise SlurmGPUError(
            f"nodes_per_task = {resources.nodes_per_task}, but {title_of(name, 'workload')} runs in one process, which "
            f'sees the GPUs of one node only. Set processes = "per-gpu" in [resources] if it can run in several.'
        )
    is_chosen = resources.array or resources.gpus_per_task is not None or bool(found.lines)
    if found.processes == "one" and gpus_per_task > 1 and not is_chosen:
        line = f"One task with one process has all {gpus_per_task} GPUs. For a task on each GPU: array = true, --array."
        return replace(found, lines=(line,))
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
            f'{error} (gpu_type = "{kind}" is assumed to have {most / 1e9:.1f} GB, the most that is sold under that '
            f"name; set gpu_memory in [resources] if it has more.)"
        ) from error
    sold = sorted(_card(_name_of(resources)) or ())
    warning = (
        f'gpu_type = "{kind}" is sold with {sold[0]} and with {sold[-1]} GB, and this run fits only the larger one. '
        f'Set gpu_memory = "{sold[-1]}G" in [resources] if your cluster has that; a task on a smaller one ends at once.'
    )
    return replace(found, lines=(*found.lines, warning))
