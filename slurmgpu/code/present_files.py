"""Check whether the files of a snapshot have changed on disk, and give programs the snapshot's copies.

The worker imports modules from the snapshot. A program that a workload starts imports them from disk, and code reads
configurations there. Once a file of the snapshot has changed, programs run from its copies. Once a file that code reads
has changed, rows count as computed by unknown code. The worker imports this: standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

from slurmgpu.code.snapshots import ReadFile, SourceFile
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, retried
from slurmgpu.util.users import resolved

MANY_BESIDE = 2000
"""A folder with more entries holds data: nothing in it is linked for the copy of a script."""

_Signature = tuple[int, int, int]

log = logging.getLogger(__name__)


class PresentFiles:
    """Checks the `files` of a snapshot, by path, and those that its code `read`s from disk; `copies` is its folder."""

    def __init__(self, copies: Path, files: Mapping[str, SourceFile], read: Iterable[ReadFile]) -> None:
        self._copies, self._files, self._read = copies, files, [*read]
        self._same: dict[str, _Signature] = {}
        self._linked: set[str] = set()
        self._has_changed = False
        self._read_and_changed: set[str] = set()
        self._reads_again = False
        self._is_unknown = False

    def look_at_read_files(self) -> list[str]:
        """Log and return the files that code reads from disk and that have changed since the last call.

        Call it after code has read them: a file that is checked earlier may change before it is read.
        """
        found = []
        for each in self._read:
            if each.path not in self._read_and_changed and not self._is_same(
                each.path, partial(_has_sha256, each.sha256)
            ):
                self._read_and_changed.add(each.path)
                found.append(each.path)
        if found:
            log.warning("changed since it was submitted, so rows are computed by unknown code: %s", ", ".join(found))
        return found

    def expect_reads_again(self) -> None:
        """Check the files that code reads after each shard, because it starts programs that read them again."""
        self._reads_again = True

    def note_unknown_code(self) -> None:
        """Mark the shard in progress as computed by unknown code: an edited module may have been imported."""
        self._is_unknown = True

    def is_code_known(self, *, looks: bool) -> bool:
        """Whether the code of the snapshot computed the last shard.

        With `looks`, or after `expect_reads_again`, the files that code reads from disk are checked first.
        """
        if looks or self._reads_again:
            self.look_at_read_files()
        was_unknown, self._is_unknown = self._is_unknown, False
        return not (was_unknown or self._read_and_changed)

    def as_submitted(self, path: Path) -> Path:
        """The path of a script to run: its own or, once a file of the snapshot has changed, that of its copy."""
        file = self._files.get(str(path))
        if file is None or self._is_as_submitted():
            return path
        self._link_beside(file)
        return self._copies / file.name

    def python_path(self) -> list[str]:
        """The folders with copies of modules for PYTHONPATH, once a file of the snapshot has changed; none before.

        The folder of a script is not among them, because Python adds it.
        """
        if self._is_as_submitted():
            return []
        files = self._files.values()
        scripts = {(self._copies / file.name).parent for file in files if not file.modules}
        for file in [file for file in files if not file.modules]:
            self._link_beside(file)
        roots = {(self._copies / file.name).parents[_depth(file)]: None for file in files if file.modules}
        return [str(root) for root in roots if root not in scripts]

    def has_just_changed(self) -> bool:
        """Whether a file of the snapshot has changed and no earlier call noticed a change."""
        return not self._has_changed and not self._is_as_submitted()

    def _link_beside(self, script: SourceFile) -> None:
        if script.path not in self._linked:
            self._linked.add(script.path)
            _link_what_is_beside(script, self._copies, self._files.values())

    def _is_as_submitted(self) -> bool:
        """Whether no file has changed so far; False stays False, even if the file is restored."""
        if not self._has_changed:
            files = self._files.values()
            self._has_changed = not all(self._is_same(each.path, each.source.__eq__) for each in files)
        return not self._has_changed

    def _is_same(self, path: str, is_its: Callable[[bytes], bool]) -> bool:
        """Whether a file on disk has its former content. It is read again only if its inode, size or time changes."""

        def look() -> bool:
            with open(path, "rb") as opened:  # opening makes a network file system check for changes
                signature = _signature(opened)
                if self._same.get(path) != signature and is_its(opened.read()):
                    self._same[path] = signature
            return self._same.get(path) == signature

        try:
            return retried(look, BRIEF_PATIENCE_S)
        except OSError:
            return False


def _has_sha256(sha256: str, content: bytes) -> bool:
    return hashlib.sha256(content).hexdigest() == sha256


def _signature(opened: BinaryIO) -> _Signature:
    status = os.fstat(opened.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns


def _link_what_is_beside(script: SourceFile, snapshot: Path, files: Iterable[SourceFile]) -> None:
    """Link what lies beside the files of a snapshot into it, so that copies of scripts and modules find it.

    Errors are ignored: without permission to write there are no links.
    """
    here = snapshot.resolve()
    for folder, original in sorted(_folders_with_files(script, files).items()):
        with contextlib.suppress(OSError):
            for path in _entries_to_link(original, here):
                with contextlib.suppress(FileExistsError):
                    (snapshot / folder / path.name).symlink_to(path)


def _folders_with_files(script: SourceFile, files: Iterable[SourceFile]) -> dict[Path, Path]:
    """The folders of these files by their name in the snapshot: those above scripts, and those of modules."""
    pairs: dict[Path, Path] = {}
    is_of_base = script.path.endswith(f"{os.sep}{script.name}")
    base = Path(script.path.removesuffix(script.name)) if is_of_base else None
    for file in files:
        name, path = Path(file.name), Path(file.path)
        if base is not None and path == base / name:
            pairs |= {parent: base / parent for parent in name.parents}
        else:
            pairs |= {name.parents[above]: path.parents[above] for above in range(_depth(file))}
    return pairs


def _entries_to_link(folder: Path, snapshot: Path) -> list[Path]:
    """The entries of a folder; none of them if there are many, and none that leads to the snapshot."""
    with os.scandir(folder) as entries:
        found = [Path(entry.path) for entry in entries if entry.name != "__pycache__"]
    if len(found) > MANY_BESIDE:
        return []
    # A walk that follows links would not end.
    return [path for path in found if not snapshot.is_relative_to(resolved(path))]


def _depth(file: SourceFile) -> int:
    """The number of folders above a module's file that are packages, its own folder included."""
    dots = min((name.count(".") for name in file.modules), default=0)
    return dots + (1 if file.modules and Path(file.path).name == "__init__.py" else 0)
