"""Make the command and environment of a worker: in an image or not, with one process or several."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

from slurmgpu.containers.command import exec_command, package_binds, python_path
from slurmgpu.containers.folders import leave_task_folders
from slurmgpu.containers.node import Prepared, prepare
from slurmgpu.containers.runtime import runtime_named
from slurmgpu.containers.settings import Container, ContainerError
from slurmgpu.plan.binds import container_binds
from slurmgpu.run.directory import Run
from slurmgpu.run.records import Attempt
from slurmgpu.slurm.own_job import as_only_task
from slurmgpu.util.packages import own_python_path
from slurmgpu.worker.assignment import Assignment

# The image's Python is known only here: one that is too old gets a message instead of a SyntaxError.
START = """\
import sys
if sys.version_info < (3, 10):
    sys.exit("slurmgpu needs Python 3.10 or newer, but this is %d.%d" % sys.version_info[:2])
if sys.path and sys.path[0] == "":
    del sys.path[0]  # the run file's folder: a platform.py in it is not the standard library's
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
OWN_ENVIRON = {"PYTHONUNBUFFERED": "1", "HDF5_USE_FILE_LOCKING": "FALSE"}
"""Variables of every worker."""


SHOWN = 400
"""The longest message of a runtime that is repeated, in characters."""

WORKER = "slurmgpu.worker.main"
"""The module of a worker."""


class Launcher:
    """Makes the commands of a task's workers. Call `prepare` first, before anything is claimed."""

    def __init__(self, run: Run, attempt: Attempt) -> None:
        self.run = run
        self.attempt = attempt
        # [container] may have been corrected for this submission.
        found = run.submission(attempt.submission).get("container") or run.plan.container
        self.container = Container.from_json(found) if found else None
        self._prepared: Prepared | None = None

    @property
    def may_fork(self) -> bool:
        """Whether a fork of the task can be the worker: one process, not in an image, with the task's environment."""
        plan = self.run.plan
        return self.container is None and plan.processes == "one" and not plan.environ

    def prepare(self, pause: Callable[[float], None] = time.sleep) -> None:
        """Check what the worker needs on this node; ContainerError says what is missing.

        `pause` is called while an image is copied, and may raise to stop that.
        """
        if self.container is not None and self._prepared is None:
            self._prepared = prepare(self.container, container_binds(self.run), os.environ, pause)

    def close(self) -> None:
        """Remove the task's own folder on this node, once its worker has ended."""
        leave_task_folders()

    @property
    def image(self) -> str | None:
        """The image on this node, which may be a staged copy; None without one."""
        return str(self._prepared.image) if self._prepared else None

    @property
    def if_slow(self) -> str:
        """A likely cause if the worker's Python takes long to start; empty if none is known."""
        return "" if self.container is None else runtime_named(self.container.runtime).if_slow

    @property
    def runtime(self) -> str | None:
        """The container runtime of this node and its version; None without an image."""
        return self._prepared.runtime_version if self._prepared else None

    def worker(self, assignment: Assignment) -> tuple[list[str], dict[str, str]]:
        """The worker's argument vector, and its environment."""
        module = "slurmgpu.worker.group_launcher" if self.run.plan.processes == "per-gpu" else WORKER
        return self.command(module, str(self.run.folder), json.dumps(asdict(assignment)))

    def command(
        self, module: str, *arguments: str, environ: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[list[str], dict[str, str]]:
        """The command that runs a module of slurmgpu where the worker runs, and its environment with `environ`."""
        inner = ["-c", START, module, *arguments]
        own = {**OWN_ENVIRON, **as_only_task(), **self.run.plan.environ, **environ}
        if self.container is None:
            # The worker runs the same slurmgpu as this task, wherever that was imported from.
            return [sys.executable, *inner], {**os.environ, **own, **own_python_path()}
        assert self._prepared is not None, "prepare() comes first"
        return exec_command(
            self.container,
            inner,
            image=self._prepared.image,
            binds=[*self._prepared.binds, *package_binds(self.container.packages)],
            gpus=self.attempt.uses_gpus,
            folder=Path(self.run.plan.search_path),
            environ=os.environ,
            extra_env={**own, "PYTHONPATH": python_path(self.container.packages)},
            scratch=self._prepared.scratch,
        )

    def explain(self, said: str, returncode: int) -> ContainerError | None:
        """Why a worker ended without an event; None if the container is not the cause.

        A damaged copy of the image on this node is removed.
        """
        if self.container is None:
            return None
        runtime = runtime_named(self.container.runtime)
        found = runtime.explain(said, returncode)
        copy = None if self._prepared is None else self._prepared.image
        if found is None or not found.is_damage or copy is None or copy == Path(self.container.image):
            return found
        runtime.discard(copy)
        return ContainerError(
            f"this node's copy of the image, {copy}, was damaged and has been removed; the next task here makes a new "
            f"one. The image itself is not affected. The runtime said: {said.strip()[-SHOWN:]}",
            node_at_fault=True,
        )
