"""Locate the user's own modules as the tasks of a run do, without importing anything.

These are the modules beside the run file, in editable installs and in other folders on Python's path; with an image,
those beside the run file and those that are bound into it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import site
import sys
import sysconfig
import zipimport
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path

import slurmgpu
from slurmgpu.code.imported_modules import invalidate_caches, without_dots
from slurmgpu.code.importer import BY_PATH, INSTALLED, Finder, is_installed
from slurmgpu.code.snapshots import SourceFile
from slurmgpu.containers import INSIDE
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, is_file, is_folder


@dataclass(frozen=True)
class Place:
    """A module's file, which may be compiled, None for a namespace; and the folders of its submodules.

    A namespace `is_shared` if installed distributions have modules of it in other folders.
    """

    path: str | None
    folders: tuple[str, ...]
    is_shared: bool = False


_INSTALLED = Place(None, ())
"""The place of a module of the standard library or of an installed distribution, which is not the user's."""


class Locator:
    """Finds modules by name, as the run's tasks do.

    `folder` is the run file's. `packages` are names and paths bound into the run's image, None without an image.
    The paths of `former` files are tried last: code may have added their folder to the path.

    `folders` are searched first. `foreign` are requested packages that are not the user's; `bound_in` are installed
    distributions that are bound into the image; `elsewhere` are packages outside of the image, with paths:
    the user's, and those that `pip install --target` put on Python's path.
    `archives` are zip archives, other than installed ones, that have requested modules.
    """

    def __init__(
        self, folder: Path, packages: Sequence[tuple[str, str]] | None, former: Iterable[SourceFile] = ()
    ) -> None:
        self.folders = [str(folder)]
        self.foreign: set[str] = set()
        self.bound_in: set[str] = set()
        self.elsewhere: dict[str, str] = {}
        self.archives: set[str] = set()
        self._packages = packages
        self._formerly = {name: file.path for file in former for name in file.modules}
        self._places: dict[str, Place | None] = {}
        self._looked_for: set[str] = set()
        self._tops: set[str] = set()
        invalidate_caches()

    @property
    def packages(self) -> set[str]:
        """The requested packages that are not the user's; with an image, those of them that are bound into it."""
        return self.foreign if self._packages is None else self.bound_in

    def search_first(self, folder: Path) -> None:
        """Search a folder before all others, as Python does with a script's own folder."""
        if str(folder) not in self.folders:
            self.folders.insert(0, str(folder))

    def search_last(self, folder: Path) -> None:
        """Search a folder after the others that are searched first."""
        if str(folder) not in self.folders:
            self.folders.append(str(folder))

    def top_of(self, module: str) -> str | None:
        """The package of a module, if it is not beside the run file."""
        top = module.partition(".")[0]
        return top if top in self._tops else None

    def vanished(self, module: str) -> str | None:
        """The former path of a module that can no longer be found; None for one that the image may have."""
        path = self._formerly.get(module)
        if path is None or is_file(path, BRIEF_PATIENCE_S) or self.locate(module) is not None:
            return None
        is_unknown = "." not in module and (self._packages is not None or _on_path(module) is not None)
        return None if is_unknown else path

    def give_up(self, top: str) -> None:
        """Treat a package as foreign."""
        self.foreign.add(top)
        self._places[top] = None

    def locate(self, name: str) -> Place | None:
        """The place of a module if it is the user's; None for others."""
        if name not in self._places:
            parent, _, tail = name.rpartition(".")
            above = self._places.get(parent) if parent else None
            if not parent:
                self._places[name] = self._locate_top(name)
            else:
                self._places[name] = self._locate_below(above, name, tail) if above else None
        return self._places[name]

    def look(self, top: str) -> Place | None:
        """Like `locate`, for a name in any text: a package that is not the user's does not count as requested."""
        if top in self._places or top in self._looked_for:
            return self._places.get(top)
        is_elsewhere = top in self.elsewhere
        place = self.locate(top)
        if place is None:
            del self._places[top]
            self._looked_for.add(top)
            self.foreign.discard(top)
            self.bound_in.discard(top)
            if not is_elsewhere:
                self.elsewhere.pop(top, None)
        return place

    def _locate_below(self, above: Place, name: str, tail: str) -> Place | None:
        found = search(above.folders, tail)
        if found is None and above.path is None and self._packages is None:
            # An editable install may map a package of a namespace to a folder of another name.
            there = _on_path(name, above)
            found = None if there is _INSTALLED else there
        return found

    def _locate_top(self, name: str) -> Place | None:
        if name == "slurmgpu" or name.startswith(BY_PATH):  # no distribution has a file that is named by path
            return None
        here = search(tuple(self.folders), name)
        if here is not None and here.path is not None:
            return here
        there = _on_path(name)
        if there is _INSTALLED and (archive := archive_of(PathFinder.find_spec(name))) is not None:
            self.archives.add(archive)
        if there is None:
            there = self._where_it_was(name)
        if self._packages is not None:
            there = self._bound(name, here, there)
        if there is not None and there is not _INSTALLED:
            self._tops.add(name)
            if there.is_shared:
                self.foreign.add(name)
            return there
        if there is None and here is not None:  # a namespace: a folder without __init__.py
            return here
        if name not in sys.stdlib_module_names:
            self.foreign.add(name)
        return None

    def _where_it_was(self, name: str) -> Place | None:
        """The place of a module in a former snapshot, if its file still exists."""
        path = Path(self._formerly.get(name, ""))
        if not is_file(path, BRIEF_PATIENCE_S):
            return None
        return Place(str(path), (str(path.parent),) if path.name == "__init__.py" else ())

    def _bound(self, name: str, here: Place | None, there: Place | None) -> Place | None:
        """The place of a module that is bound into the image; None for others."""
        folders = []
        for inside, path in self._packages or ():
            if inside.rpartition("/")[2].partition(".")[0] == name:
                if is_others(path):
                    self.bound_in.add(name)
                    return None
                if not is_folder(path, BRIEF_PATIENCE_S):
                    return Place(path, ())
                if is_file(init := Path(path, "__init__.py"), BRIEF_PATIENCE_S):
                    return Place(str(init), (path,))
                folders.append(path)
        if folders:
            return Place(None, (*(here.folders if here else ()), *folders))
        if there is _INSTALLED and here is None and (target := _in_target(name)) is not None:
            self.elsewhere[name] = target
        elif there is not None and there is not _INSTALLED and here is None:
            self.elsewhere[name] = there.path or there.folders[0]
        return None

    def inside(self, path: str, top: str | None) -> str | None:
        """The path in the image of a file that is bound into it with its package; None for others."""
        for inside, bound in (self._packages or ()) if top is not None else ():
            if path == bound:
                return f"{INSIDE}/{inside}"
            if path.startswith(f"{bound}{os.sep}"):
                return f"{INSIDE}/{inside}{path[len(bound) :]}"
        return None


def search(folders: Sequence[str], name: str) -> Place | None:
    """Find a module in folders, as Python does."""
    spaces = []
    for folder in folders:
        inner = os.path.join(folder, name)  # quick: each import is looked for
        init = os.path.join(inner, "__init__.py")
        if is_file(init, BRIEF_PATIENCE_S):
            return Place(init, (inner,))
        for suffix in EXTENSION_SUFFIXES:
            if is_file(f"{inner}{suffix}", BRIEF_PATIENCE_S):
                return Place(f"{inner}{suffix}", ())
        if is_file(f"{inner}.py", BRIEF_PATIENCE_S):
            return Place(f"{inner}.py", ())
        if is_folder(inner, BRIEF_PATIENCE_S):
            spaces.append(inner)
    return Place(None, tuple(spaces)) if spaces else None


def _on_path(name: str, above: Place | None = None) -> Place | None:
    """The place of a module on Python's path; `_INSTALLED` if it is not the user's, None if it is not found.

    `above` is the namespace of a submodule.
    """
    folders = None if above is None else above.folders
    others = (finder for finder in sys.meta_path if finder not in (BuiltinImporter, FrozenImporter))
    for finder in others:
        if isinstance(finder, Finder) or not hasattr(finder, "find_spec"):
            continue
        spec = None
        with contextlib.suppress(Exception):  # a foreign finder
            spec = finder.find_spec(name, folders)
        if spec is not None:
            break
    else:
        return None if name not in sys.builtin_module_names else _INSTALLED
    inner = tuple(map(without_dots, spec.submodule_search_locations or ()))
    path = without_dots(spec.origin) if spec.origin and spec.has_location else None
    own = inner if path else tuple(each for each in inner if not is_others(each))
    if is_others(path) if path else not own:
        return _INSTALLED
    if path is not None and not (path.endswith((".py", *EXTENSION_SUFFIXES)) and is_file(path, BRIEF_PATIENCE_S)):
        return _INSTALLED  # for example in a zip archive
    return Place(path, own, own != inner)


def _in_target(name: str) -> str | None:
    """The path of a module that `pip install --target` put into a folder on Python's path; None for others."""
    if (spec := PathFinder.find_spec(name)) is None:
        return None
    paths = [spec.origin] if spec.has_location else [*(spec.submodule_search_locations or ())]
    return next(
        (
            path
            for path in paths
            if path and not path.startswith(_folders_of_others()) and INSTALLED.isdisjoint(Path(path).parts)
        ),
        None,
    )


def archive_of(spec: ModuleSpec | None) -> str | None:
    """The zip archive that a module is imported from; None for an installed archive, and without one."""
    loader = None if spec is None else spec.loader
    if not isinstance(loader, zipimport.zipimporter) or is_others(loader.archive):
        return None
    return os.path.realpath(loader.archive)


def is_others(path: str) -> bool:
    """Whether a file belongs to the standard library or to an installed distribution."""
    return path.startswith(_folders_of_others()) or is_installed(path)


@functools.cache
def _folders_of_others() -> tuple[str, ...]:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    own_package = str(Path(slurmgpu.__file__).parent)
    folders = {sysconfig.get_path(kind) for kind in kinds} | {site.getusersitepackages(), own_package}
    return tuple(f"{folder}{os.sep}" for folder in folders if folder)


def own_modules(names: Iterable[str]) -> list[str]:
    """The imported modules among `names` that are the user's own files."""
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    return sorted(name for name, file in files.items() if isinstance(file, str) and not is_others(file))
