"""The matches of a glob; every error is raised.

`glob.glob` and `Path.glob` treat a folder that cannot be listed as empty: its files would be missing from an input
without notice.
"""

from __future__ import annotations

import errno
import fnmatch
import glob
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import TypeVar

from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, list_entries, retried

_NO_SUCH = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
"""Errors of names that do not match: one that does not exist, one below a file, and one below a link to itself."""
_ANY_DEPTH = "**"

_T = TypeVar("_T")


def matches(pattern: str, folder: os.PathLike[str] | str) -> set[str]:
    """The paths that a glob matches below `folder`, or anywhere if it is absolute; empty if there is no such folder.

    As with `glob.glob`, `**` matches any depth, links are followed (circles are not), and a name that begins with a dot
    matches only a pattern that does. A folder that cannot be listed or entered raises OSError with its name.
    """
    parts = PurePosixPath(pattern).parts
    found = {os.fspath(folder)}
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        found = {path for each in found for path in _step(each, part, is_last)}
    return found - {os.fspath(folder)}


def _step(folder: str, part: str, is_last: bool) -> Iterator[str]:
    """The names in a folder that match a part of the pattern; only folders if another part follows."""
    if part == _ANY_DEPTH:
        return _below(folder, is_last, frozenset())
    if glob.has_magic(part):
        return _named(folder, part, is_last)
    path = os.path.join(folder, part)  # the pattern may have a million matches
    return iter([path] if _is_there(path, folder, is_last) else [])


def _named(folder: str, part: str, is_last: bool) -> Iterator[str]:
    is_meant = re.compile(fnmatch.translate(part)).match
    for entry in _entries(folder):
        if not is_meant(entry.name) or (_is_hidden(entry) and not part.startswith(".")):
            continue
        if is_last or _is_folder(entry):
            yield entry.path


def _below(folder: str, is_last: bool, above: frozenset[tuple[int, int]]) -> Iterator[str]:
    """The folder and those below, with their files if `is_last`; `above` are the folders that it lies in."""
    status = _look(lambda: os.stat(folder))
    if status is None or (status.st_dev, status.st_ino) in above:
        return
    above |= {(status.st_dev, status.st_ino)}
    yield folder
    for entry in _entries(folder):
        if _is_hidden(entry):
            continue
        if _is_folder(entry):
            yield from _below(entry.path, is_last, above)
        elif is_last:
            yield entry.path


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        return list_entries(folder, BRIEF_PATIENCE_S)
    except OSError as error:
        if error.errno in _NO_SUCH:
            return []
        raise


def _is_hidden(entry: os.DirEntry[str]) -> bool:
    return entry.name.startswith(".")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder, or a link to one; OSError if the target of a link may not be looked at."""
    return bool(_look(entry.is_dir))


def _is_there(path: str, folder: str, is_last: bool) -> bool:
    """Whether a name exists, and is a folder unless it is the last part of the pattern."""
    try:
        status = _look(lambda: os.lstat(path) if is_last else os.stat(path))
    except OSError as error:
        error.filename = folder  # it may not be entered
        raise
    return status is not None and (is_last or stat.S_ISDIR(status.st_mode))


def _look(operation: Callable[[], _T]) -> _T | None:
    """The result of `operation`; None for a name that does not exist."""
    try:
        return retried(operation, BRIEF_PATIENCE_S)
    except OSError as error:
        if error.errno in _NO_SUCH:
            return None
        raise
