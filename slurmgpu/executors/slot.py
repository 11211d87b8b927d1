"""A slot of the local executor: it forks its task, passes signals on to it, and exits with its code.

If a slot is killed, for example by the kernel's out-of-memory killer, the kernel sends SIGTERM to its task.

`python -m slurmgpu.executors.slot FOLDER` runs one, with Submitit's files in FOLDER, the run's logs/. A detached
process forks slots before it has threads. Submitit's own controller would start a second Python, always exit with 0,
and die of the first error on its logs.
"""

import signal

from slurmgpu.util.early_signals import SIGNUMS, remember

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNUMS)  # until there is a task, and before anything that takes time

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from slurmgpu.executors.begin import import_submitit, run_job

import_submitit()

from submitit.core import plugins  # noqa: E402
from submitit.core.utils import JobPaths  # noqa: E402
from submitit.local.local import LocalJobEnvironment  # noqa: E402

import slurmgpu.executors.job_entry  # noqa: E402, F401 - what the job calls: its fork need not import it
from slurmgpu.code.imported_modules import has_imported  # noqa: E402
from slurmgpu.run.failures import blaming  # noqa: E402
from slurmgpu.run.records import node_name  # noqa: E402
from slurmgpu.util.forks import Fork, fork, leave  # noqa: E402
from slurmgpu.util.prctl import PR_SET_NAME, end_with, prctl  # noqa: E402
from slurmgpu.util.regular_files import open_to_append  # noqa: E402
from slurmgpu.util.shared_files import retried  # noqa: E402

log = logging.getLogger(__name__)

NAME, TASK_NAME = b"slurmgpu slot", b"slurmgpu task"
"""The names of these processes for ps and top; the arguments of a fork are its parent's."""

_waiting: list[Fork] = []
"""Forks that wait for the run of which they become slots."""


def fork_slots(n: int) -> Callable[[], NoReturn] | None:
    """Fork slots that wait for `begin_slot`; in a fork, return the function to run. Only without threads."""
    if threading.active_count() > 1:
        return None  # the slots will be programs
    former = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNUMS)
    for _ in range(n):
        orders, told = os.pipe()
        try:
            pid = fork()
        except OSError as error:
            log.warning("starting slots as programs, because this process cannot be forked: %s", error)
            os.close(orders)
            os.close(told)
            break
        if pid == 0:
            os.close(told)
            for other in _waiting:  # its siblings, which the parent begins
                assert other.stdin is not None
                other.stdin.close()
            _waiting.clear()
            return lambda: _wait_as_slot(orders)
        os.close(orders)
        _waiting.append(Fork(pid, stdin=open(told, "wb", 0)))  # noqa: SIM115 - closed once it is told
    signal.pthread_sigmask(signal.SIG_SETMASK, former)
    return None


def waiting_slot() -> Fork | None:
    """A fork that waits for `begin_slot`; None if there is none."""
    return _waiting.pop(0) if _waiting else None


def begin_slot(slot: Fork, folder: Path, environ: Mapping[str, str]) -> None:
    """Let a waiting fork run the job whose files are in `folder`, with more variables in its environment."""
    assert slot.stdin is not None
    with contextlib.suppress(BrokenPipeError), slot.stdin as pipe:  # the exit code tells if it was killed
        pipe.write(json.dumps([str(folder), dict(environ)]).encode())


def _wait_as_slot(orders: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a slot that is a program; its task has a handler
    prctl(PR_SET_NAME, NAME)
    with open(orders, "rb") as pipe:
        told = pipe.read()
    if not told:
        leave(0)  # nothing was submitted
    folder, environ = json.loads(told)
    os.environ.update(environ)
    run_slot(Path(folder))


def run_slot(folder: Path) -> NoReturn:
    """Run the task of this slot, and exit with its code, 128 + N for signal N. Signals are blocked until then.

    The fork that runs the task does not return either.
    """
    own = os.getpid()
    paths = JobPaths(folder, str(own), 0)
    with contextlib.ExitStack() as logs:
        with blaming(node_name()):
            both = (paths.stdout, paths.stderr)
            streams = retried(lambda: [logs.enter_context(open_to_append(path)) for path in both])
        if (pid := fork()) == 0:
            remember()
            end_with(own)
            for number, stream in enumerate(streams, 1):
                os.dup2(stream.fileno(), number)
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNUMS)
        prctl(PR_SET_NAME, TASK_NAME)
        names = {"LOCALID": "0", "GLOBALID": "0", "JOB_ID": paths.job_id}
        os.environ.update({f"SUBMITIT_LOCAL_{name}": value for name, value in names.items()})
        _run_task(folder)

    def pass_on(signum: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the task as well
    passed_on = [signum for signum in SIGNUMS if signal.getsignal(signum) != signal.SIG_IGN]  # as SIGHUP under nohup
    for signum in passed_on:
        signal.signal(signum, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNUMS)
    code = Fork(pid).wait()
    for signum in passed_on:
        signal.signal(signum, signal.SIG_IGN)  # another process may get its pid from now on
    leave(code if code >= 0 else 128 - code)


def _run_task(folder: Path) -> NoReturn:
    """Run Submitit's job, and exit with its code."""
    own, code = os.getpid(), 0
    # Submitit would ask every installed package for plug-ins to find where it runs, which takes as long as five forks.
    setattr(plugins, "get_job_environment", LocalJobEnvironment)  # noqa: B010
    try:
        run_job(str(folder))
    except SystemExit as end:
        if os.getpid() != own:
            raise  # it is the task's worker
        code = end.code if isinstance(end.code, int) else 1
    if has_imported():
        sys.exit(code)  # the task has merged, and called the user's code
    leave(code)


if __name__ == "__main__":
    run_slot(Path(sys.argv[1]))
