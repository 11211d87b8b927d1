"""The present files of a snapshot on disk: which have changed, and the copies that run instead.

Modules are imported from the snapshot. A program that a workload starts imports them from disk, and code reads
configurations there: once one has changed, programs run by copies, and rows by changed files are by unknown code. The
worker imports this: standard library only.
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

MANY_BESIDE = 2000
"""Nothing is linked for the copy of a script in a folder with more entries: the folder holds data."""

_Signature = tuple[int, int, int]

log = logging.getLogger(__name__)


class PresentFiles:
    """Looks at the files of a snapshot, by path, and at those that its code has `read`; `copies` is its folder."""

    def __init__(self, copies: Path, files: Mapping[str, SourceFile], read: Iterable[ReadFile]) -> None:
        self._copies, self._files, self._read = copies, files, [*read]
        self._same: dict[str, _Signature] = {}
        self._linked: set[str] = set()
        self._has_changed = False
        self._read_and_changed: set[str] = set()
        self._reads_again = False
        self._is_unknown = False

    def look_at_read_files(self) -> list[str]:
        """Look whether the files that code reads where they lie are as they were; log those that are not since now.

        It is called once code has read them: it may read another file later.
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
        """Have the files that code reads looked at after each shard: it starts programs that read them."""
        self._reads_again = True

    def note_unknown_code(self) -> None:
        """Note that the shard which is being computed is by unknown code: an edited module may have been imported."""
        self._is_unknown = True

    def is_code_known(self, *, looks: bool) -> bool:
        """Whether a shard that was just computed is by the code of the snapshot; without `looks`, as far as was seen.

        The files that code reads where they lie are looked at if it `looks`, or reads them for each shard.
        """
        if looks or self._reads_again:
            self.look_at_read_files()
        was_unknown, self._is_unknown = self._is_unknown, False
        return not (was_unknown or self._read_and_changed)

    def as_submitted(self, path: Path) -> Path:
        """A script as it was submitted: the file itself or, once a file of the snapshot has changed, its copy there."""
        file = self._files.get(str(path))
        if file is None or self._is_as_submitted():
            return path
        self._link_beside(file)
        return self._copies / file.name

    def python_path(self) -> list[str]:
        """The folders in which programs find the copies of modules, once a file of the snapshot has changed.

        Python puts the folder of a script on the path by itself.
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
        """Whether a file of the snapshot is seen to have changed for the first time."""
        return not self._has_changed and not self._is_as_submitted()

    def _link_beside(self, script: SourceFile) -> None:
        if script.path not in self._linked:
            self._linked.add(script.path)
            _link_what_is_beside(script, self._copies, self._files.values())

    def _is_as_submitted(self) -> bool:
        """Whether all files are as they were; once one was not, copies are used, whatever comes later."""
        if not self._has_changed:
            files = self._files.values()
            self._has_changed = not all(self._is_same(each.path, each.source.__eq__) for each in files)
        return not self._has_changed

    def _is_same(self, path: str, is_its: Callable[[bytes], bool]) -> bool:
        """Whether a file on disk has the content that it had; it is read once, unless it changes."""

        def look() -> bool:
            with open(path, "rb") as opened:  # a network file system looks again as it opens
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
    """Link what lies beside the files of a snapshot into it, so that the copy of a script finds it by its own place.

    So do modules of packages from elsewhere. Whoever may not write there goes without.
    """
    pairs: dict[Path, Path] = {}
    is_of_base = script.path.endswith(f"{os.sep}{script.name}")
    base = Path(script.path.removesuffix(script.name)) if is_of_base else None
    for file in files:
        name, path = Path(file.name), Path(file.path)
        if base is not None and path == base / name:
            pairs |= {parent: base / parent for parent in name.parents}
        else:
            pairs |= {name.parents[above]: path.parents[above] for above in range(_depth(file))}
    here = snapshot.resolve()
    for folder, original in sorted(pairs.items()):
        with contextlib.suppress(OSError):
            with os.scandir(original) as entries:
                found = [Path(entry.path) for entry in entries if entry.name != "__pycache__"]
            for path in found if len(found) <= MANY_BESIDE else ():
                if not here.is_relative_to(path.resolve()):  # what walks along links would walk for ever
                    with contextlib.suppress(FileExistsError):
                        (snapshot / folder / path.name).symlink_to(path)


def _depth(file: SourceFile) -> int:
    """How many folders above a module's file, its own included, are packages."""
    dots = min((name.count(".") for name in file.modules), default=0)
    return dots + (1 if file.modules and Path(file.path).name == "__init__.py" else 0)
