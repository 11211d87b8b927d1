"""Run Python programs that a model wrote: without a network, on a read-only file system, within limits.

By bubblewrap (https://github.com/containers/bubblewrap), which needs no root, but unprivileged user namespaces.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from slurmgpu.errors import SlurmGPUError

CPU_S = 10
"""The CPU time of a program with its tests. Not real time, by which a busy node would find other programs wrong."""
WALL_S = 60
MEMORY_BYTES = 2 << 30
FILE_BYTES = 64 << 20
N_PROCESSES = 12
"""Processes and threads: one of bubblewrap's, the program, and ten more, which together may have 22 GiB."""
TOLD_BYTES = 4096
"""The bytes that are read of a program's stdout and stderr: a word, or why it could not be started."""

SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
"""The system's files that Python needs; homes, data sets and /etc are not there."""

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LC_ALL": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # a set has the same order for everybody
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

PROGRAM = "/program/program.py"
"""The path of the program: a child that multiprocessing starts by `spawn` or `forkserver`, as Python 3.14 does by
default, imports it from there."""

RUNNER = f"""
import importlib.util, json, os, resource, sys
told = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
asked = json.loads(sys.stdin.buffer.read())
for name, limit in asked["limits"].items():
    which = getattr(resource, name)
    most = resource.getrlimit(which)[1]
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(which, (limit, limit))
for fd in (0, 1, 2):
    os.dup2(null, fd)
path, word = {PROGRAM!r}, asked.pop("word")
spec = importlib.util.spec_from_file_location("program", path)
program = sys.modules["program"] = importlib.util.module_from_spec(spec)
sys.path.append(os.path.dirname(path))
exec(compile(asked["program"], path, "exec"), vars(program))
exec(compile(asked["tests"], "tests.py", "exec"), vars(program))
os.write(told, word.encode())
"""
"""The word says that the tests came to their end: a program that ends the process itself exits with 0 as well.

The program is the module `program`, as dataclasses with annotations as text, pickle and `typing.get_type_hints` look up
the module of a class by its name. It is executed here rather than imported: a thread of its own that looks that up
would wait for the import's end.
"""


def passes(program: str, tests: str) -> bool:
    """Whether the program runs, and then its tests, to their end, within the limits."""
    return _run(program, tests) is None


def check() -> None:
    """Refuse a machine that cannot run programs apart: SlurmGPUError says what it lacks."""
    if (said := _run("", "")) is None:
        return
    if shutil.which("bwrap") is None:
        raise SlurmGPUError(
            'checker = "python" runs programs apart from everything else by bubblewrap, and there is no program '
            "bwrap here. Install the package bubblewrap, on the nodes or in the image, or write a checker of your "
            "own."
        )
    raise SlurmGPUError(
        f'checker = "python" runs programs apart from everything else by bubblewrap, which fails here: {said}. It '
        f"needs unprivileged user namespaces (the sysctl user.max_user_namespaces above 0, and, on Debian and "
        f"Ubuntu, kernel.unprivileged_userns_clone = 1 or an AppArmor profile for bwrap)."
    )


def _run(program: str, tests: str) -> str | None:
    """None if the program and its tests come to their end; else the end of what stderr says, or the exit code."""
    word = secrets.token_hex(16)
    asked = json.dumps({"word": word, "limits": _limits(), "program": program, "tests": tests})
    try:
        process = _start(program)
    except FileNotFoundError:
        return "there is no program bwrap"
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    timer = threading.Timer(WALL_S, process.kill)
    with process:
        try:
            timer.start()
            with contextlib.suppress(BrokenPipeError), process.stdin:  # it has ended, and says why
                process.stdin.write(asked.encode("utf-8", "surrogatepass"))
            told = process.stdout.read(TOLD_BYTES)
            if len(told) == TOLD_BYTES:  # more than a word; more is not read
                process.kill()
            process.wait()
            said = process.stderr.read(1 << 16)[-TOLD_BYTES:]
        finally:
            process.kill()
            timer.cancel()
    if process.returncode == 0 and told == word.encode():
        return None
    return " ".join(said.decode(errors="replace").split())[-300:] or f"exit code {process.returncode}"


def _start(program: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    # No memfd_create: Pythons that are built for an old glibc lack it, as those of conda and uv.
    with tempfile.TemporaryFile() as file:
        file.write(program.encode("utf-8", "surrogatepass"))
        file.seek(0)
        command = apart([sys.executable, "-s", "-c", RUNNER], texts={PROGRAM: file.fileno()})
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, env=ENVIRONMENT, pass_fds=[file.fileno()]
        )


def _limits() -> dict[str, int]:
    limits = {
        "RLIMIT_CPU": CPU_S,
        "RLIMIT_AS": MEMORY_BYTES,
        "RLIMIT_FSIZE": FILE_BYTES,
        "RLIMIT_CORE": 0,
    }
    # An older kernel counts all threads of the user on the node, and so would find right programs wrong.
    return limits | ({"RLIMIT_NPROC": N_PROCESSES} if _counts_apart(platform.release()) else {})


def apart(command: Sequence[str], more: Sequence[str] = (), texts: Mapping[str, int] | None = None) -> list[str]:
    """A command of this Python in bubblewrap: no network, no files but Python's, the system's and `more`, read-only.

    `texts` are more files: their paths, and the descriptors that bubblewrap inherits to read their content from.
    """
    bwrap, python = shutil.which("bwrap") or "/nowhere/bwrap", Path(sys.executable)
    own = (sys.prefix, sys.base_prefix, str(python.resolve().parent.parent), *more)
    size = _size(bwrap)
    binds = [each for path in (*SYSTEM, *own) for each in ("--ro-bind-try", path, path)]
    binds += [each for path, file in (texts or {}).items() for each in ("--ro-bind-data", str(file), path)]
    return [
        *(bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *("--proc", "/proc", "--dev", "/dev"),
        *(*size, "--tmpfs", "/dev/shm", *size, "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *binds,  # later, as Python may be in /tmp
        *("--remount-ro", "/dev", "--remount-ro", "/"),  # which are file systems in memory, without a size
        *command,
    ]


def _counts_apart(release: str) -> bool:
    """Whether a kernel counts the processes of each user namespace apart, as since Linux 5.14."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return found is not None and (int(found[1]), int(found[2])) >= (5, 14)


@cache
def _size(bwrap: str) -> Sequence[str]:
    """The options that limit the next file system in memory; none before bubblewrap 0.7, where files alone are limited.

    Distributions that live long have older ones.
    """
    try:
        told = subprocess.run([bwrap, "--help"], capture_output=True, check=False).stdout
    except FileNotFoundError:
        return ()
    return ("--size", str(FILE_BYTES)) if b"--size" in told else ()
