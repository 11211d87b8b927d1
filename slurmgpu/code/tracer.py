"""Find the user's files that a workload imports, runs and reads, as they are on disk now.

A `Tracer` begins with the workload, scripts and texts of the run file; `finish` follows them and returns a `Trace`.
Nothing is imported: the planning process may have imported an older version, and a login node may lack dependencies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurmgpu.code import names_in_shell
from slurmgpu.code.kept_files import KeptFile, KeptFiles
from slurmgpu.code.locator import Locator
from slurmgpu.code.named_files import NamedFiles
from slurmgpu.code.read_files import ReadFiles
from slurmgpu.code.shell_scripts import ShellScripts
from slurmgpu.code.snapshots import DIGITS, ReadFile, SourceFile
from slurmgpu.code.source_facts import facts_of
from slurmgpu.code.trace_notes import TraceNotes
from slurmgpu.code.user_code import UserCode
from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, retried

_LARGEST_COMPILED = 1 << 26


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


@dataclass(frozen=True)
class Scope:
    """What the tracers of one run share: the run's own, and those of programs that run from disk.

    `folder` is the run file's. `packages` are names and paths bound into the run's image, None without an image.
    `inputs` are files that need no digest here, because the plan has it. `programs` are those that were followed.
    """

    folder: Path
    packages: Sequence[tuple[str, str]] | None
    inputs: Collection[str] = ()
    notes: TraceNotes = field(default_factory=TraceNotes)
    programs: set[Path] = field(default_factory=set)


class Tracer:
    """Follows a run's code from file to file.

    What it begins with is added to `code`, `named`, `read` and `shells`. `former` are the files of an earlier snapshot.
    `options` are the names of options on the command line of scripts, with `_` for `-`; None if it is unknown.
    """

    def __init__(self, scope: Scope, former: Iterable[SourceFile] = (), options: Collection[str] | None = ()) -> None:
        folder, notes = scope.folder, scope.notes
        self.scope, self._options = scope, options
        self._locator = Locator(folder, scope.packages, former)
        self._kept = KeptFiles(folder, self._locator, notes)
        self.code = UserCode(folder, self._locator, self._kept, notes)
        self.read = ReadFiles(folder, scope.inputs, self._kept, self.code)
        self.named = NamedFiles(folder, self.code, self.read, notes)
        self.shells = ShellScripts(folder, self.code, self.read, notes)

    def finish(self) -> Trace:
        """Follow all imports, and return what was found.

        SlurmGPUError if a needed file is missing, cannot be read, or is not valid Python.
        """
        for file in self._kept.unread():
            self._follow(file)
        files = self._kept.source_files()
        read = self._read_files(files)
        modules = [name for file in files for name in file.modules]
        spaces = {space for space in self.code.namespaces if any(name.startswith(f"{space}.") for name in modules)}
        notes = self.scope.notes.sentences(read, self.code.compiled, self._locator.elsewhere)
        return Trace(files, read, tuple(sorted(spaces)), frozenset(self._locator.packages), notes)

    def _follow(self, file: KeptFile) -> None:
        """Read a file, and add what it imports and names."""
        path, notes = Path(file.path), self.scope.notes
        try:
            file.source = source = retried(path.read_bytes, BRIEF_PATIENCE_S)
        except OSError as error:
            if file.needed:
                raise SlurmGPUError(
                    f"{path}, which the workload imports, cannot be read: {error.strerror}. "
                    f"Make it readable, and submit again."
                ) from error
            notes.leave_out(f"{path} cannot be read and is not in the snapshot: {error.strerror}.")
            return
        file.digest = hashlib.sha256(source).hexdigest()[:DIGITS]
        if file.is_script and names_in_shell.is_shell(source, path.suffix):
            self.shells.add(path, source, is_started=file.is_started)
            return
        try:
            facts = facts_of(source, self.code.package_of(file), is_script=file.is_script)
        except (SyntaxError, ValueError, RecursionError) as error:
            if file.needed and not isinstance(error, RecursionError):
                raise _not_python(path, error) from error
            return  # it may be for another version of Python
        # The digest of a script is that of its bytes: its first line, or comments as in PEP 723, may say what runs it.
        if file.is_script:
            notes.look_for_slurm(file.name, names_in_shell.without_usage("\n".join(facts.texts)))
        else:
            file.digest = facts.digest
        imported = set[str]() if facts.imports is None else self.code.add_imports(file, facts.imports)
        if facts.named is None:
            notes.leave_out(f"Some imports and reads of {path} are unknown, because it is nested too deeply.")
            return
        notes.look_for_outputs(file.name, facts.named, self._options, is_started=file.is_started)
        self.named.add_all(path, facts.named, facts.n_above, imported)

    def _read_files(self, files: Iterable[SourceFile]) -> tuple[ReadFile, ...]:
        """The files that code reads from disk, without those that it has in the snapshot."""
        # Programs run from disk, even if the snapshot has them, too.
        started = self._follow_programs(self.shells.programs)
        read = self.read.files | self._follow_programs(dict.fromkeys(self.read.programs, False))
        for file in files:
            read.pop(file.path, None)
            if file.modules and any(Path(file.path).is_relative_to(folder) for folder in self.code.first_folders):
                started[file.path] = ReadFile(file.name, file.path, file.sha256)
        for path in sorted(self.code.compiled | self._locator.archives):
            if (found := self.read.digest(path, _LARGEST_COMPILED)) is not None:
                started[path] = found
        return tuple(file for _, file in sorted((read | started).items()))

    def _follow_programs(self, programs: Mapping[Path, bool]) -> dict[str, ReadFile]:
        """Python programs that run from disk, with the files that they import and read."""
        resolved = {path.resolve(): is_started for path, is_started in programs.items()}
        todo = sorted(resolved.keys() - self.scope.programs)
        if not todo:
            return {}
        self.scope.programs.update(todo)
        tracer = Tracer(self.scope, options=None)
        for folder in self._locator.folders:
            tracer._locator.search_last(Path(folder))
        for path in todo:
            tracer.code.add_script(path, is_started=resolved[path])
        found = tracer.finish()
        self._locator.packages.update(found.packages)
        run = {file.path: ReadFile(file.name, file.path, file.sha256) for file in found.files}
        return run | {file.path: file for file in found.read}


def _not_python(path: Path, error: Exception) -> SlurmGPUError:
    line, said = (f", line {error.lineno},", error.msg) if isinstance(error, SyntaxError) else ("", str(error))
    return SlurmGPUError(f"{path}{line} is not Python: {said}. Correct it there, and submit again.")
