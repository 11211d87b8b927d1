"""Traces which files of the user's a workload imports, as they are on disk now.

Follows imports in syntax trees, also within functions. Nothing is imported: the planning process may have imported an
older version, and a login node may lack dependencies.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmgpu import __version__
from slurmgpu.code.locator import Locator
from slurmgpu.code.snapshots import Snapshot, SourceFile, tree_digest
from slurmgpu.containers.settings import ContainerRecord
from slurmgpu.errors import SlurmGPUError
from slurmgpu.run.frozen_plan import Plan
from slurmgpu.run.submissions import CodeAbout, Git
from slurmgpu.util.env_info import PACKAGES
from slurmgpu.util.hashing import DIGITS
from slurmgpu.util.home import expanded
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, is_file, retried

MANY_FILES = 2000
"""A package with more files is not the user's own, such as PyTorch built from source."""
MANY_NAMED = 5
LONG_TEXT = 4096
NAMED = re.compile(r"([^\s:][^:]*):[A-Za-z_][\w.]*")
"""A setting that names a class or a function in a module or a file: `digits.py:Digits`."""
_GIT_PATIENCE_S = 20


@dataclass
class _Found:
    path: str
    name: str
    modules: list[str]
    needed: bool
    """Whether it is imported unconditionally, so that the run fails if it is not valid."""
    top: str | None = None
    """Its package, if that is outside of the run file's folder."""
    is_script: bool = False


def snapshot_of(
    plan: Plan,
    container: ContainerRecord | None,
    git: Git | None,
    *,
    also: Iterable[str] = (),
    former: Iterable[SourceFile] = (),
) -> Snapshot:
    """A snapshot of a run's user modules as they are now. SlurmGPUError names file and line of a syntax error.

    `git` is the state of their repository. `also` are other modules that were seen to be imported. `former` are the
    files of an earlier snapshot; their modules are traced, too.
    """
    packages = None if container is None else [(str(name), str(path)) for name, path in container["packages"]]
    former = list(former)
    tracer = _Tracer(Path(plan.search_path), packages, former)
    tracer.add_named(plan.workload.rpartition(":")[0], needed=True)
    for text in plan.texts():
        if len(text) < LONG_TEXT and (found := NAMED.fullmatch(text)):
            tracer.add_named(found[1], needed=False)
    for script in plan.scripts:
        tracer.add_script(Path(script))
    for name in sorted({*also, *(name for file in former for name in file.modules)}):
        tracer.add_module(name, needed=False)
    files = tracer.follow()
    about: CodeAbout = {
        "python": platform.python_version(),
        "distributions": _versions(tracer.where.bound_in if container else {*tracer.where.foreign, *PACKAGES}),
        "image": container["identity"].get("sha256") if container else None,
        "git": git,
    }
    return Snapshot(files, about, tuple(tracer.sentences()), tracer.namespaces(files))


def git_state(folder: Path) -> Git | None:
    """The commit of a folder's repository and whether its tree is dirty; None without a repository or git."""
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
    """Follows imports from file to file; `where` locates modules and collects foreign packages."""

    def __init__(self, folder: Path, packages: Sequence[tuple[str, str]] | None, former: Iterable[SourceFile]) -> None:
        self.where = Locator(folder, packages, former)
        self._base = folder
        self._left_out: list[str] = []
        self._compiled: set[str] = set()
        self._files: dict[str, _Found] = {}
        self._todo: list[_Found] = []
        self._dropped: set[str] = set()
        self._spaces: set[str] = set()
        self._roots: list[Path] = []

    def add_named(self, module: str, *, needed: bool) -> None:
        """Add a module or a file that the run file names."""
        if not module.endswith(".py"):
            known = set(self.where.foreign)
            if all(part.isidentifier() for part in module.split(".")):
                self.add_module(module, needed=needed)
            if not needed:
                self.where.foreign = known  # any text may have a colon
            return
        path = (self._base / expanded(module)).resolve()
        if is_file(path, BRIEF_PATIENCE_S):
            if str(path.parent) not in self.where.folders:
                self.where.folders.insert(0, str(path.parent))
            self._take(str(path), None, needed=needed)
        elif needed:
            raise SlurmGPUError(
                f"The file {path} of the run's workload no longer exists. Put it back, or compute with the "
                f"snapshot of the last submission: --code former."
            )

    def add_script(self, path: Path) -> None:
        """Add a file that runs as a program, of whatever language, and what it imports if that is Python."""
        if str(path.parent) not in self.where.folders:
            self.where.folders.insert(0, str(path.parent))
        if not path.is_relative_to(self._base):
            self._roots.append(_root_of(path))
        self._take(str(path), None, needed=False, is_script=True)

    def add_module(self, name: str, *, needed: bool) -> None:
        """Add a module and its parent packages, if they are the user's own."""
        parts = name.split(".")
        for n_parts in range(1, len(parts) + 1):
            whole = ".".join(parts[:n_parts])
            place = self.where.locate(whole)
            if place is None:
                return
            if place.path is not None:
                self._take(place.path, whole, needed=needed)
            else:
                self._spaces.add(whole)

    def namespaces(self, files: Iterable[SourceFile]) -> tuple[str, ...]:
        """The packages without an `__init__.py` that have modules among the files."""
        names = [name for file in files for name in file.modules]
        return tuple(sorted(space for space in self._spaces if any(name.startswith(f"{space}.") for name in names)))

    def sentences(self) -> list[str]:
        """Sentences on imports that are not in the snapshot."""
        found = list(self._left_out)
        if self._compiled:
            found.append(
                f"Compiled modules are not in the snapshot of the code; tasks import the files on disk: "
                f"{_some(self._compiled)}."
            )
        if elsewhere := [f"{name} ({path})" for name, path in self.where.elsewhere.items()]:
            found.append(
                f"The code imports from folders that are not bound into the image; tasks import the image's versions, "
                f"if any: {_some(elsewhere)}. Put them beside the run file, or install them in the image."
            )
        return found

    def follow(self) -> tuple[SourceFile, ...]:
        """Follow all imports, and return the files."""
        sources: dict[str, tuple[bytes, str]] = {}
        while self._todo:
            # Needed files first: whether a file is needed must be known when it is read.
            found = self._todo.pop(next((i for i, each in enumerate(self._todo) if each.needed), 0))
            if found.path in sources or found.top in self._dropped:
                continue
            try:
                source = retried(Path(found.path).read_bytes, BRIEF_PATIENCE_S)
                tree = ast.parse(source, found.path)
            except (SyntaxError, ValueError, RecursionError) as error:
                if found.needed and not isinstance(error, RecursionError):
                    raise _not_python(found.path, error) from error
                # It may be for another version of Python.
                sources[found.path] = source, _digest_of_bytes(source)
                continue
            except OSError as error:
                if found.needed:
                    raise SlurmGPUError(
                        f"{found.path}, which the workload imports, cannot be read: {error.strerror}. "
                        f"Make it readable, and submit again."
                    ) from error
                self._left_out.append(f"{found.path} cannot be read and is not in the snapshot: {error.strerror}.")
                continue
            # A program's first line, or its comments as of PEP 723, may say what runs it.
            digest = _digest_of_bytes(source) if found.is_script else tree_digest(source, found.path)
            sources[found.path] = source, digest
            try:
                self._follow_imports(found, tree)
            except RecursionError:  # an expression of a thousand operators
                self._left_out.append(f"The imports of {found.path} are unknown: it is nested too deeply.")
        taken = [found for path, found in sorted(self._files.items()) if path in sources]
        kept = [found for found in taken if found.top not in self._dropped]
        return tuple(
            SourceFile(
                found.name,
                found.path,
                tuple(sorted(found.modules)),
                digest,
                hashlib.sha256(source).hexdigest(),
                source,
                self.where.inside(found.path, found.top),
            )
            for found in kept
            for source, digest in [sources[found.path]]
        )

    def _follow_imports(self, found: _Found, tree: ast.Module) -> None:
        module = found.modules[0] if found.modules else None
        is_package = Path(found.path).name == "__init__.py"
        package = None if module is None else module if is_package else module.rpartition(".")[0]
        imports = _Imports(package or (self._package_of_script(Path(found.path)) if found.is_script else None))
        imports.visit(tree)
        for name, always in imports.names:
            self.add_module(name, needed=found.needed and always)
            if found.needed and always and name in imports.modules and (path := self.where.vanished(name)):
                raise SlurmGPUError(
                    f"{found.path} imports {name}, whose file {path} no longer exists. Put it back, or compute "
                    f"with the snapshot of the last submission: --code former."
                )
        below = set(imports.below)
        if imports.made_up and package:
            # Any module of the package may be imported at run time.
            below.add(package.partition(".")[0])
        elif imports.made_up:
            self._left_out.append(
                f"{found.path}, line {imports.made_up}, imports by a name that is computed at run time: such a module "
                f"is not in the snapshot of the code, and tasks import the file on disk."
            )
        for name in sorted(name for each in below for name in self._modules_below(each)):
            self.add_module(name, needed=False)

    def _package_of_script(self, path: Path) -> str | None:
        """The package to which a script belongs that `python -m` runs in the run file's folder; None for others."""
        parts = path.parent.relative_to(self._base).parts if path.is_relative_to(self._base) else ()
        return ".".join(parts) if parts and all(part.isidentifier() for part in parts) else None

    def _take(self, path: str, module: str | None, *, needed: bool, is_script: bool = False) -> None:
        if not (path.endswith(".py") or is_script):
            self._compiled.add(path)
            return
        found = self._files.get(path)
        if found is None:
            top = None if module is None else self.where.top_of(module)
            found = self._files[path] = _Found(path, self._name(path, top, module), [], needed, top)
            self._todo.append(found)
            if top and sum(each.top == top for each in self._files.values()) > MANY_FILES:
                self._dropped.add(top)
                self.where.give_up(top)
                self._left_out.append(
                    f"{top} has more than {MANY_FILES:,} modules: they are not in the snapshot of the code."
                )
        found.needed |= needed
        found.is_script |= is_script
        if module is not None and module not in found.modules:
            found.modules.append(module)

    def _name(self, path: str, top: str | None, module: str | None) -> str:
        """The name of a file in the snapshot: its path below the run file's folder, a script's, or its package's."""
        where = Path(path)
        if root := next((each for each in (self._base, *self._roots) if where.is_relative_to(each)), None):
            name = str(where.relative_to(root))
        elif module is not None:
            depth = module.count(".") + (2 if where.name == "__init__.py" else 1)
            name = str(Path(*where.parts[-depth:]))
        else:
            name = where.name
        taken = {found.name for found in self._files.values()}
        folders = {str(folder) for each in taken for folder in Path(each).parents}
        number = 2
        while name in taken or name in folders or any(str(folder) in taken for folder in Path(name).parents):
            name, number = f"{number}/{name}", number + 1
        return name

    def _modules_below(self, top: str) -> Iterator[str]:
        self.add_module(top, needed=False)
        place = self.where.locate(top)
        for folder in place.folders if place else ():
            for where, _, names in os.walk(folder, onerror=self._leave_out):
                for name in names:
                    parts = Path(where, name).relative_to(folder).with_suffix("").parts
                    parts = parts[:-1] if parts[-1] == "__init__" else parts
                    if name.endswith(".py") and all(part.isidentifier() for part in parts):
                        yield ".".join((top, *parts))

    def _leave_out(self, error: OSError) -> None:
        if isinstance(error, FileNotFoundError):  # no folder, no modules
            return
        said = f"{error.filename} cannot be listed: modules in it are not in the snapshot: {error.strerror}."
        if said not in self._left_out:
            self._left_out.append(said)


def _root_of(script: Path) -> Path:
    """The folder in which the snapshot keeps the places of a script from elsewhere and of what is around it."""
    above = script.parent.parent
    return script.parent if above in (Path(above.anchor), expanded("~").parent) else above


def _digest_of_bytes(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:DIGITS]


class _Imports(ast.NodeVisitor):
    """The modules that a file imports, and whether each is imported unconditionally."""

    def __init__(self, package: str | None) -> None:
        self.names: list[tuple[str, bool]] = []
        self.modules: set[str] = set()
        """The names that must be modules."""
        self.below: set[str] = set()
        """Packages from which it imports modules by names computed at run time."""
        self.made_up = 0
        """The line of an import by an unknown name."""
        self._package = package
        self._depth = 0

    def visit_Try(self, node: ast.Try) -> None:
        """Imports within `try` may fail."""
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    def visit_If(self, node: ast.If) -> None:
        """Skip imports for type checkers."""
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
            self.modules.add(alias.name)

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
        self.modules.add(base)
        for alias in node.names:
            if alias.name != "*":
                self._add(f"{base}.{alias.name}")

    def visit_Call(self, node: ast.Call) -> None:
        """`importlib.import_module("a.b")`, `importlib.import_module(f"plugins.{name}")`."""
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in ("import_module", "__import__", "run_module") and node.args:
            begin, is_whole = _beginning(node.args[0])
            package, dot, _ = begin.rpartition(".")
            if is_whole and not begin.startswith("."):
                self.names.append((begin, False))
            elif dot and not begin.startswith("."):
                self.below.add(package)
            else:
                self.made_up = node.lineno
        self.generic_visit(node)

    def _add(self, name: str) -> None:
        self.names.append((name, self._depth == 0))


def _beginning(node: ast.expr) -> tuple[str, bool]:
    """The known beginning of a text expression, and whether that is the whole text."""
    match node:
        case ast.Constant(value=str(text)):
            return text, True
        case (
            ast.JoinedStr(values=[ast.Constant(value=str(text)), *_])
            | ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Add())
        ):
            return text, False
        case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mod()):
            return text.partition("%")[0], False
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format")):
            return text.partition("{")[0], False
    return "", False


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - MANY_NAMED} more" if len(names) > MANY_NAMED else ""
    return ", ".join(names[:MANY_NAMED]) + more


def _not_python(path: str, error: Exception) -> SlurmGPUError:
    line, said = (f", line {error.lineno},", error.msg) if isinstance(error, SyntaxError) else ("", str(error))
    return SlurmGPUError(f"{path}{line} is not Python: {said}. Correct it there, and submit again.")


def _versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of these packages' distributions and of slurmgpu."""
    found = {"slurmgpu": __version__}
    unknown = set()
    for name in names:
        try:
            found[name.replace("_", "-").lower()] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name not in PACKAGES:
                unknown.add(name)
    # A package such as `yaml` may have a distribution of another name.
    of_packages = importlib.metadata.packages_distributions() if unknown else {}
    for name in unknown:
        for distribution in of_packages.get(name, ()):
            found[distribution] = importlib.metadata.version(distribution)
    return dict(sorted(found.items()))
