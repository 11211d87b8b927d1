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
from pathlib import Path
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

GRACE_S = 2.0
"""How long a worker may take to end after SIGTERM; Slurm's KillWait is 30 s by default, and sites shorten it."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)

Events = queue.SimpleQueue[dict[str, Any]]


class StoppedError(Exception):
    """A signal asks this task to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class StopSignals:
    """Signals that end the task, turned into events of one queue; the former handlers come back at the end."""

    def __init__(self) -> None:
        self.events: Events = queue.SimpleQueue()
        self._former: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for signum in STOP_SIGNALS:
            self._former[signum] = signal.signal(signum, self._put)
        return self

    def _put(self, signum: int, frame: FrameType | None) -> None:
        self.events.put({"event": "signal", "signum": signum})

    def pause(self, seconds: float) -> None:
        """Wait; raises StoppedError as soon as a signal comes. For times when no worker lives."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                event = self.events.get(timeout=left)
            except queue.Empty:
                return
            if event["event"] == "signal":
                raise StoppedError(event["signum"])

    def __exit__(self, *exc_info: object) -> None:
        for signum, handler in self._former.items():
            signal.signal(signum, handler)


class WorkerProcess:
    """A worker in a session of its own, its events read into a queue; gone, with all its children, at the end."""

    def __init__(
        self,
        command: list[str],
        env: dict[str, str],
        log_path: Path,
        events: Events,
    ) -> None:
        with open(log_path, "ab") as file:
            # Its own session: Ctrl-C reaches the task alone, and killing the group reaches the worker's children.
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._events = events
        self._reader = threading.Thread(target=self._read, daemon=True, name="worker events")
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                try:
                    event = json.loads(line)
                    self._events.put({"event": event["event"], **event})
                except (ValueError, TypeError, KeyError):
                    # Printed before the worker took the pipe for itself, or cut short by its death.
                    log.warning("the worker wrote %r", line)
        finally:
            self._events.put({"event": "eof", "pid": self.pid})

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait()

    def take_no_more(self) -> None:
        """Let it finish the shard in hand, and end."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended by itself
            self._process.stdin.write(b"stop\n")
            self._process.stdin.flush()

    def reap(self) -> None:
        """When the worker is dead, kill what it left: children that hold its pipe open would hide its end."""
        if self._process.poll() is not None:
            self._kill_group()

    def stop(self) -> None:
        """End it: politely, then not."""
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            log.warning("the worker did not end within %.0f s of SIGTERM; killing it", GRACE_S)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._kill_group()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # a word that it did not live to hear
                stream.close()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # all of the group are gone, as they should be
            os.killpg(self.pid, signal.SIGKILL)
