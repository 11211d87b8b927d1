"""What Slurm's jobs run on a node: a task, or the merge. Plain arguments, so that Submitit's pickles stay small."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmgpu.executors.registry import executor_named
from slurmgpu.run import owners
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import blaming
from slurmgpu.run.heartbeats import beating
from slurmgpu.run.records import Attempt, node_name
from slurmgpu.run.submissions import SubmissionLine, abroad
from slurmgpu.slurm import commands
from slurmgpu.slurm.own_job import OwnJob, own_job
from slurmgpu.task.node_agent import follow
from slurmgpu.task.nodes import node_rank
from slurmgpu.task.supervisor import EXIT_STOPPED, Task
from slurmgpu.util import early_signals, gpus
from slurmgpu.util.logging import log_to_stderr

log = logging.getLogger(__name__)

EXIT_INTERRUPTED = 130
BEGIN = "-u -m slurmgpu.executors.begin"
"""What Submitit gives its own arguments to, instead of to Python: signals are remembered from there on."""


@contextlib.contextmanager
def owners_files(executor: type, starts: str) -> Iterator[None]:
    """Have nobody but the owner read or write what Submitit writes, up to the moment at which `starts` is called.

    Jobs unpickle it, or run it, and `setup` may hold tokens. `starts` is the method of its executor that comes last
    before sbatch, or the process: these get the umask of the user, which counts for all that a run writes.
    """
    former, own = os.umask(0o077), executor.__dict__.get(starts)
    method = getattr(executor, starts)

    def start(*args: Any, **kwargs: Any) -> Any:
        os.umask(former)
        return method(*args, **kwargs)

    setattr(executor, starts, start)
    try:
        yield
    finally:
        os.umask(former)
        if own is None:
            delattr(executor, starts)
        else:
            setattr(executor, starts, own)


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Keep files of the current folder, a numbers.py say, from shadowing modules in the jobs that start meanwhile.

    `python -m`, which starts them, puts that folder first on the path. (From Python 3.11 on.)
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _log_like_ours() -> None:
    """Log on standard error, Submitit's warnings too: in our lines, and each once."""
    log_to_stderr(force=True)
    submitits = logging.getLogger("submitit")
    submitits.handlers.clear()
    # It says "Job completed successfully" of its pickle, also where a walltime has ended the task.
    submitits.setLevel(logging.WARNING)
    # It logs each of these, and Slurm sends one before every other signal.
    signal.signal(signal.SIGCONT, signal.SIG_DFL)


def run_task(folder: Path, submission: int) -> None:
    """An array task of Submitit's; exits with the task's code, for Slurm's accounting."""
    early_signals.remember()
    _log_like_ours()
    with blaming(node_name()):
        run, own = Run.open(folder), own_job(own_array=True)
        with _beating(folder, own):
            code = _work_as_submitted(run, own, submission)
    if code:
        sys.exit(code)


def _work_as_submitted(run: Run, own: OwnJob, submission: int) -> int:
    given = next(line for line in run.submissions() if line["submission"] == submission)
    nodes = given.get("nodes_per_task", 1)
    n_gpus = given["gpus_per_task"] // nodes
    attempt = attempt_here(own, submission, n_gpus, given["device"], nodes, run.submissions())
    return work(run, attempt, own.end_time)


def _beating(folder: Path, own: OwnJob) -> contextlib.AbstractContextManager[None]:
    """Show that this process lives, from before it knows what it is to do."""
    return beating(folder, f"{own.array_job}_{own.task}.{own.restart}", own.array_job, node_rank())


def run_task_by_hand(folder: Path, device: str | None = None, *, trust: bool = False, own_array: bool = False) -> int:
    """A task of a job that was submitted by hand, sbatch/array.sbatch say; its exit code.

    The allocation is what Slurm's environment says, not what the plan asked for. With `trust` what the run says is run,
    whoever may have written it. `own_array` is whether the job's script makes it an array, whoever submits it.
    """
    from slurmgpu.executors import manual_jobs

    early_signals.remember()
    manual_jobs.check_job()
    log_to_stderr(force=True)
    with blaming(node_name()):
        return _work_by_hand(folder, device, trust=trust, own_array=own_array)


def _work_by_hand(folder: Path, device: str | None, *, trust: bool, own_array: bool) -> int:
    from slurmgpu.executors import manual_jobs

    if trust:
        owners.trust(folder)
    run = Run.open(folder)
    owners.refuse_unwritable(run, "compute it", computes=True)
    owners.refuse_foreign(run, "compute it", [run.folder / "submissions.jsonl"])
    own = own_job(own_array=own_array)
    with _beating(run.folder, own), manual_jobs.log_beside(run, f"{own.array_job}_{own.task}"):
        given = manual_jobs.join(run, own, device, _end_if_asked)
        n_gpus, n_nodes = manual_jobs.gpus_here(), manual_jobs.nodes_here()
        asked, lines = device or given["device"], run.submissions()
        attempt = attempt_here(own, given["submission"], n_gpus, asked, n_nodes, lines)
        return work(run, attempt, own.end_time)


def _end_if_asked() -> None:
    """End a task that has claimed nothing yet, if a signal has asked for it."""
    if early_signals.is_asked_to_end():
        log.warning("a signal has asked this task to end before it began")
        raise SystemExit(EXIT_STOPPED)


def work(run: Run, attempt: Attempt, end_time: Callable[[], float | None] = lambda: None) -> int:
    """Work as this attempt until no shard is left for it; the exit code. The ways of all executors meet here.

    `end_time` tells when the walltime ends, once that is known.
    """
    _log_beginning(run, attempt)
    if attempt.n_nodes > 1 and (rank := node_rank()):
        return follow(run, attempt, rank, node_name())
    task = Task(run, attempt, end_time)
    code = task.run_worker()
    if task.record["reason"] == "complete":
        executor_named(attempt.executor).drop_waiting(attempt.job)
    return code


def _log_beginning(run: Run, attempt: Attempt) -> None:
    # Also so that every task's log says its offset from UTC, which Submitit's lines lack.
    held = gpus.number_of(attempt.n_gpus)
    log.info("attempt %s of %s: %s, device %s", attempt.name, run.folder, held, attempt.device)


def attempt_here(
    own: OwnJob,
    submission: int,
    n_gpus: int,
    device: str,
    n_nodes: int = 1,
    lines: Sequence[SubmissionLine] = (),
) -> Attempt:
    """The attempt that runs here, from the environment that Slurm gave it; `n_gpus` are those of this node.

    `lines` are the run's submissions.
    """
    environ = os.environ
    return Attempt(
        job=own.array_job,
        task=own.task,
        restart=own.restart,
        submission=submission,
        executor="slurm",
        n_gpus=n_gpus,
        device=device,
        end_time=own.end_time(),
        memory_mb=_memory_mb(environ, n_gpus),
        n_nodes=n_nodes,
        nodes=commands.hostnames(environ["SLURM_STEP_NODELIST"]) if n_nodes > 1 else (),
        abroad=abroad(lines, environ.get("SLURM_CLUSTER_NAME", "")),
    )


def _memory_mb(environ: Mapping[str, str], n_gpus: int) -> int | None:
    """The job's memory on this node, in whichever of three ways it was asked for; 0 stands for all of the node's."""
    shares = {
        "SLURM_MEM_PER_NODE": 1,
        "SLURM_MEM_PER_CPU": int(environ.get("SLURM_CPUS_ON_NODE", "0")),
        "SLURM_MEM_PER_GPU": n_gpus,
    }
    return next((int(environ[name]) * count or None for name, count in shares.items() if name in environ), None)


def run_merge(folder: Path) -> None:
    """The merge job: joins, reports, resubmits if the run file says so; exits with 3 while the run is incomplete.

    A signal ends it at once, with the run as it was, and with exit code 143 for SIGTERM; the notice SIGUSR2 does not.
    """
    from slurmgpu.executors import submission as submitting  # it imports this module's functions for Submitit to pickle

    _log_like_ours()
    try:
        with early_signals.heeded():
            code = submitting.merge_on_slurm(Run.open(folder), os.environ["SLURM_JOB_ID"])
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if code:
        sys.exit(code)


def run_local_task(
    folder: Path, job: str, slot: int, submission: int, gpu_ids: list[str], device: str, n_threads: int
) -> None:
    """A slot of the local executor, with GPUs and a share of the cores of its own; exits with the task's code."""
    early_signals.remember()
    _log_like_ours()
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
    with blaming(node_name()):
        code = _work_in_slot(folder, job, slot, submission, gpu_ids, device, n_threads)
    if code:
        sys.exit(code)


def _work_in_slot(
    folder: Path, job: str, slot: int, submission: int, gpu_ids: list[str], device: str, n_threads: int
) -> int:
    run = Run.open(folder)
    n_processes = len(gpu_ids) if run.plan.processes == "per-gpu" else 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, n_threads // max(1, n_processes))))
    attempt = Attempt(job, slot, submission=submission, executor="local", n_gpus=len(gpu_ids), device=device)
    with beating(folder, attempt.name, job):
        return work(run, attempt)
