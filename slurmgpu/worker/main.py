"""The process of a worker: `python -m slurmgpu.worker.main RUN ASSIGNMENT`, started by the task, possibly in an image.

It needs only the standard library, NumPy and h5py before it imports the workload. It reports to the task in lines of
JSON on its original standard output (prints of the workload go to standard error). It ends when its standard input
closes, and so when its task ends.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from slurmgpu.code import importer
from slurmgpu.code.imported_modules import skip_last_collections
from slurmgpu.errors import SlurmGPUError, WorkerBrokenError
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import FILES, class_of, is_of_disk
from slurmgpu.util.exceptions import described, message_of, trace_of
from slurmgpu.util.logging import log_own_lines, log_to_stderr
from slurmgpu.util.pipes import close_stdin, listen_on_stdin, outlive_signals, report_on_stdout, watch_stdin
from slurmgpu.worker import groups
from slurmgpu.worker.assignment import Assignment, WorkerFailedError
from slurmgpu.worker.groups import Group
from slurmgpu.worker.worker import Worker

log = logging.getLogger("slurmgpu.worker")  # __name__ is "__main__" in its own process

SWITCH_S = 0.0005
"""How long a thread computes in Python before another one may (sys.setswitchinterval); Python's own 5 ms are too long.

Each operation of PyTorch's gives Python to other threads: a thread that starts a batch's kernels waits for it each time
while another one converts the rows of the batch before.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker; 0 when its work is done, 1 after a `failed` event, 70 if a new process is needed."""
    parser = argparse.ArgumentParser(prog="python -m slurmgpu.worker.main")
    parser.add_argument("run", type=Path)
    parser.add_argument("assignment", type=json.loads)
    arguments = parser.parse_args(argv)
    log_to_stderr()
    log_own_lines()
    sys.setswitchinterval(SWITCH_S)
    # Log the Python stack of a segmentation fault.
    faulthandler.enable()
    # Slurm may signal every process of a job; only the task handles the notice.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, groups.BLOCKED_SIGNALS)
    os.environ.pop("PYTHONSAFEPATH", None)  # only for this process, not for the workload's children
    group = Group.of_environment()
    report = report_on_stdout(group.rank, group.local_rank)
    stopping, end_times = threading.Event(), list[float]()
    if group.leads:
        listen_on_stdin(stopping, end_times.append)
    else:
        watch_stdin()
        close_stdin()
    try:
        assignment = Assignment(**arguments.assignment)
        run = Run.open(arguments.run).computing(assignment.submission)
        if assignment.code is not None:
            try:
                importer.use(run.folder, assignment.code)
            except SlurmGPUError as error:
                raise WorkerFailedError("workload_error", str(error)) from error
        if group.leads:
            log.info("this worker is process %d of attempt %s", os.getpid(), assignment.attempt)
        worker = Worker(run, assignment, report, stopping, group, outlive_signals, end_times, reports_in_threads=True)
        worker.work()
        group.leave()
    except WorkerFailedError as error:
        log.error("%s: %s%s", error.kind, error, f"\n{error.trace}" if error.trace else "")
        report({"event": "failed", "class": error.kind, "message": str(error), "traceback": error.trace})
        return 1
    except WorkerBrokenError as error:
        log.error("this process cannot go on: %s", error)
        blame = {"blames_items": error.blames_items, "is_sure": error.is_sure}
        report({"event": "broken", "message": str(error), **blame})
        return 70
    except Exception as error:
        # The workload's errors were caught at its calls, so this is a disk's fault or a bug of slurmgpu.
        kind = class_of(error, FILES)
        if is_of_disk(kind):
            message = message_of(error)
            log.error("%s: %s", kind, message)
            report({"event": "failed", "class": kind, "message": message, "traceback": ""})
            return 1
        report({"event": "failed", "class": kind, "message": described(error), "traceback": trace_of(error)})
        raise
    return 0


def run_process() -> None:
    """Run the worker with the arguments in sys.argv, and end the process."""
    exit_code = main()
    if exit_code:
        # A lost CUDA context, or a collective that waits for a failed rank, may block Python's exit.
        with contextlib.suppress(ValueError):  # the workload has closed it
            sys.stderr.flush()
        os._exit(exit_code)
    if lasting := [thread.name for thread in threading.enumerate() if not thread.daemon][1:]:  # the first is this one
        log.info("Python waits for threads that the workload started: %s", ", ".join(lasting))
    skip_last_collections()


if __name__ == "__mp_main__":
    # A process that the workload spawns by multiprocessing starts with this main module.
    importer.use_as_parent()

if __name__ == "__main__":
    run_process()
