"""Follow what shell scripts start and read."""

from __future__ import annotations

import contextlib
from pathlib import Path

from slurmgpu.code import names_in_shell
from slurmgpu.code.file_kinds import CONFIGURATIONS, PROGRAMS
from slurmgpu.code.locator import is_others
from slurmgpu.code.read_files import ReadFiles
from slurmgpu.code.trace_notes import TraceNotes
from slurmgpu.code.user_code import UserCode
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, is_file, retried


class ShellScripts:
    """Adds what shell scripts name. Even the copy of a script starts the files on disk in the folder where it runs.

    `programs` are the Python files among those, and whether they are started in the run file's folder.
    """

    def __init__(self, folder: Path, code: UserCode, read: ReadFiles, notes: TraceNotes) -> None:
        self.programs: dict[Path, bool] = {}
        self._folder, self._code, self._read, self._notes = folder, code, read, notes
        self._followed: set[Path] = set()

    def add_code(self, code: str) -> None:
        """Add what the code of `bash -c` names, which runs in the run file's folder."""
        self._follow("the code after -c", self._folder, code.encode(), is_started=True)

    def add(self, script: Path, source: bytes, *, is_started: bool) -> None:
        """Add what a script names."""
        self._follow(self._read.shown(script), script.parent, source, is_started=is_started)

    def _follow(self, shown: str, folder: Path, source: bytes, *, is_started: bool) -> None:
        text = names_in_shell.commands_in(source)
        names = names_in_shell.names_in(text)
        if names.chooses_gpus:
            self._notes.choosing_gpus.append(shown)
        if is_started and names.outputs:
            self._notes.outputs[shown] = sorted(names.outputs)
        is_started &= not names.changes_folder
        self._notes.look_for_slurm(shown, text)
        self._code.search(names.path, is_first=True)
        for name in sorted(names.beside):
            self._add_beside(folder / name, is_started=is_started)
        for name in sorted(names.here):
            self._add_here(self._folder / name, is_started=is_started)
        for name in sorted(names.modules):
            path = self._folder.joinpath(*name.split("."))
            programs = (path.with_suffix(".py"), path / "__main__.py")
            found = [program for program in programs if is_file(program, BRIEF_PATIENCE_S)]
            self.programs |= dict.fromkeys(found, is_started)

    def _add_beside(self, path: Path, *, is_started: bool) -> None:
        """Add a file that a script names in its own folder: programs go into the snapshot, too."""
        if path.suffix in PROGRAMS and is_file(path, BRIEF_PATIENCE_S) and not is_others(str(path)):
            self._code.add_script(path.resolve(), is_started=is_started)
        elif path.suffix in CONFIGURATIONS:
            self._read.add(path)

    def _add_here(self, path: Path, *, is_started: bool) -> None:
        """Add a file that a script reads or runs in the folder where it runs itself."""
        if path.suffix == ".py" and is_file(path, BRIEF_PATIENCE_S):
            self.programs[path] = is_started
        elif path.suffix in CONFIGURATIONS | PROGRAMS and self._read.add(path):
            with contextlib.suppress(OSError):
                content = retried(path.read_bytes, BRIEF_PATIENCE_S)
                if names_in_shell.is_shell(content, path.suffix) and path.resolve() not in self._followed:
                    self._followed.add(path.resolve())
                    self.add(path, content, is_started=is_started)
