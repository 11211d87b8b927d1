"""Names and home directories of users on this machine."""

from __future__ import annotations

import os
import pwd
from pathlib import Path


def name_of(uid: int) -> str | None:
    """The name of a user; None if it has none here, as in some containers."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def groups_of(uid: int) -> list[int]:
    """The groups of a user; none if it has no name here."""
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return []
    return os.getgrouplist(user.pw_name, user.pw_gid)


def name_in_words(uid: int) -> str:
    """The name of a user for messages; its number if it has no name here."""
    return name_of(uid) or f"the user with the number {uid}"


def own_name() -> str:
    """The user of this process, also for Slurm. LOGNAME and USER may be another's: `su` and `sudo -E` keep them."""
    return name_of(os.getuid()) or str(os.getuid())


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with `~` or `~NAME` replaced by that user's home; unchanged if there is no such user or home.

    Path.expanduser raises a RuntimeError then, also for a folder whose name begins with ~.
    """
    return Path(os.path.expanduser(path))


def resolved(path: str | os.PathLike[str]) -> Path:
    """The absolute path without `~` and links; one in a circle of links stays, for whoever opens it to say so.

    Path.resolve raises a RuntimeError then, before Python 3.13.
    """
    return Path(os.path.realpath(expanded(path)))
