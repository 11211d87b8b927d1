"""A process of the command: its pipes are read while it works, and its process group ends with it.

It does not outlive this process.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurmgpu.errors import ItemError, NodeError, WorkloadError
from slurmgpu.util import pids
from slurmgpu.util.guard import OWN_GROUP, Guard
from slurmgpu.util.shared_files import is_transient
from slurmgpu.util.signals import is_self_inflicted, name_of_signal, signal_of
from slurmgpu.workloads.command.programs import why_not_started
from slurmgpu.workloads.command.sinks import OutputError, Sink, ToLog

LAST_LINE = 200
"""The error's first line ends with the most informative line of stderr, cut at this many characters."""
GRACE_S = 2.0
"""How long a process may take to end after SIGTERM."""
SETTLE_S = 0.5
"""A signal from outside may be meant for the whole job: wait this long for it to reach this process."""
LOOK_S = 0.1
"""How often to look whether a process has ended whose pipes are still open."""
START_S = 60.0
"""A process has imported most of its modules after this time; an edit before then makes it start again."""
ASK_S = 0.5
"""How often to ask whether a process should end."""
KILL_S = 60.0
"""How long a process may take to end after SIGKILL, while the driver frees its GPUs."""
PASSING = {errno.EAGAIN, errno.ENOMEM, errno.ETXTBSY, errno.ESTALE, errno.EIO}
"""Errors after which starting a process is tried again, after each of PAUSES_S."""
PAUSES_S = 0.1, 0.5, 2.0
OF_NODE = {errno.ENOMEM, errno.ENFILE}
"""Errors, besides those of file systems, that may not occur on another node."""


class CallFailedError(ItemError):
    """A call of the command has no rows; calls that failed in the same way have the same `way`.

    `raised` has lines of its stderr that end a traceback about memory or GPUs, perhaps far from the end of stderr.
    """

    def __init__(self, message: str, way: str, raised: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.way = ("command", way)
        self.raised = raised

    def says(self, words: Sequence[str]) -> bool:
        """Whether one of these words is in the message or in `raised`."""
        return any(word in text for text in (str(self), *self.raised) for word in words)


class DiedError(CallFailedError):
    """The process of a call has failed with an exit code or died by a signal; `signal` is its number, else 0."""

    def __init__(self, message: str, way: str, code: int, raised: Sequence[str]) -> None:
        super().__init__(message, way, raised)
        self.code = code
        self.signal = signal_of(code)
        self.failure = "crash" if self.signal else "item_error"


class Child:
    """A process in a process group of its own, in the session of this one. `take` reads its pipes; end it with `close`.

    When this process ends, `guard` kills the group; the task kills what else there is in the session.
    """

    def __init__(
        self,
        arguments: Sequence[bytes],
        env: Mapping[str, str],
        out: Sink,
        err: ToLog,
        guard: Guard,
        *,
        has_stdin: bool = False,
    ) -> None:
        self._guard = guard
        self.name = Path(os.fsdecode(arguments[0])).name
        self.err = err
        self._out = out
        self._unsent = memoryview(b"")
        self._process = self._started(arguments, env, subprocess.PIPE if has_stdin else subprocess.DEVNULL)
        guard.watch(self._process.pid)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._pipes = selectors.PollSelector()
        self._pipes.register(self._process.stdout, selectors.EVENT_READ, out)
        self._pipes.register(self._process.stderr, selectors.EVENT_READ, err)
        self._n_open = 2
        self.out_is_open = True
        self._is_told = False
        self._leaves_time: Callable[[], bool] | None = None
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)

    def _started(self, arguments: Sequence[bytes], env: Mapping[str, str], stdin: int) -> subprocess.Popen[bytes]:
        """The process; CallFailedError if its arguments are too long.

        NodeError if the node lacks memory or a file system for it; WorkloadError for any other reason, which holds
        for all items and on all nodes.
        """
        pauses = iter(PAUSES_S)
        while True:
            try:
                return subprocess.Popen(
                    arguments,
                    env=env,
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    **OWN_GROUP,
                )
            except OSError as error:
                why = why_not_started(os.fsdecode(arguments[0]), env.get("PATH")) or error.strerror
                said = f"{self.name} cannot be started: {why}"
                if error.errno == errno.E2BIG:
                    raise CallFailedError(said, f"errno {error.errno}") from error
                pause_s = next(pauses, None) if error.errno in PASSING else None
                if pause_s is None:
                    of_node = is_transient(error) or error.errno in OF_NODE
                    raise (NodeError if of_node else WorkloadError)(said) from error
            time.sleep(pause_s)

    def send(self, data: bytes) -> None:
        """Queue data for its standard input; `take` writes it when the pipe has room."""
        assert self._process.stdin is not None
        if not self._unsent:
            self._pipes.register(self._process.stdin, selectors.EVENT_WRITE)
        self._unsent = memoryview(bytes(self._unsent) + data)

    def take(self, deadline: float | None) -> None:
        """Read available output, and write what the pipe takes; waits a moment, never beyond `deadline`."""
        wait_s = LOOK_S if deadline is None else max(0.0, min(LOOK_S, deadline - time.monotonic()))
        for key, _ in self._pipes.select(wait_s):
            if key.data is None:
                self._write()
            elif chunk := os.read(key.fd, 1 << 16):
                key.data.take(chunk)
            else:
                key.data.end()
                self._pipes.unregister(key.fileobj)
                self._n_open -= 1
                self.out_is_open &= key.fileobj is not self._process.stdout

    def wait(self, deadline: float | None) -> int:
        """Read to the end; the exit code, negative for a signal. TimeoutError at `deadline`."""
        if self._process.returncode is not None:
            return self._process.returncode
        while self._n_open and not self.has_ended():
            self.take(deadline)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError
        pause_s = 0.00005
        while not self.has_ended():  # a process may close its pipes and go on
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        pid = self._process.pid
        if self._leaves_time and pids.has_failed(pid) and not pids.is_alone_in_group(pid) and self._leaves_time():
            # A shell ends at once by SIGTERM, and the program that it has started saves its progress. Behind one that
            # ends well may be a monitor, which would go on until the task is killed, with the row.
            while not pids.is_alone_in_group(pid):
                with contextlib.suppress(OutputError):
                    self.take(None)
                time.sleep(LOOK_S)
        return self._reap()

    def has_ended(self) -> bool:
        """Whether the process has ended; until it is reaped, no other process group gets its ID."""
        return self._process.returncode is not None or pids.has_ended(self._process.pid)

    def end(self) -> int:
        """Close its standard input, and give it time to exit before `close`; returns the exit code."""
        self._close_stdin()
        with contextlib.suppress(TimeoutError, OutputError):
            return self.wait(time.monotonic() + GRACE_S)
        return self.close()

    def _close_stdin(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(KeyError):
                self._pipes.unregister(self._process.stdin)
            self._unsent = memoryview(b"")
            self._process.stdin.close()

    def close(self) -> int:
        """End its process group with SIGTERM, then SIGKILL; returns the exit code."""
        if self._process.returncode is not None:
            return self._process.returncode
        self._leaves_time = None
        self._close_stdin()
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        with contextlib.suppress(TimeoutError, OutputError):
            return self.wait(deadline)
        return self._reap()

    def finish(
        self,
        timeout_s: float | None,
        on_started: Callable[[], None] = lambda: None,
        shall_end: Callable[[], bool] = lambda: False,
        leaves_time: Callable[[], bool] | None = None,
    ) -> None:
        """Wait until it ends; CallFailedError if it fails, or takes longer than `timeout_s`.

        `on_started` is called after START_S, or once the process has ended; an exception from it ends the process. The
        process gets SIGTERM once `shall_end` returns true. If processes that it has started outlive it, they are
        waited for if it has failed and `leaves_time` returns true, and else killed.
        """
        self._leaves_time = leaves_time
        begun = time.monotonic()
        deadline = begun + (math.inf if timeout_s is None else timeout_s)
        try:
            with contextlib.suppress(TimeoutError):
                self._wait_asking(min(begun + START_S, deadline), shall_end)
            on_started()
            code = self._wait_asking(deadline, shall_end)
        except TimeoutError:
            self.close()
            raise self.failed(f"took longer than timeout_s = {timeout_s:g}", "timeout") from None
        except BaseException:
            self.close()
            raise
        if code:
            raise self.failure(code)

    def _wait_asking(self, deadline: float, shall_end: Callable[[], bool]) -> int:
        """Like `wait`, with SIGTERM once `shall_end` returns true."""
        while True:
            try:
                return self.wait(min(deadline, time.monotonic() + ASK_S))
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
            if not self._is_told and shall_end():
                self._is_told = True
                self._signal(signal.SIGTERM)

    def failure(self, code: int) -> DiedError:
        """Why it failed, from its exit code and the end of its output."""
        number = signal_of(code)
        name = name_of_signal(number) if number else ""
        if not is_self_inflicted(code):
            time.sleep(SETTLE_S)
        said = f"died by {name}" if code < 0 else f"exited with code {code}" + (f" ({name})" if name else "")
        return DiedError(self._explained(said, of_error=True), said, code, self.err.raised())

    def failed(self, said: str, way: str) -> CallFailedError:
        """The failure of a call although its process did not fail, with the end of its stderr."""
        return CallFailedError(self._explained(said, of_error=False), way, self.err.raised())

    def misprinted(self, error: OutputError) -> CallFailedError:
        """The failure of a call with invalid output; the last line of stderr, such as a warning, is not the cause."""
        self._out.tail()
        return CallFailedError(self._worded(f"failed: {error}", self.err.told(), self.err), "output", self.err.raised())

    def _explained(self, said: str, *, of_error: bool) -> str:
        """A sentence about the process, with the end of its stderr, or of its stdout if stderr is empty."""
        printed = self._out.tail()  # held-back lines go to the log before the error is reported
        where = self._out if printed and not self.err.tail() else self.err
        return self._worded(said, where.headline(of_error=of_error), where)

    def _worded(self, said: str, line: str, where: Sink) -> str:
        tail, name = where.tail(), "stderr" if where is self.err else "stdout"
        first = f"{self.name} {said}" + (f": {line[:LAST_LINE]}" if line else "")
        return first if tail == line[:LAST_LINE] else f"{first}\nThe end of its {name}:\n{tail}"

    def _write(self) -> None:
        assert self._process.stdin is not None
        try:
            n_bytes = os.write(self._process.stdin.fileno(), self._unsent)
        except BlockingIOError:
            return
        except BrokenPipeError:
            n_bytes = len(self._unsent)  # it is about to end, and its exit code will say why
        self._unsent = self._unsent[n_bytes:]
        if not self._unsent:
            self._pipes.unregister(self._process.stdin)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _reap(self) -> int:
        """Kill what is left of the group, read the pipes to their end, and take the exit code."""
        self._signal(signal.SIGKILL)
        deadline = time.monotonic() + GRACE_S
        # A daemon in a session of its own may hold the pipes; it is not waited for.
        while self._n_open and time.monotonic() < deadline:
            with contextlib.suppress(OutputError):
                self.take(deadline)
        self.err.end()
        try:
            code = self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            raise NodeError(f"{self.name} has not ended {KILL_S:g} s after SIGKILL") from None
        self._guard.watch(0)
        self._pipes.close()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        return code
