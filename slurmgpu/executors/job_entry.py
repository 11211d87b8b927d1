"""Entry points of jobs on a node: a task or the merge. Arguments are plain, so that Submitit's pickles stay small."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors.registry import executor_named
from slurmgpu.run import owners
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import blaming
from slurmgpu.run.heartbeats import beating, may_live, refuse_twin
from slurmgpu.run.liveness import is_orphaned, patience
from slurmgpu.run.records import Attempt, Unread, node_name
from slurmgpu.run.submissions import SubmissionLine, abroad
from slurmgpu.slurm import commands
from slurmgpu.slurm.own_job import OwnJob, nodes_here, own_job, refuse_copies, take_share
from slurmgpu.task.node_agent import follow
from slurmgpu.task.nodes import node_rank
from slurmgpu.task.spare_worker import SpareWorker, fork_worker
from slurmgpu.task.supervisor import Task
from slurmgpu.task.worker_process import EXIT_STOPPED
from slurmgpu.util import cgroups, early_signals
from slurmgpu.util.amounts import count_of
from slurmgpu.util.logging import log_to_stderr
from slurmgpu.util.prctl import outlive_parent

log = logging.getLogger(__name__)

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130
BEGIN = "-u -m slurmgpu.executors.begin"
"""Arguments of Python with which Submitit starts jobs, so that signals are remembered from the first instruction on."""


def _log_like_ours() -> None:
    """Log to standard error in slurmgpu's format, and each of Submitit's warnings once."""
    log_to_stderr(force=True)
    submitits = logging.getLogger("submitit")
    submitits.handlers.clear()
    # Submitit logs "Job completed successfully" for its pickle, also if the walltime has ended the task.
    submitits.setLevel(logging.WARNING)
    # It logs each SIGCONT, and Slurm sends one before every other signal.
    signal.signal(signal.SIGCONT, signal.SIG_DFL)


def run_task(folder: Path, submission: int) -> None:
    """A task of Submitit's array; exits with the task's code, for Slurm's accounting."""
    early_signals.remember()
    _log_like_ours()
    with blaming(node_name()):
        run, own = Run.open(folder), own_job(own_array=True)
        with _beating(folder, own):
            given = run.submission(submission)
            _end_copies(given.get("tasks_per_node", 1))
            take_share(given["gpus_per_task"], own.tasks_per_node, run.plan.processes)
            nodes = given["nodes_per_task"]
            code = work(run, _attempt(run, own, given, given["gpus_per_task"] // nodes, nodes), own.end_time)
    if code:
        sys.exit(code)


def _end_copies(tasks_per_node: int = 1) -> None:
    """If srun has started this job more than once, exit with a message; Submitit would show a traceback."""
    try:
        refuse_copies(tasks_per_node)
    except SlurmGPUError as error:
        log.error("%s", error)
        sys.exit(EXIT_USAGE)


def _beating(folder: Path, own: OwnJob) -> contextlib.AbstractContextManager[None]:
    return beating(folder, *_named(own))


def _named(own: OwnJob) -> tuple[str, str, int]:
    """The attempt of a job, its id, and this node's rank in it."""
    attempt = Attempt(own.array_job, own.task, own.restart)
    return attempt.name_here, attempt.job, node_rank() if nodes_here() > 1 else 0


def run_task_by_hand(folder: Path, device: str | None, *, trust: bool, own_array: bool) -> int:
    """Run a task of a job that was submitted by hand, such as sbatch/array.sbatch; return its exit code.

    The allocation is what Slurm's environment says, not what the plan asked for. With `trust` the run's code is run
    even if other users may have written it. `own_array` says whether the job's script makes it an array.
    """
    from slurmgpu.executors import manual_jobs

    early_signals.remember()
    manual_jobs.check_job()
    log_to_stderr(force=True)
    with blaming(node_name()):
        if trust:
            owners.trust(folder)
        run = Run.open(folder)
        owners.refuse_unwritable(run, "compute it", computes=True)
        owners.refuse_foreign(run, "compute it", [run.folder / "submissions.jsonl"])
        own = own_job(own_array=own_array)
        n_gpus = manual_jobs.own_gpus(run)
        run.make_folders()  # a purge may have removed tasks/ and logs/, which were empty
        refuse_twin(folder, *_named(own), patience(run.plan.lease_s), _end_if_asked)
        with _beating(run.folder, own), manual_jobs.log_beside(run, own.job_id):
            given = manual_jobs.join(run, own, n_gpus, device, _end_if_asked)
            given = {**given, "device": device or given["device"]}
            take_share(n_gpus, own.tasks_per_node, run.plan.processes)
            return work(run, _attempt(run, own, given, n_gpus, nodes_here()), own.end_time)


def _end_if_asked() -> None:
    """End a task that has claimed nothing yet, if a signal asked for that."""
    if early_signals.is_asked_to_end():
        log.warning("a signal asked this task to end before it began")
        raise SystemExit(EXIT_STOPPED)


def work(
    run: Run,
    attempt: Attempt,
    end_time: Callable[[], float | None] = lambda: None,
    spare: SpareWorker | None = None,
) -> int:
    """Compute shards as this attempt until none is left; return the exit code. Tasks of all executors call this.

    `end_time` returns when the walltime ends, once that is known. `spare` becomes the first worker.
    """
    # This also puts the offset from UTC into every task's log, which Submitit's lines lack.
    held = count_of(attempt.n_gpus, "GPU")
    log.info("attempt %s of %s: %s, device %s", attempt.name, run.folder, held, attempt.device)
    if attempt.n_nodes > 1 and (rank := node_rank()):
        return follow(run, attempt, rank, node_name())
    task = Task(run, attempt, end_time, spare)
    code = task.run_worker()
    if task.record["reason"] == "complete":
        executor_named(attempt.executor).drop_waiting(attempt.job)
    elif task.record["failure"] == "preempted":
        _wait_for_job(run, attempt)
        executor_named(attempt.executor).requeue_preempted()
    return code


REQUEUE_PATIENCE_S = 25.0
"""How long a task that requeues its job waits for the other tasks of the job, which are told to end as well."""


def _wait_for_job(run: Run, attempt: Attempt) -> None:
    """Wait until the other tasks of this task's job have ended, or were killed: a requeue would kill them."""
    n = run.submission(attempt.submission).get("tasks_per_node", 1)
    first = attempt.task // n * n
    others = [replace(attempt, task=first + rank) for rank in range(n) if first + rank != attempt.task]
    deadline = time.monotonic() + REQUEUE_PATIENCE_S
    while time.monotonic() < deadline and not all(_has_ended(run, other) for other in others):
        time.sleep(0.2)


def _has_ended(run: Run, attempt: Attempt) -> bool:
    record = run.attempt(attempt.name)
    if isinstance(record, Unread) or record["ended"] is not None:  # one without a record has not begun
        return True
    return not may_live(run.folder, attempt.name_here, attempt.job, patience(run.plan.lease_s))


def _attempt(run: Run, own: OwnJob, given: SubmissionLine, n_gpus: int, n_nodes: int) -> Attempt:
    """The attempt of this Slurm job, which has `n_gpus` GPUs on this node, and `n_nodes` nodes."""
    environ, memory_mb = os.environ, _memory_mb(n_gpus * own.tasks_per_node)
    return Attempt(
        job=own.array_job,
        task=own.task,
        restart=own.restart,
        submission=given["submission"],
        executor="slurm",
        n_gpus=n_gpus,
        device=given["device"],
        end_time=own.end_time(),
        memory_mb=memory_mb and memory_mb // own.tasks_per_node,
        n_nodes=n_nodes,
        nodes=commands.hostnames(environ["SLURM_STEP_NODELIST"]) if n_nodes > 1 else (),
        abroad=abroad(run.submissions(), environ.get("SLURM_CLUSTER_NAME", "")),
    )


def _memory_mb(n_gpus: int) -> int | None:
    """The memory of this job on this node, where it has `n_gpus` GPUs, for all of its tasks; None if it is not known.

    By the kernel's limit: the environment does not say by which of its settings Slurm gave memory to a job that asked
    for none, and counts both threads of a core, of which `hint = "nomultithread"` uses one.
    """
    if (limit := cgroups.memory_of_job()) is not None:
        return limit >> 20
    # A job asks for memory in one of three ways. 0 means all memory of the node.
    shares = {
        "SLURM_MEM_PER_NODE": 1,
        "SLURM_MEM_PER_CPU": int(os.environ.get("SLURM_CPUS_ON_NODE", "0")),
        "SLURM_MEM_PER_GPU": n_gpus,
    }
    return next((int(os.environ[name]) * n or None for name, n in shares.items() if name in os.environ), None)


def run_merge(folder: Path, submission: int) -> None:
    """The merge job of a submission; exits with 3, or more where Slurm would repeat it, while the run is incomplete.

    A signal, except SIGUSR2, ends it at once and leaves the run as it was; SIGTERM gives exit code 143.
    """
    from slurmgpu.executors.submission import merge_behind  # which imports this module, for Submitit to pickle

    _log_like_ours()
    _end_copies()
    try:
        with early_signals.heeded():
            code = merge_behind(Run.open(folder), submission)
        code = code and commands.final_code(code)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except early_signals.EndedBySignalError:
        executor_named("slurm").requeue_preempted()
        raise
    except SlurmGPUError as error:  # for example Slurm refuses the resubmission; Submitit would show a traceback
        log.error("%s", error)
        code = 1
    if code:
        sys.exit(code)


def run_local_task(
    folder: Path, job: str, slot: int, submission: int, gpu_ids: Sequence[str], device: str, n_threads: int
) -> None:
    """Run a slot of the local executor, with its own GPUs and share of the cores; exits with the task's code."""
    early_signals.remember()
    _log_like_ours()
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
    with blaming(node_name()):
        run = Run.open(folder)
        n_processes = max(1, len(gpu_ids)) if run.plan.processes == "per-gpu" else 1
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, n_threads // n_processes)))
        attempt = Attempt(job, slot, submission=submission, executor="local", n_gpus=len(gpu_ids), device=device)
        spare = fork_worker(run, attempt)  # before this process has threads
        with beating(folder, attempt.name_here, job):
            code = work(run, attempt, spare=spare)
        if is_orphaned(run, submission):
            outlive_parent()  # if the slot is killed now, the merge goes on: no other process would do it
            from slurmgpu.executors.run_merge import merge_orphaned  # which imports this module

            log.warning("the process that submitted the run has ended, so its last task merges")
            merge_orphaned(run, submission)
    if code:
        sys.exit(code)
