"""A worker that a task forks before it has threads: it imports its modules while the task looks for work.

It becomes the task's first worker. Those after a crash, those in images and the launchers of groups are programs.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from slurmgpu.run.directory import Run
from slurmgpu.run.records import Attempt
from slurmgpu.task.launcher import OWN_ENVIRON, WORKER, Launcher
from slurmgpu.task.worker_process import Started
from slurmgpu.util.early_signals import SIGNUMS
from slurmgpu.util.forks import Fork, fork
from slurmgpu.util.packages import HOME, own_python_path
from slurmgpu.util.prctl import PR_SET_NAME, prctl
from slurmgpu.util.regular_files import open_to_append
from slurmgpu.util.shared_files import retried
from slurmgpu.worker.assignment import Assignment

log = logging.getLogger(__name__)

NAME = b"slurmgpu worker"
"""The name of its process in ps and top; its arguments are the task's."""


ONLY_OF_TASKS = frozenset(
    {
        "array",
        "calendar",
        "email",
        "grp",
        "quopri",
        "resource",
        "socketserver",
        "submitit",
        "tarfile",
        "typing_extensions",
        "uu",
        "zipfile",
    }
)
"""Modules, by package, that a task has imported but a worker must not have: the user may use some of these names.

asyncio, socket and ssl stay: until Python 3.12 `_asyncio` raises the exceptions of the asyncio that was imported first.
"""


class SpareWorker:
    """A forked worker that waits for its assignment."""

    def __init__(self, process: Fork, log_path: Path, log_start: int) -> None:
        self._started = Started(process, log_path, log_start)

    def begin(self, assignment: Assignment) -> Started:
        """Let it work."""
        stdin = self._started.process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(asdict(assignment)).encode() + b"\n")
        except BrokenPipeError:
            log.debug("the worker died before its assignment")  # its exit code says how
        return self._started

    def drop(self) -> None:
        """End it: there is no work for it, and it has nothing to lose."""
        process = self._started.process
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def fork_worker(run: Run, attempt: Attempt) -> SpareWorker | None:
    """Fork a spare worker for an attempt, before any thread starts; None if its worker has to be a program.

    In the fork this never returns.
    """
    log_path = run.logs / f"{attempt.name}.log"
    if not Launcher(run, attempt).may_fork or threading.active_count() > 1:  # as a sitecustomize.py may have started
        return None
    try:
        file = retried(lambda: open_to_append(log_path))
    except OSError:
        return None  # the task records why, when it opens the log itself
    with file:
        log_start = file.tell()
        orders, to_worker = os.pipe()
        from_worker, events = os.pipe()
        former = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNUMS)
        try:
            pid = fork()
        except OSError as error:
            log.warning("the worker will be a program, because this process cannot be forked: %s", error)
            pid = None
        if pid == 0:
            for number, stream in enumerate((orders, events, file.fileno())):
                os.dup2(stream, number)
            for fd in (orders, to_worker, from_worker, events):
                os.close(fd)
            file.close()
            _work(run.folder, former)
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
    os.close(orders)
    os.close(events)
    if pid is None:
        os.close(to_worker)
        os.close(from_worker)
        return None
    return SpareWorker(Fork(pid, open(to_worker, "wb", 0), open(from_worker, "rb", 0)), log_path, log_start)


def _work(folder: Path, mask: Iterable[int]) -> NoReturn:
    """Be a worker, as if `Launcher.worker` had started it."""
    os.setsid()
    for signum in SIGNUMS:
        handler = signal.getsignal(signum)
        signal.signal(signum, signal.SIG_IGN)  # drops what came for the task and its group
        signal.signal(signum, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    prctl(PR_SET_NAME, NAME)
    python_path = own_python_path()
    os.environ.update(OWN_ENVIRON, **python_path)
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the present folder: a platform.py in it is not the standard library's
    if python_path:
        sys.path[:] = [HOME, *(path for path in sys.path if path != HOME)]
    if numpy_random := sys.modules.get("numpy.random"):  # which NumPy imports when it is first used
        numpy_random.seed()  # as in a process of its own; Python's random does so by itself
    for name in [name for name in sys.modules if name.partition(".")[0] in ONLY_OF_TASKS]:
        del sys.modules[name]
    try:
        module = importlib.import_module(WORKER)
        sys.modules["__main__"] = module  # for processes that the workload spawns
        if not (assignment := _line()):
            os._exit(0)  # no work, or the task is gone
        sys.argv = [str(module.__file__), str(folder), assignment]
        module.run_process()
    except Exception:
        sys.excepthook(*sys.exc_info())
        os._exit(1)  # the task's frames below must not handle it
    raise SystemExit(0)


def _line() -> str:
    """A line of standard input and no further byte: the worker itself reads what follows."""
    line = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode()
