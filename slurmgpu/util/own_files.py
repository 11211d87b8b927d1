"""Files and folders that only this user, or root, can have written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from slurmgpu.util.regular_files import UnusableFileError
from slurmgpu.util.shared_files import read_with_status, status_of_new_file

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
"""The bits of a mode that let users other than the owner write."""


def read_own(path: os.PathLike[str] | str, *, max_bytes: int) -> bytes:
    """The content of a regular file that only this user or root can have written; else UnusableFileError."""
    content, status = read_with_status(path, max_bytes=max_bytes)
    if why_not := why_not_own(status, Path(path).parent):
        raise UnusableFileError(path, why_not)
    return content


def why_not_own(status: os.stat_result, folder: Path) -> str | None:
    """Why another user may have written a file in a folder; None if only this user or root can have."""
    if not is_own(status.st_uid, folder):
        return f"it is owned by the user with uid {status.st_uid}, not by you"
    # The mode of a link says nothing. With an ACL the group's bits are the mask, which limits what it grants.
    if status.st_mode & OTHERS_WRITE and not stat.S_ISLNK(status.st_mode):
        return f"users other than its owner may write it (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def is_own(uid: int, folder: Path) -> bool:
    """Whether a file in a folder with this owner uid belongs to this user or root."""
    return uid in (os.geteuid(), 0) or uid == _uid_in(folder)


def is_own_folder(path: Path) -> bool:
    """Whether there is a folder that this user alone may write, on a disk of this machine."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & OTHERS_WRITE


def _uid_in(folder: Path) -> int | None:
    """The owner of files that this user creates in a folder, which a file server may map; None if unknown."""
    made = status_of_new_file(folder)
    return None if made is None else made.st_uid
