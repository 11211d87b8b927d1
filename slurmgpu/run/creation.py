"""Make run directories: choose a free name, refuse what exists, and protect what is executed from other users."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from slurmgpu.errors import SlurmGPUError
from slurmgpu.run import private
from slurmgpu.run.directory import Run
from slurmgpu.run.frozen_plan import Plan
from slurmgpu.util.atomic_files import beside, fsync_dir, write_bytes
from slurmgpu.util.own_files import OTHERS_WRITE
from slurmgpu.util.shared_files import exists, is_folder, list_names, make_folder, move, replace, retried, status_of


def create_run(folder: Path, plan: Plan, files: Sequence[Path]) -> Run:
    """Make the run directory in one step; refuse an existing one.

    `files`, and folders of files, are moved into it. If two processes make the same run at once, one succeeds.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with beside(folder) as unfinished:
        make_folder(unfinished)
        Run(unfinished, plan).make_folders()
        for file in files:
            if file.is_dir():
                make_folder(unfinished / file.name)
                for inner in sorted(file.iterdir()):
                    move(inner, unfinished / file.name / inner.name)
                fsync_dir(unfinished / file.name)
            else:
                move(file, unfinished / file.name)
        text = json.dumps(private.keep(unfinished, private.PLAN, plan.to_json()), indent=2, ensure_ascii=False) + "\n"
        mode = stat.S_IMODE(retried((unfinished / "logs").stat).st_mode) & 0o644
        write_bytes(unfinished / "run.json", text.encode("utf-8", "backslashreplace"), mode=mode)
        protect(unfinished)
        try:
            replace(unfinished, folder)  # fails on a directory that is not empty
        except OSError:
            refuse_existing(folder)
            raise
    fsync_dir(folder.parent)
    return Run(folder, plan)


def protect(folder: Path) -> None:
    """Protect what is executed, if this user owns the run directory and others may write in it.

    run.json, submissions.jsonl, and logs/ with Submitit's scripts and pickles say what is run. Others may add files,
    shards and records, but cannot remove or rename the owner's files in the directory, or write to logs/.
    """
    found = retried(folder.stat)
    if found.st_uid != os.geteuid():
        return
    for name in ("logs", "run.json", "submissions.jsonl"):
        path = folder / name
        if exists(path) and (status := retried(path.stat)).st_uid == os.geteuid():
            mode = stat.S_IMODE(status.st_mode) & ~OTHERS_WRITE
            if mode != stat.S_IMODE(status.st_mode):  # a file system without modes refuses to be told one
                retried(partial(path.chmod, mode))
    if (mode := stat.S_IMODE(found.st_mode)) & OTHERS_WRITE:
        retried(lambda: folder.chmod(mode | stat.S_ISVTX))


def free_run_dir(folder: Path, name: str) -> Path:
    """The run directory of that name in a folder, or the next free one: `count`, `count-2`."""
    names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    return next(path for each in names if status_of(path := folder / each) is None)


@contextlib.contextmanager
def reserved_run_dir(folder: Path, name: str) -> Iterator[Path]:
    """Reserve the free run directory of that name for the block, as an empty folder that nobody else takes.

    If no run is in it at the end, it is removed, and so is `folder` if this made it.
    """
    made = not exists(folder)
    while True:
        path = free_run_dir(folder, name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.mkdir()
            break
        except FileExistsError:
            if not is_folder(folder):
                raise
        except FileNotFoundError:  # another process has removed the folder that it made
            continue
    try:
        yield path
    finally:
        for each in (path, *([folder] if made else [])):
            with contextlib.suppress(OSError):  # it is not empty
                each.rmdir()


def refuse_existing(folder: Path) -> None:
    """Raise SlurmGPUError if `folder` holds a run, or anything else."""
    if status_of(folder / "run.json") is not None:
        typed = shlex.quote(str(folder))
        raise SlurmGPUError(
            f"{folder} already holds a run. `slurmgpu resubmit {typed}` computes what it lacks, and "
            f"`slurmgpu status {typed}` shows it. For another run, name another directory with --run-dir (in Python: "
            f"run_dir=, or name= of slurmgpu.map)."
        )
    if status_of(folder) is not None and not (is_folder(folder) and not list_names(folder)):
        raise SlurmGPUError(f"{folder} exists and is not a run directory; name another with --run-dir.")
