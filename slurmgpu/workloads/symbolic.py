"""Compare mathematical expressions by the library math-verify, in a process of its own that can be ended."""

from __future__ import annotations

import contextlib
import json
import logging
import select
import signal
import subprocess
import sys
import weakref
from typing import Any

from slurmgpu.errors import SlurmGPUError

log = logging.getLogger(__name__)

CPU_S = 10
"""The most CPU time of a question: no wall time, so that what is right does not depend on how busy the machine is."""
WALL_FACTOR = 30
"""After so many times that, the process is ended though it has hardly computed."""
N_TRIES = 2
"""Who kills a process may have meant another."""
SHOWN = 200
"""Characters of a text that a warning shows."""


class Symbols:
    """Questions about expressions; `cpu_s` is the most CPU time of each. The process starts with the first one."""

    def __init__(self, cpu_s: int = CPU_S) -> None:
        self._cpu_s = cpu_s
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        """The process, which takes a second to start; SlurmGPUError if math-verify cannot be imported there."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        command = [sys.executable, "-m", "slurmgpu.workloads.symbolic_process", str(self._cpu_s)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
        weakref.finalize(self, _end, process)
        line = self._ask_process(process, None)
        said = json.loads(line) if line else {"missing": f"its process ended with exit code {process.wait()}"}
        if "missing" in said:
            raise SlurmGPUError(
                f'checker = "math" needs the package math-verify, which cannot be imported here ({said["missing"]}): '
                f"pip install 'slurmgpu[math]', in the image if there is one."
            )
        self._process = process
        return process

    def are_equal(self, gold: str, said: str) -> bool:
        """Whether an answer is what the right one says; False if that takes too long."""
        return bool(self._ask("equal", gold, said))

    def has_expression(self, text: str) -> bool:
        """Whether there is an expression in a text."""
        return bool(self._ask("exists", text))

    def written(self, text: str) -> str | None:
        """The expression that is a text's answer, as it is written there; None without one."""
        found: str | None = self._ask("written", text)
        return found

    def simplest(self, text: str) -> str | None:
        """A text that is equal for most equal expressions; None without one, or if that takes too long."""
        found: str | None = self._ask("simplest", text)
        return found

    def _ask(self, wanted: str, *texts: str) -> Any:
        for _ in range(N_TRIES):
            process = self.start()
            if line := self._ask_process(process, json.dumps([wanted, *texts])):
                return json.loads(line)["answer"]
            if process.wait() == -signal.SIGXCPU:
                break
        log.warning("math-verify came to no end with %s", " and ".join(repr(each[:SHOWN]) for each in texts))
        return None

    def _ask_process(self, process: subprocess.Popen[str], question: str | None) -> str:
        """The line that answers a question, or the process's first one; empty if it ended, or took too long."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if question is not None:
                process.stdin.write(question + "\n")
                process.stdin.flush()
        except BrokenPipeError:
            return ""
        if not select.select([process.stdout], [], [], WALL_FACTOR * self._cpu_s)[0]:
            process.send_signal(signal.SIGXCPU)
        return process.stdout.readline()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what was written to a process that ended
                pipe.close()
