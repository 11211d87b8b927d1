"""Apptainer and SingularityCE: the options and variables by which a program is started in an image."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmgpu.containers.folders import task_folder
from slurmgpu.containers.settings import Bind, Container, home_folder

QUOTE = '"'
CSV_SPECIAL = frozenset(',"\r\n')

DROPPED = re.compile(
    r"""
    (APPTAINER|SINGULARITY)ENV_.*                   # get in in spite of --cleanenv
    | (APPTAINER|SINGULARITY)_(                     # options of exec that the run decides
        BIND | BINDPATH | MOUNT | ENV | ENV_FILE | HOME | NO_HOME | NO_MOUNT | WORKDIR | PWD | CWD | TARGET_PWD | NV
        | NVCCLI | ROCM | CONTAIN | CONTAINALL | CLEANENV | NO_EVAL | SCRATCH | OVERLAY | WRITABLE | WRITABLE_TMPFS
        | COMPAT | CONTAINLIBS | NO_INIT | UNSHARE_PID | PID | HOSTNAME | SHELL | APP
    )
    | BASH_FUNC_.* | LD_PRELOAD | PYTHONHOME | PYTHONPATH
    """,
    re.VERBOSE,
)


def exec_argv(
    container: Container,
    inner: Sequence[str],
    image: Path,
    binds: Sequence[Bind],
    *,
    gpus: bool,
    folder: Path,
    environ: Mapping[str, str],
    scratch: Path,
) -> list[str]:
    """The argument vector that runs the image's Python with the arguments `inner` in `folder`."""
    argv = [container.runtime, "--quiet", "exec", "--cleanenv", "--no-eval"]
    if gpus:
        argv.append("--nv")
    argv += _home_options(container, environ, scratch)
    for bind in binds:
        argv += ["--mount", mount(bind)]
    return [*argv, "--pwd", str(folder), str(image), container.python, *inner]


def _home_options(container: Container, environ: Mapping[str, str], scratch: Path) -> list[str]:
    own = task_folder(scratch)
    options = ["--containall", "--workdir", str(own)] if container.strict else []
    if container.home == "none":
        # Without the latter, home comes in all the same when the task was started below it.
        return [*options, "--no-home", "--no-mount", "cwd"]
    if container.home == "private" and not container.strict:
        return [*options, "--home", f"{own / 'home'}:{home_folder(environ)}", "--no-mount", "cwd"]
    return options


def mount(bind: Bind, *, filled: bool = False) -> str:
    """The bind as `--mount` takes it: a line of CSV, so that any character may stand in a path.

    `filled`: with as many fields whether read-only or not. A build reads all its mounts as one CSV text.
    """
    fields = ["type=bind", f"src={bind.src}", f"dst={bind.dst}"]
    if bind.read_only:
        fields.append("ro")
    elif filled:
        fields.append("type=bind")  # changes nothing; `rw` is refused, and `ro=false` means `ro`
    return ",".join(f'"{text.replace(QUOTE, 2 * QUOTE)}"' if set(text) & CSV_SPECIAL else text for text in fields)


def outer_environment(container: Container, environ: Mapping[str, str], inside: Mapping[str, str]) -> dict[str, str]:
    """The environment that the runtime is started with: the host's, and `inside` under the names that it hands on."""
    outside = {name: value for name, value in environ.items() if not DROPPED.fullmatch(name)}
    # `singularity` may be Apptainer under its old name, which prefers its new one and complains of the old alone.
    prefixes = ("APPTAINERENV_",) if container.runtime == "apptainer" else ("APPTAINERENV_", "SINGULARITYENV_")
    return outside | {prefix + name: value for prefix in prefixes for name, value in inside.items()}
