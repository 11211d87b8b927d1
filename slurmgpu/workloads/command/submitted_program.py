"""The arguments and variables of calls, with scripts and modules as they were submitted."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from slurmgpu.code.importer import present_files
from slurmgpu.code.started_modules import file_of_module, module_of
from slurmgpu.util.sockets import free_port
from slurmgpu.util.users import resolved
from slurmgpu.workloads.command.placeholders import CommandLine
from slurmgpu.workloads.command.programs import RUN_MODULE, check_program, entry_script

log = logging.getLogger(__name__)


class SubmittedProgram:
    """The program of a command line, with the `environ` from its task; SlurmGPUError if it cannot start."""

    def __init__(self, program: str, line: CommandLine, environ: Mapping[str, str]) -> None:
        self._line, self._environ = line, environ
        self._scripts = {number: resolved(text) for number, text in line.texts.items()}
        self._module = module_of(line.texts)
        self._file_of_module = file_of_module(self._module[1]) if self._module else None
        kept = present_files().as_submitted(self._scripts[0])  # the file on disk may be another one by now, or none
        check_program(program if kept == self._scripts[0] else str(kept), environ.get("PATH"))
        self._is_entry = entry_script(program, environ.get("PATH")) is not None
        self._runs_copies = False
        self._told: set[int] = set()

    def arguments(self, values: Mapping[str, str], data: Mapping[str, object]) -> list[bytes]:
        """The arguments of a call, with scripts as they were submitted."""
        arguments = self._line.fill(values, data)
        for number, path in self._scripts.items():
            if (kept := self._as_submitted(number, path)) is not None:
                arguments[number] = os.fsencode(kept)
        if self._module is not None and (file := self._file_of_module) is not None:
            number, module = self._module
            if (kept := self._as_submitted(number, file.resolve())) is not None:
                folder = str(kept).removesuffix(str(file))
                arguments[number - 1 : number + 1] = map(os.fsencode, (RUN_MODULE, folder, module))
        return arguments

    def environment(self) -> dict[str, str]:
        """The variables of a call, which make its script import modules as they were submitted."""
        # Another call on the node may use the default port of `torch.distributed`, 29500.
        environ = {"MASTER_PORT": str(free_port()), **self._environ}
        folders = present_files().python_path() if self._runs_copies or self._is_entry else []
        if folders:
            given = environ.get("PYTHONPATH")
            environ["PYTHONPATH"] = os.pathsep.join([*folders, *([given] if given else [])])
        return environ

    def _as_submitted(self, number: int, path: Path) -> Path | None:
        """The submitted copy to run instead of an argument's file, logged once; None for the file itself."""
        kept = present_files().as_submitted(path)
        if kept == path:
            return None
        self._runs_copies = True
        if number not in self._told:
            self._told.add(number)
            log.warning("%s or a module that it imports has changed since submission: running the copy %s", path, kept)
        return kept


OF_A_GROUP = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
}
"""What torchrun tells the processes of a group. A call is in none, unless the program makes one."""


def inherited_environment() -> dict[str, str]:
    """The worker's environment without the array of tasks, and without a group of processes.

    A script that takes its part of an input by SLURM_ARRAY_TASK_ID would take a part of each slice, and so would one
    that does so by a RANK that the submitting shell had; a group of one harms nothing.
    """
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1" and os.environ.get("RANK", "0") == "0"
    left_out = set() if is_alone else OF_A_GROUP
    return {
        name: value
        for name, value in os.environ.items()
        if name not in left_out and not name.startswith("SLURM_ARRAY_")
    }
