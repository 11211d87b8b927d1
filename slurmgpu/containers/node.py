"""Check what a container needs on its node, before anything is claimed and before a model is loaded."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmgpu.containers.command import needed_binds
from slurmgpu.containers.environment import FOLDERS, inner_environment
from slurmgpu.containers.folders import take_task_folder, task_folder
from slurmgpu.containers.runtime import Runtime, runtime_named
from slurmgpu.containers.settings import Bind, Container, ContainerError, expand, home_folder
from slurmgpu.containers.unpacking import Pause
from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.shared_files import FULL

INFINIBAND = "/dev/infiniband"


@dataclass(frozen=True)
class Prepared:
    """A container on this node: `image` may be a staged copy, `binds` are expanded and exist."""

    image: Path
    scratch: Path
    binds: tuple[Bind, ...]
    runtime_version: str


def prepare(
    container: Container, binds: Sequence[Bind], environ: Mapping[str, str], pause: Pause = time.sleep
) -> Prepared:
    """The container ready to run on this node, its image staged; ContainerError if that fails.

    `binds` are slurmgpu's own (the run directory, packages …), to which those of [container] and of variables that
    name folders are added. Leaves a folder `slurmgpu-<uid>` in the scratch folder with caches and staged images;
    `folders.leave_task_folders` removes the task's own folder, also after an error. `pause` may raise to end a wait.
    """
    scratch = _scratch(container, environ)
    try:
        runtime = runtime_named(container.runtime)
    except SlurmGPUError as error:
        raise ContainerError(str(error)) from error
    version = _runtime_version(runtime, environ)
    of_user = set(container.binds)
    wanted = [bind.expanded(environ) if bind in of_user else bind for bind in (*binds, *container.binds)]
    wanted += _folder_binds(container, environ, runtime.shared)
    _check_binds(wanted)
    if unfit := runtime.unfit(container, scratch, home_folder(environ)):
        raise ContainerError(unfit)
    if container.strict or container.home == "private":
        _make_places([*wanted, Bind(str(scratch), str(scratch))], task_folder(scratch) / "home", environ)
    inner_environment(container, environ, {}, scratch)  # raises if a variable of [container] env is not set
    image = Path(container.image)
    runtime.same_image(image, container.identity)
    image = runtime.stage(image, container.identity, scratch / "images", container.stage, pause)
    return Prepared(image, scratch, tuple(needed_binds(wanted)), version)


def _scratch(container: Container, environ: Mapping[str, str]) -> Path:
    """The user's folder on the node's disk, with one for this task in it."""
    given = container.scratch and expand(container.scratch, environ, "[container] scratch")
    temporary = environ.get("TMPDIR", "")
    if not Path(temporary).is_absolute() or not Path(temporary).is_dir():
        temporary = "/tmp"  # as Python does: TMPDIR may be that of the machine that submitted
    base = Path(given or temporary)
    scratch = base / f"slurmgpu-{os.getuid()}"
    try:
        scratch.mkdir(mode=0o700, exist_ok=True)
        status = scratch.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise ContainerError(
                f"{scratch} belongs to another user on this node. Name another folder with [container] scratch",
                node_at_fault=True,
            )
        if stat.S_IMODE(status.st_mode) != 0o700:
            scratch.chmod(0o700)
        take_task_folder(scratch)
        (scratch / "caches").mkdir(exist_ok=True)
    except OSError as error:
        kind = "disk_full" if error.errno in FULL else "container"
        raise ContainerError(
            f"the scratch folder {base} cannot be used on this node: {os.strerror(error.errno or 0)}. "
            f"Name another with [container] scratch",
            kind=kind,
            node_at_fault=True,
        ) from error
    return scratch


def _make_places(binds: Sequence[Bind], own_home: Path, environ: Mapping[str, str]) -> None:
    """Make the destinations of binds below home in the task's own home.

    Apptainer makes those that the image lacks; those that the image has are hidden by this home, and Apptainer fails.
    """
    homes = {Path(home_folder(environ))}
    with contextlib.suppress(KeyError):  # a user without an entry in passwd, whom Apptainer refuses
        homes.add(Path(pwd.getpwuid(os.getuid()).pw_dir))  # the home of a strict container, whatever HOME says
    for bind in needed_binds(binds):
        path = Path(os.path.normpath(bind.dst))
        for home in homes & set(path.parents):
            place = own_home / path.relative_to(home)
            with contextlib.suppress(FileExistsError, NotADirectoryError):  # below a file that is bound
                place.parent.mkdir(parents=True, exist_ok=True)
                place.mkdir(exist_ok=True) if Path(bind.src).is_dir() else place.touch()


def _folder_binds(container: Container, environ: Mapping[str, str], shared: tuple[str, ...]) -> list[Bind]:
    """Binds of the folders that variables name, and of InfiniBand for a strict container."""
    given = {name: environ.get(name) if value is True else value for name, value in container.env.items()}
    paths = {name: given.get(name, environ.get(name)) for name in FOLDERS}
    found = [os.path.normpath(path) for path in paths.values() if isinstance(path, str) and Path(path).is_absolute()]
    found = [path for path in found if path not in shared] + ([INFINIBAND] if container.strict else [])
    return [Bind(path, path) for path in found if os.path.isdir(path)]


def _check_binds(binds: Sequence[Bind]) -> None:
    sources: dict[str, str] = {}
    for bind in binds:
        try:
            Path(bind.src).stat()
        except OSError as error:
            gone = error.errno in (errno.ENOENT, errno.ENOTDIR)
            what = "does not exist" if gone else f"cannot be used ({os.strerror(error.errno or 0)})"
            raise ContainerError(
                f"{bind.src}, which should be bound into the container, {what} on this node",
                node_at_fault=True,
            ) from error
        if sources.setdefault(bind.dst, bind.src) != bind.src:
            raise ContainerError(f"{sources[bind.dst]} and {bind.src} have the same destination, {bind.dst}")


def _runtime_version(runtime: Runtime, environ: Mapping[str, str]) -> str:
    """The runtime's version here; ContainerError if it is absent, broken or too old."""
    found = shutil.which(runtime.program, path=environ.get("PATH", os.defpath))
    if found is None:
        raise ContainerError(
            f"{runtime.program} is not on this node's PATH. If this cluster has it as a module, load it in the run "
            f'file: [slurm] setup = ["module load {runtime.program}"]',
            node_at_fault=True,
        )
    done = subprocess.run(
        [found, *runtime.version_arguments],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    text = done.stdout.strip()
    version = runtime.read_version(text) if done.returncode == 0 else None
    if version is None:
        command = " ".join((runtime.program, *runtime.version_arguments))
        raise ContainerError(f"`{command}` does not work on this node: {text!r}", node_at_fault=True)
    return version
