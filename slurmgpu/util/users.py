"""Names of users on this machine."""

from __future__ import annotations

import os
import pwd


def name_of(uid: int) -> str | None:
    """The name of a user; None if it has none here, as in some containers."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def own_name() -> str:
    """The user of this process, also for Slurm. LOGNAME and USER may be another's: `su` and `sudo -E` keep them."""
    return name_of(os.getuid()) or str(os.getuid())
