"""Making an image from one of the definition files, and looking into an image as a task's worker would."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import slurmgpu
from slurmgpu.containers import INSIDE
from slurmgpu.containers.apptainer import mount
from slurmgpu.containers.apptainer_complaints import why_build_failed
from slurmgpu.containers.command import exec_command, package_binds
from slurmgpu.containers.folders import leave_task_folders
from slurmgpu.containers.node import prepare
from slurmgpu.containers.settings import Bind, Container, ContainerError
from slurmgpu.errors import SlurmGPUError
from slurmgpu.task.launcher import START
from slurmgpu.task.preflight import NodeCheck, hear

RUNTIMES = ("apptainer", "singularity")
SQUASHFS = "-comp zstd -all-root"
"""zstd: smaller than gzip, and quicker to import from. Owned by root: an image that is unpacked as a normal user, to
build another on top of it, must not name owners."""


def definition(name: str) -> Path:
    """The definition file slurmgpu-NAME.def: of the installed package, or of the repository."""
    package = Path(slurmgpu.__file__).resolve().parent
    folders = (package / "definitions", package.parent / "containers")
    for folder in folders:
        path = folder / f"slurmgpu-{name}.def"
        if path.exists():
            return path
    raise SlurmGPUError(f"This installation lacks slurmgpu-{name}.def; it should be in {folders[0]}. Install it anew.")


def find_runtime() -> str:
    """The container runtime on PATH; a sentence if there is none."""
    for name in RUNTIMES:
        if shutil.which(name) is not None:
            return name
    raise SlurmGPUError(
        "Neither apptainer nor singularity is on PATH. On a cluster it may be a module: `module load apptainer`."
    )


def build_command(
    runtime: str, target: Path, recipe: Path, *, base: str | None, arguments: Mapping[str, str], binds: Sequence[Bind]
) -> list[str]:
    """The argument vector that builds the definition file `recipe` into the file `target`.

    `base` is a file or folder that holds an image, or a name in a registry; None for the recipe's own.
    """
    given = {"VERSION": slurmgpu.__version__}
    if base is not None:
        path = Path(base).expanduser()
        is_local = path.exists() or base.endswith(".sif")
        given["BOOTSTRAP"] = "localimage" if is_local else "docker"
        given["BASE"] = str(path.absolute()) if is_local else base.removeprefix("docker://")
    command = [runtime, "build"]
    if "APPTAINER_MKSQUASHFS_ARGS" not in os.environ:
        command += ["--mksquashfs-args", SQUASHFS]
    for bind in binds:
        command += ["--mount", mount(bind, filled=True)]
    for name, value in (given | dict(arguments)).items():
        command += ["--build-arg", f"{name}={value}"]
    return [*command, str(target), str(recipe)]


def build_image(
    output: Path,
    *,
    name: str,
    base: str | None = None,
    arguments: Mapping[str, str] | None = None,
    binds: Sequence[Bind] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> None:
    """Build slurmgpu-NAME.def into the file `output`, which appears whole; `progress` gets every line that is said.

    A build that fails leaves OUTPUT.log, and a SlurmGPUError that says why.
    """
    if output.exists():
        raise SlurmGPUError(f"{output} is there already, and runs may depend on it. Give another name, or remove it.")
    if not output.absolute().parent.is_dir():
        raise SlurmGPUError(f"The folder of {output} does not exist.")
    binds = [_existing(bind) for bind in binds]
    runtime = find_runtime()
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    log = output.with_name(f"{output.name}.log")
    command = build_command(runtime, partial, definition(name), base=base, arguments=arguments or {}, binds=binds)
    try:
        code = _follow(command, log, progress)
        if code != 0:
            said = log.read_text("utf-8", "replace")
            raise SlurmGPUError(
                f"The build failed: {why_build_failed(said) or f'exit code {code}'}. All it said is in {log}."
            )
        partial.replace(output)
        log.unlink()
    finally:
        partial.unlink(missing_ok=True)


def _existing(bind: Bind) -> Bind:
    try:
        whole = bind.expanded(os.environ)
    except ContainerError as error:
        raise SlurmGPUError(f"--bind {bind.src}: {error}.") from error
    if not Path(whole.src).exists():
        raise SlurmGPUError(f"--bind names {whole.src}, which does not exist on this machine. Correct it.")
    return whole


def look_inside(container: Container, *, n_gpus: int) -> NodeCheck:
    """Start the image's Python once on this machine, as a task does, and hear what it sees."""
    with tempfile.TemporaryDirectory(prefix="slurmgpu-check-") as folder, contextlib.ExitStack() as stack:
        own = Bind(folder, folder)
        stack.callback(leave_task_folders)
        try:
            prepared = prepare(container, [own], os.environ)
        except ContainerError as error:
            return NodeCheck({}, [str(error)])
        command, environ = exec_command(
            container,
            ["-c", START, "slurmgpu.worker.probing", str(n_gpus)],
            image=prepared.image,
            binds=[*prepared.binds, *package_binds(())],
            gpus=n_gpus > 0,
            folder=Path(folder),
            environ=os.environ,
            extra_env={"PYTHONPATH": INSIDE},
            scratch=prepared.scratch,
        )
        return hear(command, environ, prepared.runtime_version)


def _follow(command: Sequence[str], log: Path, progress: Callable[[str], None]) -> int:
    with (
        open(log, "w", encoding="utf-8") as file,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                progress(line.rstrip())
        except BaseException:
            process.terminate()
            process.wait()  # it removes what it has unpacked
            raise
    return process.returncode
