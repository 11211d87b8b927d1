"""What the plan of a `slurmgpu.map` run tells about its function; slurmgpu/code/functions.py pickles it."""

from __future__ import annotations

import keyword

from slurmgpu.run.directory import Run

MAPPED = "slurmgpu.workloads.function:Function"
"""The workload of runs of `slurmgpu.map`."""


def function_by_value(run: Run) -> str | None:
    """The name of the mapped function, if the run keeps it as a pickle, which no edit changes; else None."""
    by_value = run.plan.workload == MAPPED and "pickled" in run.plan.settings
    return str(run.plan.settings["function"]) if by_value else None


def with_another_function(run: Run, name: str) -> str:
    """The line of Python that computes the failed items of a run with another function."""
    named = name if name.isidentifier() and not keyword.iskeyword(name) else "corrected"
    return f"slurmgpu.open_run({str(run.folder)!r}).resubmit(failed=True, function={named})"
