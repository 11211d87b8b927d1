"""Paths that begin with ~."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with the home of a user in place of its `~` or `~NAME`; as it is where there is no such user, or home.

    Path.expanduser raises a RuntimeError there, also for a folder whose name begins with ~.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111
