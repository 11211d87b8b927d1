"""Whether a node has room for the temporary files of calls."""

from __future__ import annotations

import os
from pathlib import Path

LEAST_BYTES = 1 << 20
"""With less room, calls fail whose files are small as well."""


def why_unusable(folder: Path) -> str | None:
    """Why the folder of temporary files is of no use to any call, in words; None if it is of some."""
    named = f"the folder for temporary files, {folder},"
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return f"{named} cannot be used: {error.strerror}"
    if found.f_flag & os.ST_RDONLY:
        return f"{named} cannot be written"
    if found.f_bavail * found.f_frsize < LEAST_BYTES or (found.f_files and not found.f_favail):
        return f"{named} is full"
    return None
