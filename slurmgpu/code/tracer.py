"""Find the user's files that a workload imports, runs and reads, as they are on disk now.

A `Tracer` begins with the workload, scripts and texts of the run file. It follows imports in syntax trees, also within
functions, and names in shell scripts; `finish` returns a `Trace`. Nothing is imported: the planning process may have
imported an older version, and a login node may lack dependencies.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from slurmgpu.code import names_in_shell
from slurmgpu.code.file_kinds import CONFIGURATIONS, PROGRAMS, TEXTS
from slurmgpu.code.files_in_source import DOTTED, FilesInSource, folders_above, texts_in
from slurmgpu.code.imports_in_source import ImportsInSource, PathFolder, all_in, defined_in
from slurmgpu.code.locator import Locator, is_others
from slurmgpu.code.snapshot_names import SnapshotNames
from slurmgpu.code.snapshots import ReadFile, SourceFile, tree_digest
from slurmgpu.code.trace_notes import TraceNotes
from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.hashing import DIGITS
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, is_file, is_folder, retried
from slurmgpu.util.users import expanded

_MANY_FILES = 2000
"""A package with more files is taken as foreign, such as PyTorch built from source."""
NAMED = re.compile(r"([^\s:][^:]*):[A-Za-z_][\w.]*")
"""A setting that names a class or a function in a module or a file: `digits.py:Digits`."""
_DOTTED_IN_TEXT = re.compile(rf"(?<![\w./-]){DOTTED.pattern}(?![\w/])")
_OF_A_RUN_FILE = re.compile(rb"(?m)^\[workload\]")
_OF_THE_SYSTEM = ("/etc/", "/proc/", "/sys/", "/dev/", "/usr/", "/run/", "/var/", "/lib/", "/lib64/")
_LARGEST_COMPILED = 1 << 26
_LARGEST_READ = 1 << 20
"""A larger file, in bytes, holds data."""
_MANY_CONFIGURATIONS, MANY_BESIDE_CONFIGURATIONS = 1000, 20_000
_OF_A_RUN = frozenset({"run.json", ".hydra", "multirun.yaml"})
"""Files in the folder of a run, of slurmgpu or of Hydra."""
_OF_RESOURCES = frozenset({"importlib.resources", "importlib_resources", "pkgutil"})
"""Modules that read the files of a package by its name."""
_FOLDER = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)*/?")
_DEEPEST = 3
"""How many folders, each named in the one before, are followed."""
_MANY_NAMED = 100
"""A folder in which a file names more holds data, such as images by their classes."""
_OF_TRACKERS = frozenset({"wandb", "mlruns", "lightning_logs", "__pycache__"})


@dataclass(frozen=True)
class Trace:
    """The files that a snapshot keeps, and those that are only `read` from disk.

    `namespaces` are packages of these files without an `__init__.py`. `packages` are installed packages that the code
    imports; with an image, those that are bound into it. `notes` are sentences for the user.
    """

    files: tuple[SourceFile, ...]
    read: tuple[ReadFile, ...]
    namespaces: tuple[str, ...]
    packages: frozenset[str]
    notes: tuple[str, ...]


@dataclass
class _UserFile:
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


class Tracer:
    """Follows imports from file to file, beginning in a run file's folder.

    `packages` are names and paths bound into the run's image, None without an image; `former` are the files of an
    earlier snapshot. `inputs` are files that need no digest here, because the plan has it. `options` are the names of
    options on the command line of scripts, with `_` for `-`; None if the command line is unknown.
    """

    def __init__(
        self,
        folder: Path,
        packages: Sequence[tuple[str, str]] | None,
        former: Iterable[SourceFile] = (),
        *,
        inputs: Collection[str] = (),
        options: Collection[str] | None = (),
    ) -> None:
        self.notes = TraceNotes()
        self._locator = Locator(folder, packages, former)
        self._base, self._packages, self._inputs, self._options = folder, packages, frozenset(inputs), options
        # Files that the snapshot keeps, by path; those still to follow; packages that are dropped for too many files.
        self._files: dict[str, _UserFile] = {}
        self._todo: list[_UserFile] = []
        self._n_modules: Counter[str] = Counter()
        self._dropped: set[str] = set()
        self._namespaces: set[str] = set()
        self._names = SnapshotNames(folder)
        self._defined: dict[str, frozenset[str]] = {}
        self._listed: dict[Path, frozenset[str]] = {}
        self._homes = (expanded("~"), Path(os.path.realpath(expanded("~"))))  # which may be a link
        # Files that are read from disk, and Python programs that run from disk or are executed as text.
        self._read: dict[str, ReadFile] = {}
        # The former with whether they are started in the run file's folder.
        self._run_by_shell: dict[Path, bool] = {}
        self._run_by_text: list[Path] = []
        # Programs and shell scripts that were followed on disk, also by another tracer.
        self._programs: set[Path] = set()
        self._shells: set[Path] = set()
        # Folders that programs search before those of the snapshot.
        self._first: set[Path] = set()

    def add_named(self, module: str, *, needed: bool = False) -> None:
        """Add a module or a file that the run file names; SlurmGPUError if a `needed` file does not exist."""
        if not module.endswith(".py"):
            is_name = all(part.isidentifier() for part in module.split("."))
            if is_name and (needed or self._locator.look(module.partition(".")[0]) is not None):
                self.add_module(module, needed=needed)
            return
        path = (self._base / expanded(module)).resolve()
        if is_file(path, BRIEF_PATIENCE_S):
            self._locator.search_first(path.parent)
            self._take(str(path), None, needed=needed)
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
        self._names.add_script(path)
        self._take(str(path), None, is_script=True, is_started=is_started)

    def add_shell_code(self, code: str) -> None:
        """Add what the code of `bash -c` names, which runs in the run file's folder."""
        self._follow_shell(self._base / "-c", code.encode(), is_started=True)

    def add_folders(self, names: Iterable[str], *, is_first: bool) -> None:
        """Search folders for modules, too. With `is_first`, programs find them there before the snapshot's copies."""
        for name in names:
            with contextlib.suppress(OSError, ValueError):
                folder = (self._base / expanded(name)).resolve()
                if is_folder(folder, BRIEF_PATIENCE_S) and not is_others(f"{folder}/"):
                    if str(folder) not in self._locator.folders:
                        self._locator.folders.append(str(folder))
                    if is_first:
                        self._first.add(folder)

    def add_module(self, name: str, *, needed: bool = False) -> None:
        """Add a module and its parent packages, if they are the user's own."""
        parts = name.split(".")
        for n_parts in range(1, len(parts) + 1):
            whole = ".".join(parts[:n_parts])
            place = self._locator.locate(whole)
            if place is None:
                return
            if place.path is not None:
                self._take(place.path, whole, needed=needed)
            else:
                self._namespaces.add(whole)

    def add_text(
        self, text: str, folders: Sequence[Path], suffixes: frozenset[str] = CONFIGURATIONS | PROGRAMS | TEXTS
    ) -> None:
        """Add the file in one of the folders, or the module by a dotted name, that a text may name."""
        if Path(text).suffix in suffixes:
            for folder in folders:
                if self.add_read(folder / text):
                    return
        named = NAMED.fullmatch(text)
        if DOTTED.fullmatch(name := f"{named[1]}.{text[named.end(1) + 1 :]}" if named else text):
            self._add_dotted(name)

    def _add_dotted(self, name: str) -> None:
        """Add the user's module that a dotted name is, or that defines its last part."""
        parts = name.split(".")
        top = self._locator.look(parts[0])
        if top is None:
            return
        module = parts[0]
        for n_parts in range(2, len(parts) + 1):
            if self._locator.locate(".".join(parts[:n_parts])) is None:
                break
            module = ".".join(parts[:n_parts])
        # Many texts with a dot name no module: `train.loss`.
        if module != parts[0] or {parts[1], "*"} & self._names_of(top.path or ""):
            self.add_module(module)

    def _names_of(self, path: str) -> frozenset[str]:
        """The names in a module's file. It is read once: a list of weights may name a thousand of its parts."""
        if path not in self._defined:
            tree = _tree_of(path)
            self._defined[path] = frozenset() if tree is None else defined_in(tree)
        return self._defined[path]

    def add_read(self, path: Path) -> bool:
        """Note a file that code reads from disk, and add the modules that it names; False if there is no such file."""
        with contextlib.suppress(OSError, ValueError):
            whole = str(path.resolve())
            if whole in self._read or whole in self._files or {whole, os.path.abspath(path)} & self._inputs:  # noqa: PTH100
                return True
            if is_others(whole) or whole.startswith(_OF_THE_SYSTEM):
                return False
            if not is_file(path, BRIEF_PATIENCE_S) or path.stat().st_size > _LARGEST_READ:
                return False
            content = retried(path.read_bytes, BRIEF_PATIENCE_S)
            if path.suffix == ".toml" and _OF_A_RUN_FILE.search(content):
                return True  # its content is in the plan
            self._read[whole] = self._digested(path, whole, content)
            if path.suffix == ".py":  # a program to run, or text for exec()
                self._run_by_text.append(path)
            if path.suffix in CONFIGURATIONS:
                for found in sorted(set(_DOTTED_IN_TEXT.findall(content.decode("utf-8", "replace")))):
                    self._add_dotted(found)
            return True
        return False

    def _digested(self, path: Path, whole: str, content: bytes) -> ReadFile:
        return ReadFile(self._shown(path), whole, _sha256(content))

    def _shown(self, path: Path) -> str:
        whole = os.path.normpath(path)
        return str(Path(whole).relative_to(self._base)) if Path(whole).is_relative_to(self._base) else whole

    def _add_configurations(self, folder: Path) -> None:
        """Note the configurations in a folder of Hydra's, which may also hold data and the files of earlier runs."""
        found: list[Path] = []
        n_files = 0
        for where, folders, names in os.walk(folder, onerror=self.notes.leave_out_folder):
            if Path(where) != folder and _OF_A_RUN.intersection(folders + names):
                folders.clear()
                continue
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _OF_TRACKERS)
            found += [Path(where, name) for name in sorted(names) if name.endswith((".yaml", ".yml"))]
            n_files += len(names)
            if len(found) > _MANY_CONFIGURATIONS or n_files > MANY_BESIDE_CONFIGURATIONS:
                self.notes.leave_out(
                    f"{folder} has many files, so it is not checked whether all configurations in it stay unchanged."
                )
                break
        for path in found[:_MANY_CONFIGURATIONS]:
            self.add_read(path)

    def finish(self) -> Trace:
        """Follow all imports, and return what was found.

        SlurmGPUError if a needed file is missing, cannot be read, or is not valid Python.
        """
        while self._todo:
            # Needed files first: whether a file is needed must be known when it is read.
            file = self._todo.pop(next((i for i, each in enumerate(self._todo) if each.needed), 0))
            if file.top not in self._dropped:
                self._follow(file)
        files = tuple(
            SourceFile(
                file.name,
                file.path,
                tuple(sorted(file.modules)),
                file.digest,
                _sha256(file.source),
                file.source,
                self._locator.inside(file.path, file.top),
            )
            for _, file in sorted(self._files.items())
            if file.source is not None and file.top not in self._dropped
        )
        read = self._read_files(files)
        modules = [name for file in files for name in file.modules]
        spaces = {space for space in self._namespaces if any(name.startswith(f"{space}.") for name in modules)}
        packages = frozenset(self._locator.foreign if self._packages is None else self._locator.bound_in)
        notes = self.notes.sentences(read, self._locator.elsewhere)
        return Trace(files, read, tuple(sorted(spaces)), packages, notes)

    def _read_files(self, files: Iterable[SourceFile]) -> tuple[ReadFile, ...]:
        """The files that code reads from disk, without those that it has in the snapshot."""
        # Programs run from disk, even if the snapshot has them, too.
        started = self._files_of(self._run_by_shell)
        read = self._read | self._files_of(dict.fromkeys(self._run_by_text, False))
        for file in files:
            read.pop(file.path, None)
            if file.modules and any(Path(file.path).is_relative_to(folder) for folder in self._first):
                started[file.path] = ReadFile(file.name, file.path, file.sha256)
        for path in sorted(self.notes.compiled | self._locator.archives):
            with contextlib.suppress(OSError):
                if Path(path).stat().st_size <= _LARGEST_COMPILED:
                    started[path] = self._digested(Path(path), path, retried(Path(path).read_bytes, BRIEF_PATIENCE_S))
        return tuple(file for _, file in sorted((read | started).items()))

    def _follow(self, file: _UserFile) -> None:
        """Read a file, and add what it imports and names."""
        try:
            file.source = source = retried(Path(file.path).read_bytes, BRIEF_PATIENCE_S)
        except OSError as error:
            if file.needed:
                raise SlurmGPUError(
                    f"{file.path}, which the workload imports, cannot be read: {error.strerror}. "
                    f"Make it readable, and submit again."
                ) from error
            self.notes.leave_out(f"{file.path} cannot be read and is not in the snapshot: {error.strerror}.")
            return
        file.digest = _sha256(source)[:DIGITS]
        if file.is_script and names_in_shell.is_shell(source, Path(file.path).suffix):
            self._follow_shell(Path(file.path), source, is_started=file.is_started)
            return
        try:
            tree = ast.parse(source, file.path)
        except (SyntaxError, ValueError, RecursionError) as error:
            if file.needed and not isinstance(error, RecursionError):
                raise _not_python(file.path, error) from error
            return  # it may be for another version of Python
        # The digest of a script is that of its bytes: its first line, or comments as in PEP 723, may say what runs it.
        if file.is_script:
            self.notes.look_for_slurm(file.name, names_in_shell.without_usage("\n".join(texts_in(tree))))
        else:
            file.digest = tree_digest(source, file.path, tree)
        try:
            self._follow_imports(file, tree)
        except RecursionError:  # an expression of a thousand operators
            self.notes.leave_out(f"Some imports and reads of {file.path} are unknown, because it is nested too deeply.")

    def _follow_imports(self, file: _UserFile, tree: ast.Module) -> None:
        path = Path(file.path)
        module = file.modules[0] if file.modules else ""
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        imports = ImportsInSource(tree, package or (self._package_of_script(path) if file.is_script else ""))
        self._follow_modules(file, imports, package)
        names = {each.name for each in imports.imports}
        above = folders_above(tree) if b"__file__" in (file.source or b"") else 0
        self._follow_files(file, FilesInSource(tree), above, names if names & _OF_RESOURCES else ())

    def _follow_modules(self, file: _UserFile, imports: ImportsInSource, package: str) -> None:
        for each in imports.path_folders:
            self._add_path_folder(each, Path(file.path), is_script=file.is_script)
        for name in sorted(imports.stars):
            self._add_all_of(name)
        modules = {each.name for each in imports.imports if each.is_module}
        for name, always, _ in imports.imports:
            needed = file.needed and always
            self.add_module(name, needed=needed)
            if needed and name in modules and (gone := self._locator.vanished(name)):
                raise SlurmGPUError(
                    f"{file.path} imports {name}, whose file {gone} no longer exists. Restore it, or compute "
                    f"with the snapshot of the last submission: --code former."
                )
        plugin_packages = set(imports.plugin_packages)
        if imports.unknown_line and package:
            # Any module of the package may be imported at run time.
            plugin_packages.add(package.partition(".")[0])
        elif imports.unknown_line and not imports.walks:
            self.notes.leave_out(
                f"{file.path}, line {imports.unknown_line}, imports a module whose name is computed at run time. It is "
                f"not in the snapshot of the code; tasks import the file on disk."
            )
        for name in sorted(name for each in plugin_packages for name in self._modules_below(each)):
            self.add_module(name)

    def _follow_files(self, file: _UserFile, named: FilesInSource, n_above: int, imported: Collection[str]) -> None:
        """Note what a file reads: in its folder, `n_above` above it, or among the resources of `imported` packages."""
        path = Path(file.path)
        if named.gpus_line:
            self.notes.choosing_gpus.append(f"{file.name} in line {named.gpus_line}")
        left_out = set[str]() if self._options is None else named.output_options.keys() - self._options
        defaults = {f"{named.output_options[name]} (--{name})" for name in left_out}
        if file.is_started and named.outputs:
            self.notes.outputs[file.name] = sorted(named.outputs)
        if file.is_started and (into := named.output_folders | defaults):
            self.notes.output_folders[file.name] = sorted(into)
        above = [
            folder
            for number, folder in enumerate(path.parents)
            if folder.is_relative_to(self._base)
            or (number < n_above and not any(home.is_relative_to(folder) for home in self._homes))
        ]
        folders = tuple(dict.fromkeys((path.parent, *above, self._base)))
        texts = sorted(named.read_texts())
        inner = self._folders_named(texts, folders)
        if imported:
            inner += [folder for name in sorted({*imported, *texts}) for folder in self._folders_of(name)]
        for text in texts:
            self.add_text(text, folders)
            if Path(text).suffix in CONFIGURATIONS | PROGRAMS | TEXTS:
                for folder in inner:
                    self.add_read(folder / text)
        for text in sorted(named.config_folders):
            self._add_configurations(path.parent / text)

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

    def _folders_of(self, name: str) -> tuple[Path, ...]:
        """The folders of a package of the user's, by its full name; none for other texts."""
        if (
            not all(part.isidentifier() for part in name.split("."))
            or self._locator.look(name.partition(".")[0]) is None
        ):
            return ()
        parts = name.split(".")
        places = [self._locator.locate(".".join(parts[:n_parts])) for n_parts in range(1, len(parts) + 1)]
        return tuple(map(Path, places[-1].folders)) if places[-1] is not None else ()

    def _add_path_folder(self, each: PathFolder, path: Path, *, is_script: bool) -> None:
        if each.n_up is None:
            names = [each.name] if each.name else []
            self.add_folders(names, is_first=is_script and each.is_first)
        elif 1 <= each.n_up <= len(path.parents):
            self.add_folders([str(path.parents[each.n_up - 1] / each.name)], is_first=False)

    def _add_all_of(self, package: str) -> None:
        """Add the modules that `from package import *` imports."""
        self.add_module(package)
        place = self._locator.locate(package)
        tree = None if place is None else _tree_of(place.path or "")
        for name in all_in(tree) if tree else ():
            if name.isidentifier():
                self.add_module(f"{package}.{name}")

    def _follow_shell(self, script: Path, source: bytes, *, is_started: bool) -> None:
        """Add what a shell script names. Even its copy starts the files on disk in the folder where it runs."""
        text = names_in_shell.commands_in(source)
        names = names_in_shell.names_in(text)
        shown = self._shown(script) if script.name != "-c" else "the code after -c"
        if names.chooses_gpus:
            self.notes.choosing_gpus.append(shown)
        if is_started and names.outputs:
            self.notes.outputs[shown] = sorted(names.outputs)
        is_started &= not names.changes_folder
        self.notes.look_for_slurm(shown, text)
        self.add_folders(names.path, is_first=True)
        for name in sorted(names.beside):
            self._follow_beside(script.parent / name, is_started=is_started)
        for name in sorted(names.here):
            self._follow_here(self._base / name, is_started=is_started)
        for name in sorted(names.modules):
            path = self._base.joinpath(*name.split("."))
            programs = (path.with_suffix(".py"), path / "__main__.py")
            found = [program for program in programs if is_file(program, BRIEF_PATIENCE_S)]
            self._run_by_shell |= dict.fromkeys(found, is_started)

    def _follow_beside(self, path: Path, *, is_started: bool) -> None:
        """Add a file that a shell script names in its own folder: programs go into the snapshot, too."""
        if path.suffix in PROGRAMS and is_file(path, BRIEF_PATIENCE_S) and not is_others(str(path)):
            self.add_script(path.resolve(), is_started=is_started)
        elif path.suffix in CONFIGURATIONS:
            self.add_read(path)

    def _follow_here(self, path: Path, *, is_started: bool) -> None:
        """Add a file that a shell script reads or runs in the folder where it runs itself."""
        if path.suffix == ".py" and is_file(path, BRIEF_PATIENCE_S):
            self._run_by_shell[path] = is_started
        elif path.suffix in CONFIGURATIONS | PROGRAMS and self.add_read(path):
            with contextlib.suppress(OSError):
                content = retried(path.read_bytes, BRIEF_PATIENCE_S)
                if names_in_shell.is_shell(content, path.suffix) and path.resolve() not in self._shells:
                    self._shells.add(path.resolve())
                    self._follow_shell(path, content, is_started=is_started)

    def _files_of(self, programs: Mapping[Path, bool]) -> dict[str, ReadFile]:
        """Python programs that run from disk, with the files that they import and read."""
        resolved = {path.resolve(): is_started for path, is_started in programs.items()}
        todo = sorted(resolved.keys() - self._programs)
        if not todo:
            return {}
        self._programs.update(todo)
        tracer = Tracer(self._base, self._packages, inputs=self._inputs, options=None)
        tracer._programs = self._programs
        tracer._locator.folders += self._locator.folders
        for path in todo:
            tracer.add_script(path, is_started=resolved[path])
        found = tracer.finish()
        self._locator.foreign |= tracer._locator.foreign
        for sentence in tracer.notes.left_out:
            self.notes.leave_out(sentence)
        self.notes.add_calls(tracer.notes)
        run = {file.path: ReadFile(file.name, file.path, file.sha256) for file in found.files}
        return run | {file.path: file for file in found.read}

    def _package_of_script(self, path: Path) -> str:
        """The package of a script that `python -m` may run in the run file's folder; "" for others."""
        parts = path.parent.relative_to(self._base).parts if path.is_relative_to(self._base) else ()
        return ".".join(parts) if all(part.isidentifier() for part in parts) else ""

    def _take(
        self,
        path: str,
        module: str | None,
        *,
        needed: bool = False,
        is_script: bool = False,
        is_started: bool = False,
    ) -> None:
        if not (path.endswith(".py") or is_script):
            self.notes.compiled.add(path)
            return
        found = self._files.get(path)
        if found is None:
            top = None if module is None else self._locator.top_of(module)
            found = self._files[path] = _UserFile(path, self._names.new(Path(path), module), top)
            self._todo.append(found)
            if top is not None:
                self._count(top)
        found.needed |= needed
        found.is_script |= is_script
        found.is_started |= is_started
        if module is not None and module not in found.modules:
            found.modules.append(module)

    def _count(self, top: str) -> None:
        """Count a module of a package from elsewhere, and drop the package if it has too many."""
        self._n_modules[top] += 1
        if self._n_modules[top] > _MANY_FILES and top not in self._dropped:
            self._dropped.add(top)
            self._locator.give_up(top)
            self.notes.leave_out(
                f"{top} has more than {_MANY_FILES:,} modules: they are not in the snapshot of the code."
            )

    def _modules_below(self, top: str) -> Iterator[str]:
        self.add_module(top)
        place = self._locator.locate(top)
        for folder in place.folders if place else ():
            for where, _, names in os.walk(folder, onerror=self.notes.leave_out_folder):
                for name in names:
                    parts = Path(where, name).relative_to(folder).with_suffix("").parts
                    parts = parts[:-1] if parts[-1] == "__init__" else parts
                    if name.endswith(".py") and all(part.isidentifier() for part in parts):
                        yield ".".join((top, *parts))


def _tree_of(path: str) -> ast.Module | None:
    """The syntax tree of a Python file; None for other files, and if it cannot be read or parsed."""
    if path.endswith(".py"):
        with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
            return ast.parse(retried(Path(path).read_bytes, BRIEF_PATIENCE_S))
    return None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _not_python(path: str, error: Exception) -> SlurmGPUError:
    line, said = (f", line {error.lineno},", error.msg) if isinstance(error, SyntaxError) else ("", str(error))
    return SlurmGPUError(f"{path}{line} is not Python: {said}. Correct it there, and submit again.")
