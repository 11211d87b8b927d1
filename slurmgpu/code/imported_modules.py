"""The user's modules that this process has imported, with the digests that their files had.

Python imports a module once. A process that plans several runs drops modules that were edited since, and modules that
differ from a snapshot are imported again from it. The worker imports this: standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from slurmgpu.code.snapshots import digest_of
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, retried

DIGESTS: dict[str, str] = {}
"""Digests of the imported files of the user by path, from planning or from a snapshot."""
_stats: dict[str, Mapping[str, Any]] = {}
"""The time and size of source files as they were imported, since `watch_imports`."""
_noted: dict[Path, set[str]] = {}
"""Names of the user's modules that plans imported, by the folder of the run files."""
_named: set[str] = set()
"""Modules, files and pickles of others that a run file or a plan names, and that this process has imported."""
_INVALIDATING = threading.Lock()


def files_of_modules() -> dict[str, str]:
    """The files of all imported modules, by name."""
    found = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    # Only absolute paths: the modules that PyTorch makes for operators have the `__file__` "_ops.py".
    return {
        name: without_dots(path) for name, path in found.items() if isinstance(path, str) and path.startswith(os.sep)
    }


def invalidate_caches() -> None:
    """`importlib.invalidate_caches` under a lock: two threads in it cause a KeyError (Python 3.10 to 3.13)."""
    with _INVALIDATING:
        importlib.invalidate_caches()


def without_dots(path: str) -> str:
    """A path with `..`, as after `sys.path.append("..")`, resolved; any other path unchanged, links included."""
    return os.path.realpath(path) if f"{os.sep}{os.pardir}{os.sep}" in path else path


def take_out(paths: Mapping[str, object]) -> dict[str, ModuleType]:
    """Remove the modules of these files from sys.modules, and return them."""
    names = [name for name, path in files_of_modules().items() if path in paths]
    return {name: sys.modules.pop(name) for name in names}


def note_named(module: str) -> None:
    """Note that a module is imported by a name that is the user's choice: it may be of an installed package."""
    if not module.startswith("slurmgpu."):
        _named.add(module)


def has_imported() -> bool:
    """Whether this process has imported code of the user's: by a plan, from a snapshot, or from a package."""
    return bool(DIGESTS or _named)


def skip_last_collections() -> None:
    """Let this process end without collections of garbage, unless it has imported code of the user's.

    Python makes several as it ends: after an import of PyTorch and transformers they take 1.1 s of a processor. With
    code of the user's they stay: what it has written to a file that it leaves open may reach the file there.
    """
    if not has_imported():
        gc.freeze()


def watch_imports() -> None:
    """From now on, record the time and size of each source file when it is imported, for `note_imported`."""
    plain = SourceFileLoader.path_stats
    if getattr(plain, "is_watch", False):
        return

    def path_stats(loader: SourceFileLoader, path: str) -> Mapping[str, Any]:
        found = _stats[path] = plain(loader, path)
        return found

    path_stats.is_watch = True  # type: ignore[attr-defined]
    SourceFileLoader.path_stats = path_stats  # type: ignore[assignment, method-assign]


def note_imported(names: Iterable[str], folder: Path) -> list[str]:
    """Record the digests of the user's imported modules, and return the names of those that are Python files.

    A file that was edited after its import counts as changed. The result includes modules that earlier plans of run
    files in `folder` imported and that are still loaded: Python does not import them again, and this plan may need
    them, too.
    """
    paths = files_of_modules()
    noted = _noted[folder] = {name for name in list(_noted.get(folder, ())) if paths.get(name) in DIGESTS}
    for name in names:
        path = paths.get(name)
        if path is not None and path.endswith(".py"):
            noted.add(name)
            with contextlib.suppress(OSError, SyntaxError, ValueError):
                digest = digest_of(retried(Path(path).read_bytes, BRIEF_PATIENCE_S), path)
                status = retried(Path(path).stat, BRIEF_PATIENCE_S)
                present = {"mtime": status.st_mtime, "size": status.st_size}
                DIGESTS[path] = digest if _stats.get(path, present) == present else ""
    return sorted(noted)


def forget_changed() -> None:
    """Drop the modules that planning imported if one of their files has changed, so that they are imported again."""
    # A copy, because another thread may plan while this one reads files.
    if any(_has_changed(path, digest) for path, digest in list(DIGESTS.items())):
        take_out(DIGESTS)
        DIGESTS.clear()
        invalidate_caches()


def _has_changed(path: str, digest: str) -> bool:
    try:
        return digest_of(retried(Path(path).read_bytes, BRIEF_PATIENCE_S), path) != digest
    except (OSError, SyntaxError, ValueError):
        return True
