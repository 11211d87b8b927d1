"""Compare mathematical expressions with math-verify, in a separate process that can be killed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import slurmgpu
from slurmgpu.errors import SlurmGPUError
from slurmgpu.workloads.grading.sandbox import ENVIRONMENT, apart

log = logging.getLogger(__name__)

CPU_S = 10
"""The most CPU time for a question; not wall time, so that results do not depend on the machine's load."""
WALL_FACTOR = 30
"""The wall time after which the process is killed anyway, as a multiple of the CPU time."""
N_TRIES = 2
"""Tries for a question: a signal that killed the process may not have been its fault."""
ENDED_BY_TIME = (-signal.SIGXCPU, 128 + signal.SIGXCPU)
"""The exit codes of a process that exceeded its CPU time, alone and in bubblewrap."""
HEEDLESS = ("/bin/sh", "-c", "trap '' INT TERM HUP USR1 USR2; exec \"$@\"", "sh")
"""Slurm may send signals to all processes of a job, which would end bubblewrap; ignored signals stay ignored."""
SHOWN = 200
"""The number of characters of a text that a warning shows."""


class Symbols:
    """Answers questions about expressions; its process starts with the first question.

    The process evaluates text from models, so it has no network and no other files if bubblewrap works.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        """Start the process, which takes a second; SlurmGPUError if it cannot import math-verify."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        missing = None
        for command, environ in self._ways():
            process, missing = self._begin(command, environ)
            if missing is None:
                self._process = process
                return process
            log.info("math-verify does not start in %s: %s", Path(command[0]).name, missing)
        raise SlurmGPUError(
            f'checker = "math" needs the package math-verify, which cannot be imported here ({missing}): '
            f"pip install 'slurmgpu[math]', in the image if there is one."
        )

    def _ways(self) -> Iterator[tuple[Sequence[str], Mapping[str, str] | None]]:
        """The commands for the process, with their environments: first in bubblewrap if it exists, then without."""
        if shutil.which("bwrap") is not None:
            own = Path(slurmgpu.__file__).parent
            others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
            environ = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(own.parent), *others])}
            yield [*HEEDLESS, *apart(self._alone, [str(own), *others])], environ
        yield self._alone, None

    @property
    def _alone(self) -> list[str]:
        return [sys.executable, "-m", "slurmgpu.workloads.grading.symbolic_process", str(CPU_S)]

    def _begin(
        self, command: Sequence[str], environ: Mapping[str, str] | None
    ) -> tuple[subprocess.Popen[str], str | None]:
        """A process, and why it cannot answer questions; None if it can."""
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, encoding="utf-8", env=environ)
        weakref.finalize(self, _end, process)
        line = self._ask_process(process, None)
        said = json.loads(line) if line else {"missing": f"its process ended with exit code {process.wait()}"}
        return process, said.get("missing")

    def are_equal(self, gold: str, said: str) -> bool:
        """Whether an answer equals the right one; False if the comparison takes too long."""
        return bool(self._ask("equal", gold, said))

    def has_expression(self, text: str) -> bool:
        """Whether a text has an expression."""
        return bool(self._ask("exists", text))

    def written(self, text: str) -> str | None:
        """The expression that is a text's answer, as written in the text; None without one."""
        found: str | None = self._ask("written", text)
        return found

    def simplest(self, text: str) -> str | None:
        """A text that is equal for most equal expressions; None without an expression, or if it takes too long."""
        found: str | None = self._ask("simplest", text)
        return found

    def _ask(self, wanted: str, *texts: str) -> Any:
        for _ in range(N_TRIES):
            process = self.start()
            if line := self._ask_process(process, json.dumps([wanted, *texts])):
                return json.loads(line)["answer"]
            if process.wait() in ENDED_BY_TIME:
                break
        log.warning("math-verify took too long for %s", " and ".join(repr(each[:SHOWN]) for each in texts))
        return None

    def _ask_process(self, process: subprocess.Popen[str], question: str | None) -> str:
        """The line that answers a question, or the process's first line; "" if it ended, or took too long."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if question is not None:
                process.stdin.write(question + "\n")
                process.stdin.flush()
        except BrokenPipeError:
            return ""
        if not select.select([process.stdout], [], [], WALL_FACTOR * CPU_S)[0]:
            process.send_signal(signal.SIGXCPU)
        return process.stdout.readline()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # unwritten data for a process that ended
                pipe.close()
