"""Files that are read again only if they have changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmgpu.util.regular_files import open_file
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, retried

RELOOK_S = 10.0
"""A file that seems unchanged is opened after this time."""


class UpToDate:
    """The result of `read`, which is called again when its file or folder has changed."""

    def __init__(self, path: Path, read: Callable[[], Any]) -> None:
        self._path, self._read = path, read
        self._mark: object = object()
        self._looked = 0.0
        self._value: Any = None

    def get(self, now: float) -> Any:
        """The value at the moment `now`."""
        mark, is_due = mark_of(self._path), abs(now - self._looked) > RELOOK_S
        if mark != self._mark or (is_due and _may_have_changed(self._path, mark)):
            self._value, self._mark, self._looked = self._read(), mark, now
        elif is_due:
            self._looked = now
        return self._value


def mark_of(path: Path | os.DirEntry[str]) -> object:
    """A value that differs after a file was written again; None without a file."""
    try:
        return _mark(retried(path.stat, BRIEF_PATIENCE_S))
    except FileNotFoundError:
        return None


def _mark(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_mtime_ns, found.st_size, found.st_ino


def _may_have_changed(path: Path, mark: object) -> bool:
    """Whether a file's mark differs from that of `stat`; True for folders, whose times are coarse."""
    try:
        # NFS answers stat from its cache for up to a minute; opening a file asks the server.
        with open_file(path) as file:
            return _mark(os.fstat(file.fileno())) != mark
    except FileNotFoundError:
        return mark is not None
    except OSError:  # a folder, or an error that `read` reports
        return True
