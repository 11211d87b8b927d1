"""Import the user's modules from a run's snapshot.

A module's `__file__` is the original path, so that it finds the files next to it, and tracebacks name the file that the
user edits. The worker imports this: standard library only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import linecache
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.abc import MetaPathFinder
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, SupportsIndex

import slurmgpu
from slurmgpu.code import snapshots
from slurmgpu.code.imported_modules import DIGESTS, files_of_modules, take_out
from slurmgpu.code.present_files import PresentFiles
from slurmgpu.code.snapshots import Snapshot, SourceFile
from slurmgpu.containers import INSIDE, image_name
from slurmgpu.run.submissions import Pickled
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, is_file, retried

BY_PATH = "slurmgpu_workload_"
"""The prefix of module names for files that a run file names by path."""
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of folders with installed distributions."""
ENVIRON = "SLURMGPU_CODE"
"""The environment variable that passes the snapshot to processes that a worker spawns."""

_OF_PYTHON: tuple[object, ...] = (BuiltinImporter, FrozenImporter)

log = logging.getLogger(__name__)

_active: list[Finder] = []
"""The active finder, if there is one. It is kept here because the user's code may replace `sys.meta_path`."""


def name_of_file(path: Path) -> str:
    """The module name of a file, always the same for its path, so that pickles and repeated builds see one class."""
    return f"{BY_PATH}{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"


def loader_of(name: str, path: Path) -> SourceFileLoader | None:
    """A loader for a file of the active snapshot, or for another `.py` file on disk; None for other files."""
    finder = _in_use()
    file = finder.by_path.get(str(path)) if finder else None
    if file is not None:
        return _Loader(name, file)
    return _PatientLoader(name, str(path)) if path.suffix == ".py" else None


class _PatientLoader(SourceFileLoader):
    """Retries reads that fail temporarily."""

    def get_data(self, path: str) -> bytes:
        return retried(lambda: super(_PatientLoader, self).get_data(path), BRIEF_PATIENCE_S)


class _MetaPath(list[Any]):
    """A `sys.meta_path` whose first finder stays first: where it is inserted, read or removed, 0 means the next one.

    So `insert(0, hook)`, `[0]` and `pop(0)` mean the same hook.
    """

    def insert(self, index: SupportsIndex, finder: Any) -> None:
        super().insert(index or 1, finder)

    def pop(self, index: SupportsIndex = -1) -> Any:
        return super().pop(index or 1)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(1 if index == 0 else index)

    def __delitem__(self, index: Any) -> None:
        super().__delitem__(1 if index == 0 else index)


class Finder(MetaPathFinder):
    """Finds the modules of a snapshot under their original names.

    It comes first in `sys.meta_path`, because the finder of an editable install or of an import hook reads the files on
    disk. It asks the other finders about its modules, so that a loader that changes how source is compiled, such as
    typeguard's or jaxtyping's, gets the source of the snapshot.
    """

    def __init__(self, snapshot: Snapshot, folder: Path) -> None:
        self.functions = snapshot.about.get("functions", {})
        files = [_as_seen_here(file) for file in snapshot.files]
        self.by_path = {file.path: file for file in files}
        # In an image, only files that are bound into it can be read.
        read = (each for each in snapshot.read if image_name() is None or os.path.exists(each.path))
        self.present = PresentFiles(folder, self.by_path, read)
        self._by_name = {name: file for file in files for name in file.modules}
        # By this name, too, another process unpickles objects of a file's module.
        self._by_name |= {name_of_file(Path(file.path)): file for file in files}
        self._spaces = {name: _folders_of(name, files) for name in snapshot.namespaces}
        self._path_hooks = list(sys.path_hooks)
        self._there = set(files_of_modules().values())
        # The spec given while another finder is asked, by thread and module; None until then.
        self._asked: dict[tuple[int, str], ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module or a namespace in the snapshot, else None."""
        if self is _in_use() and not isinstance(sys.meta_path, _MetaPath):  # the user's code has made another list
            _install(self)
        file = self._by_name.get(fullname)
        if file is None and fullname not in self._spaces:
            return None
        if BuiltinImporter.find_spec(fullname) or FrozenImporter.find_spec(fullname):
            return None
        return self._space(fullname, path, target) if file is None else self._module(fullname, file, path, target)

    def _module(
        self, fullname: str, file: SourceFile, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """The spec of a module in the snapshot, or another finder's if its loader takes the same source."""
        own = _Loader(fullname, file)
        spec = importlib.util.spec_from_file_location(fullname, file.path, loader=own)
        asked = threading.get_ident(), fullname
        if asked in self._asked:  # asked by a finder that changes the specs of others, such as wrapt's
            self._asked[asked] = spec
            return spec
        self._asked[asked] = None
        try:
            found = self._ask_others(fullname, path, target)
        finally:
            given = self._asked.pop(asked)
        if found is None or found.loader is None:
            return spec
        return found if found is given or _takes_source(found.loader, own) else spec

    def _space(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        """A namespace package as Python finds it; the snapshot's if it is gone or has become a regular package."""
        found = self._ask_others(fullname, path, target, in_folders=True)
        if found is not None and not found.has_location and found.submodule_search_locations is not None:
            return found
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = self._spaces[fullname]
        return spec

    def _ask_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None, *, in_folders: bool = False
    ) -> ModuleSpec | None:
        """The first spec that the other finders return, of those before PathFinder, which searches folders.

        PathFinder is asked, too, with `in_folders` or if the user's code has added a path hook. Finders behind it are
        not asked: they find modules that are in no folder, and may install them.
        """
        in_folders = in_folders or any(hook not in self._path_hooks for hook in sys.path_hooks)
        for finder in list(sys.meta_path):
            if finder is PathFinder and not in_folders:
                return None
            if finder in _OF_PYTHON or isinstance(finder, Finder) or not hasattr(finder, "find_spec"):
                continue
            if (found := finder.find_spec(fullname, path, target)) is not None or finder is PathFinder:
                return found
        return None

    def namesakes(self, files: Mapping[str, str]) -> list[str]:
        """The modules among `files` that have the name of a module in the snapshot, but another file."""
        return [name for name, path in files.items() if name in self._by_name and path not in self.by_path]

    def bypassed(self) -> list[str]:
        """The files of the snapshot that another loader has imported since, from disk."""
        now = {path for path in files_of_modules().values() if path in self.by_path} - self._there
        return sorted(path for path in now if DIGESTS.get(path) != self.by_path[path].digest)


def _folders_of(space: str, files: Iterable[SourceFile]) -> list[str]:
    """The folders of a namespace by the paths of its modules; not those that an editable install maps elsewhere."""
    found: dict[str, None] = {}
    for file in files:
        for name in file.modules:
            if name.startswith(f"{space}."):
                depth = name.count(".") - space.count(".") - (Path(file.path).name != "__init__.py")
                folder = Path(file.path).parents[depth]
                if folder.name == space.rpartition(".")[2]:
                    found[str(folder)] = None
    return list(found)


def _takes_source(loader: object, own: _Loader) -> bool:
    """Make another finder's loader read the source from the snapshot; False if it does not read that file.

    The reader is the loader itself, or one that it wraps, as scikit-build-core's does.
    """
    known = vars(loader).values() if hasattr(loader, "__dict__") else ()
    reader = next((each for each in (loader, *known) if isinstance(each, SourceFileLoader)), None)
    if reader is None:
        log.warning("%s is imported from the snapshot of the code, not by %s", own.name, type(loader).__name__)
        return False
    if reader.path != own.path:
        return False
    vars(reader).update(get_data=own.get_data, path_stats=own.path_stats)
    return True


def _as_seen_here(file: SourceFile) -> SourceFile:
    """The file with its path in the run's image, if this process runs there."""
    is_inside = file.inside is not None and image_name() is not None and __file__.startswith(f"{INSIDE}/")
    return replace(file, path=file.inside) if is_inside and file.inside else file


class _Loader(SourceFileLoader):
    """Reads the module's file from the snapshot, and files beside it from disk."""

    def __init__(self, name: str, file: SourceFile) -> None:
        super().__init__(name, file.path)
        self._file = file

    def get_data(self, path: str) -> bytes:
        if path != self._file.path:
            return super().get_data(path)
        # Tracebacks, debuggers and inspect.getsource, which Triton calls, read lines from linecache. With None for the
        # time, linecache does not compare the file on disk.
        lines = importlib.util.decode_source(self._file.source).splitlines(keepends=True)
        linecache.cache[self._file.path] = (len(self._file.source), None, lines, self._file.path)
        DIGESTS[self._file.path] = self._file.digest
        return self._file.source

    def path_stats(self, path: str) -> Mapping[str, int]:
        raise OSError("no bytecode is kept of a snapshot")  # it would be written beside the file on disk


def _finder(run: Path, digest: str) -> Finder:
    return Finder(snapshots.read(run, digest), run / snapshots.FOLDER / digest)


def use(run: Path, digest: str) -> None:
    """Import the user's modules from a run's snapshot from now on, also in spawned processes."""
    _install(_finder(run, digest))
    os.environ[ENVIRON] = str(run / snapshots.FOLDER / digest)


def present_files() -> PresentFiles:
    """The files of the active snapshot as they are on disk; none without a snapshot."""
    finder = _in_use()
    return PresentFiles(Path(), {}, ()) if finder is None else finder.present


def functions_given() -> Mapping[str, Pickled]:
    """The pickles, by role, that replace functions of the plan in the active snapshot."""
    finder = _in_use()
    return {} if finder is None else finder.functions


def use_as_parent() -> None:
    """Use the snapshot of the worker that spawned this process."""
    if folder := os.environ.get(ENVIRON):
        path = Path(folder)
        use(path.parent.parent, path.name)


@contextlib.contextmanager
def using(run: Path, digest: str | None) -> Iterator[None]:
    """Import the user's modules from a run's snapshot within a `with` block.

    Modules that are already imported stay unless they are known to differ from the snapshot, or are other files of the
    same name.
    """
    if digest is None:  # a run that was never submitted
        yield
        return
    finder = _finder(run, digest)
    stale = [
        name
        for name, path in files_of_modules().items()
        if path in finder.by_path and DIGESTS.get(path, finder.by_path[path].digest) != finder.by_path[path].digest
    ]
    namesakes = finder.namesakes(files_of_modules())
    known = {path: digest for path, digest in list(DIGESTS.items()) if path in finder.by_path}
    former = take_out(finder.by_path) if stale or namesakes else {}
    former |= {name: sys.modules.pop(name) for name in namesakes}
    _install(finder)
    try:
        yield
    finally:
        _active[:] = [each for each in _active if each is not finder]
        sys.meta_path = [each for each in sys.meta_path if each is not finder]
        if former:
            take_out(finder.by_path)
            sys.modules.update(former)
            DIGESTS.update(known)


def outside(folder: Path) -> list[str]:
    """The user's imported files that are missing from the active snapshot.

    They are below `folder` or, except in an image, outside of the installations of Python and distributions. `__main__`
    does not count: functions of a script are pickled by value.
    """
    finder = _in_use()
    known = finder.by_path if finder else {}
    here, python, own = (
        f"{each}{os.sep}" for each in (folder, Path(os.__file__).parent, Path(slurmgpu.__file__).parent)
    )
    is_in_image = image_name() is not None
    mine = {
        path
        for name, path in files_of_modules().items()
        if name != "__main__"
        and path.endswith(".py")
        and not path.startswith(own)  # which lies below `folder` if the run file is in a clone of slurmgpu
        and (path.startswith(here) or not (is_in_image or path.startswith(python)))
        and not is_installed(path)
    }
    return sorted(mine - known.keys())


def is_installed(path: str) -> bool:
    """Whether a file belongs to an installed distribution.

    It lies in a folder of that name, or in one on Python's path where `pip install --target` has recorded it.
    """
    if INSTALLED.intersection(path.split(os.sep)):  # noqa: PTH206 - of thousands of modules, Path takes milliseconds
        return True
    folders = (folder for folder in sys.path if folder and path.startswith(f"{folder}{os.sep}"))
    return any(path[len(folder) + 1 :].partition(os.sep)[0] in _recorded_in(folder) for folder in folders)


@functools.cache
def _recorded_in(folder: str) -> frozenset[str]:
    """The modules and packages of the distributions that are installed in a folder, as their first folder or file."""
    found: set[str] = set()
    with contextlib.suppress(OSError):  # a zip archive, a missing folder, or a distribution that is being removed
        for name in retried(lambda: os.listdir(folder), BRIEF_PATIENCE_S):
            record = Path(folder, name, "RECORD")
            if name.endswith(".dist-info") and is_file(record, BRIEF_PATIENCE_S):
                lines = retried(record.read_bytes, BRIEF_PATIENCE_S).decode(errors="replace").splitlines()
                found.update(line.partition(",")[0].partition("/")[0] for line in lines)
    return frozenset(found)


def bypassed() -> list[str]:
    """The files of the active snapshot that another loader has imported from disk."""
    finder = _in_use()
    return [] if finder is None else finder.bypassed()


def _install(finder: Finder) -> None:
    """Replace the active finder; the new one comes before all others."""
    _active[:] = [finder]
    sys.meta_path = _MetaPath([finder, *(each for each in sys.meta_path if not isinstance(each, Finder))])


def _in_use() -> Finder | None:
    return _active[0] if _active else None
