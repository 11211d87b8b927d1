"""Find the files and modules that texts in code name, in the folders that the code knows."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from pathlib import Path

from slurmgpu.code.file_kinds import CONFIGURATIONS, PROGRAMS, TEXTS
from slurmgpu.code.files_in_source import DOTTED, FilesInSource
from slurmgpu.code.read_files import ReadFiles
from slurmgpu.code.trace_notes import TraceNotes
from slurmgpu.code.user_code import UserCode
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, is_file, is_folder
from slurmgpu.util.users import expanded

NAMED = re.compile(r"([^\s:][^:]*):[A-Za-z_][\w.]*")
"""A setting that names a class or a function in a module or a file: `digits.py:Digits`."""
_MANY_CONFIGURATIONS, MANY_BESIDE_CONFIGURATIONS = 1000, 20_000
_OF_A_RUN = frozenset({"run.json", ".hydra", "multirun.yaml"})
"""Files in the folder of a run, of slurmgpu or of Hydra."""
_OF_TRACKERS = frozenset({"wandb", "mlruns", "lightning_logs", "__pycache__"})
_OF_RESOURCES = frozenset({"importlib.resources", "importlib_resources", "pkgutil"})
"""Modules that read the files of a package by its name."""
_FOLDER = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)*/?")
_DEEPEST = 3
"""How many folders, each named in the one before, are followed."""
_MANY_NAMED = 100
"""A folder in which a file names more holds data, such as images by their classes."""
_READ = CONFIGURATIONS | PROGRAMS | TEXTS


class NamedFiles:
    """Looks for what texts name: a file that code reads, or a module by a dotted name."""

    def __init__(self, folder: Path, code: UserCode, read: ReadFiles, notes: TraceNotes) -> None:
        self._folder, self._code, self._read, self._notes = folder, code, read, notes
        self._listed: dict[Path, frozenset[str]] = {}

    def add_text(self, text: str, folders: Sequence[Path], suffixes: frozenset[str] = _READ) -> None:
        """Add the file in one of the folders, or the module by a dotted name, that a text may name."""
        if Path(text).suffix in suffixes and any(self._read.add(folder / text) for folder in folders):
            return
        named = NAMED.fullmatch(text)
        if DOTTED.fullmatch(name := f"{named[1]}.{text[named.end(1) + 1 :]}" if named else text):
            self._code.add_dotted(name)

    def add_all(self, file: Path, named: FilesInSource, n_above: int, imported: Collection[str]) -> None:
        """Add what a Python file reads: in its folder, `n_above` above it, or in packages that it has `imported`."""
        within = [folder for folder in file.parents if folder.is_relative_to(self._folder)]
        above = [folder for folder in file.parents[len(within) : n_above] if not _has_home(folder)]
        folders = tuple(dict.fromkeys((file.parent, *within, *above, self._folder)))
        texts = sorted(named.read_texts())
        inner = self._folders_named(texts, folders)
        if not _OF_RESOURCES.isdisjoint(imported):
            inner += [folder for name in sorted({*imported, *texts}) for folder in self._code.folders_of(name)]
        for text in texts:
            self.add_text(text, folders)
            if Path(text).suffix in _READ:
                for folder in inner:
                    self._read.add(folder / text)
        for text in sorted(named.config_folders):
            for path in _configurations_in(file.parent / text, self._notes):
                self._read.add(path)

    def _folders_named(self, texts: Iterable[str], folders: Sequence[Path]) -> list[Path]:
        """The folders that texts name in others, and in those: `DATA = HERE / "data"`, then `DATA / "prompts"`."""
        names = {text for text in texts if _FOLDER.fullmatch(text)} - _OF_TRACKERS
        found: dict[Path, None] = {}
        for _ in range(_DEEPEST):
            for folder in (*folders, *found):
                present = self._names_in(folder)
                paths = [folder / name for name in sorted(names) if name.partition("/")[0] in present]
                inner = [path for path in paths if is_folder(path, BRIEF_PATIENCE_S)]
                if len(inner) <= _MANY_NAMED:
                    found |= dict.fromkeys(inner)
        return [each for each in found if each not in folders and not is_file(each / "run.json", BRIEF_PATIENCE_S)]

    def _names_in(self, folder: Path) -> frozenset[str]:
        """The names of what is in a folder; none in one that holds data, or a run. It is listed once."""
        if folder not in self._listed:
            names = set[str]()
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                names.update(entry.name for entry in islice(entries, MANY_BESIDE_CONFIGURATIONS + 1))
            is_named = len(names) <= MANY_BESIDE_CONFIGURATIONS and not names & _OF_A_RUN
            self._listed[folder] = frozenset(names) if is_named else frozenset()
        return self._listed[folder]


def _has_home(folder: Path) -> bool:
    """Whether a folder is the user's home, which may be a link, or above it."""
    home = expanded("~")
    return any(each.is_relative_to(folder) for each in (home, Path(os.path.realpath(home))))


def _configurations_in(folder: Path, notes: TraceNotes) -> list[Path]:
    """The configurations in a folder of Hydra's, which may also hold data and the files of earlier runs."""
    found: list[Path] = []
    n_files = 0
    for where, folders, names in os.walk(folder, onerror=notes.leave_out_folder):
        if Path(where) != folder and _OF_A_RUN.intersection(folders + names):
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _OF_TRACKERS)
        found += [Path(where, name) for name in sorted(names) if name.endswith((".yaml", ".yml"))]
        n_files += len(names)
        if len(found) > _MANY_CONFIGURATIONS or n_files > MANY_BESIDE_CONFIGURATIONS:
            notes.leave_out(
                f"{folder} has many files, so it is not checked whether all configurations in it stay unchanged."
            )
            break
    return found[:_MANY_CONFIGURATIONS]
