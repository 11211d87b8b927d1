"""Find executors by name, and those of a run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors.interface import Executor, Lines
from slurmgpu.plan.executors import DEFAULT, EXECUTORS
from slurmgpu.report.outcomes import Accounting
from slurmgpu.report.queued import Job
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import SubmissionLine


@functools.cache
def executor_named(name: str) -> Executor:
    """The executor of this name; SlurmGPUError if no package here has it."""
    executor: Executor = EXECUTORS.make(name)
    return executor


def executors_of(run: Run) -> list[tuple[Executor, Lines]]:
    """The executors of a run's submissions, each with those that have not ended.

    For a run without submissions it is the default one: jobs submitted by hand are not recorded before they start.
    """
    found: dict[str, list[SubmissionLine]] = {}
    for line in run.submissions():
        of_it = found.setdefault(line["executor"], [])
        if line["state"] != "ended":
            of_it.append(line)
    return [(executor_named(name), lines) for name, lines in (found or {DEFAULT: []}).items()]


def queueing(lines: Lines) -> Iterator[Executor]:
    """The executors of a run's submissions that are installed here; the default one if there are none."""
    for name in dict.fromkeys(line["executor"] for line in lines) or {DEFAULT: None}:
        with contextlib.suppress(SlurmGPUError):
            yield executor_named(name)


def queued_jobs(
    run: Run, last: list[Job] | None = None, among: Mapping[str, Sequence[Any]] | None = None
) -> list[Job] | None:
    """A run's jobs in its executors' queues; None if there is no queue for it, `last` without an answer.

    `among` are all of the user's jobs by executor, if one request is made for many runs.
    """
    found = [
        executor.queued(run, None if among is None else among[executor.name], last)
        for executor in queueing(run.submissions())
        if among is None or executor.name in among
    ]
    if last is not None and any(jobs is last for jobs in found):
        return last  # the same list: a reader of status knows by it when the queue was asked
    answers = [jobs for jobs in found if jobs is not None]
    return [job for jobs in answers for job in jobs] if answers else None


def accounting_of(run: Run, *, settled: bool = False) -> Accounting | None:
    """The attempts of a run's tasks from the accounting of its executors, as `Executor.accounting`."""
    found = [executor.accounting(run, settled=settled) for executor in queueing(run.submissions())]
    answers = [answer for answer in found if answer is not None]
    return {task: each for answer in answers for task, each in answer.items()} if answers else None
