"""Replace an earlier probe or look by a new one."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors.live_tasks import refuse_alive
from slurmgpu.run.directory import Run
from slurmgpu.run.lock import RUN_LOCK, is_left_by_dead, run_lock
from slurmgpu.util.atomic_files import partial_path
from slurmgpu.util.shared_files import exists, is_folder, list_names, remove, replace, retried, time_in
from slurmgpu.util.users import name_in_words

PLANNED = ".planned"
"""The file that marks a run directory to be submitted by hand."""
MAKING_S = 60.0
"""A run that is older than this and has no submission is no longer being submitted."""


def check_room(folder: Path, kind: str) -> Run | None:
    """The earlier probe or look at `folder`, if any. SlurmGPUError for anything else, and if it may be running."""
    if folder.is_symlink():
        raise SlurmGPUError(
            f"{folder}, where the {kind} would go, is a symbolic link; only a directory can be replaced. "
            f"Remove the link, or name another --run-dir."
        )
    if not exists(folder):
        return None
    if (owner := retried(folder.stat).st_uid) != os.geteuid() != 0:
        raise SlurmGPUError(
            f"{folder}, where the {kind} would go, belongs to {name_in_words(owner)}. Name another --run-dir."
        )
    run = Run.open(folder) if exists(folder / "run.json") else None
    if run is None or not (run.plan.is_probe if kind == "probe" else run.plan.look == kind):
        raise SlurmGPUError(
            f"{folder}, where the {kind} would go, exists and is not a {kind}. Move it, or name another --run-dir."
        )
    assert run.status is not None
    is_submitted = bool(run.submissions()) or exists(folder / PLANNED)
    if not is_submitted and time_in(folder) - run.status.st_mtime < MAKING_S:
        raise SlurmGPUError(
            f"{folder} was made less than {MAKING_S:.0f} s ago and is not submitted yet: another process may be "
            f"submitting it. Try again in a minute, or name another --run-dir."
        )
    refuse_alive(run, f"{kind} again", otherwise="name another --run-dir")
    return run


@contextlib.contextmanager
def room(folder: Path, kind: str) -> Iterator[None]:
    """Make room at `folder` for the block, which makes and submits a probe or a look. Raises as `check_room`.

    An earlier one is renamed, and removed at the end. If the block raises and leaves nothing at `folder`, the earlier
    one is restored.
    """
    remove_left(folder)
    if check_room(folder, kind) is None:
        yield
        return
    aside = partial_path(folder)
    with run_lock(folder, "removing") as lock:
        check_room(folder, kind)
        lock.check()
        replace(folder, aside)  # with its lock, which tells who left it if this process is killed
    try:
        yield
    except BaseException:
        if exists(folder):
            shutil.rmtree(aside, ignore_errors=True)
        else:
            remove(aside / RUN_LOCK)
            replace(aside, folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)  # on NFS what is open elsewhere stays until it is closed


def remove_left(folder: Path) -> None:
    """Remove earlier probes or looks of `folder` that killed processes of this user have renamed and left.

    Only if such a process is known to be dead.
    """
    if not exists(folder.parent):
        return
    for name in list_names(folder.parent):
        left = folder.with_name(name)
        is_aside = name.startswith(f".{folder.name}.") and name.endswith(".partial") and is_folder(left)
        if is_aside and retried(left.stat).st_uid == os.geteuid() and is_left_by_dead(left):
            shutil.rmtree(left, ignore_errors=True)
