"""Which runtime a node has, and whether it is new enough; asked for once for each program file, as it takes 20 ms."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from slurmgpu.containers.settings import ContainerError
from slurmgpu.util.atomic_files import write_json

OLDEST = {"apptainer": (1, 1), "singularity": (3, 10)}
"""The first versions with --no-eval, without which a value `$(…)` in the environment is run by a shell."""
VERSION = re.compile(r"(apptainer|singularity)\S* version (\d+)\.(\d+)\S*")


def runtime_version(runtime: str, environ: Mapping[str, str], scratch: Path) -> str:
    """What `runtime --version` says, remembered in `scratch`; ContainerError if it is absent, broken or too old."""
    found = shutil.which(runtime, path=environ.get("PATH", os.defpath))
    if found is None:
        raise ContainerError(
            f"{runtime} is not on this node's PATH. If it is a module here, load it in the run file: "
            f'[slurm] setup = ["module load {runtime}"]',
            node_at_fault=True,
        )
    program, memory = Path(found).resolve(), scratch / "runtime.json"
    status = program.stat()
    key = f"{program}|{status.st_size}|{status.st_mtime_ns}|{status.st_ino}"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # anything but what was written here
        known = json.loads(memory.read_bytes())
        if known["key"] == key:
            return str(known["version"])
    version = _ask(found, runtime, environ)
    if _is_binary(program):  # a script may call another program tomorrow
        with contextlib.suppress(OSError):
            write_json(memory, {"key": key, "version": version}, durable=False)
    return version


def _ask(program: str, runtime: str, environ: Mapping[str, str]) -> str:
    done = subprocess.run(
        [program, "--version"],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    text = done.stdout.strip()
    match = VERSION.search(text)
    if match is None or done.returncode != 0:
        raise ContainerError(f"`{runtime} --version` does not work on this node: {text!r}", node_at_fault=True)
    oldest = OLDEST[match[1]]
    if (int(match[2]), int(match[3])) < oldest:
        raise ContainerError(
            f"this node has {text}, and slurmgpu needs {match[1]} {oldest[0]}.{oldest[1]} or newer (for --no-eval)",
            node_at_fault=True,
        )
    return match[0]


def _is_binary(program: Path) -> bool:
    with open(program, "rb") as file:
        return file.read(4) == b"\x7fELF"
