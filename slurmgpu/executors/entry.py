"""What Submitit calls on a node: a task, or the merge. Plain arguments, so that its pickles stay small."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from slurmgpu.executors import commands
from slurmgpu.records import Attempt
from slurmgpu.runs import Run
from slurmgpu.task import Task

log = logging.getLogger(__name__)


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


def run_task(folder: Path, submission: int) -> None:
    """An array task of a Slurm job; exits with the task's code, for Slurm's accounting."""
    _log_to_stderr()
    run = Run.open(folder)
    attempt = attempt_here(run, submission)
    task = Task(run, attempt)
    code = task.run_worker()
    if task.record.reason == "complete":
        try:
            commands.cancel_pending(attempt.job)
        except commands.SlurmUnavailableError as error:
            log.warning("tasks that are still queued stay so: %s", error)
    if code:
        sys.exit(code)


def attempt_here(run: Run, submission: int) -> Attempt:
    """The attempt that runs here, from the environment that Slurm gave it."""
    environ = os.environ
    given = next(line for line in run.submissions() if line["submission"] == submission)
    job = environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_TASK_ID" in environ:
        # The job id of the last array task is that of the whole array, which squeue answers with all tasks.
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    left = commands.seconds_left(job)
    return Attempt(
        job=environ.get("SLURM_ARRAY_JOB_ID", environ["SLURM_JOB_ID"]),
        task=int(environ.get("SLURM_ARRAY_TASK_ID", "0")),
        restart=int(environ.get("SLURM_RESTART_COUNT", "0")),
        submission=submission,
        executor="slurm",
        n_gpus=given["gpus_per_task"],
        device=given["device"],
        end_time=None if left is None else time.time() + left,
        memory_mb=int(environ["SLURM_MEM_PER_NODE"]) if "SLURM_MEM_PER_NODE" in environ else None,
    )


def run_merge(folder: Path) -> None:
    """The merge job: joins, reports, resubmits if the run file says so; exits with 3 while the run is incomplete."""
    from slurmgpu.executors import submitting  # it imports this module's functions for Submitit to pickle

    _log_to_stderr()
    code = submitting.merge_on_slurm(Run.open(folder), os.environ["SLURM_JOB_ID"])
    if code:
        sys.exit(code)


def run_local_task(
    folder: Path, job: str, slot: int, submission: int, gpu_ids: list[str], device: str, n_threads: int
) -> None:
    """A slot of the local executor, with GPUs and a share of the cores of its own; exits with the task's code."""
    _log_to_stderr()
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
    os.environ.setdefault("OMP_NUM_THREADS", str(n_threads))
    attempt = Attempt(job, slot, submission=submission, executor="local", n_gpus=len(gpu_ids), device=device)
    code = Task(Run.open(folder), attempt).run_worker()
    if code:
        sys.exit(code)


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
