"""The local executor: one Submitit process for each slot of this machine, each with its own GPUs."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from typing import NoReturn

from slurmgpu.containers.runtime import runtime_named
from slurmgpu.containers.settings import ContainerRecord
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors.here import Here, n_threads_of
from slurmgpu.executors.interface import Started
from slurmgpu.report.outcomes import Accounting
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import Submission
from slurmgpu.task.launcher import OWN_ENVIRON, WORKER
from slurmgpu.util.pids import processes
from slurmgpu.util.process_wide import environment


class Local(Here):
    """Slots of this machine."""

    name = "local"
    detaches = True

    def check(self, submission: Submission, container: ContainerRecord | None) -> None:
        """Also refuse a container runtime that is not installed here."""
        super().check(submission, container)
        program = runtime_named(container["runtime"]).program if container else None
        if program and shutil.which(program) is None:
            raise SlurmGPUError(
                f"The run file's image needs {program}, which is not on the PATH of this machine. "
                f'Load its module, or set runtime = "none" in [container] to run without the image.'
            )

    def import_ahead(self, n_slots: int) -> None:
        """Import what slots, tasks and workers need.

        libhdf5 then locks no file in this process either, which merges.
        """
        # OpenBLAS and libhdf5 read these when they are loaded. A slot sets the first for its worker.
        own = {"OMP_NUM_THREADS": str(n_threads_of(n_slots)), **OWN_ENVIRON}
        with environment({name: value for name, value in own.items() if name not in os.environ}):
            importlib.import_module("slurmgpu.executors.local_slots")  # with Submitit
            importlib.import_module(WORKER)  # with NumPy and h5py

    def fork_ahead(self, n_slots: int) -> Callable[[], NoReturn] | None:
        """Fork the slots."""
        from slurmgpu.executors import slot  # as below

        return slot.fork_slots(n_slots)

    def start(self, run: Run, submission: Submission) -> Started:
        """Start the slots."""
        from slurmgpu.executors import local_slots  # here: Submitit's import is slow, and `status` uses executors

        slots = local_slots.start(run, submission)
        pids = [os.getpid(), *(int(slot.job_id) for slot in slots)]  # this process merges when the slots have ended

        def wait_for_end(on_tick: Callable[[], None]) -> Accounting:
            local_slots.wait(run, submission, slots, on_tick)
            return local_slots.accounting_of(submission, slots)

        return Started({"state": "running", **self.place(run, submission), **processes(pids)}, wait_for_end)
