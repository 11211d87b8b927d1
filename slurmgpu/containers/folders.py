"""Folders on a node's disk: one that a task has for itself, in use as long as a lock says so and gone with its task."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import IO

LOCK = "lock"

_locks: dict[Path, IO[bytes]] = {}


def task_folder(scratch: Path) -> Path:
    """The folder under `scratch` that this task has for itself: a private home, a strict container's /tmp."""
    return scratch / "tasks" / f"{os.uname().nodename}-{os.getpid()}-{_token(os.getpid())}"


@functools.cache
def _token(pid: int) -> str:
    # Scratch may be shared by nodes, or by PID namespaces of one: their processes may have equal numbers.
    return secrets.token_hex(4)


def take_task_folder(scratch: Path) -> Path:
    """The task's folder, new, with an empty `home` in it; what dead tasks of this node left goes first."""
    own = task_folder(scratch)
    _leave(own)
    own.parent.mkdir(exist_ok=True)
    for folder in own.parent.iterdir():
        # Locks of another node cannot be trusted: they are its own on many a file system.
        if folder.name.rsplit("-", 2)[0] == os.uname().nodename:
            _remove_if_dead(folder)
    # It gets its name when it has its lock: until then another task would take it for a dead one's.
    new = own.with_name(f".{own.name}")
    (new / "home").mkdir(parents=True)
    lock = open(new / LOCK, "wb")  # noqa: SIM115 - it is held until the task leaves
    with contextlib.suppress(OSError):  # a file system without locks: nobody gets it, and nothing is removed
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    new.rename(own)
    _locks[own] = lock
    return own


def leave_task_folders() -> None:
    """Remove what this process took, with all that is in it; never an error."""
    for own in list(_locks):
        if own == task_folder(own.parent.parent):  # not what a process took of which this one is a fork
            _leave(own)


def _leave(own: Path) -> None:
    lock = _locks.pop(own, None)
    if lock is not None:
        _remove_locked(own, lock)


def _remove_if_dead(folder: Path) -> None:
    # "ab": a task that was killed while it removed its folder may have left it without a lock.
    with contextlib.suppress(OSError), open(folder / LOCK, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_locked(folder, lock)


def _remove_locked(folder: Path, lock: IO[bytes]) -> None:
    remove(folder)
    lock.close()
    with contextlib.suppress(OSError):
        folder.rmdir()  # NFS keeps an open file in it under another name


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, as far as that can be done; no error if it is not there."""
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
    # An image, or a cache, may hold folders that even their owner may not change.
    with contextlib.suppress(OSError):
        if not folder.is_symlink():
            folder.chmod(stat.S_IRWXU)
