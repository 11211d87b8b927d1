"""Unpack a SIF into a folder, and check whether such a folder is still whole."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from slurmgpu.containers.settings import ContainerError
from slurmgpu.containers.sif import read_sif
from slurmgpu.util.atomic_files import write_json

UPPER_LEVELS = 4
"""How many levels are checked before each task, down to the libraries of a system; it takes some milliseconds."""
WHOLE_S = 86400.0
"""How often all files are checked, and touched: cleaning of /tmp by age keeps a file for a few days."""

Pause = Callable[[float], None]


def unpack(image: Path, part: Path, pause: Pause) -> None:
    """Unpack the SIF into the new folder `part`; what `pause` raises ends it."""
    # Not `apptainer build --sandbox`: it asks keyservers about signed images, and as root it needs all capabilities.
    program = shutil.which("unsquashfs", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin")))
    if program is None:
        raise ContainerError(
            'stage = "unpack" needs unsquashfs (of squashfs-tools), which is not on this node; '
            "name a sandbox as [container] image instead: `apptainer build --sandbox DIR IMAGE.sif`",
            node_at_fault=True,
        )
    offset = read_sif(image).root_offset
    argv = [program, "-no-progress", "-no-xattrs", "-offset", str(offset), "-dest", str(part), str(image)]
    returncode, said = _run(argv, pause)
    if returncode < 0:
        pause(0.5)  # a signal to the whole job may have ended it before this process gets it
    is_full = "No space left" in said or "Disk quota" in said
    # 2: something that a container does not need, such as a device file, could not be made.
    if returncode not in (0, 2) or is_full or not (part / ".singularity.d").is_dir():
        raise ContainerError(
            f"{image} cannot be unpacked on this node: {said.strip()[-400:] or f'unsquashfs ended with {returncode}'}",
            kind="disk_full" if is_full else "container",
            node_at_fault=True,
        )


def _run(argv: list[str], pause: Pause) -> tuple[int, str]:
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    said = process.communicate(timeout=0.2)[1]
                    return process.returncode, said
                pause(0)
        except BaseException:
            process.kill()
            raise


def record_of(folder: Path) -> Path:
    """The file beside an unpacked image that describes it; written last, removed first."""
    return folder.with_name(f"{folder.name}.json")


def describe(folder: Path, pause: Pause) -> dict[str, list[int]]:
    """The values that `is_whole` compares a folder with: its entries and bytes, and its entries near the top."""
    return {"whole": _look(folder, pause), "upper": _look(folder, pause, UPPER_LEVELS)}


def remember(folder: Path, description: dict[str, list[int]]) -> None:
    """Write the folder's record."""
    write_json(record_of(folder), description)


def is_whole(folder: Path, pause: Pause) -> bool:
    """Whether the image that was unpacked into `folder` is complete.

    All files are counted once a day and after a boot, and touched, so that cleaning by age keeps them; in between only
    the upper levels are counted.
    """
    record = record_of(folder)
    try:
        known = json.loads(record.read_bytes())
        age_s = time.time() - record.stat().st_mtime
        if 0 <= age_s < min(WHOLE_S, time.clock_gettime(time.CLOCK_BOOTTIME)):
            return bool(_look(folder, pause, UPPER_LEVELS) == known["upper"])
        if _look(folder, pause) != known["whole"]:
            return False
        os.utime(record)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _look(folder: Path, pause: Pause, levels: float = math.inf) -> list[int]:
    """The number of entries and, if all `levels` are counted, of bytes in files, which are then touched."""
    n_entries = n_bytes = 0
    now, todo = time.time_ns(), [(os.fspath(folder), 1)]
    while todo:
        path, level = todo.pop()
        pause(0)
        with contextlib.suppress(PermissionError), os.scandir(path) as entries:
            for entry in entries:
                n_entries += 1
                is_folder = entry.is_dir(follow_symlinks=False)
                if is_folder and level < levels:
                    todo.append((entry.path, level + 1))
                if levels == math.inf:
                    status = entry.stat(follow_symlinks=False)
                    n_bytes += 0 if is_folder else status.st_size
                    # Not the time of modification, by which Python finds its compiled files.
                    os.utime(entry.path, ns=(now, status.st_mtime_ns), follow_symlinks=False)
    return [n_entries, n_bytes]
