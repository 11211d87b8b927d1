"""Whether a node has room for the temporary files of calls."""

from __future__ import annotations

import os
from pathlib import Path

LEAST_BYTES = 1 << 20
"""With less room even calls whose files are small fail."""


def why_unusable(folder: Path) -> str | None:
    """Why no call can use the folder for temporary files, in words; None if calls can."""
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
