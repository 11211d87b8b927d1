"""Run Python programs that a model wrote: without a network, on a read-only file system, within limits.

By bubblewrap (https://github.com/containers/bubblewrap), which needs no root, but unprivileged user namespaces.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from slurmgpu.errors import SlurmGPUError

CPU_S = 10
"""The CPU time of a program with its tests. Not real time, by which a busy node would find other programs wrong."""
WALL_S = 60
MEMORY_BYTES = 2 << 30
FILE_BYTES = 64 << 20
N_PROCESSES = 64

SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
"""What Python needs of the system's files; homes, data sets and /etc are not there."""

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LC_ALL": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # a set has the same order for everybody
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

RUNNER = """
import json, os, resource, sys
told = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
asked = json.loads(sys.stdin.buffer.read())
for fd in (0, 1, 2):
    os.dup2(null, fd)
for name, limit in asked["limits"].items():
    resource.setrlimit(getattr(resource, name), (limit, limit))
word, space = asked.pop("word"), {"__name__": "program"}
exec(compile(asked["program"], "program.py", "exec"), space)
exec(compile(asked["tests"], "tests.py", "exec"), space)
os.write(told, word.encode())
"""
"""The word says that the tests came to their end: a program that ends the process itself exits with 0 as well."""


@dataclass(frozen=True)
class Sandbox:
    """Runs a program and its tests in a process that sees nothing but Python's files, and an empty /tmp."""

    cpu_s: int = CPU_S
    memory_bytes: int = MEMORY_BYTES

    def passes(self, program: str, tests: str) -> bool:
        """Whether the program runs, and then its tests, to their end, within the limits."""
        word = secrets.token_hex(16)
        limits = {
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_FSIZE": FILE_BYTES,
            "RLIMIT_NPROC": N_PROCESSES,
            "RLIMIT_CORE": 0,
        }
        asked = json.dumps({"word": word, "limits": limits, "program": program, "tests": tests})
        try:
            done = self._run(asked)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0 and done.stdout == word.encode()

    def check(self) -> None:
        """Refuse a machine that cannot run programs apart: SlurmGPUError says what it lacks."""
        if self.passes("", ""):
            return
        if shutil.which("bwrap") is None:
            raise SlurmGPUError(
                'checker = "python" runs programs apart from everything else by bubblewrap, and there is no program '
                "bwrap here. Install the package bubblewrap, on the nodes or in the image, or write a checker of your "
                "own."
            )
        said = " ".join(self._run("{}").stderr.decode(errors="replace").split())[:300]
        raise SlurmGPUError(
            f'checker = "python" runs programs apart from everything else by bubblewrap, which fails here: {said}. It '
            f"needs unprivileged user namespaces (the sysctl user.max_user_namespaces above 0, and, on Debian and "
            f"Ubuntu, kernel.unprivileged_userns_clone = 1 or an AppArmor profile for bwrap)."
        )

    def _run(self, asked: str) -> subprocess.CompletedProcess[bytes]:
        try:
            return subprocess.run(
                self._command,
                input=asked.encode("utf-8", "surrogatepass"),
                capture_output=True,
                timeout=WALL_S,
                check=False,
                env=ENVIRONMENT,
            )
        except FileNotFoundError:
            return subprocess.CompletedProcess(self._command, 127, b"", b"there is no program bwrap")

    @cached_property
    def _command(self) -> Sequence[str]:
        bwrap, python = shutil.which("bwrap") or "/nowhere/bwrap", Path(sys.executable)
        own = (sys.prefix, sys.base_prefix, str(python.resolve().parent.parent))
        binds = [each for path in (*SYSTEM, *own) for each in ("--ro-bind-try", path, path)]
        return [
            *(bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
            *binds,
            *("--proc", "/proc", "--dev", "/dev", *_size(bwrap), "--tmpfs", "/tmp", "--chdir", "/tmp"),
            *(str(python), "-s", "-c", RUNNER),
        ]


def _size(bwrap: str) -> Sequence[str]:
    """The options that limit the next file system in memory; none before bubblewrap 0.7, where files alone are limited.

    Distributions that live long have older ones.
    """
    try:
        told = subprocess.run([bwrap, "--help"], capture_output=True, check=False).stdout
    except FileNotFoundError:
        return ()
    return ("--size", str(FILE_BYTES)) if b"--size" in told else ()
