"""Files that are looked at again and again: what they hold is read anew only if they have changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

RELOOK_S = 10.0
"""A folder is listed anew after this time even if it seems unchanged: the time of its last change is a coarse clock."""


class Remembered:
    """What `read` makes of a file or folder, and makes anew when that has changed."""

    def __init__(self, path: Path, read: Callable[[], Any]) -> None:
        self._path, self._read = path, read
        self._mark: object = object()
        self._read_at = 0.0
        self._value: Any = None

    def get(self, now: float) -> Any:
        """The value at the moment `now`."""
        mark = mark_of(self._path)
        if mark != self._mark or abs(now - self._read_at) > RELOOK_S:
            self._value = self._read()
            self._mark, self._read_at = mark, now
        return self._value


def mark_of(path: Path | os.DirEntry[str]) -> object:
    """What is another when a file was written anew; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
