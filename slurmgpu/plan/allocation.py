"""The number of tasks of a run, and of GPUs per task."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from slurmgpu.errors import SlurmGPUError
from slurmgpu.plan.executors import EXECUTORS
from slurmgpu.plan.run_file import Resources
from slurmgpu.util.amounts import count_of


@dataclass(frozen=True)
class Allocation:
    """The number of tasks, how many of them may run at once, and the GPUs of each."""

    n_tasks: int
    n_concurrent: int
    gpus_per_task: int


def allocate(resources: Resources, n_shards: int | None) -> Allocation:
    """The tasks and GPUs that [resources] ask for, at most one task per shard; docs/reference/cli.md has the rule."""
    n_concurrent, per_task = _at_once(resources)
    _check_nodes_per_task(resources, per_task)
    _check_tasks_per_node(resources, n_concurrent)
    n_tasks = min(resources.tasks or n_concurrent, n_shards or sys.maxsize)
    return Allocation(n_tasks, min(n_concurrent, n_tasks), per_task)


def _at_once(resources: Resources) -> tuple[int, int]:
    """How many tasks may run at once, and the GPUs of each."""
    gpus, per_task = resources.gpus, resources.gpus_per_task
    if gpus == 0:
        if per_task is not None:
            raise SlurmGPUError("gpus = 0 runs on CPUs, so gpus_per_task cannot be set; use tasks for the number.")
        return resources.tasks or 1, 0
    if resources.array:
        per_task = per_task or 1
        if gpus % per_task:
            raise SlurmGPUError(f"gpus = {gpus} is not a multiple of gpus_per_task = {per_task}.")
        return gpus // per_task, per_task
    if per_task not in (None, gpus):
        raise SlurmGPUError(
            f"gpus_per_task = {per_task}, but without --array one task holds all of gpus = {gpus}; add --array."
        )
    return 1, gpus


def _check_nodes_per_task(resources: Resources, per_task: int) -> None:
    nodes = resources.nodes_per_task
    if nodes > 1 and (per_task == 0 or per_task % nodes):
        raise SlurmGPUError(
            f"nodes_per_task = {nodes}, but a task has {count_of(per_task, 'GPU')}; expected a multiple of {nodes}, "
            f"so that each node has the same number. Correct gpus or gpus_per_task."
        )
    if nodes > 1 and resources.processes == "one":
        raise SlurmGPUError(
            f'nodes_per_task = {nodes}, but processes = "one": one process sees the GPUs of its own node only. '
            f'Set processes = "per-gpu".'
        )


def _check_tasks_per_node(resources: Resources, n_concurrent: int) -> None:
    per_node, nodes, gpus = resources.tasks_per_node or 1, resources.nodes_per_task, resources.gpus
    if per_node == 1 or not EXECUTORS.make(resources.executor).queues:
        return  # tasks of this machine share it in any case
    if nodes > 1:
        raise SlurmGPUError(
            f"tasks_per_node = {per_node} and nodes_per_task = {nodes}: several tasks share a node, or a task has "
            f"several nodes. Give one of both."
        )
    if gpus and not resources.array:
        raise SlurmGPUError(
            f"tasks_per_node = {per_node}, but without --array one task holds all of gpus = {gpus}; add --array."
        )
    if n_concurrent > per_node and n_concurrent % per_node:
        raise SlurmGPUError(
            f"tasks_per_node = {per_node}, but {n_concurrent} tasks may run at once; expected a multiple of "
            f"{per_node}, so that each job has as many. Correct {'gpus' if gpus else 'tasks'} or tasks_per_node."
        )
