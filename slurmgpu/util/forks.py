"""Forks of this process, instead of new programs, which would import the same modules again.

A process forks before it has threads, and before it imports anything of the user's.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import BinaryIO, NoReturn

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.early_signals import recall

LONGEST_LOOK_S = 0.05
"""The pause between two polls of a fork that is waited for with a timeout."""

TOO_MANY = (
    "This machine starts no more processes for you: those that you have, with their threads, are as many as "
    "`ulimit -u`, or a cgroup, allows. End some of them, or ask for a higher limit."
)
"""What to say of EAGAIN when a process is started, which stays, unlike a file system's."""
NO_THREADS = "can't start new thread"
"""Python's message if a thread cannot be started."""


def is_of_limit(error: BaseException) -> bool:
    """Whether an error says that no process, or no thread, could be started: what to say of it is TOO_MANY."""
    if isinstance(error, BlockingIOError):
        # Else a file system's. HDF5's of a locked file, and Python's of a pipe that is full, have texts of their own.
        return error.filename is None and error.strerror == os.strerror(errno.EAGAIN)
    return isinstance(error, RuntimeError) and str(error) == NO_THREADS


class Fork:
    """A forked child process, with the methods of `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: BinaryIO | None = None, stdout: BinaryIO | None = None) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, -N for signal N; None while the process runs."""
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit code; subprocess.TimeoutExpired after `timeout` seconds."""
        if timeout is None:
            code = self._reap(0)
            assert code is not None
            return code
        end, pause = time.monotonic() + timeout, 0.0005
        while (code := self.poll()) is None:
            if (left := end - time.monotonic()) <= 0:
                raise subprocess.TimeoutExpired([f"fork {self.pid}"], timeout)
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_LOOK_S)
        return code

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # SIGCHLD is ignored: how it ended is not known, which `subprocess` calls 0, too
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Raise SlurmGPUError if the block can start no process."""
    try:
        yield
    except BlockingIOError as error:
        raise SlurmGPUError(TOO_MANY) from error


def fork() -> int:
    """Fork this process and return the pid; 0 in the fork, where signals act as in a new program.

    Call it while signals that may come before the fork can handle them are blocked.
    """
    gc.freeze()  # no collection writes to pages that the two share
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: OpenBLAS prepares its own for forks
        pid = os.fork()
    if pid == 0:
        recall()  # they came for the parent
        for signum in signal.valid_signals():
            if callable(signal.getsignal(signum)):
                signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    return pid


@contextlib.contextmanager
def ending_forks() -> Iterator[None]:
    """End a fork made in the block when it leaves the block, as Python ends a program.

    Otherwise two processes would continue with the code after the block.
    """
    own = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != own:
            _end_fork(error)
        raise
    if os.getpid() != own:
        _end_fork(SystemExit(0))


def _end_fork(error: BaseException) -> NoReturn:
    code = error.code if isinstance(error, SystemExit) else 1
    try:
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        elif not isinstance(code, int | None):
            sys.stderr.write(f"{code}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF if isinstance(code, int) else code is not None)


def leave(code: int) -> NoReturn:
    """End a process that has run no code of the user's, at once: Python's own exit takes as long as ten forks."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None: the process was started without it
            stream.flush()
    os._exit(code)
