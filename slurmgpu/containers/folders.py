"""A task's own folder on the node's disk: in use while its lock is held, and removed with the task."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import stat
from pathlib import Path
from typing import IO

LOCK = "lock"

_locks: dict[Path, IO[bytes]] = {}


def task_folder(scratch: Path) -> Path:
    """The folder of this task under `scratch`: a private home, a strict container's /tmp."""
    return scratch / "tasks" / f"{os.uname().nodename}-{os.getpid()}-{_token(os.getpid())}"


@functools.cache
def _token(pid: int) -> str:
    # Nodes, or PID namespaces of a node, may share scratch: their processes may have the same pid.
    return os.urandom(4).hex()


def take_task_folder(scratch: Path) -> Path:
    """Make the task's folder with an empty `home` in it; folders of dead tasks of this node are removed."""
    own = task_folder(scratch)
    _leave(own)
    own.parent.mkdir(exist_ok=True)
    for folder in own.parent.iterdir():
        # Not those of other nodes: many file systems do not share locks.
        if folder.name.rsplit("-", 2)[0] == os.uname().nodename:
            _remove_if_dead(folder)
    # It gets its name once it has its lock: without one, another task would remove it.
    new = own.with_name(f".{own.name}")
    (new / "home").mkdir(parents=True)
    lock = open(new / LOCK, "wb")  # noqa: SIM115 - it is held until the task leaves
    with contextlib.suppress(OSError):  # a file system without locks: no task gets one, and nothing is removed
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    new.rename(own)
    _locks[own] = lock
    return own


def leave_task_folders() -> None:
    """Remove the folders that this process took; never an error."""
    for own in list(_locks):
        if own == task_folder(own.parent.parent):  # not those of the process that forked this one
            _leave(own)


def _leave(own: Path) -> None:
    lock = _locks.pop(own, None)
    if lock is not None:
        _remove_locked(own, lock)


def _remove_if_dead(folder: Path) -> None:
    # "ab": a task that was killed while it removed its folder may have left one without a lock.
    with contextlib.suppress(OSError), open(folder / LOCK, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_locked(folder, lock)


def _remove_locked(folder: Path, lock: IO[bytes]) -> None:
    remove(folder)
    lock.close()
    with contextlib.suppress(OSError):
        folder.rmdir()  # NFS keeps an open file in it under another name


def remove(path: Path) -> None:
    """Remove a file, or a folder and its content; no error if that fails."""
    if not path.is_dir() or path.is_symlink():
        with contextlib.suppress(OSError):
            path.unlink()
        return
    _open_up(path)
    for folder, names, _ in os.walk(path):
        for name in names:
            _open_up(Path(folder, name))
    shutil.rmtree(path, ignore_errors=True)


def _open_up(folder: Path) -> None:
    # An image, or a cache, may hold folders that their owner may not write.
    with contextlib.suppress(OSError):
        if not folder.is_symlink():
            folder.chmod(stat.S_IRWXU)
