"""The slots of the local executor: Submitit's processes on this machine."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import submitit
from submitit.local.local import LocalJob

from slurmgpu.executors import job_entry
from slurmgpu.executors.here import SLOT, gpu_ids, n_threads_of, stop, surely_of, tasks_here
from slurmgpu.executors.slot import begin_slot, waiting_slot
from slurmgpu.executors.submitit_patches import patch_submitit
from slurmgpu.report.outcomes import Accounted
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import POLICIES, class_of_exit
from slurmgpu.run.liveness import patience
from slurmgpu.run.submissions import Submission, job_here
from slurmgpu.util import standard_streams
from slurmgpu.util.amounts import count_of
from slurmgpu.util.early_signals import ended_by_exception
from slurmgpu.util.forks import Fork, starting
from slurmgpu.util.process_wide import safe_path
from slurmgpu.util.shared_files import retried
from slurmgpu.util.signals import name_of_signal

log = logging.getLogger(__name__)


def accounting_of(submission: Submission, slots: list[Any]) -> dict[str, list[Accounted]]:
    """The ends of the slots: the report also names those that died before they wrote a record."""
    accounting, job, node = {}, job_here(submission.executor, submission.submission), platform.node()
    for number, slot in enumerate(slots):
        failure, message = class_of_exit(code := slot._process.poll()), ""
        if failure is not None:
            message = f"{node} {POLICIES[failure].says} (exit code {code})"
        elif code < 0:
            message = f"the slot of its task was killed by {name_of_signal(-code)}"
        n_gpus, executor = submission.gpus_per_task, submission.executor
        ended = Accounted("ENDED", failure or "lost", True, 0, n_gpus, node, message, executor)
        accounting[f"{job}_{number}"] = [ended]
    return accounting


ENVIRON = {
    "SUBMITIT_EXECUTOR": "local",
    "SUBMITIT_LOCAL_NTASKS": "1",
    "SUBMITIT_LOCAL_NODEID": "0",
    "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
"""The variables that a slot has in addition to those of this process; its task sets its own GPUs."""


class Slot(LocalJob):
    """Submitit's job of a slot."""

    def __del__(self) -> None:
        """Nothing: Submitit's looks for a file, on a file system that may be gone, to forget a process of its own."""


class _Executor(submitit.LocalExecutor):
    """Submitit's executor; slots start its jobs."""

    def _submit_command(self, command: str) -> Any:
        process: subprocess.Popen[bytes] | Fork | None = waiting_slot()
        if process is None:
            argv = [sys.executable, "-u", "-m", SLOT, str(self.folder)]
            with starting():
                process = subprocess.Popen(argv, env={**os.environ, **ENVIRON})
        return Slot(folder=self.folder, job_id=str(process.pid), process=process, tasks=[0])


def start(run: Run, submission: Submission) -> list[Any]:
    """Start the slots, and return Submitit's jobs."""
    job = job_here(submission.executor, submission.submission)
    patch_submitit()
    standard_streams.open_missing()
    executor = _Executor(run.logs)
    executor._throttling = 0.0  # Submitit waits between two submissions to spare Slurm
    slots = gpu_ids(submission)
    n_threads = n_threads_of(len(slots))
    number, device = submission.submission, submission.device
    with safe_path(), _ignoring_sigint():
        jobs = []
        for slot, ids in enumerate(slots):
            given = (run.folder, job, slot, number, ids, device, n_threads)
            jobs.append(retried(lambda: executor.submit(job_entry.run_local_task, *given)))  # noqa: B023
            if isinstance(waiting := jobs[-1]._process, Fork):
                # Only now: a task that does not find its job's pickle, which is named after it, waits for a second.
                begin_slot(waiting, run.logs, ENVIRON)
        return jobs


@contextlib.contextmanager
def _ignoring_sigint() -> Iterator[None]:
    """Start processes in the block that ignore SIGINT: `stop` ends slots, Ctrl-C does not.

    The task in each slot has its own handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers cannot be set in this thread
        return
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def wait(run: Run, submission: Submission, jobs: list[Any], on_tick: Callable[[], None]) -> None:
    """Wait for the slots and their tasks. Any exception stops them, and they give their shards back.

    The first SIGTERM or SIGHUP raises EndedBySignalError; a terminal that is closed sends several.
    """
    with ended_by_exception():
        try:
            while not all(job.done() for job in jobs):
                on_tick()
                time.sleep(0.1)
            _wait_for_tasks(run, submission)
        except BaseException:
            stop([int(job.job_id) for job in jobs if not job.done()])
            for job in jobs:
                while not job.done():
                    time.sleep(0.05)
            _wait_for_tasks(run, submission)
            raise


def _wait_for_tasks(run: Run, submission: Submission) -> None:
    """Wait for tasks whose slots were killed. The kernel has sent them SIGTERM; those that do not end are killed."""
    patience_s, begun, is_told = patience(run.plan.lease_s), time.monotonic(), False
    while living := surely_of(run, tasks_here(run, submission.executor, submission.submission)):
        words = f"{count_of(len(living), 'task')} whose slot was killed: process {', '.join(map(str, living))}"
        if not is_told:
            log.warning("waiting up to %.0f s for the end of %s", patience_s, words)
            is_told = True
        if time.monotonic() - begun > patience_s:
            log.warning("SIGTERM did not end them; killing %s", words)
            stop(living, signal.SIGKILL)
            begun = math.inf
        time.sleep(0.1)
