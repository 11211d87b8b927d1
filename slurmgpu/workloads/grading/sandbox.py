"""Run Python programs that a model wrote: without a network, on a read-only file system, within limits.

Uses bubblewrap (https://github.com/containers/bubblewrap), which needs unprivileged user namespaces, and no root.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from slurmgpu.errors import SlurmGPUError

CPU_S = 10
"""The CPU time of a program with its tests. Not wall time: a busy node would then reject right programs."""
WALL_S = 60
MEMORY_BYTES = 2 << 30
FILE_BYTES = 64 << 20
N_PROCESSES = 12
"""Processes and threads: one of bubblewrap's, the program, and ten more, which together may have 22 GiB."""
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL, 128 + signal.SIGXCPU)
"""The exit codes at the end of a program's time."""
NO_PROGRAM = 65
"""The exit code for a text that is no Python, EX_DATAERR of sysexits.h."""
TOLD_BYTES = 4096
"""The bytes that are read from a program's stdout and stderr: a word, or why it could not be started."""

SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
"""The system's files that Python needs; homes, data sets and /etc are not there."""

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LC_ALL": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # sets have the same order in every run
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

PROGRAM = "/program/program.py"
"""The path of the program: children of multiprocessing with `spawn` or `forkserver`, the default since Python 3.14,
import it from there."""

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
ways = ("multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver")
sys.modules.update(dict.fromkeys(ways))
try:
    code = compile(asked["program"], path, "exec")
except (SyntaxError, ValueError):
    os._exit({NO_PROGRAM})
exec(code, vars(program))
for way in ways:
    sys.modules.pop(way, None)
exec(compile(asked["tests"], "tests.py", "exec"), vars(program))
os.write(told, word.encode())
"""
"""The word shows that the tests ran to their end: a program that exits early also has exit code 0.

The program is the module `program`: dataclasses with annotations as text, pickle and `typing.get_type_hints` look up
the module of a class by its name. It is executed here rather than imported: a thread of the program that looks up the
module would wait for the end of the import.

At its top level it can start no process by `spawn` or `forkserver`: that would import the program, start one in turn,
and so on until the time is over. Python refuses it in a main module.
"""


def failure(program: str, tests: str) -> str | None:
    """Why a program does not pass: `syntax error`, `killed` at the end of its time, or `failed`; None if it does."""
    said = _run(program, tests)
    if said is None:
        return None
    if said == f"exit code {NO_PROGRAM}":
        return "syntax error"
    return "killed" if said in [f"exit code {code}" for code in KILLED] else "failed"


def check() -> None:
    """Refuse a machine that cannot run programs in a sandbox; the SlurmGPUError says what is missing."""
    if (said := _run("", "")) is None:
        return
    if shutil.which("bwrap") is None:
        raise SlurmGPUError(
            'checker = "python" runs programs in a sandbox of bubblewrap, and there is no program bwrap here. Install '
            "the package bubblewrap, on the nodes or in the image, or write a checker of your own."
        )
    raise SlurmGPUError(
        f'checker = "python" runs programs in a sandbox of bubblewrap, which fails here: {said}. bubblewrap needs '
        f"unprivileged user namespaces: the sysctl user.max_user_namespaces above 0, and, on Debian and Ubuntu, "
        f"kernel.unprivileged_userns_clone = 1 or an AppArmor profile for bwrap. Ask the admins of your cluster."
    )


def _run(program: str, tests: str) -> str | None:
    """None if the program and its tests run to their end; else the end of stderr, or the exit code."""
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
            with contextlib.suppress(BrokenPipeError), process.stdin:  # it has ended, and its stderr says why
                process.stdin.write(asked.encode("utf-8", "surrogatepass"))
            told = process.stdout.read(TOLD_BYTES)
            if len(told) == TOLD_BYTES:  # more than a word; the rest is not read
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
    # No memfd_create: Pythons built for an old glibc lack it, such as those of conda and uv.
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
    # An older kernel counts all threads of the user on the node, and the limit would fail right programs.
    return limits | ({"RLIMIT_NPROC": N_PROCESSES} if _counts_apart(platform.release()) else {})


def apart(command: Sequence[str], more: Sequence[str] = (), texts: Mapping[str, int] | None = None) -> list[str]:
    """A command of this Python in bubblewrap: no network, and only files of Python, the system and `more`, read-only.

    `texts` are more files: their paths, and the inherited descriptors that bubblewrap reads their content from.
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
        *binds,  # after /tmp, as Python may be in there
        *("--remount-ro", "/dev", "--remount-ro", "/"),  # they are file systems in memory without a size limit
        *command,
    ]


def _counts_apart(release: str) -> bool:
    """Whether the kernel counts processes for each user namespace, as Linux does since 5.14."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return found is not None and (int(found[1]), int(found[2])) >= (5, 14)


@cache
def _size(bwrap: str) -> Sequence[str]:
    """Options that limit the next file system in memory; none before bubblewrap 0.7, where only files are limited.

    Long-lived distributions have older versions.
    """
    try:
        told = subprocess.run([bwrap, "--help"], capture_output=True, check=False).stdout
    except FileNotFoundError:
        return ()
    return ("--size", str(FILE_BYTES)) if b"--size" in told else ()
