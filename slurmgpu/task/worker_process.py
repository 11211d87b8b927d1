"""A worker process as its task sees it: events out of a pipe, signals, and an end that leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from slurmgpu.util.early_signals import recall
from slurmgpu.util.process_tree import living
from slurmgpu.util.shared_files import open_file, open_to_append, retried

log = logging.getLogger(__name__)

GRACE_S = 2.0
"""How long a worker may take to end after SIGTERM; Slurm's KillWait is 30 s by default, and sites shorten it."""
PARTING_S = 20.0
"""How long one may take that keeps the progress of its items: so much of KillWait that the task can still give back."""
SAID_BYTES = 1 << 16
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)

Events = queue.SimpleQueue[dict[str, Any]]


class StoppedError(Exception):
    """A signal asks this task to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class StopSignals:
    """Signals that end the task, turned into events of one queue; the former handlers come back at the end.

    `on_pause` is called whenever somebody pauses.
    """

    def __init__(self, on_pause: Callable[[], None] = lambda: None) -> None:
        self._on_pause = on_pause
        self.events: Events = queue.SimpleQueue()
        self._former: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for signum in STOP_SIGNALS:
            if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
                continue  # nohup: the run shall outlive its terminal
            self._former[signum] = signal.signal(signum, self._put)
        for came in recall():  # before this task could listen
            self._put(came, None)
        return self

    def _put(self, signum: int, frame: FrameType | None) -> None:
        self.events.put({"event": "signal", "signum": signum})

    def pause(self, seconds: float) -> None:
        """Wait; raises StoppedError as soon as a signal comes, also with 0 seconds. For times when no worker lives."""
        self._on_pause()
        end = time.monotonic() + seconds
        while True:
            try:
                event = self.events.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return
            if event["event"] == "signal":
                raise StoppedError(event["signum"])

    def __exit__(self, *exc_info: object) -> None:
        for signum, handler in self._former.items():
            signal.signal(signum, handler)


class WorkerProcess:
    """A worker in a session of its own, its events read into a queue; gone, with all its children, at the end."""

    was_oom = False
    """Whether host memory was short on another node of the task."""

    def __init__(
        self,
        command: list[str],
        env: dict[str, str],
        log_path: Path,
        events: Events,
    ) -> None:
        self._log_path = log_path
        with retried(lambda: open_to_append(log_path)) as file:
            self._log_start = file.tell()
            # Its own session: Ctrl-C reaches the task alone, and killing the group reaches the worker's children.
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
                bufsize=0,
            )
        self.pid = self._process.pid
        self._dead_since: float | None = None
        self._events = events
        self._reader = threading.Thread(target=self._read, daemon=True, name="worker events")
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        # Not through a buffered file: while a read of it waits, nobody could close it, not even Python at its end.
        pipe, rest = self._process.stdout.fileno(), b""
        while chunk := os.read(pipe, 1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._take(line)
        if rest:
            self._take(rest)
        self._events.put({"event": "eof", "pid": self.pid})

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            self._events.put({"event": event["event"], **event})
        except (ValueError, TypeError, KeyError):
            # Printed before the worker took the pipe for itself, or cut short by its death.
            log.warning("the worker wrote %r", line)

    def said(self) -> str:
        """What it has written to its log so far; the end of it, if that is much; "" if that cannot be read."""
        with contextlib.suppress(OSError), open_file(self._log_path) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - SAID_BYTES))
            return file.read().decode(errors="replace")
        return ""

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait()

    def take_no_more(self) -> None:
        """Let it finish the shard in hand, and end."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended by itself, or is being ended
            self._process.stdin.write(b"stop\n")
            self._process.stdin.flush()

    def tell_end(self, end_time: float) -> None:
        """Tell it when the walltime ends: Slurm has said so since it was started."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(f"end {end_time!r}\n".encode())
            self._process.stdin.flush()

    def reap(self) -> None:
        """When the worker is dead, kill what it left: children that hold its pipe open would hide its end.

        A daemon that it started, in a session of its own and with no living parent, is left alone, and not waited for.
        """
        if self._process.poll() is None:
            return
        self._kill_all()
        self._dead_since = self._dead_since or time.monotonic()
        if self._reader.is_alive() and time.monotonic() - self._dead_since > GRACE_S:
            log.warning("something that the worker started holds its pipe; going on without it")
            self._events.put({"event": "eof", "pid": self.pid})

    def stop(self) -> None:
        """End it: politely, then not."""
        assert self._process.stdin is not None
        # A group's launcher, and a worker that keeps progress, outlive SIGTERM, and end at this.
        self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            log.warning("the worker did not end within %.0f s of SIGTERM; killing it", GRACE_S)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._kill_all()
        self._process.wait()
        self._reader.join(GRACE_S)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        if not self._reader.is_alive():  # else the number of its file would be given to another while it is read
            self._process.stdout.close()

    def _kill_all(self) -> None:
        """Kill whatever lives of the worker: its session, also what runs in process groups or sessions below it.

        Apptainer puts the process that serves the image into a group of its own, a launcher each rank into a session.
        """
        deadline = time.monotonic() + GRACE_S
        while left := living(self.pid):
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended; it is another user's
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                log.warning("processes %s do not die of SIGKILL; they wait for a disk or a GPU", sorted(left))
                return
            time.sleep(0.005)
