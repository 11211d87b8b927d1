"""Executors by name, and those that a run has to do with."""

from __future__ import annotations

import functools

from slurmgpu.executors.interface import Executor, Lines
from slurmgpu.plan.executors import EXECUTORS
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import SubmissionLine


@functools.cache
def executor_named(name: str) -> Executor:
    """The executor that [resources] executor, or a submission, names; SlurmGPUError if no package here has it."""
    executor: Executor = EXECUTORS.make(name)
    return executor


def executors_of(run: Run) -> list[tuple[Executor, Lines]]:
    """The executors of a run's submissions, each with those of them that have not ended.

    Slurm of a run that has none: jobs by hand may wait, of which nothing is written before they start.
    """
    found: dict[str, list[SubmissionLine]] = {}
    for line in run.submissions():
        of_it = found.setdefault(line["executor"], [])
        if line["state"] != "ended":
            of_it.append(line)
    return [(executor_named(name), lines) for name, lines in (found or {"slurm": []}).items()]
