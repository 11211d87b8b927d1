"""Check whether this node can work on a run: the image, its Python and the GPUs, as a task checks them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmgpu.containers import INSIDE
from slurmgpu.containers.command import exec_command, package_binds
from slurmgpu.containers.folders import leave_task_folders
from slurmgpu.containers.node import prepare
from slurmgpu.containers.runtime import runtime_named
from slurmgpu.containers.settings import Bind, Container, ContainerError
from slurmgpu.run.directory import Run
from slurmgpu.run.frozen_plan import Plan
from slurmgpu.run.records import Attempt, node_name
from slurmgpu.task.launcher import START, Launcher
from slurmgpu.worker.surroundings import Found

TIMEOUT_S = 300


@dataclass(frozen=True)
class NodeCheck:
    """The findings on a node: `found` is the output of `worker.surroundings`, `problems` are sentences.

    `start_s` is how long the Python took to start and report; `runtime` is the container runtime and its version;
    `if_slow` is a likely cause of a slow start.
    """

    found: Found
    problems: list[str]
    node: str = ""
    start_s: float = 0.0
    runtime: str | None = None
    if_slow: str = ""


def check_here(plan: Plan, n_gpus: int, device: str) -> NodeCheck:
    """Start the plan's Python once, in its image if it has one, and report what it sees."""
    with tempfile.TemporaryDirectory(prefix="slurmgpu-check-") as folder, contextlib.ExitStack() as stack:
        launcher = Launcher(Run(Path(folder), plan), Attempt("check", 0, n_gpus=n_gpus, device=device))
        stack.callback(launcher.close)
        try:
            launcher.prepare()
            command, environ = launcher.command("slurmgpu.worker.surroundings", str(n_gpus if device != "cpu" else 0))
        except ContainerError as error:
            return NodeCheck({}, [str(error)])
        return _check(command, environ, launcher.runtime, launcher.explain, launcher.if_slow)


def check_image(container: Container, *, n_gpus: int) -> NodeCheck:
    """Start an image's Python once, as a task does, and report what it sees."""
    with tempfile.TemporaryDirectory(prefix="slurmgpu-check-") as folder, contextlib.ExitStack() as stack:
        own = Bind(folder, folder)
        stack.callback(leave_task_folders)
        try:
            prepared = prepare(container, [own], os.environ)
        except ContainerError as error:
            return NodeCheck({}, [str(error)])
        command, environ = exec_command(
            container,
            ["-c", START, "slurmgpu.worker.surroundings", str(n_gpus)],
            image=prepared.image,
            binds=[*prepared.binds, *package_binds(())],
            gpus=n_gpus > 0,
            folder=Path(folder),
            environ=os.environ,
            extra_env={"PYTHONPATH": INSIDE},
            scratch=prepared.scratch,
        )
        runtime = runtime_named(container.runtime)
        return _check(command, environ, prepared.runtime_version, runtime.explain, runtime.if_slow)


def _check(
    command: Sequence[str],
    environ: Mapping[str, str],
    runtime: str | None,
    explain: Callable[[str, int], ContainerError | None],
    if_slow: str,
) -> NodeCheck:
    """Run a command that starts `slurmgpu.worker.surroundings`, and read its output; `explain` reads its stderr."""
    started = time.monotonic()
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return NodeCheck({}, [f"its Python did not start within {TIMEOUT_S} s"])
    # A wrapper or a sitecustomize in the image may have printed something before.
    line = next((line for line in reversed(done.stdout.splitlines()) if line.startswith("{")), None)
    if line is None:
        complaint = explain(done.stderr, done.returncode)
        return NodeCheck({}, [str(complaint or done.stderr.strip() or f"exit code {done.returncode}")])
    found: Found = json.loads(line)
    problems = [text for _, text in found["problems"]]
    return NodeCheck(found, problems, node_name(), time.monotonic() - started, runtime, if_slow)
