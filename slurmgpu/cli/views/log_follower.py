"""`logs --follow`: print new lines of log files, including future ones, until the task or the run ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from slurmgpu.cli.views.log_lines import Printer, labels_of, print_run
from slurmgpu.logs.files import LogFile, merge_files
from slurmgpu.logs.lines import Line, read_lines
from slurmgpu.logs.places import last_end
from slurmgpu.logs.times import zone_of
from slurmgpu.run import submissions
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import POLICIES
from slurmgpu.run.records import Record

POLL_S = 0.5
LOOK_S = 3.0
"""How often to look for new attempts: as often as records are written."""
PART_BYTES = 1 << 22
"""The most bytes of a file that are read at once."""
DOUBT_S = 30.0
"""After this time without new lines, check whether any task of the run is alive."""

Records = Callable[[], list[Record]]


class LogFollower:
    """Prints lines added after `positions`. `records` finds the attempts; with None only the merge is followed.

    With `named` each line has its attempt.
    """

    def __init__(
        self, run: Run, printer: Printer, positions: dict[Path, int], records: Records | None, *, named: bool = False
    ) -> None:
        self.run, self.printer, self.positions, self.records, self.named = run, printer, positions, records, named
        self._zones: dict[Path, float | None] = {}
        self._files: list[LogFile] = []
        self._lags = False

    def go_on(self) -> None:
        """Print until the end."""
        from slurmgpu.executors import live_tasks

        looked = spoke = float("-inf")
        is_over = False
        while not is_over:
            now = time.monotonic()
            if now - looked >= LOOK_S or not self._files:
                looked = now
                is_over = self._look()  # before reading, so that the last lines are not missed
            if self.print_new():
                spoke = now
            elif now - max(spoke, looked - DOUBT_S) >= DOUBT_S:
                is_over, spoke = is_over or not live_tasks.may_live(self.run), now
            if not is_over and not self._lags:
                time.sleep(max(POLL_S, len(self._files) / 1000))
        while self.print_new(whole=False):
            pass

    def _look(self) -> bool:
        """Find the present files; whether they are complete."""
        is_over = submissions.is_over(self.run.submissions())
        if self.records is None:
            labels = {file: file.source for file in merge_files(self.run)}
        else:
            records = self.records()
            labels = labels_of(self.run, records, named=self.named)
            labels |= {file: file.source for file in merge_files(self.run) if self.named}
            # When a whole run is followed, more tasks may start.
            is_over = is_over or (not self.named and bool(records) and all(map(_has_ended, records)))
        if new := {file.path: label for file, label in labels.items() if file.path not in self._zones}:
            self.printer.add(new)
        self._files = list(labels)
        for file in self._files:
            self._zones.setdefault(file.path, None)
        return is_over

    def print_new(self, *, whole: bool = True) -> bool:
        """Print new lines, or with `whole` only complete ones, ordered by time; whether there were any."""
        new: list[Line] = []
        self._lags = False
        for file in self._files:
            start, stop = self._added(file.path, whole)
            if stop > start:
                if self._zones[file.path] is None:
                    self._zones[file.path] = zone_of(file.path)
                new += read_lines(file, start, stop, zone=self._zones[file.path])
                self.positions[file.path] = stop
        for line in sorted(new, key=lambda line: line.time):
            self.printer.show(line)
        sys.stdout.flush()
        return bool(new)

    def _added(self, path: Path, whole: bool) -> tuple[int, int]:
        """The range of bytes of a file to print next."""
        try:
            size = path.stat().st_size
        except OSError:  # removed; a later file of that name is printed from its beginning
            self.positions.pop(path, None)
            return 0, 0
        start = self.positions.get(path, 0)
        if size < start:  # it was truncated
            start = self.positions[path] = 0
        if size - start > PART_BYTES:
            self._lags = whole = True
        return start, last_end(path, min(size, start + PART_BYTES)) if whole else size


def follow_run(run: Run, n_lines: int | None) -> None:
    """Print new lines of all attempts until the run ends; with `n_lines` the last present lines come first."""
    stops = {} if n_lines is None else print_run(run, n_lines)
    labels = {file.path: label for file, label in labels_of(run, run.attempts(), named=True).items()}
    printer = Printer(labels, always=True)
    files = [*labels, *(file.path for file in merge_files(run))]
    stops = {path: last_end(path) for path in files} | stops
    LogFollower(run, printer, stops, run.attempts, named=True).go_on()


def _has_ended(record: Record) -> bool:
    """Whether an attempt has ended for good; a preempted one may start again."""
    failure = record["failure"]
    return record["state"] == "ended" and not (failure and POLICIES[failure].may_restart)
