"""The binds of a run in its container: its own folders, its input, and paths among its settings.

They are computed on the node, where links may have other targets. `containers.command.needed_binds` adds these.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from slurmgpu.containers.links import Known, names, upwards
from slurmgpu.containers.runtime import SHARED
from slurmgpu.containers.settings import Bind, ContainerError, home_folder
from slurmgpu.run.directory import Run

MANY_FOLDERS = 100
"""If there are more folders, their parents are bound instead, because the length of a command line is limited."""

MOST_BYTES = 64 * 1024
"""The most characters of paths of files that are bound one by one because their folder cannot be.

Some runtimes put all binds into one variable, which the kernel limits to 128 kB.
"""

OF_THE_IMAGE = ("/bin", "/dev", "/etc", "/lib", "/lib64", "/opt", "/proc", "/run", "/sbin", "/sys", "/usr", "/var")
"""Folders of the image."""


def container_binds(run: Run) -> list[Bind]:
    """The run directory, the run file's folder, and what the run reads elsewhere.

    None of these binds home, a folder above it, /tmp, or a folder of the image, unless the run file is in it.
    """
    known: Known = {}
    private = {name for folder in (home_folder(os.environ), *SHARED) for name in names(folder, known)}
    # Folders that hold more than a run's files: they are not bound just because a file in them is read.
    apart = {folder for name in private for folder in upwards(name)} | set(OF_THE_IMAGE)
    binds = [Bind(folder, folder) for folder in (str(run.folder), run.plan.search_path)]
    settings = list(_named_by_settings(run, apart, known))
    binds += [Bind(path, path) for path in settings]
    binds += [Bind(path, path, read_only=True) for path in run.plan.paths]
    brought = {name for bind in binds for name in names(bind.src, known)}
    folders: set[str] = set()
    files: set[str] = set()
    module = run.plan.workload.rpartition(":")[0]
    read = [file["path"] for file in run.input["files"]] + ([module] if module.endswith(".py") else [])
    for path in (*read, *_linked_in([*settings, *run.plan.paths])):
        for name in names(path, known):
            folder = name.rpartition("/")[0] or "/"
            if brought.isdisjoint(upwards(name)):
                (files if folder in apart else folders).add(name if folder in apart else folder)
    for folder in run.input["folders"]:
        for name in names(folder, known):
            if name in apart:
                raise ContainerError(
                    f"the input has files in {folder}, which is not bound as a whole, because it holds files of "
                    "others, too; move the input's files into a folder of their own"
                )
            folders |= {name} if brought.isdisjoint(upwards(name)) else set()
    if sum(len(os.fsencode(path)) + 1 for path in files) > MOST_BYTES:
        raise ContainerError(
            f"{len(files)} files that the run reads are directly in {os.path.dirname(min(files))} or another folder "
            f"that is not bound as a whole, because it holds other files, too; move them into a folder of their own"
        )
    wanted = sorted(files) + sorted(_gathered(folders, apart))
    return [*binds, *(Bind(path, path, read_only=True) for path in wanted)]


def _named_by_settings(run: Run, apart: set[str], known: Known) -> Iterator[str]:
    base = run.plan.search_path
    for value in run.plan.texts():
        # A prompt may begin with ~, and be too long for a path: these functions do not raise for that.
        path = os.path.normpath(os.path.join(base, os.path.expanduser(value)))
        if path != base and os.path.exists(path) and apart.isdisjoint(names(path, known)):
            yield path


def _linked_in(paths: Iterable[str]) -> Iterator[str]:
    """The links in these folders; every file of a Hugging Face snapshot is one.

    Links into a folder that may not be entered are left out; pathlib raises for them.
    """
    for path in paths:
        if os.path.isdir(path) and os.access(path, os.R_OK):
            links = (entry.path for entry in os.scandir(path) if entry.is_symlink())
            yield from (link for link in links if os.path.exists(link))


def _gathered(folders: set[str], apart: set[str]) -> set[str]:
    """The folders; if there are too many, the deepest ones are replaced by their parents."""
    depth = max((folder.count("/") for folder in folders), default=0)
    while len(folders) > MANY_FOLDERS and depth > 1:
        above = {folder: folder.rpartition("/")[0] for folder in folders if folder.count("/") == depth}
        folders = {folder if above.get(folder, "/") in {"/", *apart} else above[folder] for folder in folders}
        depth -= 1
    return folders
