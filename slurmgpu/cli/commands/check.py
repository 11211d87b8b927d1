"""`check`: one line for each requirement of a run, on this machine or on a node of the cluster."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from slurmgpu import __version__, api, inputs
from slurmgpu.cli.console import plain_console, result
from slurmgpu.containers.settings import Identity
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors.registry import executor_named
from slurmgpu.faults import gpu_trial
from slurmgpu.inputs import sweeps
from slurmgpu.plan.allocation import allocate
from slurmgpu.plan.checked_workload import workload_of
from slurmgpu.plan.container_spec import identify_image, image_path
from slurmgpu.plan.overrides import Overrides
from slurmgpu.plan.planner import Draft, draft_run
from slurmgpu.plan.run_file import RunFile
from slurmgpu.plan.site_file import read_run_file
from slurmgpu.plan.variants import variants_of
from slurmgpu.slurm import commands
from slurmgpu.task.preflight import NodeCheck, check_here
from slurmgpu.util.amounts import count_of, size_of
from slurmgpu.util.process_wide import working_folder
from slurmgpu.util.redact import hidden
from slurmgpu.util.users import resolved

SLOW_S = 10.0
"""A container that takes longer to start has a reason that the runtime does not report."""
NOWHERE = ".slurmgpu-check"
"""A run directory that does not exist: an existing one would be reported as a fault of the run file."""
MARKS = ("✓", "✗")


def run_checks(
    run_file: Path,
    overrides: Overrides,
    typed: Sequence[str],
    *,
    node: bool,
    fetch: bool,
    gpu: bool,
) -> int:
    """Print a line for each check, for each run of a sweep; return the exit code: 2 if a check failed.

    `typed` are the options that gave `overrides`. `fetch` first downloads what the workload needs. `node` also checks a
    node of the cluster with a short job, which for a sweep has the resources of its first run; `gpu` tries its GPUs.
    """
    try:
        variants = variants_of(run_file, overrides, Path(NOWHERE))
    except SlurmGPUError as error:
        print_line(True, "versions", _versions())
        print_line(False, "run file", str(error))
        return 2
    checked = []
    for variant in variants.runs if variants else [None]:
        if variant is not None:
            result(f"{variant.name}: {sweeps.describe(hidden(variant.values))}")
        checked.append(_Checks(run_file, overrides if variant is None else variant.overrides))
        checked[-1].run(fetch=fetch)
    are_good = all(each.are_good for each in checked)
    if node and are_good:
        assert checked[0].config is not None
        on_node = [str(resolved(run_file)), *typed, *(["--gpu"] if gpu else [])]
        are_good = _check_a_node(on_node, checked[0].config)
    return 0 if are_good else 2


def run_checks_here(run_file: Path, overrides: Overrides, *, gpu: bool) -> int:
    """Print what a task would find on this machine: image, Python, GPUs. Return 2 if a task could not run, else 0.

    For a sweep, it is a task of its first run. `gpu` also tries the GPUs, with a run of real faults.
    """
    try:
        variants = variants_of(run_file, overrides, Path(NOWHERE))
        overrides = variants.runs[0].overrides if variants else overrides
        with draft_run(run_file, overrides, Path(NOWHERE)) as draft:
            allocation = allocate(draft.resources, None)
        n_gpus, device = allocation.gpus_per_task // draft.resources.nodes_per_task, draft.resources.device
        if print_node(check_here(draft.plan, n_gpus, device), "node"):
            return 2
        return _try_gpus(run_file, overrides, n_gpus, device) if gpu else 0
    except SlurmGPUError as error:
        print_line(False, "node", str(error))
        return 2


def _try_gpus(run_file: Path, overrides: Mapping[str, Any], n_gpus: int, device: str) -> int:
    """Print a line for each check of the GPUs; return the exit code: 2 if one fails."""
    if n_gpus == 0:
        print_line(
            False,
            "GPU trial",
            "The run file asks for no GPU, so none is tried: set resources.gpus, or leave out --gpu.",
        )
        return 2
    on_gpu = device != "cpu"
    container = read_run_file(run_file, overrides).container.model_dump(exclude_unset=True)
    with (
        tempfile.TemporaryDirectory(prefix="slurmgpu-gpu-") as folder,
        working_folder(resolved(run_file).parent),  # paths in [container] are relative to it
        commands.outside_job(),
    ):
        verdicts = gpu_trial.try_gpus(
            Path(folder), n_gpus if on_gpu else 0, lambda keys: api.submit(keys).run, container
        )
        kept = [print_line(verdict.kept, "GPU trial", verdict.text) for verdict in verdicts]
    if not on_gpu:
        print_line(True, "GPU trial", 'device = "cpu": the faults were simulated, which proves nothing about a GPU')
    return 0 if all(kept) else 2


class _Checks:
    """The checks of a run file on this machine. An error that several of them meet is printed once."""

    def __init__(self, run_file: Path, overrides: Mapping[str, Any]) -> None:
        self.config: RunFile | None = None
        self.are_good = True
        self._run_file = run_file
        self._overrides = overrides
        self._draft: Draft | None = None
        self._said: set[str] = set()

    def run(self, *, fetch: bool) -> None:
        """Print the lines."""
        self._line("versions", _versions)
        self._line("run file", self._read)
        if (config := self.config) is not None:
            if fetch:
                if inputs.is_of_hub(config.input or ()):
                    self._line("fetch", lambda: "; ".join(inputs.fetch(config.input or ())))
                self._line("fetch", self._fetch)
            self._line("image", lambda: self._image(config))
            self._line("plan", self._plan)
            for line in self._draft.plan.placement if self._draft else ():
                print_line(True, "placement", line)
            for note in self._draft.notes if self._draft else ():
                print_line(True, "note", note)
            self._line("resources", lambda: _resources(config))
            self._line("executor", lambda: self._executor(config))

    def _line(self, name: str, check: Callable[[], str]) -> None:
        try:
            print_line(True, name, check())
        except SlurmGPUError as error:
            self.are_good = False
            if str(error) not in self._said:
                print_line(False, name, str(error))
            self._said.add(str(error))

    def _read(self) -> str:
        self.config = read_run_file(self._run_file, self._overrides)
        return str(self._run_file)

    def _image(self, config: RunFile) -> str:
        run_file = resolved(self._run_file)
        path = image_path(config.container, run_file.parent)
        if path is None:
            return "none: the workers run in this Python"
        return describe_image(path, identify_image(path, config.container.runtime, run_file, self._overrides))

    def _plan(self) -> str:
        with draft_run(self._run_file, self._overrides, Path(NOWHERE)) as draft:
            self._draft, plan = draft, draft.plan
        return f"{count_of(plan.n_items, 'item')}, {count_of(plan.n_shards, 'shard')}, workload {plan.workload}"

    def _fetch(self) -> str:
        workload = workload_of(self._run_file, self._overrides)
        if workload.fetch is None:
            return f"workload {workload.name.rpartition(':')[2]} has nothing to download"
        with working_folder(resolved(self._run_file).parent):  # a setting may be a path
            return str(workload.fetch())

    def _executor(self, config: RunFile) -> str:
        return executor_named(config.resources.executor).describe(self._draft.plan.container if self._draft else None)


def _versions() -> str:
    names = ("submitit", "h5py", "numpy")
    return f"slurmgpu {__version__}, " + ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def describe_image(path: Path, identity: Identity) -> str:
    """Path, size, digest and date of an image, in a line."""
    size = f"{size_of(identity['size_bytes'])}, " if identity["size_bytes"] else "unpacked, "
    built = f", built {identity['created']}" if identity["created"] else ""
    return f"{path}: {size}{identity['arch']}, sha256 {identity['sha256'][:12]}{built}"


def _resources(config: RunFile) -> str:
    wanted = config.resources
    found = allocate(wanted, None)
    nodes = f" on {wanted.nodes_per_task} nodes" if wanted.nodes_per_task > 1 else ""
    share = f"of {count_of(found.gpus_per_task, 'GPU')}" if found.gpus_per_task else "on CPUs"
    return f"{count_of(found.n_tasks, 'task')} {share}{nodes}, executor {wanted.executor}, device {wanted.device}"


def _check_a_node(arguments: Sequence[str], config: RunFile) -> bool:
    """Run `check --here` on a node with the run's resources, and print its lines as they arrive."""
    here = [sys.executable, "-m", "slurmgpu", "check", *arguments, "--here"]
    try:
        command = executor_named(config.resources.executor).command_on_node(config, here)
    except SlurmGPUError as error:
        return print_line(False, "node", str(error))
    has_spoken = False
    with commands.outside_job(), tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        try:
            job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace")
        except FileNotFoundError:
            return print_line(False, "node", commands.NOT_HERE.format(command[0]))
        with job:
            assert job.stdout is not None
            for line in job.stdout:
                has_spoken = has_spoken or line.startswith(MARKS)
                result(line.rstrip("\n"))
        errors.seek(0)
        said = errors.read()
    if job.returncode != 0 and not has_spoken:
        why = " ".join(said.replace("srun: error: ", "").split()) or f"{command[0]} ended with code {job.returncode}"
        return print_line(False, "node", f"The check did not start on a node: {why.rstrip('.')}. Correct [slurm].")
    sys.stderr.write(said)
    return job.returncode == 0


def print_node(checked: NodeCheck, problems: str) -> int:
    """Print the results of a check on a node, and return the exit code. `problems` names the lines of problems."""
    for name, text in _node_lines(checked) if checked.found else ():
        print_line(True, name, text)
    for problem in checked.problems:
        print_line(False, problems, problem)
    return 2 if checked.problems else 0


def _node_lines(checked: NodeCheck) -> Iterable[tuple[str, str]]:
    found = checked.found
    start = f"started in {checked.start_s:.1f} s"
    if checked.runtime and checked.start_s > SLOW_S:
        start += f", which is slow: {checked.if_slow}" if checked.if_slow else ", which is slow"
    yield "node", ", ".join(part for part in (checked.node, checked.runtime, start) if part)
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    where = f" in {found['image']}" if found["image"] else ""
    yield "python", f"{found['python']}{where} ({packages})"
    for gpu in found["gpus"]:
        free = "" if gpu["free_bytes"] is None else f", {gpu['free_bytes'] / 1e9:.1f} GB free"
        yield "GPU", f"{gpu['name']}, {gpu['memory_bytes'] / 1e9:.1f} GB{free}, driver for CUDA {gpu['cuda']}"
    if found["shm_bytes"]:
        yield "/dev/shm", f"{(found['shm_free_bytes'] or 0) / 1e9:.1f} of {found['shm_bytes'] / 1e9:.1f} GB free"


def print_line(good: bool, name: str, text: str) -> bool:
    """Print the line of a check, and return `good`."""
    mark = f"[green]{MARKS[0]}[/]" if good else f"[red]{MARKS[1]}[/]"
    plain_console(soft_wrap=True).print(f"{mark} {name:<10} {escape(' '.join(text.split()))}")
    return good
