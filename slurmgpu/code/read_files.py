"""The files that code reads from disk while it runs: configurations, prompts, programs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Collection
from pathlib import Path

from slurmgpu.code.file_kinds import CONFIGURATIONS
from slurmgpu.code.files_in_source import DOTTED
from slurmgpu.code.kept_files import KeptFiles
from slurmgpu.code.locator import is_others
from slurmgpu.code.snapshots import ReadFile
from slurmgpu.code.user_code import UserCode
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, is_file, retried
from slurmgpu.util.users import resolved

_DOTTED_IN_TEXT = re.compile(rf"(?<![\w./-]){DOTTED.pattern}(?![\w/])")
_OF_A_RUN_FILE = re.compile(rb"(?m)^\[workload\]")
_OF_THE_SYSTEM = ("/etc/", "/proc/", "/sys/", "/dev/", "/usr/", "/run/", "/var/", "/lib/", "/lib64/")
_LARGEST_READ = 1 << 20
"""A larger file, in bytes, holds data."""


class ReadFiles:
    """Notes files with their digests, by path, and adds the modules that configurations name.

    `inputs` are files that need no digest here, because the plan has it. `programs` are the Python files among those
    that are read: a program to run, or text for `exec()`.
    """

    def __init__(self, folder: Path, inputs: Collection[str], kept: KeptFiles, code: UserCode) -> None:
        self.files: dict[str, ReadFile] = {}
        self.programs: list[Path] = []
        self._folder, self._inputs, self._kept, self._code = folder, frozenset(inputs), kept, code

    def add(self, path: Path) -> bool:
        """Note a file that code reads, and add the modules that it names; False if there is no such file."""
        with contextlib.suppress(OSError, ValueError):
            whole = str(resolved(path))
            if whole in self.files or whole in self._kept or {whole, os.path.abspath(path)} & self._inputs:
                return True
            if is_others(whole) or whole.startswith(_OF_THE_SYSTEM):
                return False
            if not is_file(path, BRIEF_PATIENCE_S) or path.stat().st_size > _LARGEST_READ:
                return False
            content = retried(path.read_bytes, BRIEF_PATIENCE_S)
            if path.suffix == ".toml" and _OF_A_RUN_FILE.search(content):
                return True  # its content is in the plan
            self.files[whole] = self._digested(path, whole, content)
            if path.suffix == ".py":
                self.programs.append(path)
            if path.suffix in CONFIGURATIONS:
                for found in sorted(set(_DOTTED_IN_TEXT.findall(content.decode("utf-8", "replace")))):
                    self._code.add_dotted(found)
            return True
        return False

    def digest(self, path: str, most_bytes: int) -> ReadFile | None:
        """A file as it is read from disk, which is not noted here; None if it is larger, or cannot be read."""
        with contextlib.suppress(OSError):
            if Path(path).stat().st_size <= most_bytes:
                return self._digested(Path(path), path, retried(Path(path).read_bytes, BRIEF_PATIENCE_S))
        return None

    def shown(self, path: Path) -> str:
        """The path in messages: relative to the run file's folder, if it is below that."""
        whole = Path(os.path.normpath(path))
        return str(whole.relative_to(self._folder) if whole.is_relative_to(self._folder) else whole)

    def _digested(self, path: Path, whole: str, content: bytes) -> ReadFile:
        return ReadFile(self.shown(path), whole, hashlib.sha256(content).hexdigest())
