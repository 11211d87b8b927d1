"""A run whose records are read once: reading them for each of a thousand failures would take a quarter of an hour."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from slurmgpu.logs import attempts_with_logs
from slurmgpu.report import judged_attempts
from slurmgpu.runs import Run


class Remembering(Run):
    """A run as it was when it was first looked at, for one search."""

    @cached_property
    def _attempts(self) -> tuple[list[dict[str, Any]], list[str]]:
        return super().read_attempts()

    @cached_property
    def _submissions(self) -> list[dict[str, Any]]:
        return super().submissions()

    def read_attempts(self) -> tuple[list[dict[str, Any]], list[str]]:
        """What each attempt wrote of itself, and the names of those that are damaged."""
        return self._attempts

    def submissions(self) -> list[dict[str, Any]]:
        """The submissions."""
        return self._submissions

    @cached_property
    def judged(self) -> dict[str, dict[str, Any]]:
        """Every attempt by its name, as the last report has judged it."""
        return {attempt["attempt"]: attempt for attempt in judged_attempts(self)}

    @cached_property
    def logged(self) -> dict[str, dict[str, Any]]:
        """The record of every attempt by its name, and what is known of those that have logs alone."""
        return {record["attempt"]: record for record in attempts_with_logs(self)}


def remembering(run: Run) -> Remembering:
    """The same run, to be asked many things at once."""
    return run if isinstance(run, Remembering) else Remembering(run.folder, run.plan)
