"""Load a run's workload, alone or together with the other ranks of a group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from slurmgpu.code import importer
from slurmgpu.errors import GPUFaultError, SlurmGPUError
from slurmgpu.loader.adapted import Adapted
from slurmgpu.loader.build import build
from slurmgpu.run.failures import LOADING, class_of
from slurmgpu.run.frozen_plan import Plan
from slurmgpu.run.worker_events import Report
from slurmgpu.util import gpus
from slurmgpu.util.early_signals import INTERRUPTS
from slurmgpu.util.exceptions import described, message_of, trace_of
from slurmgpu.util.forks import ending_forks
from slurmgpu.worker import groups
from slurmgpu.worker.assignment import Assignment, WorkerFailedError
from slurmgpu.worker.call_failures import check_debugger_left
from slurmgpu.worker.groups import Group, PeersMissingError
from slurmgpu.workload import TaskContext

log = logging.getLogger("slurmgpu.worker")


def device_of(assignment: Assignment, group: Group, report: Report) -> str:
    """PyTorch's name of this process's device, after a probe of its GPUs; WorkerFailedError if they are faulty."""
    if not assignment.n_gpus or assignment.device == "cpu":
        return "cpu"
    try:
        found = gpus.probe(assignment.n_gpus, mine=group.local_rank if group.world_size > 1 else None)
    except GPUFaultError as error:
        raise WorkerFailedError("gpu_fault", str(error)) from error
    report({"event": "gpus", "names": [gpu.name for gpu in found], "uuids": [gpu.uuid for gpu in found]})
    return f"cuda:{group.local_rank}"


def load_workload(plan: Plan, task: TaskContext) -> Adapted:
    """The plan's workload, loaded on the task's device; WorkerFailedError says what failed."""

    def kind_of(error: BaseException) -> str:
        found = class_of(error, LOADING)
        # A workload that uses a GPU where the run asks for none finds none on any node.
        return "workload_error" if found == "gpu_fault" and task.device == "cpu" else found

    try:
        with ending_forks():
            workload = build(plan.workload, plan.settings, Path(plan.search_path))
            workload.load(task)
    except SlurmGPUError as error:
        if error.__cause__ is not None:
            log.info("its cause:", exc_info=error.__cause__)
        raise WorkerFailedError(kind_of(error), message_of(error)) from error
    except INTERRUPTS:
        raise
    except BaseException as error:  # also a panic of a library in Rust
        check_debugger_left(error)
        raise WorkerFailedError(kind_of(error), described(error), trace_of(error)) from error
    return workload


def load_together(load: Callable[[], Adapted], group: Group) -> Adapted:
    """The result of `load`, once all ranks have it.

    A rank that fails does not end at once but waits for the others: its end would make those in a collective fail, and
    it may itself have failed because another rank died, whose launcher then ends it.
    """
    loaded: Adapted | None = None
    failure: WorkerFailedError | None = None
    try:
        loaded = load()
    except WorkerFailedError as error:
        failure = error
    try:
        has_failed = group.gather(failure is not None, groups.LOADING_PATIENCE_S if failure else None)
        first = has_failed.index(True) if any(has_failed) else None
    except PeersMissingError as error:
        first = error.rank
    if first not in (None, group.rank):
        if failure is not None:
            log.error("%s: %s%s", failure.kind, failure, f"\n{failure.trace}" if failure.trace else "")
        group.gather()  # until the end of that rank, which says why, ends all
    if failure is not None:
        raise failure
    assert loaded is not None
    return loaded


def log_outside(plan: Plan, code: str | None, logged: Sequence[str] = ()) -> list[str]:
    """Log imported files of the user that the snapshot `code` lacks, such as dynamically named modules.

    Returns all such files; those that were `logged` already are not logged again.
    """
    if code is None:
        return []
    outside, bypassed = importer.outside(Path(plan.search_path)), importer.bypassed()
    if new := [file for file in outside if file not in logged]:
        log.warning("not in the snapshot of the code, so the current file was imported: %s", ", ".join(new))
    if new := [file for file in bypassed if file not in logged]:
        log.warning("imported from disk by another loader, not from the snapshot of the code: %s", ", ".join(new))
    return [*outside, *bypassed]
