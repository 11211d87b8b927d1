"""Reads a run's status in the background, so that drawing never waits for a file system or Slurm."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from slurmgpu.executors.registry import queued_jobs
from slurmgpu.report.queued import Job, Queue
from slurmgpu.report.state_words import GRACE_S
from slurmgpu.report.status import Status, StatusReader
from slurmgpu.run.directory import Run
from slurmgpu.util.ansi import plain
from slurmgpu.util.exceptions import described
from slurmgpu.util.pauses import rest_s
from slurmgpu.util.regular_files import open_file

LOOK_S = 1.0
QUEUE_S = 30.0
"""How often Slurm is asked at most; it is not asked for a run without jobs."""
JOIN_S = 0.2
PATIENCE_S = 5.0
"""How long to wait for the first answer of squeue."""
TAIL_BYTES = 16_384
PREFIX = re.compile(r"^\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)? (?:[A-Z]+ )?(?:[\w.]+: )?")
"""Time, level and logger before a logged message."""
OWN = re.compile(r"\d{4}-\d\d-\d\dT\S+ INFO slurmgpu\..*")
"""Messages about begun and published shards, which the columns show; also after a progress bar."""
BEGINS = re.compile(r" INFO slurmgpu\.worker: shard \d+: items ")
"""The message at the start of a shard."""
FIRST_WORDS = " INFO slurmgpu.worker: this worker is process "
"""A worker's first line."""


class Look:
    """Reads the status and the last lines of logs."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._reader = StatusReader(run)
        self._lines: dict[str, tuple[object, str]] = {}
        self._over_since: float | None = None

    def read(self, queued: Queue | None, visible: Collection[str] | None, now: float) -> tuple[Status, dict[str, str]]:
        """The status, and the last log line by attempt; details only for visible attempts."""
        status = self._reader.read(queued, now=now, gpus_of=visible)
        living = {a["attempt"]: a for a in status["attempts"] if a["state"] != "ended" and not a["progress"]}
        names = [name for name in living if visible is None or name in visible]
        self._lines = {name: self._last_line(name, living[name]["state"] == "running") for name in names}
        return status, {name: line for name, (_, line) in self._lines.items()}

    def has_ended(self, status: Status) -> bool:
        """Whether the run is over, as far as its files tell."""
        if status["state"] != "ended" or status["at_work"] is None:
            self._over_since = None
            return status["state"] in ("complete", "incomplete")
        self._over_since = status["time"] if self._over_since is None else self._over_since
        return status["cancelled"] or status["time"] - self._over_since >= GRACE_S

    def _last_line(self, attempt: str, computes: bool) -> tuple[object, str]:
        path = self.run.logs / f"{attempt}.log"
        known = self._lines.get(attempt)
        try:
            found = path.stat()
            mark = (found.st_mtime_ns, found.st_size, computes)
            return known if known is not None and known[0] == mark else (mark, last_line(path, computes))
        except OSError:
            return None, ""


def last_line(path: Path, computes: bool = False) -> str:
    """The last informative line of the living worker in a log, without its time; reads only the file's end.

    Lines on shards are skipped. If the worker `computes`, lines from before its first shard are outdated.
    """
    with open_file(path) as file:
        start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
        file.seek(start)
        text = file.read().decode(errors="replace")
    # A progress bar writes over its line after a carriage return.
    lines = re.split(r"[\r\n]", text)
    lines = lines[1:] if start and len(lines) > 1 else lines
    firsts = [number for number, line in enumerate(lines) if FIRST_WORDS in line]
    lines = lines[firsts[-1] + 1 :] if firsts else lines  # lines above belong to a worker that has died
    begun = [number for number, line in enumerate(lines) if BEGINS.search(line)]
    if computes and (begun or firsts or not start):
        lines = lines[begun[0] + 1 :] if begun else []
    said = (plain(PREFIX.sub("", OWN.sub("", line))) for line in reversed(lines))
    return next(filter(None, said), "")


class StatusPoller:
    """The latest status of a run, updated by threads that call `on_look` after each update.

    `visible` are the attempts whose details are wanted; None is all.
    """

    def __init__(self, run: Run, on_look: Callable[[], None]) -> None:
        self.run = run
        self.status: Status | None = None
        self.words: Mapping[str, str] = {}
        self.has_ended = False
        self.error: BaseException | None = None
        self.visible: Collection[str] | None = ()
        self._look = Look(run)
        self._on_look = on_look
        self._queue: list[Job] | None = None
        self._answered = threading.Event()
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def latest(self) -> tuple[Status | None, bool]:
        """The last status, and whether the run was over by then. Raises the error of a thread."""
        if self.error is not None:
            raise self.error
        has_ended = self.has_ended  # first: both may change
        return self.status, has_ended

    def start(self) -> None:
        """Start the threads."""
        self._threads = [threading.Thread(target=t, daemon=True) for t in (self._keep_asking, self._keep_looking)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the threads, without waiting for a slow file system."""
        self._stopped.set()
        self._changed.set()
        for thread in self._threads[-1:]:
            thread.join(JOIN_S)

    def show(self, names: Sequence[str]) -> None:
        """Request the details of these attempts."""
        if self.visible is not None and names != self.visible:
            self.visible = names
            self._changed.set()

    def _keep_asking(self) -> None:
        while not self._stopped.is_set():
            try:
                self._queue = queued_jobs(self.run, last=self._queue)
            except Exception as error:
                logging.getLogger(__name__).warning("the queue is unknown: %s", described(error))
            self._answered.set()
            self._stopped.wait(QUEUE_S)

    def _keep_looking(self) -> None:
        self._answered.wait(PATIENCE_S)
        while not self._stopped.is_set():
            began = time.monotonic()
            self._changed.clear()
            try:
                self.status, self.words = self._look.read(self._queue, self.visible, time.time())
                self.has_ended = self._look.has_ended(self.status)
            except BaseException as error:  # raised by the thread that draws
                self.error = error
            if self._stopped.is_set():
                return
            self._on_look()
            if self.error is not None or self.has_ended:
                return
            took = time.monotonic() - began
            self._changed.wait(rest_s(took, LOOK_S - took))
