"""Build an image from one of the definition files, with the first container runtime on PATH that can."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import slurmgpu
from slurmgpu.containers.runtime import DEFAULT_RUNTIME, RUNTIMES, Runtime, runtime_named
from slurmgpu.containers.settings import Bind, ContainerError, Identity
from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.atomic_files import partial_path


def definition(name: str, suffix: str = ".def") -> Path:
    """The definition file slurmgpu-NAME with this suffix: of the installed package, or of the repository."""
    package = Path(slurmgpu.__file__).resolve().parent
    folders = (package / "definitions", package.parent / "containers")
    for folder in folders:
        path = folder / f"slurmgpu-{name}{suffix}"
        if path.exists():
            return path
    raise SlurmGPUError(
        f"This installation lacks slurmgpu-{name}{suffix}, which should be in {folders[0]}. Reinstall slurmgpu."
    )


def installed() -> Iterator[Runtime]:
    """The container runtimes on PATH."""
    return (runtime for runtime in map(runtime_named, RUNTIMES.names()) if shutil.which(runtime.program) is not None)


def find_runtime(*, builds: bool = False) -> Runtime:
    """The first container runtime on PATH, with `builds` the first that builds images; SlurmGPUError without one."""
    for runtime in installed():
        if runtime.definitions or not builds:
            return runtime
    programs = [runtime_named(name).program for name in RUNTIMES.built_in]
    raise SlurmGPUError(
        f"Neither {' nor '.join(programs)} is on PATH. On a cluster it may be a module: `module load {programs[0]}`."
    )


def find_runtime_of(image: Path) -> tuple[Runtime, Identity]:
    """The first container runtime on PATH that recognises `image`, and the image's identity.

    SlurmGPUError of the first one if none does, and of the default runtime if none is on PATH.
    """
    first: SlurmGPUError | None = None
    for runtime in [*installed()] or [runtime_named(DEFAULT_RUNTIME)]:
        try:
            return runtime, runtime.identify(image)
        except SlurmGPUError as error:
            first = first or error
    assert first is not None
    raise first


def build_image(
    output: Path,
    *,
    name: str,
    base: str | None,
    arguments: Mapping[str, str] | None,
    binds: Sequence[Bind],
    progress: Callable[[str, bool], None],
) -> None:
    """Build slurmgpu-NAME.def into `output`, which appears whole. `progress` gets lines and whether each is a step.

    A build that fails leaves OUTPUT.log, and raises a SlurmGPUError that says why.
    """
    if output.exists():
        raise SlurmGPUError(f"{output} already exists, and runs may depend on it. Give another name, or remove it.")
    if not output.absolute().parent.is_dir():
        raise SlurmGPUError(f"The folder of {output} does not exist.")
    binds = [_existing(bind) for bind in binds]
    runtime = find_runtime(builds=True)
    partial = partial_path(output)
    log = output.with_name(f"{output.name}.log")
    recipe = definition(name, runtime.definitions or "")
    command = runtime.build_command(partial, recipe, base=base, arguments=arguments or {}, binds=binds)
    try:
        code = _follow(command, log, runtime, progress)
        if code != 0:
            said = log.read_text("utf-8", "replace")
            raise SlurmGPUError(
                f"The build failed: {runtime.why_build_failed(said) or f'exit code {code}'}. Its output is in {log}."
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


def _follow(command: Sequence[str], log: Path, runtime: Runtime, progress: Callable[[str, bool], None]) -> int:
    log.unlink(missing_ok=True)  # of an earlier build; in a shared folder it may be a link to another file
    with (
        open(log, "x", encoding="utf-8") as file,
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
                if (shown := runtime.read_build_line(line.rstrip())) is not None:
                    progress(*shown)
        except BaseException:
            process.terminate()
            process.wait()  # it removes what it has unpacked
            raise
    return process.returncode
