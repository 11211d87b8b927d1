"""The version of a node's runtime, cached for each program file, as asking for it takes 20 ms."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from slurmgpu.containers.runtime import Runtime
from slurmgpu.containers.settings import ContainerError
from slurmgpu.util.atomic_files import write_json


def runtime_version(runtime: Runtime, environ: Mapping[str, str], scratch: Path) -> str:
    """The runtime's version here, remembered in `scratch`; ContainerError if it is absent, broken or too old."""
    found = shutil.which(runtime.program, path=environ.get("PATH", os.defpath))
    if found is None:
        raise ContainerError(
            f"{runtime.program} is not on this node's PATH. If it is a module here, load it in the run file: "
            f'[slurm] setup = ["module load {runtime.program}"]',
            node_at_fault=True,
        )
    program, memory = Path(found).resolve(), scratch / "runtime.json"
    status = program.stat()
    key = f"{program}|{status.st_size}|{status.st_mtime_ns}|{status.st_ino}"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no cache, or a damaged one
        known = json.loads(memory.read_bytes())
        if known["key"] == key:
            return str(known["version"])
    version = _ask(found, runtime, environ)
    if _is_binary(program):  # a script may call another program later
        with contextlib.suppress(OSError):
            write_json(memory, {"key": key, "version": version}, durable=False)
    return version


def _ask(program: str, runtime: Runtime, environ: Mapping[str, str]) -> str:
    done = subprocess.run(
        [program, *runtime.version_arguments],
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


def _is_binary(program: Path) -> bool:
    with open(program, "rb") as file:
        return file.read(4) == b"\x7fELF"
