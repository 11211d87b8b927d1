"""Apptainer and SingularityCE: their options, their messages and their images."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import slurmgpu
from slurmgpu.containers import apptainer_complaints, images, staging
from slurmgpu.containers.runtime import Runtime, Start
from slurmgpu.containers.settings import Bind, Container, ContainerError, Identity
from slurmgpu.util.users import expanded

OLDEST = {"apptainer": (1, 1), "singularity": (3, 10)}
"""The first versions with --no-eval; without it a shell evaluates `$(…)` in values of the environment."""
VERSION = re.compile(r"(apptainer|singularity)\S* version (\d+)\.(\d+)\S*")

SQUASHFS = "-comp zstd -all-root"
"""zstd: smaller and faster to read than gzip. Owned by root: normal users cannot unpack an image with other owners, to
build another one on top of it."""

NEEDLESS = re.compile(r"mksquashfs output|Non-gzip|Build complete|default remote")
"""Lines of a build without information about its progress."""

QUOTE = '"'
CSV_SPECIAL = frozenset(',"\r\n')

DROPPED = re.compile(
    r"""
    (APPTAINER|SINGULARITY)ENV_.*                   # are set inside in spite of --cleanenv
    | (APPTAINER|SINGULARITY)_(                     # options of exec that the run decides, and their older names
        BIND | BINDPATH | MOUNT | ENV | ENV_FILE | HOME | NO_HOME | NO_MOUNT | WORKDIR | PWD | CWD | TARGET_PWD | NV
        | NVCCLI | ROCM | CONTAIN | CONTAINALL | CLEANENV | NO_EVAL | (SCRATCH | OVERLAY) \w* | WRITABLE\w*
        | COMPAT | CONTAINLIBS | NO_INIT | HOSTNAME | SHELL | APP | NO_(NV | ROCM | UMASK) | (NV | ROCM)_OFF
        | (UNSHARE_)?(PID | IPC | UTS | NET) | NETWORK\w* | NETNS_PATH | DNS | SECURITY | FAKEROOT | FUSEMOUNT | OCI
        | APPLY_CGROUPS | MEMORY\w* | CPU\w* | BLKIO\w* | PIDS_LIMIT | OOM_KILL_DISABLE
    )
    | BASH_FUNC_.* | LD_PRELOAD | PYTHONHOME | PYTHONPATH
    """,
    re.VERBOSE,
)


class Apptainer(Runtime):
    """Apptainer: images are SIF files and sandboxes, which are folders."""

    name = "apptainer"
    title = "Apptainer"
    program = "apptainer"
    homes = ("host", "private", "none")
    stages = ("none", "node", "unpack")
    can_be_strict = True
    if_slow = 'perhaps this node has no squashfuse; stage = "unpack" does not need it'
    definitions = ".def"
    identify = staticmethod(images.identify)
    same_image = staticmethod(images.same_image)
    stage = staticmethod(staging.stage)
    discard = staticmethod(staging.discard)
    explain = staticmethod(apptainer_complaints.explain)
    why_build_failed = staticmethod(apptainer_complaints.why_build_failed)
    prefixes: ClassVar[tuple[str, ...]] = ("APPTAINERENV_",)
    """Variables with this prefix are set inside without it."""

    def read_version(self, said: str) -> str | None:
        """The version, with the program's name from the text: `singularity` may be a link to Apptainer."""
        match = VERSION.search(said)
        if match is None:
            return None
        oldest = OLDEST[match[1]]
        if (int(match[2]), int(match[3])) < oldest:
            raise ContainerError(
                f"this node has {said}, but slurmgpu needs {match[1]} {oldest[0]}.{oldest[1]} or newer (for --no-eval)",
                node_at_fault=True,
            )
        return match[0]

    def unfit(self, container: Container, scratch: Path, home: str) -> str:
        """Refuse a colon in a path of `--home SRC:DST`, which a strict container does not use."""
        if container.home != "private" or container.strict or ":" not in f"{scratch}{home}":
            return ""
        what, to_do = "home directory", "Set another value of home"
        if ":" in str(scratch):
            what, to_do = (
                f"scratch folder {scratch}",
                "Name another as [container] scratch, or set another value of home",
            )
        return f'With home = "private", {self.title} takes no {what} with a colon in its path. {to_do}'

    def if_served(self, identity: Identity, how: str) -> str:
        """Advise unpacking a SIF, which squashfuse serves."""
        is_served = how != "unpack" and identity["kind"] == "sif"
        return 'Set stage = "unpack" in [container], which needs no such process.' if is_served else ""

    def command(self, start: Start, environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """`exec`, with the variables inside under their prefixed names."""
        argv = [self.program, "--quiet", "exec", "--cleanenv", "--no-eval"]
        if start.gpus:
            argv.append("--nv")
        argv += _home_options(start)
        for bind in start.binds:
            argv += ["--mount", mount(bind)]
        argv += ["--pwd", str(start.folder), str(start.image), *start.argv]
        outside = {name: value for name, value in environ.items() if not DROPPED.fullmatch(name)}
        handed = {prefix + name: value for prefix in self.prefixes for name, value in start.environ.items()}
        return argv, outside | handed

    def build_command(
        self,
        target: Path,
        recipe: Path,
        *,
        base: str | None,
        arguments: Mapping[str, str],
        binds: Sequence[Bind],
    ) -> list[str]:
        """`build`, with the definition's arguments."""
        given = {"VERSION": slurmgpu.__version__}
        if base is not None:
            path = expanded(base)
            is_local = path.exists() or base.endswith(".sif")
            given["BOOTSTRAP"] = "localimage" if is_local else "docker"
            given["BASE"] = str(path.absolute()) if is_local else base.removeprefix("docker://")
        command = [self.program, "build"]
        if "APPTAINER_MKSQUASHFS_ARGS" not in os.environ:
            command += ["--mksquashfs-args", SQUASHFS]
        for bind in binds:
            command += ["--mount", mount(bind, filled=True)]
        for name, value in (given | dict(arguments)).items():
            command += ["--build-arg", f"{name}={value}"]
        return [*command, str(target), str(recipe)]

    def read_build_line(self, line: str) -> tuple[str, bool] | None:
        """Its own lines begin with INFO and are the steps; the others come from the definition's script."""
        step = line.removeprefix("INFO:")
        return None if NEEDLESS.search(line) or not line.strip() else (step.strip(), step != line)


class SingularityCE(Apptainer):
    """SingularityCE, or Apptainer as `singularity`, which warns if only the old prefix is used."""

    name = "singularity"
    title = "SingularityCE"
    program = "singularity"
    prefixes = ("APPTAINERENV_", "SINGULARITYENV_")


def _home_options(start: Start) -> list[str]:
    home = start.container.home
    options = ["--containall", "--workdir", str(start.own_folder)] if start.container.strict else []
    if home == "none":
        # Without `--no-mount cwd` home is mounted if the task was started below it.
        return [*options, "--no-home", "--no-mount", "cwd"]
    if home == "private" and not start.container.strict:
        return [*options, "--home", f"{start.own_folder / 'home'}:{start.home}", "--no-mount", "cwd"]
    return options


def mount(bind: Bind, *, filled: bool = False) -> str:
    """The bind as `--mount` takes it: a line of CSV, so that a path may hold any character.

    `filled`: the same number of fields for all binds, since a build reads its mounts as one CSV text.
    """
    fields = ["type=bind", f"src={bind.src}", f"dst={bind.dst}"]
    if bind.read_only:
        fields.append("ro")
    elif filled:
        fields.append("type=bind")  # changes nothing; `rw` is refused, and `ro=false` means `ro`
    return ",".join(f'"{text.replace(QUOTE, 2 * QUOTE)}"' if set(text) & CSV_SPECIAL else text for text in fields)
