"""Tracing: which files of the user's a workload imports, as they are on disk at this moment.

Imports are followed in syntax trees, those within functions as well, and nothing is imported: the process that plans
may have imported an older version, and a login node may lack what a module needs.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, BuiltinImporter, FrozenImporter
from pathlib import Path
from typing import Any

from slurmgpu import __version__
from slurmgpu.digests import DIGITS
from slurmgpu.errors import SlurmGPUError
from slurmgpu.importing import Finder
from slurmgpu.runs import Plan
from slurmgpu.shared_files import BRIEF_PATIENCE_S, is_file, is_folder, retried
from slurmgpu.snapshots import Snapshot, SourceFile
from slurmgpu.surroundings import PACKAGES
from slurmgpu.syntax import tree_digest

INSTALLED = frozenset({"site-packages", "dist-packages"})
MANY_FILES = 2000
"""So many files of one installed package are no user's own code, wherever they lie: PyTorch built from its source."""
LONG_TEXT = 4096
NAMED = re.compile(r"([^\s:][^:]*):[A-Za-z_]\w*")
"""What names a class or a function in a module or a file, among the settings: "digits.py:Digits"."""
_GIT_PATIENCE_S = 20


@dataclass(frozen=True)
class _Place:
    """Where a module is: its file, none for a namespace, and the folders of its submodules."""

    path: str | None
    folders: tuple[str, ...]


@dataclass
class _Found:
    path: str
    name: str
    modules: list[str]
    needed: bool
    """Whether it is imported under no condition, so that the run fails where it is no Python."""
    top: str | None = None
    """The package that is installed elsewhere; None for what lies below the run file's folder."""


def snapshot_of(
    plan: Plan, container: Mapping[str, Any] | None, git: Mapping[str, Any] | None, *, also: Iterable[str] = ()
) -> Snapshot:
    """The user's modules of a run as they are now; a sentence with file and line where one that it needs is no Python.

    `git` is the state of their repository, `also` are modules that were seen to be imported, however they were named.
    """
    tracer = _Tracer(Path(plan.search_path), in_image=container is not None)
    tracer.add_named(plan.workload.rpartition(":")[0], needed=True)
    for text in _texts(plan.settings):
        if found := NAMED.fullmatch(text):
            tracer.add_named(found[1], needed=False)
    for name in also:
        tracer.add_module(name, needed=False)
    files = tracer.follow()
    about: dict[str, Any] = {
        "python": platform.python_version(),
        "distributions": {} if container else _versions(tracer.foreign),
        "image": dict(container["identity"]).get("sha256") if container else None,
        "git": git,
    }
    return Snapshot(files, about, tuple(tracer.left_out))


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of a folder's repository and whether its tree was dirty; None outside one, or without git."""
    try:
        commit = _git_output(folder, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git_output(folder, "status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git_output(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, errors="replace", timeout=_GIT_PATIENCE_S
    )
    return done.stdout.strip()


class _Tracer:
    """Follows imports from file to file; `foreign` are the packages met that are not the user's own."""

    def __init__(self, folder: Path, *, in_image: bool) -> None:
        self.foreign: set[str] = set()
        self.left_out: list[str] = []
        self._base = folder
        self._in_image = in_image
        self._folders = [str(folder)]
        self._places: dict[str, _Place | None] = {}
        self._tops: dict[str, str] = {}
        self._files: dict[str, _Found] = {}
        self._todo: list[_Found] = []
        self._dropped: set[str] = set()
        importlib.invalidate_caches()

    def add_named(self, module: str, *, needed: bool) -> None:
        """Take a module, or a file, that the run file names."""
        if not module.endswith(".py"):
            known = set(self.foreign)
            if all(part.isidentifier() for part in module.split(".")):
                self.add_module(module, needed=needed)
            if not needed:
                self.foreign = known  # a text with a colon in it may be anything
            return
        path = (self._base / Path(module).expanduser()).resolve()
        if is_file(path, BRIEF_PATIENCE_S):
            if str(path.parent) not in self._folders:
                self._folders.insert(0, str(path.parent))
            self._take(str(path), None, needed=needed)
        elif needed:
            raise SlurmGPUError(
                f"There is no file {path} any more, which is the run's workload. Put it back, or compute with the "
                f"snapshot of the last submission: --code former."
            )

    def add_module(self, name: str, *, needed: bool) -> None:
        """Take a module and the packages that it is in, if they are the user's own."""
        parts = name.split(".")
        for n_parts in range(1, len(parts) + 1):
            whole = ".".join(parts[:n_parts])
            place = self._locate(whole)
            if place is None:
                return
            if place.path is not None:
                self._take(place.path, whole, needed=needed)

    def follow(self) -> tuple[SourceFile, ...]:
        """The files, when all that they import has been taken as well."""
        sources: dict[str, tuple[bytes, str]] = {}
        while self._todo:
            # What is needed first: whether a file is, must be known before it is read.
            found = self._todo.pop(next((i for i, each in enumerate(self._todo) if each.needed), 0))
            if found.path in sources or found.top in self._dropped:
                continue
            try:
                source = retried(Path(found.path).read_bytes, BRIEF_PATIENCE_S)
                tree = ast.parse(source, found.path)
            except (SyntaxError, ValueError, RecursionError) as error:
                if found.needed and not isinstance(error, RecursionError):
                    raise _not_python(found.path, error) from error
                # It may be for another Python than this one.
                sources[found.path] = source, hashlib.sha256(source).hexdigest()[:DIGITS]
                continue
            except OSError as error:
                raise SlurmGPUError(f"{found.path}, which the workload imports, cannot be read: {error}.") from error
            sources[found.path] = source, tree_digest(source, found.path)
            try:
                self._follow_imports(found, tree)
            except RecursionError:  # an expression of a thousand operators
                self.left_out.append(f"What {found.path} imports is not known: it is nested too deeply.")
        taken = [found for path, found in sorted(self._files.items()) if path in sources]
        kept = [found for found in taken if found.top not in self._dropped]
        return tuple(
            SourceFile(found.name, found.path, tuple(sorted(found.modules)), sources[found.path][1], source)
            for found in kept
            for source in [sources[found.path][0]]
        )

    def _follow_imports(self, found: _Found, tree: ast.Module) -> None:
        module = found.modules[0] if found.modules else None
        is_package = Path(found.path).name == "__init__.py"
        package = None if module is None else module if is_package else module.rpartition(".")[0]
        imports = _Imports(package)
        imports.visit(tree)
        for name, always in imports.names:
            self.add_module(name, needed=found.needed and always)
        if imports.is_dynamic and package:
            # Which of its modules it imports is known only when it runs.
            for name in self._modules_below(package.partition(".")[0]):
                self.add_module(name, needed=False)

    def _take(self, path: str, module: str | None, *, needed: bool) -> None:
        found = self._files.get(path)
        if found is None:
            top = None if module is None else self._tops.get(module.partition(".")[0])
            found = self._files[path] = _Found(path, self._name(path, top, module), [], needed, top)
            self._todo.append(found)
            if top and sum(each.top == top for each in self._files.values()) > MANY_FILES:
                self._dropped.add(top)
                self.foreign.add(top)
                self._places[top] = None
                self.left_out.append(f"{top} has more than {MANY_FILES:,} modules: they are imported as they are then.")
        found.needed |= needed
        if module is not None and module not in found.modules:
            found.modules.append(module)

    def _name(self, path: str, top: str | None, module: str | None) -> str:
        """What a file is called in the snapshot: its path below the run file's folder, or below its package's."""
        where = Path(path)
        if where.is_relative_to(self._base):
            name = str(where.relative_to(self._base))
        elif module is not None:
            depth = module.count(".") + (2 if where.name == "__init__.py" else 1)
            name = str(Path(*where.parts[-depth:]))
        else:
            name = where.name
        taken = {found.name for found in self._files.values()}
        number = 2
        while name in taken:
            name, number = f"{number}/{name}", number + 1
        return name

    def _locate(self, name: str) -> _Place | None:
        """Where a module of the user's is; None for all others."""
        if name not in self._places:
            parent, _, tail = name.rpartition(".")
            above = self._places.get(parent) if parent else None
            if not parent:
                self._places[name] = self._locate_top(name)
            else:
                self._places[name] = _search(above.folders, tail) if above else None
        return self._places[name]

    def _locate_top(self, name: str) -> _Place | None:
        if name == "slurmgpu":
            return None
        here = _search(tuple(self._folders), name)
        if here is not None and here.path is not None:
            return here
        there = None if self._in_image else _installed(name)
        if isinstance(there, _Place):
            self._tops[name] = name
            return there
        if there is None and here is not None:  # a namespace: a folder without __init__.py
            return here
        if name not in sys.stdlib_module_names:
            self.foreign.add(name)
        return None

    def _modules_below(self, top: str) -> Iterator[str]:
        place = self._locate(top)
        for folder in place.folders if place else ():
            for path in sorted(Path(folder).rglob("*.py")):
                parts = path.relative_to(folder).with_suffix("").parts
                parts = parts[:-1] if parts[-1] == "__init__" else parts
                if all(part.isidentifier() for part in parts):
                    yield ".".join((top, *parts))


class _Imports(ast.NodeVisitor):
    """The modules that a file names in its imports, and whether each of them is imported under no condition."""

    def __init__(self, package: str | None) -> None:
        self.names: list[tuple[str, bool]] = []
        self.is_dynamic = False
        self._package = package
        self._depth = 0

    def visit_Try(self, node: ast.Try) -> None:
        """Go deeper: what is tried may fail."""
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    def visit_If(self, node: ast.If) -> None:
        """Leave out what is imported for type checkers alone."""
        test = node.test
        name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
        self._depth += 1
        for each in node.orelse if name == "TYPE_CHECKING" else ast.iter_child_nodes(node):
            self.visit(each)
        self._depth -= 1

    def visit_Import(self, node: ast.Import) -> None:
        """`import a.b`."""
        for alias in node.names:
            self._add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """`from a import b`, where b may be a module."""
        base = node.module or ""
        if node.level:
            if not self._package:
                return
            above = self._package.split(".")
            if node.level > len(above):
                return
            base = ".".join([*above[: len(above) - node.level + 1], *([base] if base else [])])
        self._add(base)
        for alias in node.names:
            if alias.name != "*":
                self._add(f"{base}.{alias.name}")

    def visit_Call(self, node: ast.Call) -> None:
        """`importlib.import_module("a.b")`."""
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in ("import_module", "__import__") and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str) and not first.value.startswith("."):
                self.names.append((first.value, False))
            else:
                self.is_dynamic = True
        self.generic_visit(node)

    def _add(self, name: str) -> None:
        self.names.append((name, self._depth == 0))


def _search(folders: Sequence[str], name: str) -> _Place | None:
    """A module in these folders, as Python looks for it there."""
    spaces = []
    for folder in folders:
        inner = os.path.join(folder, name)  # noqa: PTH118  (quick: each import is looked for)
        init = os.path.join(inner, "__init__.py")  # noqa: PTH118
        if is_file(init, BRIEF_PATIENCE_S):
            return _Place(init, (inner,))
        if any(is_file(f"{inner}{suffix}", BRIEF_PATIENCE_S) for suffix in EXTENSION_SUFFIXES):
            return None  # compiled: it cannot be imported from elsewhere
        if is_file(f"{inner}.py", BRIEF_PATIENCE_S):
            return _Place(f"{inner}.py", ())
        if is_folder(inner, BRIEF_PATIENCE_S):
            spaces.append(inner)
    return _Place(None, tuple(spaces)) if spaces else None


def _installed(name: str) -> _Place | bool | None:
    """Where a module is that is no installed distribution's copy, as of an editable install, or on PYTHONPATH.

    False for others' modules, None where there is none.
    """
    others = (finder for finder in sys.meta_path if finder not in (BuiltinImporter, FrozenImporter))
    for finder in others:
        if isinstance(finder, Finder) or not hasattr(finder, "find_spec"):
            continue
        spec = None
        with contextlib.suppress(Exception):  # a finder of somebody else's
            spec = finder.find_spec(name, None)
        if spec is not None:
            break
    else:
        return None if name not in sys.builtin_module_names else False
    folders = tuple(spec.submodule_search_locations or ())
    path = spec.origin if spec.origin and spec.has_location else None
    if path is None and not folders:
        return False
    if any(_is_others(each) for each in ((path,) if path else folders)):
        return False
    if path is not None and not path.endswith(".py"):
        return False
    return _Place(path, folders)


def _is_others(path: str) -> bool:
    """Whether a file is of the standard library, or was copied where distributions are installed."""
    return bool(INSTALLED.intersection(Path(path).parts)) or path.startswith(_folders_of_others())


@functools.cache
def _folders_of_others() -> tuple[str, ...]:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    own_package = str(Path(__file__).parent)
    folders = {sysconfig.get_path(kind) for kind in kinds} | {site.getusersitepackages(), own_package}
    return tuple(f"{folder}{os.sep}" for folder in folders if folder)


def own_modules(names: Iterable[str]) -> list[str]:
    """Those of these modules, which are imported, that are the user's own files."""
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    return sorted(name for name, file in files.items() if isinstance(file, str) and not _is_others(file))


def _not_python(path: str, error: Exception) -> SlurmGPUError:
    line, said = (f", line {error.lineno},", error.msg) if isinstance(error, SyntaxError) else ("", str(error))
    return SlurmGPUError(f"{path}{line} is not Python: {said}. Correct it there, and submit again.")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if len(value) < LONG_TEXT:
            yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of the distributions that these packages come from, and of those that built-in workloads use."""
    found = {"slurmgpu": __version__}
    unknown = set()
    for name in {*names, *PACKAGES}:
        try:
            found[name.replace("_", "-").lower()] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name not in PACKAGES:
                unknown.add(name)
    # Which one has `yaml` is known only from all of them.
    of_packages = importlib.metadata.packages_distributions() if unknown else {}
    for name in unknown:
        for distribution in of_packages.get(name, ()):
            found[distribution] = importlib.metadata.version(distribution)
    return dict(sorted(found.items()))
