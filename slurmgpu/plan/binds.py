"""What a run needs of the file system in its container: its own folders, its input, and paths among its settings.

On the node, since links may lead elsewhere there. `containers.command.needed_binds` adds where they lead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from slurmgpu.containers.links import Known, names, upwards
from slurmgpu.containers.runtime import SHARED
from slurmgpu.containers.settings import Bind, ContainerError, home_folder
from slurmgpu.run.directory import Run

MANY_FOLDERS = 100
"""From so many folders on, those above them are bound in their place: a command line has an end."""

MOST_BYTES = 64 * 1024
"""So long may be the paths of files whose folder cannot be bound.

Some runtimes put all binds into one variable, and the kernel takes none of more than 128 kB.
"""

OF_THE_IMAGE = ("/bin", "/dev", "/etc", "/lib", "/lib64", "/opt", "/proc", "/run", "/sbin", "/sys", "/usr", "/var")
"""Folders that an image fills itself."""


def container_binds(run: Run) -> list[Bind]:
    """What every run needs inside: its directory, the run file's folder, and what it reads elsewhere.

    No bind of these brings in home, a folder above it, /tmp, or what is the image's; but the run file may lie in one.
    """
    known: Known = {}
    apart = _apart(known)
    binds = [Bind(folder, folder) for folder in (str(run.folder), run.plan.search_path)]
    settings = list(_named_by_settings(run, apart, known))
    binds += [Bind(path, path) for path in settings]
    binds += [Bind(path, path, read_only=True) for path in run.plan.paths]
    brought = {name for bind in binds for name in names(bind.src, known)}
    folders: set[str] = set()
    files: set[str] = set()
    for path in (*_read_files(run), *_linked_in([*settings, *run.plan.paths])):
        for name in names(path, known):
            folder = name.rpartition("/")[0] or "/"
            if brought.isdisjoint(upwards(name)):
                (files if folder in apart else folders).add(name if folder in apart else folder)
    if sum(len(os.fsencode(path)) + 1 for path in files) > MOST_BYTES:
        raise ContainerError(
            f"{len(files)} files that the run reads lie directly in {os.path.dirname(min(files))} or another folder "  # noqa: PTH120
            f"that is not bound as a whole, because it holds more than the run's; move them into a folder of their own"
        )
    wanted = sorted(files) + sorted(_gathered(folders, apart))
    return [*binds, *(Bind(path, path, read_only=True) for path in wanted)]


def _apart(known: Known) -> set[str]:
    """The folders that hold more than a run's: none of them is bound because a file in it is read."""
    private = {name for folder in (home_folder(os.environ), *SHARED) for name in names(folder, known)}
    return {folder for name in private for folder in upwards(name)} | set(OF_THE_IMAGE)


def _read_files(run: Run) -> Iterator[str]:
    """The input, and the workload's file."""
    for file in run.input["files"]:
        yield file["path"]
    module = run.plan.workload.rpartition(":")[0]
    if module.endswith(".py"):
        yield module


def _named_by_settings(run: Run, apart: set[str], known: Known) -> Iterator[str]:
    """The files and folders that settings name."""
    base = run.plan.search_path
    for value in run.plan.texts():
        # A prompt may begin with ~, and be too long for a path: these two functions raise nothing.
        path = os.path.normpath(os.path.join(base, os.path.expanduser(value)))  # noqa: PTH111, PTH118
        if path != base and os.path.exists(path) and apart.isdisjoint(names(path, known)):  # noqa: PTH110
            yield path


def _linked_in(paths: Iterable[str]) -> Iterator[str]:
    """The links that lie in these folders: of a Hugging Face snapshot, every file is one."""
    for path in map(Path, paths):
        if path.is_dir() and os.access(path, os.R_OK):
            yield from (entry.path for entry in os.scandir(path) if entry.is_symlink() and Path(entry.path).exists())


def _gathered(folders: set[str], apart: set[str]) -> set[str]:
    """The folders; if they are many, the deepest of them give way to those that they are in."""
    depth = max((folder.count("/") for folder in folders), default=0)
    while len(folders) > MANY_FOLDERS and depth > 1:
        above = {folder: folder.rpartition("/")[0] for folder in folders if folder.count("/") == depth}
        folders = {folder if above.get(folder, "/") in {"/", *apart} else above[folder] for folder in folders}
        depth -= 1
    return folders
