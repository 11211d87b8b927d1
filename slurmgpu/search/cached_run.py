"""A run that reads its files once: a search for a thousand failures would take a quarter of an hour otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, cached_property

from slurmgpu.errors import SlurmGPUError
from slurmgpu.logs.files import attempts_with_logs, files_of
from slurmgpu.logs.lines import text_of
from slurmgpu.logs.places import TAIL_BYTES, last_end, line_around, places_of
from slurmgpu.report.attempts import AttemptRow
from slurmgpu.report.report_file import Report, judged_attempts, read_report
from slurmgpu.run.directory import Run
from slurmgpu.run.records import Record, Unread
from slurmgpu.run.submissions import SubmissionLine


class CachedRun(Run):
    """A run with cached records, submissions and report, for one search."""

    @cached_property
    def _attempts(self) -> tuple[list[Record], dict[str, Unread]]:
        return super().read_attempts()

    @cached_property
    def _submissions(self) -> list[SubmissionLine]:
        return super().submissions()

    def read_attempts(self) -> tuple[list[Record], dict[str, Unread]]:
        """The attempts' records, and why others are left out."""
        return self._attempts

    def submissions(self) -> list[SubmissionLine]:
        """The submissions."""
        return self._submissions

    @cached_property
    def judged(self) -> dict[str, AttemptRow]:
        """Every attempt by name, with its outcome in the last report."""
        return {attempt["attempt"]: attempt for attempt in judged_attempts(self)}

    @cached_property
    def report(self) -> Report | None:
        """The last report; None if there is none, or it cannot be read."""
        try:
            return read_report(self)
        except (OSError, SlurmGPUError):
            return None

    @cached_property
    def failed_items(self) -> dict[int, tuple[str, str]]:
        """Failure class and message of each failed item in the last report, by index."""
        errors = self.report["errors"] if self.report is not None else ()
        return {error["index"]: (error["class"], error["message"]) for error in errors}

    @cached_property
    def logged(self) -> dict[str, Record]:
        """The record of every attempt by name, also of attempts with only a log."""
        return {record["attempt"]: record for record in attempts_with_logs(self)}

    @cached_property
    def last_begun(self) -> Callable[[str], int | None]:
        """The last shard that each attempt began, by its log and its record."""
        return cache(self._last_begun)

    def _last_begun(self, attempt: str) -> int | None:
        record = self.logged[attempt]
        # A killed task may have begun another shard since its last record.
        for file in [file for file in files_of(self, record) if file.is_worker][:1]:
            size = last_end(file.path)
            for place in places_of(file.path, b": items ", max(0, size - TAIL_BYTES), size, backwards=True):
                if match := re.search(r" shard (\d+): items ", text_of(line_around(file.path, place)[1])):
                    return int(match[1])
        return record["shard"]


def cached(run: Run) -> CachedRun:
    """The run with caches for many searches."""
    return run if isinstance(run, CachedRun) else CachedRun(run.folder, run.plan)
