"""`Runtime`, the interface of container runtimes: it has everything in which they differ; and runtimes by name.

`containers/apptainer.py` implements it; other packages can, with the entry-point group `slurmgpu.runtimes`.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from slurmgpu.containers.complaints import INTERPRETER, find_complaint
from slurmgpu.containers.folders import remove
from slurmgpu.containers.settings import Bind, Container, ContainerError, Identity, other_image
from slurmgpu.containers.unpacking import Pause
from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.ansi import without_escapes
from slurmgpu.util.plugins import Plugins

DEFAULT_RUNTIME = "apptainer"
RUNTIMES = Plugins(
    "slurmgpu.runtimes",
    "container runtime",
    "slurmgpu.containers.runtime.Runtime",
    {
        "apptainer": "slurmgpu.containers.apptainer:Apptainer",
        "singularity": "slurmgpu.containers.apptainer:SingularityCE",
    },
)
"""The runtimes by name: the built-in ones, and those of installed packages."""

SHARED = ("/tmp", "/var/tmp")
"""A node's folders for temporary files."""


@dataclass(frozen=True)
class Start:
    """A program to run in an image on this node, for the runtime to make a command of.

    `argv` is the program in the image and its arguments. `binds` exist, parents before what is in them. `environ` are
    all variables of the program. `home` is the path of home, `own_folder` the task's own folder on the node's disk,
    with an empty `home` in it for a private one.
    """

    container: Container
    image: Path
    argv: tuple[str, ...]
    binds: tuple[Bind, ...]
    gpus: bool
    folder: Path
    environ: Mapping[str, str]
    home: str
    own_folder: Path


class Runtime(ABC):
    """A container runtime. It has no state: every call gets what it needs of a run.

    `name` is used in [container] runtime and in run.json, `title` in sentences; `program` is searched on PATH. The
    next attributes are the values of [container] that it supports; `check` refuses others when a run is planned.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    program: ClassVar[str]
    version_arguments: ClassVar[tuple[str, ...]] = ("--version",)
    homes: ClassVar[tuple[str, ...]] = ("host",)
    stages: ClassVar[tuple[str, ...]] = ("none",)
    can_be_strict: ClassVar[bool] = False
    shared: ClassVar[tuple[str, ...]] = SHARED
    """Folders of the node that a container sees and can write, unless it is strict."""
    if_slow: ClassVar[str] = ""
    """A likely cause, and what to do, if a container takes more than 10 s to start; empty if none is known."""
    definitions: ClassVar[str | None] = None
    """The suffix of the definition files that it builds images from; None if it builds none."""

    def check(self, container: Container) -> None:
        """Raise SlurmGPUError for settings of [container] that this runtime does not support."""
        for key, value, can in (("home", container.home, self.homes), ("stage", container.stage, self.stages)):
            if value not in can:
                choice = " or ".join(f'"{each}"' for each in can)
                raise SlurmGPUError(f'{self.title} does not support [container] {key} = "{value}"; expected {choice}.')
        if container.strict and not self.can_be_strict:
            raise SlurmGPUError(f"{self.title} does not support [container] strict = true. Remove the line.")

    @abstractmethod
    def read_version(self, said: str) -> str | None:
        """The version in the output of `program` with `version_arguments`, for records; None if there is none.

        ContainerError if it is too old.
        """

    @abstractmethod
    def identify(self, path: Path) -> Identity:
        """The identity of this image for run.json; SlurmGPUError if it is no image or cannot run here.

        Keys: `kind`, a word for the format; `sha256`; `partition_sha256`, of the root file system alone, or None;
        `uuid`, `arch` as in `platform.machine()`, `created`, each a text or None; `labels`, texts by name;
        `size_bytes`, None for a folder; `mtime_ns`. Called where runs are planned: it starts no process.
        """

    def same_image(self, path: Path, identity: Identity) -> None:
        """Raise ContainerError unless the image on this node is the one of the plan, `identity`."""
        try:
            found = self.identify(path)
        except SlurmGPUError as error:
            raise ContainerError(str(error)) from error
        if found["sha256"] != identity["sha256"]:
            raise other_image(path, f"digest {found['sha256'][:12]}…, not {identity['sha256'][:12]}…")

    def stage(self, image: Path, identity: Identity, folder: Path, how: str, pause: Pause = time.sleep) -> Path:
        """The image to run on this node: `image`, or a copy of it in `folder`; `how` is one of `stages`.

        ContainerError if it cannot be copied. `pause` is called repeatedly during the copy, and may raise to end it.
        """
        return image

    def discard(self, copy: Path) -> None:
        """Remove a copy that `stage` made and that is damaged, so that the next task makes a new one."""
        remove(copy)

    def unfit(self, container: Container, scratch: Path, home: str) -> str:
        """Why the runtime cannot use the path of this node's scratch folder, or of home; "" if it can."""
        return ""

    def if_served(self, identity: Identity, how: str) -> str:
        """What to change if Slurm signals all processes of a job; empty unless one of them serves the image's files.

        A signal ends that process, and the worker dies of a bus error.
        """
        return ""

    @abstractmethod
    def command(self, start: Start, environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """The argument vector that runs the program, and the environment of that command; `environ` is the task's.

        The exit code is the program's, signals reach it once, and standard streams are its own. No value of
        `start.environ` is an argument: `ps` shows these to everybody.
        """

    def explain(self, said: str, returncode: int) -> ContainerError | None:
        """Why a worker ended without an event, by its stderr; None if the container is not the cause.

        `returncode` as in `subprocess`.
        """
        return find_complaint(without_escapes(said), INTERPRETER)

    def build_command(
        self,
        target: Path,
        recipe: Path,
        *,
        base: str | None,
        arguments: Mapping[str, str],
        binds: Sequence[Bind],
    ) -> list[str]:
        """The argument vector that builds the definition file `recipe` into the file `target`.

        `base` is a file or folder that holds an image, or a name in a registry; None for the recipe's own.
        Needed only where `definitions` is set.
        """
        raise NotImplementedError

    def read_build_line(self, line: str) -> tuple[str, bool] | None:
        """What to show of a line of a build's output, and whether it is a step of the build; None to show nothing."""
        return (line, False) if line.strip() else None

    def why_build_failed(self, said: str) -> str | None:
        """Why a build failed, from its output; its last message, or None, if the cause is unknown."""
        return None


@functools.cache
def runtime_named(name: str) -> Runtime:
    """The runtime that [container] runtime, or run.json, names; SlurmGPUError if no package here has it."""
    runtime: Runtime = RUNTIMES.make(name)
    return runtime
