"""Traces which files of the user's a workload imports, as they are on disk now.

Follows imports in syntax trees, also within functions. Nothing is imported: the planning process may have imported an
older version, and a login node may lack dependencies.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmgpu.code import names_in_shell
from slurmgpu.code.files_in_source import DOTTED, FilesInSource
from slurmgpu.code.imports_in_source import ImportsInSource, PathFolder, all_in, defined_in
from slurmgpu.code.locator import Locator, is_others
from slurmgpu.code.snapshots import ReadFile, SourceFile, tree_digest
from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.amounts import some_of
from slurmgpu.util.hashing import DIGITS
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, is_file, is_folder, retried
from slurmgpu.util.users import expanded

MANY_FILES = 2000
"""A package with more files is not the user's own, such as PyTorch built from source."""
MANY_NAMED = 5
NAMED = re.compile(r"([^\s:][^:]*):[A-Za-z_][\w.]*")
"""A setting that names a class or a function in a module or a file: `digits.py:Digits`."""
_DOTTED_IN_TEXT = re.compile(rf"(?<![\w./-]){DOTTED.pattern}(?![\w/])")
_OF_A_RUN_FILE = re.compile(rb"(?m)^\[workload\]")
CONFIGURATIONS = frozenset({".yaml", ".yml", ".toml", ".json", ".ini", ".cfg", ".conf", ".gin"})
TEXTS = frozenset({".txt", ".md", ".j2", ".jinja", ".jinja2", ".prompt", ".csv", ".tsv"})
"""Prompts, lists of words, small tables."""
SCRIPTS = frozenset({".py", ".sh", ".bash", ".zsh", ".pl", ".rb", ".R", ".r", ".jl", ".lua", ".js", ".mjs", ".awk"})
PROGRAMS = SCRIPTS | {".cu", ".cuh", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".pyx"}
_OF_THE_SYSTEM = ("/etc/", "/proc/", "/sys/", "/dev/", "/usr/", "/run/", "/var/", "/lib/", "/lib64/")
LARGEST_COMPILED = 1 << 26
LARGEST_READ = 1 << 20
"""A larger file, in bytes, holds data."""
MANY_CONFIGURATIONS, MANY_BESIDE_CONFIGURATIONS = 1000, 20_000
_OF_A_RUN = frozenset({"run.json", ".hydra", "multirun.yaml"})
"""Files in the folder of a run, of slurmgpu or of Hydra."""
_OF_TRACKERS = frozenset({"wandb", "mlruns", "lightning_logs", "__pycache__"})


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


class Tracer:
    """Follows imports from file to file; `where` locates modules and collects foreign packages."""

    def __init__(self, folder: Path, packages: Sequence[tuple[str, str]] | None, former: Iterable[SourceFile]) -> None:
        self.where = Locator(folder, packages, former)
        self._base, self._packages = folder, packages
        self.inputs: set[str] = set()
        """Files whose digests the plan has: a task refuses others."""
        self._left_out: list[str] = []
        self._compiled: set[str] = set()
        self._files: dict[str, _Found] = {}
        self._todo: list[_Found] = []
        self._dropped: set[str] = set()
        self._spaces: set[str] = set()
        self._roots: list[Path] = []
        self._read: dict[str, ReadFile] = {}
        self._started: dict[str, ReadFile] = {}
        """Files of programs that run where they lie, though they may be in the snapshot as well."""
        self._run_by_shell: list[Path] = []
        self._run_by_text: list[Path] = []
        self._programs: set[Path] = set()
        self._shells: set[Path] = set()
        self._first: set[Path] = set()
        self.choosing_gpus: list[str] = []
        """Places that set CUDA_VISIBLE_DEVICES."""
        self.options: set[str] = set()
        """The options on the command line of scripts, as variables are named."""
        self._outputs: dict[str, list[str]] = {}
        """The files that scripts write by a name which is the same in each call, by the script."""
        self._defined: dict[str, frozenset[str]] = {}

    def add_named(self, module: str, *, needed: bool) -> None:
        """Add a module or a file that the run file names."""
        if not module.endswith(".py"):
            is_name = all(part.isidentifier() for part in module.split("."))
            if is_name and (needed or self.where.look(module.partition(".")[0]) is not None):
                self.add_module(module, needed=needed)
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
        """Add a file that runs as a program, in whatever language, and what it imports if that is Python."""
        if str(path.parent) not in self.where.folders:
            self.where.folders.insert(0, str(path.parent))
        if not path.is_relative_to(self._base):
            self._roots.append(_root_of(path))
        self._take(str(path), None, needed=False, is_script=True)

    def add_shell_code(self, code: str) -> None:
        """Add what the code of `bash -c` names, which runs in the run file's folder."""
        self._follow_shell(self._base / "-c", code.encode())

    def add_folders(self, names: Iterable[str], *, is_first: bool) -> None:
        """Look for modules in folders as well; if they are the first on a program's path, it does not find copies."""
        for name in names:
            with contextlib.suppress(OSError, ValueError):
                folder = (self._base / expanded(name)).resolve()
                if is_folder(folder, BRIEF_PATIENCE_S) and not is_others(f"{folder}/"):
                    if str(folder) not in self.where.folders:
                        self.where.folders.append(str(folder))
                    if is_first:
                        self._first.add(folder)

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

    def add_text(self, text: str, folders: Sequence[Path], suffixes: frozenset[str]) -> None:
        """Add what a text names, if anything: a file in one of the folders, or a module by a dotted name."""
        if Path(text).suffix in suffixes:
            for folder in folders:
                if self._add_read(folder / text):
                    return
        named = NAMED.fullmatch(text)
        if DOTTED.fullmatch(name := f"{named[1]}.{text[named.end(1) + 1 :]}" if named else text):
            self._add_dotted(name)

    def _add_dotted(self, name: str) -> None:
        """Add the module of the user's that a dotted name is of, or that defines its last part."""
        parts = name.split(".")
        top = self.where.look(parts[0])
        if top is None:
            return
        module = parts[0]
        for n_parts in range(2, len(parts) + 1):
            if self.where.locate(".".join(parts[:n_parts])) is None:
                break
            module = ".".join(parts[:n_parts])
        if module == parts[0]:
            # Many a text has a dot, and is no name of Python's: `train.loss`.
            if top.path is None or not top.path.endswith(".py"):
                return
            if {parts[1], "*"} & self._names_of(top.path):
                self.add_module(module, needed=False)
            return
        self.add_module(module, needed=False)

    def _names_of(self, path: str) -> frozenset[str]:
        """The names in a module's file, which is read once: a table of weights may name a thousand of its parts."""
        if path not in self._defined:
            self._defined[path] = frozenset()
            with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
                self._defined[path] = defined_in(ast.parse(retried(Path(path).read_bytes, BRIEF_PATIENCE_S)))
        return self._defined[path]

    def _add_read(self, path: Path) -> bool:
        """Note a file that code reads where it lies, and add the modules that it names; False if there is none."""
        with contextlib.suppress(OSError, ValueError):
            whole = str(path.resolve())
            if whole in self._read or whole in self._files or {whole, os.path.abspath(path)} & self.inputs:  # noqa: PTH100
                return True
            if is_others(whole) or whole.startswith(_OF_THE_SYSTEM):
                return False
            if not is_file(path, BRIEF_PATIENCE_S) or path.stat().st_size > LARGEST_READ:
                return False
            content = retried(path.read_bytes, BRIEF_PATIENCE_S)
            if path.suffix == ".toml" and _OF_A_RUN_FILE.search(content):
                return True  # the plan has what it says
            self._read[whole] = ReadFile(self._shown(path), whole, hashlib.sha256(content).hexdigest())
            if path.suffix == ".py":  # it is run, or executed as text
                self._run_by_text.append(path)
            if path.suffix in CONFIGURATIONS:
                for found in sorted(set(_DOTTED_IN_TEXT.findall(content.decode("utf-8", "replace")))):
                    self._add_dotted(found)
            return True
        return False

    def _shown(self, path: Path) -> str:
        whole = os.path.normpath(path)
        return str(Path(whole).relative_to(self._base)) if Path(whole).is_relative_to(self._base) else whole

    def _add_configurations(self, folder: Path) -> None:
        """Note what Hydra may read of a folder, which may hold data and the files of earlier runs as well."""
        found: list[Path] = []
        n_files = 0
        for where, folders, names in os.walk(folder, onerror=self._leave_out):
            if Path(where) != folder and _OF_A_RUN.intersection(folders + names):
                folders.clear()
                continue
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _OF_TRACKERS)
            found += [Path(where, name) for name in sorted(names) if name.endswith((".yaml", ".yml"))]
            n_files += len(names)
            if len(found) > MANY_CONFIGURATIONS or n_files > MANY_BESIDE_CONFIGURATIONS:
                self._left_out.append(
                    f"{folder} has many files: whether all configurations in it stay as they are is not known."
                )
                break
        for path in found[:MANY_CONFIGURATIONS]:
            self._add_read(path)

    def read_files(self, files: Iterable[SourceFile]) -> tuple[ReadFile, ...]:
        """The files that code names and reads where they lie, without those in the snapshot."""
        self._started |= self._files_of(self._run_by_shell)
        self._read |= self._files_of(self._run_by_text)
        kept = {file.path for file in files}
        for file in files:
            if file.modules and any(Path(file.path).is_relative_to(folder) for folder in self._first):
                self._started[file.path] = ReadFile(file.name, file.path, file.sha256)
        for path in sorted(self._compiled | self.where.archives):
            with contextlib.suppress(OSError):
                if Path(path).stat().st_size <= LARGEST_COMPILED:
                    content = retried(Path(path).read_bytes, BRIEF_PATIENCE_S)
                    self._started[path] = ReadFile(self._shown(Path(path)), path, hashlib.sha256(content).hexdigest())
        read = {path: file for path, file in self._read.items() if path not in kept}
        return tuple(file for _, file in sorted((read | self._started).items()))

    def namespaces(self, files: Iterable[SourceFile]) -> tuple[str, ...]:
        """The packages without an `__init__.py` that have modules among the files."""
        names = [name for file in files for name in file.modules]
        return tuple(sorted(space for space in self._spaces if any(name.startswith(f"{space}.") for name in names)))

    def sentences(self, read: Sequence[ReadFile]) -> list[str]:
        """Sentences on imports, and on files that are read, that are not in the snapshot."""
        found = list(self._left_out)
        if self._compiled:
            found.append(
                f"Compiled modules are not in the snapshot of the code; tasks import the files on disk: "
                f"{_some(self._compiled)}."
            )
        if read := [file for file in read if file.path not in self._compiled]:
            found.append(
                f"Tasks read these files when they run, not as they are now: {_some(file.name for file in read)}. "
                f"After a change of one of them, the report counts further rows as by unknown code."
            )
        if self.choosing_gpus:
            found.append(
                f"CUDA_VISIBLE_DEVICES is set by {some_of(self.choosing_gpus, MANY_NAMED)}, to GPUs that may be "
                f"another task's, or none. Leave that out: a task sees its own GPUs alone, as cuda:0 and so on."
            )
        found += [
            f"{script} writes {some_of(names, MANY_NAMED)} by the same name in each call: calls that run at once "
            f"overwrite each other's, and one may read what another has left. Take a part of the name from the command "
            f"line, as in --out fits/{{id}}, unless each call has a working folder of its own."
            for script, names in self._outputs.items()
        ]
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
                if found.is_script and names_in_shell.is_shell(source, Path(found.path).suffix):
                    sources[found.path] = source, _digest_of_bytes(source)
                    self._follow_shell(Path(found.path), source)
                    continue
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
        path = Path(found.path)
        module = found.modules[0] if found.modules else ""
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        imports = ImportsInSource(tree, package or (self._package_of_script(path) if found.is_script else ""))
        self._follow_modules(found, imports, package)
        self._follow_files(found, FilesInSource(tree))

    def _follow_modules(self, found: _Found, imports: ImportsInSource, package: str) -> None:
        for each in imports.path_folders:
            self._add_path_folder(each, Path(found.path), is_script=found.is_script)
        for name in sorted(imports.stars):
            self._add_all_of(name)
        for name, always, is_module in imports.imports:
            needed = found.needed and always
            self.add_module(name, needed=needed)
            if needed and is_module and (gone := self.where.vanished(name)):
                raise SlurmGPUError(
                    f"{found.path} imports {name}, whose file {gone} no longer exists. Put it back, or compute "
                    f"with the snapshot of the last submission: --code former."
                )
        plugin_packages = set(imports.plugin_packages)
        if imports.unknown_line and package:
            # Any module of the package may be imported at run time.
            plugin_packages.add(package.partition(".")[0])
        elif imports.unknown_line and not imports.walks:
            self._left_out.append(
                f"{found.path}, line {imports.unknown_line}, imports by a name that is computed at run time: such a "
                f"module is not in the snapshot of the code, and tasks import the file on disk."
            )
        for name in sorted(name for each in plugin_packages for name in self._modules_below(each)):
            self.add_module(name, needed=False)

    def _follow_files(self, found: _Found, named: FilesInSource) -> None:
        path = Path(found.path)
        if named.gpus_line:
            self.choosing_gpus.append(f"{found.name} in line {named.gpus_line}")
        defaults = {f"{folder} (--{name})" for name, folder in named.output_options.items() if name not in self.options}
        if found.is_script and (outputs := named.outputs | defaults):
            self._outputs[found.name] = sorted(outputs)
        above = [folder for folder in path.parents if folder.is_relative_to(self._base)]
        folders = tuple(dict.fromkeys((path.parent, *above, self._base)))
        for text in sorted(named.read_texts()):
            self.add_text(text, folders, CONFIGURATIONS | PROGRAMS | TEXTS)
        for text in sorted(named.config_folders):
            self._add_configurations(path.parent / text)

    def _add_path_folder(self, each: PathFolder, path: Path, *, is_script: bool) -> None:
        if each.n_up is None:
            names = [each.name] if each.name else []
            self.add_folders(names, is_first=is_script and each.is_first)
        elif 1 <= each.n_up <= len(path.parents):
            self.add_folders([str(path.parents[each.n_up - 1] / each.name)], is_first=False)

    def _add_all_of(self, package: str) -> None:
        """Add the modules that `from package import *` imports."""
        self.add_module(package, needed=False)
        place = self.where.locate(package)
        if place is None or place.path is None or not place.path.endswith(".py"):
            return
        with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
            for name in all_in(ast.parse(retried(Path(place.path).read_bytes, BRIEF_PATIENCE_S))):
                if name.isidentifier():
                    self.add_module(f"{package}.{name}", needed=False)

    def _follow_shell(self, script: Path, source: bytes) -> None:
        """Add what a script of a shell names; its copy would start the present files of the folder in which it runs."""
        names = names_in_shell.names_in(source)
        if names.chooses_gpus:
            self.choosing_gpus.append(self._shown(script) if script.name != "-c" else "the code behind -c")
        self.add_folders(names.path, is_first=True)
        for name in sorted(names.beside):
            path = script.parent / name
            if path.suffix in PROGRAMS and is_file(path, BRIEF_PATIENCE_S) and not is_others(str(path)):
                self.add_script(path.resolve())
            elif path.suffix in CONFIGURATIONS:
                self._add_read(path)
        for name in sorted(names.here):
            path = self._base / name
            if path.suffix == ".py" and is_file(path, BRIEF_PATIENCE_S):
                self._run_by_shell.append(path)
            elif path.suffix in CONFIGURATIONS | PROGRAMS and self._add_read(path):
                with contextlib.suppress(OSError):
                    content = retried(path.read_bytes, BRIEF_PATIENCE_S)
                    if names_in_shell.is_shell(content, path.suffix) and path.resolve() not in self._shells:
                        self._shells.add(path.resolve())
                        self._follow_shell(path, content)
        for name in sorted(names.modules):
            path = self._base.joinpath(*name.split("."))
            for file in (path.with_suffix(".py"), path / "__main__.py"):
                if is_file(file, BRIEF_PATIENCE_S):
                    self._run_by_shell.append(file)

    def _files_of(self, programs: Iterable[Path]) -> dict[str, ReadFile]:
        """Programs of Python's that run where they lie, with the files that they import and read."""
        todo = sorted({path.resolve() for path in programs} - self._programs)
        if not todo:
            return {}
        self._programs.update(todo)
        tracer = Tracer(self._base, self._packages, ())
        tracer._programs, tracer.inputs = self._programs, self.inputs
        tracer.where.folders += self.where.folders
        for path in todo:
            tracer.add_script(path)
        files = tracer.follow()
        self.where.foreign |= tracer.where.foreign
        self._left_out += [said for said in tracer._left_out if said not in self._left_out]
        found = {file.path: ReadFile(file.name, file.path, file.sha256) for file in files}
        return found | {file.path: file for file in tracer.read_files(files)}

    def _package_of_script(self, path: Path) -> str:
        """The package to which a script belongs that `python -m` runs in the run file's folder; "" for others."""
        parts = path.parent.relative_to(self._base).parts if path.is_relative_to(self._base) else ()
        return ".".join(parts) if all(part.isidentifier() for part in parts) else ""

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


def _some(names: Iterable[str]) -> str:
    return some_of(sorted(names), MANY_NAMED)


def _not_python(path: str, error: Exception) -> SlurmGPUError:
    line, said = (f", line {error.lineno},", error.msg) if isinstance(error, SyntaxError) else ("", str(error))
    return SlurmGPUError(f"{path}{line} is not Python: {said}. Correct it there, and submit again.")
