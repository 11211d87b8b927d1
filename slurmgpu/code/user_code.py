"""Add the user's modules and scripts to the files that a snapshot keeps, by the names that code imports."""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from slurmgpu.code.imports_in_source import Import, ImportsInSource, PathFolder, all_in, defined_in
from slurmgpu.code.kept_files import KeptFile, KeptFiles
from slurmgpu.code.locator import Locator, is_others
from slurmgpu.code.source_facts import parsed
from slurmgpu.code.trace_notes import TraceNotes
from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, is_file, is_folder, retried
from slurmgpu.util.users import expanded, resolved


class UserCode:
    """The user's own modules and scripts; names of other modules are left to the `locator`.

    `compiled` are the paths of compiled modules, which no snapshot keeps. `namespaces` are packages without an
    `__init__.py`. `first_folders` are searched by programs before those of the snapshot.
    """

    def __init__(self, folder: Path, locator: Locator, kept: KeptFiles, notes: TraceNotes) -> None:
        self.compiled: set[str] = set()
        self.namespaces: set[str] = set()
        self.first_folders: set[Path] = set()
        self._folder, self._locator, self._kept, self._notes = folder, locator, kept, notes
        self._defined: dict[str, frozenset[str]] = {}

    def add_named(self, module: str, *, needed: bool = False) -> None:
        """Add a module or a file that the run file names; SlurmGPUError if a `needed` file does not exist."""
        if not module.endswith(".py"):
            is_name = all(part.isidentifier() for part in module.split("."))
            if is_name and (needed or self._locator.look(module.partition(".")[0]) is not None):
                self.add_module(module, needed=needed)
            return
        path = resolved(self._folder / expanded(module))
        if is_file(path, BRIEF_PATIENCE_S):
            self._locator.search_first(path.parent)
            self._kept.add_module(str(path), None, needed=needed)
        elif needed:
            raise SlurmGPUError(
                f"The file {path} of the run's workload no longer exists. Restore it, or compute with the "
                f"snapshot of the last submission: --code former."
            )

    def add_script(self, path: Path, *, is_started: bool = True) -> None:
        """Add a program in any language, and what it imports if it is Python.

        One that another program starts, which chooses its folder and its options, is not `is_started`.
        """
        self._locator.search_first(path.parent)
        self._kept.add_script(path, is_started=is_started)

    def add_module(self, name: str, *, needed: bool = False) -> None:
        """Add a module and its parent packages, if they are the user's own."""
        for whole in _with_parents(name):
            place = self._locator.locate(whole)
            if place is None:
                return
            if place.path is None:
                self.namespaces.add(whole)
            elif place.path.endswith(".py"):
                self._kept.add_module(place.path, whole, needed=needed)
            else:
                self.compiled.add(place.path)

    def add_dotted(self, name: str) -> None:
        """Add the user's module that a dotted name in a text is, or that defines its last part."""
        top, *below = _with_parents(name)
        place = self._locator.look(top)
        if place is None:
            return
        *_, module = (top, *takewhile(self._locator.locate, below))
        # Many texts with a dot name no module: `train.loss`.
        if module != top or {name.split(".")[1], "*"} & self._names_in(place.path or ""):
            self.add_module(module)

    def add_below(self, packages: Iterable[str]) -> None:
        """Add packages with all of their modules."""
        for name in sorted(name for package in packages for name in self._modules_below(package)):
            self.add_module(name)

    def package_of(self, file: KeptFile) -> str:
        """The package whose modules a file's relative imports name, "" for none."""
        return file.package or (self._package_of_script(Path(file.path)) if file.is_script else "")

    def add_imports(self, file: KeptFile, imports: ImportsInSource) -> set[str]:
        """Add what a file imports; the names of all that it imports, also of others' modules."""
        path, package = Path(file.path), file.package
        for each in imports.path_folders:
            self._search_path_folder(each, path, is_script=file.is_script)
        for name in sorted(imports.stars):
            self._add_starred(name)
        self._add_each(file, imports.imports)
        plugin_packages = set(imports.plugin_packages)
        if imports.unknown_line and package:
            # Any module of the package may be imported at run time.
            plugin_packages.add(package.partition(".")[0])
        elif imports.unknown_line and not imports.walks:
            self._notes.leave_out(
                f"{file.path}, line {imports.unknown_line}, imports a module whose name is computed at run time. It is "
                f"not in the snapshot of the code; tasks import the file on disk."
            )
        self.add_below(plugin_packages)
        return {each.name for each in imports.imports}

    def search(self, folders: Iterable[str], *, is_first: bool) -> None:
        """Search folders for modules, too. With `is_first`, programs find them there before the snapshot's copies."""
        for name in folders:
            with contextlib.suppress(OSError, ValueError):
                folder = resolved(self._folder / expanded(name))
                if is_folder(folder, BRIEF_PATIENCE_S) and not is_others(f"{folder}/"):
                    self._locator.search_last(folder)
                    if is_first:
                        self.first_folders.add(folder)

    def folders_of(self, name: str) -> tuple[Path, ...]:
        """The folders of a package of the user's, by its full name; none for other texts."""
        top, *below = _with_parents(name)
        if not all(part.isidentifier() for part in name.split(".")) or self._locator.look(top) is None:
            return ()
        *_, place = map(self._locator.locate, (top, *below))
        return () if place is None else tuple(map(Path, place.folders))

    def _add_each(self, file: KeptFile, imports: Sequence[Import]) -> None:
        modules = {each.name for each in imports if each.is_module}
        for name, always, _ in imports:
            needed = file.needed and always
            self.add_module(name, needed=needed)
            if needed and name in modules and (gone := self._locator.vanished(name)):
                raise SlurmGPUError(
                    f"{file.path} imports {name}, whose file {gone} no longer exists. Restore it, or compute "
                    f"with the snapshot of the last submission: --code former."
                )

    def _add_starred(self, package: str) -> None:
        """Add the modules that `from package import *` imports."""
        self.add_module(package)
        place = self._locator.locate(package)
        tree = None if place is None else _tree_of(place.path or "")
        for name in all_in(tree) if tree else ():
            if name.isidentifier():
                self.add_module(f"{package}.{name}")

    def _modules_below(self, package: str) -> Iterator[str]:
        self.add_module(package)
        place = self._locator.locate(package)
        for folder in place.folders if place else ():
            for where, _, names in os.walk(folder, onerror=self._notes.leave_out_folder):
                for name in names:
                    parts = Path(where, name).relative_to(folder).with_suffix("").parts
                    parts = parts[:-1] if parts[-1] == "__init__" else parts
                    if name.endswith(".py") and all(part.isidentifier() for part in parts):
                        yield ".".join((package, *parts))

    def _search_path_folder(self, each: PathFolder, path: Path, *, is_script: bool) -> None:
        if each.n_up is None:
            self.search([each.name] if each.name else [], is_first=is_script and each.is_first)
        elif 1 <= each.n_up <= len(path.parents):
            self.search([str(path.parents[each.n_up - 1] / each.name)], is_first=False)

    def _package_of_script(self, path: Path) -> str:
        """The package of a script that `python -m` may run in the run file's folder; "" for others."""
        parts = path.parent.relative_to(self._folder).parts if path.is_relative_to(self._folder) else ()
        return ".".join(parts) if all(part.isidentifier() for part in parts) else ""

    def _names_in(self, path: str) -> frozenset[str]:
        """The names that a module's file defines. It is read once: a list of weights may name a thousand of them."""
        if path not in self._defined:
            tree = _tree_of(path)
            self._defined[path] = frozenset() if tree is None else defined_in(tree)
        return self._defined[path]


def _with_parents(name: str) -> list[str]:
    """`a`, `a.b` and `a.b.c` for `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[:n_parts]) for n_parts in range(1, len(parts) + 1)]


def _tree_of(path: str) -> ast.Module | None:
    """The syntax tree of a Python file; None for other files, and if it cannot be read or parsed."""
    if path.endswith(".py"):
        with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
            return parsed(retried(Path(path).read_bytes, BRIEF_PATIENCE_S))
    return None
