"""The files that a snapshot keeps, and those among them that are still to be read."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slurmgpu.code.locator import Locator
from slurmgpu.code.snapshot_names import SnapshotNames
from slurmgpu.code.snapshots import SourceFile
from slurmgpu.code.trace_notes import TraceNotes

_MANY_FILES = 2000
"""A package with more files is taken as foreign, such as PyTorch built from source."""


@dataclass
class KeptFile:
    """A file of the user's; what is known of it grows while others are followed."""

    path: str
    name: str
    """Its name in the snapshot."""
    top: str | None
    """Its package, if that is outside of the run file's folder."""
    modules: list[str] = field(default_factory=list)
    needed: bool = False
    """Whether it is imported unconditionally, so that the run fails if it is not valid."""
    is_script: bool = False
    is_started: bool = False
    """Whether the command starts it, itself or by a shell, in the run file's folder."""
    source: bytes | None = None
    """Its content, once it is read."""
    digest: str = ""

    @property
    def package(self) -> str:
        """The package whose modules its relative imports name; "" for a script."""
        module = self.modules[0] if self.modules else ""
        return module if self.path.endswith("/__init__.py") else module.rpartition(".")[0]


class KeptFiles:
    """Gives each file a name in the snapshot, and hands it out once to be read."""

    def __init__(self, folder: Path, locator: Locator, notes: TraceNotes) -> None:
        self._locator, self._notes = locator, notes
        self._names = SnapshotNames(folder)
        self._files: dict[str, KeptFile] = {}
        self._unread: list[KeptFile] = []
        self._n_modules: Counter[str | None] = Counter()

    def __contains__(self, path: str) -> bool:
        return path in self._files

    def add_module(self, path: str, module: str | None, *, needed: bool) -> None:
        """Add a module's file. `module` is its full name; None for a file that the run file names by path."""
        file = self._add(path, module)
        file.needed |= needed
        if module is not None and module not in file.modules:
            file.modules.append(module)

    def add_script(self, path: Path, *, is_started: bool) -> None:
        """Add a program in any language."""
        self._names.add_script(path)
        file = self._add(str(path), None)
        file.is_script = True
        file.is_started |= is_started

    def unread(self) -> Iterator[KeptFile]:
        """The files that are still to be read, also those that are added meanwhile."""
        while self._unread:
            # Needed files first: whether a file is needed must be known when it is read.
            file = self._unread.pop(next((i for i, each in enumerate(self._unread) if each.needed), 0))
            if not self._is_dropped(file):
                yield file

    def source_files(self) -> tuple[SourceFile, ...]:
        """The files that were read, by path."""
        return tuple(
            SourceFile(
                file.name,
                file.path,
                tuple(sorted(file.modules)),
                file.digest,
                hashlib.sha256(file.source).hexdigest(),
                file.source,
                self._locator.inside(file.path, file.top),
            )
            for _, file in sorted(self._files.items())
            if file.source is not None and not self._is_dropped(file)
        )

    def _add(self, path: str, module: str | None) -> KeptFile:
        if path not in self._files:
            top = None if module is None else self._locator.top_of(module)
            self._files[path] = KeptFile(path, self._names.new(Path(path), module), top)
            self._unread.append(self._files[path])
            if top is not None:
                self._count(top)
        return self._files[path]

    def _count(self, top: str) -> None:
        """Count a module of a package from elsewhere, and drop the package if it has too many."""
        self._n_modules[top] += 1
        if self._n_modules[top] == _MANY_FILES + 1:
            self._locator.give_up(top)
            self._notes.leave_out(
                f"{top} has more than {_MANY_FILES:,} modules: they are not in the snapshot of the code."
            )

    def _is_dropped(self, file: KeptFile) -> bool:
        return self._n_modules[file.top] > _MANY_FILES
