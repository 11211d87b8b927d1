"""The base of the executors of this machine: its GPUs and its processes."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import signal
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from slurmgpu.containers.settings import ContainerRecord
from slurmgpu.errors import GPUFaultError, SlurmGPUError
from slurmgpu.executors.interface import Executor, Lines, Sight
from slurmgpu.run.directory import Run
from slurmgpu.run.heartbeats import Observer
from slurmgpu.run.liveness import patience, processes_here
from slurmgpu.run.owners import LEFT_ALONE, refuse_other_users, why_forgeable
from slurmgpu.run.submissions import Submission, job_here, slots_of
from slurmgpu.util import gpus
from slurmgpu.util.amounts import count_of
from slurmgpu.util.pids import are_numbered_here, numbering, parent_of, processes

log = logging.getLogger(__name__)

SLOT = "slurmgpu.executors.slot"
"""The module that runs a slot as a program; its first argument is the folder of the run's logs."""


class Here(Executor):
    """An executor whose tasks are processes of this machine, by the `pids` in submissions.jsonl."""

    def check(self, submission: Submission, container: ContainerRecord | None) -> None:
        """Refuse more GPUs or nodes than this machine has."""
        gpu_ids(submission)

    def describe(self, container: ContainerRecord | None) -> str:
        """A sentence that says that no Slurm is needed."""
        return f"{self.name}: no Slurm is needed"

    def place(self, run: Run, submission: Submission) -> dict[str, Any]:
        """The machine, and the process that submits."""
        return {"host": platform.node(), **numbering(), **processes([os.getpid()])}

    def look(self, run: Run, lines: Lines, waiting_merge: str | None) -> Sight:
        """Whether a process of the run is alive."""
        found = [processes_here(line) for line in reversed(lines) if "pids" in line]
        living = [pids[0] for pids in found if pids]
        return Sight(f"process {living[0]} works on it" if living else None, hides=None in found)

    def cancel(self, run: Run, lines: Lines, among: Sequence[Any] | None = None) -> list[str]:
        """Ask the processes of the run's slots to end, and tasks whose slots were killed."""
        if elsewhere := next((line for line in lines if not are_numbered_here(line)), None):
            raise SlurmGPUError(f"This run is computed on {elsewhere['host']}; cancel it there, outside a container.")
        done, is_open, living = [], {line["submission"] for line in lines}, _heard_of(run)
        for line in run.submissions():  # also one that has ended: a task may have outlived it
            if line["executor"] != self.name:
                continue
            number, pids = line["submission"], set()
            if number in is_open:
                pids = {*(processes_here(line) or ())} & {*slots_of(line)}
            tasks = living.get(job_here(self.name, number), [])
            pids |= {pid for pid in tasks if parent_of(pid) not in pids}
            if pids:
                refuse_other_users(run, line)
            if pids := {*surely_of(run, pids)}:
                run.record_submission({"submission": number, "cancelled": True})
                stop(pids)
                done.append(f"processes {', '.join(map(str, sorted(pids)))}")
        return done


def tasks_here(run: Run, executor: str, submission: int) -> list[int]:
    """The living tasks of a submission to this machine, by their heartbeats; also those whose slots were killed."""
    return _heard_of(run).get(job_here(executor, submission), [])


def _heard_of(run: Run) -> dict[str, list[int]]:
    """The pids of the living tasks of a run by their jobs, from one look at its heartbeats."""
    found: dict[str, list[int]] = {}
    for task in Observer(run.folder, patience(run.plan.lease_s)).look():
        if task.lives:
            found.setdefault(str(task.told.get("job")), []).append(task.told["pid"])
    return found


def surely_of(run: Run, pids: Iterable[int]) -> list[int]:
    """The processes that may safely be ended: all of them, unless another user may have written their pids.

    In that case only those whose arguments name the run, or that write into its logs: only their owner can cause that.
    """
    named = sorted(pids)
    if not named or (why := why_forgeable(run, run.tasks)) is None:
        return named
    found = [pid for pid in named if _shows(run, pid)]
    for pid in named:
        if pid not in found:
            log.warning(LEFT_ALONE, f"process {pid}", why)
    return found


def _shows(run: Run, pid: int) -> bool:
    """Whether /proc shows that a process belongs to a run."""
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR(run.logs.lstat().st_mode):
            return False  # a link could lead to the logs of another run
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if SLOT.encode() in arguments:
            return Path(os.fsdecode(arguments[arguments.index(SLOT.encode()) + 1])).samefile(run.logs)
        return Path(f"/proc/{pid}/fd/1").readlink().parent.samefile(run.logs)
    return False


def n_threads_of(n_slots: int) -> int:
    """The number of this machine's cores for each slot."""
    return max(1, len(os.sched_getaffinity(0)) // n_slots)


def stop(pids: Iterable[int], signum: int = signal.SIGTERM) -> None:
    """Signal live slots, which pass it on to their tasks, or tasks themselves."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def gpu_ids(submission: Submission) -> list[list[str]]:
    """The GPUs of each slot, as CUDA_VISIBLE_DEVICES takes them; SlurmGPUError if this machine has too few."""
    n_slots, per_slot = submission.n_concurrent, submission.gpus_per_task
    if submission.nodes_per_task > 1:
        raise SlurmGPUError(
            f"nodes_per_task = {submission.nodes_per_task}, but the local executor has one node, this machine. "
            f"Use --nodes-per-task 1."
        )
    if per_slot == 0:
        return [[] for _ in range(n_slots)]
    ids = gpus.visible_ids()
    if submission.device == "cpu":
        ids = [str(number) for number in range(n_slots * per_slot)]
    elif ids is None:
        try:
            ids = [str(number) for number in range(len(gpus.probe(n_slots * per_slot)))]
        except GPUFaultError as error:
            raise SlurmGPUError(
                f"{error}. To compute on this machine's CPUs: --gpus 0 (in Python: gpus=0), and --tasks for "
                f"the number of tasks."
            ) from error
    if len(ids) < n_slots * per_slot:
        raise SlurmGPUError(
            f"Asked for {count_of(n_slots * per_slot, 'GPU')}, but CUDA_VISIBLE_DEVICES gives this shell {len(ids)}. "
            f"Ask for fewer with --gpus (in Python: gpus)."
        )
    return [ids[slot * per_slot : (slot + 1) * per_slot] for slot in range(n_slots)]
