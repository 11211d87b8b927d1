"""Compare the modules that this process has imported with those that a run's tasks will import."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TypeVar

from slurmgpu.code import imported_modules
from slurmgpu.code.imported_modules import without_dots
from slurmgpu.code.locator import archive_of, is_others, own_modules, search
from slurmgpu.code.snapshots import SourceFile
from slurmgpu.errors import SlurmGPUError
from slurmgpu.util import process_wide
from slurmgpu.util.shared_files import is_file

_SCRIPTS = ("__main__", "__mp_main__")
T = TypeVar("T")


def refuse_other_modules(files: Iterable[SourceFile], needed: Iterable[str], folder: Path) -> None:
    """Raise SlurmGPUError if tasks would import other modules than this process has imported, or none.

    `files` are those of the snapshot, `needed` the modules of the functions that are sent, and `folder` is where tasks
    search first.
    """
    there = {name: file.path for file in files for name in file.modules}
    for name, path in sorted(there.items()):
        if (here := _file_of(name)) is not None and not Path(here).samefile(path):
            raise SlurmGPUError(
                f"This process imported {name} from {here}, but tasks will import {path}, because they search {folder} "
                f"first. Rename one of the two, or call from another folder."
            )
    on_path = {os.path.realpath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each}
    for name in sorted({*needed} - there.keys()):
        archive = archive_of(getattr(sys.modules.get(name), "__spec__", None))
        if archive is not None and archive not in on_path:
            raise SlurmGPUError(
                f"This process imported {name} from {archive}, but tasks will not find it, because the archive is not "
                f"on PYTHONPATH. Unpack it into {folder}, or set PYTHONPATH={archive} before Python starts."
            )
        if (here := _own_file_of(name)) is not None and PathFinder.find_spec(top := name.partition(".")[0]) is None:
            outer = _folder_of(top) or Path(here).parent
            raise SlurmGPUError(
                f"This process imported {name} from {here}, but tasks will not find it: they search {folder} and "
                f"sys.path, and {outer} is in neither. Call from {outer}, or sys.path.append({str(outer)!r})."
            )


@contextlib.contextmanager
def namesakes_hidden(folder: Path) -> Iterator[None]:
    """Within the block, import modules from `folder` first, as tasks do, whatever this process has imported.

    The user's modules that have a namesake there are hidden, and put back at the end; `sys.path` is restored, too. Both
    belong to the whole process, so a lock keeps other threads from planning meanwhile.
    """
    with process_wide.one_thread():
        others = {top for top in {name.partition(".")[0] for name in list(sys.modules)} if _has_other(folder, top)}
        hidden = {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] in others}
        before = sys.modules.keys() - hidden.keys()
        for name in hidden:
            del sys.modules[name]
        sys.path.insert(0, str(folder))
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):
                sys.path.remove(str(folder))
            if hidden:
                # All that the block imported, since it may use modules of the folder. The next plan imports it again.
                for name in own_modules(sys.modules.keys() - before):
                    del sys.modules[name]
                sys.modules.update(hidden)


def importing_anew(folder: Path, make: Callable[[], T]) -> tuple[T, list[str]]:
    """What `make` returns, and the modules of the user's that it needs, imported as their files in `folder` are now.

    It is to be called where their namesakes are hidden.
    """
    imported_modules.forget_changed()
    imported_modules.watch_imports()
    before = set(sys.modules)
    try:
        made = make()
    finally:  # also what a failed import leaves is to be imported again once its file has changed
        names = imported_modules.note_imported(own_modules(sys.modules.keys() - before), folder)
    return made, names


def _has_other(folder: Path, top: str) -> bool:
    if (path := _own_file_of(top)) is None:
        return False
    place = search((str(folder),), top)
    return place is not None and place.path is not None and not Path(path).samefile(place.path)


def _file_of(name: str) -> str | None:
    """The Python file of a module that this process has imported."""
    path = getattr(sys.modules.get(name), "__file__", None) if name not in _SCRIPTS else None
    if not isinstance(path, str) or not path.endswith(".py") or not is_file(path):
        return None
    return without_dots(path)


def _own_file_of(name: str) -> str | None:
    """The Python file of a module of the user's that this process has imported."""
    path = _file_of(name)
    return None if path is None or is_others(path) else path


def _folder_of(top: str) -> Path | None:
    """The folder that has to be on the path for a module or a package."""
    path = _file_of(top)
    if path is None:
        return None
    return Path(path).parents[1 if Path(path).name == "__init__.py" else 0]
