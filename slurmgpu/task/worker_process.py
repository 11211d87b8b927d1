"""A worker process as its task sees it: events from a pipe, signals, and an end that leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple, TypedDict

from slurmgpu.run.worker_events import WorkerEvent
from slurmgpu.util.early_signals import listened, recall
from slurmgpu.util.forks import Fork, starting
from slurmgpu.util.process_tree import living
from slurmgpu.util.regular_files import open_file, open_to_append
from slurmgpu.util.shared_files import retried

log = logging.getLogger(__name__)

GRACE_S = 2.0
"""How long a worker may take to end after SIGTERM; Slurm's KillWait is 30 s by default, and sites shorten it."""
PARTING_S = 20.0
"""How long a worker that keeps its progress may take; the rest of KillWait is for the task's own end."""
SAID_BYTES = 1 << 16
PIPE_BYTES = 1 << 16  # pipe(7)
NAP_S = 0.01
"""The pause between two looks at a worker's events: waking up at each call of a workload, which may take a millisecond,
would cost a tenth of a core."""
EXIT_STOPPED = 75  # EX_TEMPFAIL: the task's shards were given back


class Tick(TypedDict):
    """Nothing has happened for a while."""

    event: Literal["tick"]


class Signal(TypedDict):
    """The task got a signal."""

    event: Literal["signal"]
    signum: int


class EndOfPipe(TypedDict):
    """The worker with this process id reports nothing more."""

    event: Literal["eof"]
    pid: int


class FromLeader(TypedDict):
    """A message of the leader's to another node of its task: see `OtherNodes.tell`. None if the leader is gone."""

    event: Literal["leader"]
    message: dict[str, Any] | None


TaskEvent = WorkerEvent | Tick | Signal | EndOfPipe | FromLeader
Events = queue.SimpleQueue[TaskEvent]
TICK: Tick = {"event": "tick"}


def next_event(events: Events, timeout_s: float) -> TaskEvent | None:
    """The next event; None if there is none for so long."""
    try:
        # First without a timeout: Python 3.10's `get` waits for ever if its time ends while the queue's lock is free.
        with contextlib.suppress(queue.Empty):
            return events.get_nowait()
        return events.get(timeout=max(0.0, timeout_s))
    except queue.Empty:
        return None


class StoppedError(Exception):
    """A signal asked this task to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class StopSignals:
    """Signals that end the task, as events of one queue; the former handlers are restored at the end.

    `on_pause` is called by each `pause`.
    """

    def __init__(self, on_pause: Callable[[], None] = lambda: None) -> None:
        self._on_pause = on_pause
        self.events: Events = queue.SimpleQueue()
        self._former: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for signum in listened():
            self._former[signum] = signal.signal(signum, self._put)
        for came in recall():  # those that came before this task could listen
            self._put(came, None)
        return self

    def _put(self, signum: int, frame: FrameType | None) -> None:
        self.events.put({"event": "signal", "signum": signum})

    def pause(self, seconds: float) -> None:
        """Wait; raises StoppedError as soon as a signal comes, also with 0 seconds. Only while no worker is alive."""
        self._on_pause()
        end = time.monotonic() + seconds
        while True:
            event = next_event(self.events, end - time.monotonic())
            if event is None:
                return
            if event["event"] == "signal":
                raise StoppedError(event["signum"])

    def __exit__(self, *exc_info: object) -> None:
        for signum, handler in self._former.items():
            signal.signal(signum, handler)


class Started(NamedTuple):
    """The first process of a worker, with pipes to it, its log, and where that begins in the file."""

    process: subprocess.Popen[bytes] | Fork
    log_path: Path
    log_start: int


def start_program(command: list[str], env: dict[str, str], log_path: Path) -> Started:
    """Start a worker as a program."""
    with retried(lambda: open_to_append(log_path)) as file:
        # Its own session: Ctrl-C reaches the task alone, and killing the group reaches the worker's children.
        with starting():
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
                bufsize=0,
            )
        return Started(process, log_path, file.tell())


class WorkerProcess:
    """A worker in its own session, its events read into a queue; killed with all its children at the end."""

    since_kill_s = math.inf
    """The seconds since the kernel killed a process for lack of memory on another node of the task, at the end."""

    def __init__(self, started: Started, events: Events) -> None:
        self._process, self._log_path, self._log_start = started
        self.pid = self._process.pid
        self._dead_since: float | None = None
        self._events = events
        self._reader = threading.Thread(target=self._read, daemon=True, name="worker events")
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        # Not through a buffered file: it cannot be closed while a read waits, not even when Python exits.
        pipe, rest = self._process.stdout.fileno(), b""
        while chunk := os.read(pipe, PIPE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._take(line)
            if len(chunk) < PIPE_BYTES // 8:  # the pipe has room for events that come meanwhile
                time.sleep(NAP_S)
        if rest:
            self._take(rest)
        self._events.put({"event": "eof", "pid": self.pid})

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            self._events.put({"event": event["event"], **event})
        except (ValueError, TypeError, KeyError, RecursionError):
            # It was printed before the worker took the pipe, or cut short by its death.
            log.warning("the worker wrote %r", line)

    def said(self) -> str:
        """The log that it has written, or its end; "" if it cannot be read."""
        with contextlib.suppress(OSError), open_file(self._log_path) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - SAID_BYTES))
            return file.read().decode(errors="replace")
        return ""

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait()

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end at most `seconds`; return whether it has ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def take_no_more(self) -> None:
        """Let it finish its shard, and end."""
        self._tell("stop")

    def tell_end(self, end_time: float) -> None:
        """Tell it when the walltime ends, if that was not known when it started."""
        self._tell(f"end {end_time!r}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended, or is being ended
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def reap(self) -> None:
        """If the worker is dead, kill its children: those that hold its pipe open would hide its end.

        A daemon that it started, in its own session and with no living parent, is not killed and not waited for.
        """
        if self._process.poll() is None:
            return
        self._kill_all()
        self._dead_since = self._dead_since or time.monotonic()
        if self._reader.is_alive() and time.monotonic() - self._dead_since > GRACE_S:
            log.warning("a process that the worker started holds its pipe open; going on without it")
            self._events.put({"event": "eof", "pid": self.pid})

    def stop(self) -> None:
        """Ask it to end, and wait a moment for that."""
        assert self._process.stdin is not None
        # A group's launcher, and a worker that keeps progress, ignore SIGTERM, and end when their stdin is closed.
        self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            log.warning("the worker did not end within %.0f s of SIGTERM; killing it", GRACE_S)

    def end(self) -> None:
        """End it with SIGTERM, then with SIGKILL; its last event says that it has ended."""
        self.stop()
        self._kill_all()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._kill_all()
        self._process.wait()
        self._reader.join(GRACE_S)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        if not self._reader.is_alive():  # otherwise its file descriptor could be reused while it is read
            self._process.stdout.close()

    def _kill_all(self) -> None:
        """Kill the worker's session, and process groups and sessions below it.

        Apptainer puts the process that serves the image into its own group, and a launcher puts each rank into its own
        session.
        """
        deadline = time.monotonic() + GRACE_S
        while left := living(self.pid):
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or is another user's
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                log.warning("SIGKILL does not end processes %s; they wait for a disk or a GPU", sorted(left))
                return
            time.sleep(0.005)
