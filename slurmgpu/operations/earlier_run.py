"""Compare a new run, which takes the next free name and computes all items, with the last run of the same name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from slurmgpu.code.former import changed_since
from slurmgpu.errors import SlurmGPUError
from slurmgpu.plan.planner import Draft
from slurmgpu.report.completeness import is_complete
from slurmgpu.run.directory import Run
from slurmgpu.run.frozen_plan import Plan


def earlier_run_dir(target: Path, name: str) -> Path | None:
    """The last run directory with a name, if `target` is the next free one; None for the first."""
    if target.name == name:
        return None
    number = int(target.name.removeprefix(f"{name}-"))
    return target.with_name(name if number == 2 else f"{name}-{number - 1}")


def compare_earlier(
    folder: Path, draft: Draft, what: str, rows: str, resubmit: str, plan_as_in: Callable[[Plan], Plan]
) -> str:
    """A sentence on an earlier run: whether it has the same `what`, items and code, and how to continue it.

    `rows` says where its rows are, and `resubmit` computes what it lacks. `plan_as_in` returns the plan of the draft,
    with the values that differ in every draft taken from the earlier plan. A run that cannot be read is no obstacle.
    """
    begun = f"This run computes all items, in {draft.run_dir}"
    try:
        run = Run.open(folder)
        if not run.plan.computes_same(plan_as_in(run.plan)):
            return f"{begun}: {folder} has another {what}, other items or other columns."
        if changed := changed_since(run, draft.code):
            return f"{begun}: {folder} has the same {what} and items, but other code: {changed}"
        if is_complete(run):
            return f"{begun}. {folder} has the same {what} and items, and is complete: {rows}."
    except (SlurmGPUError, OSError):
        return f"{begun}, because {folder} exists."
    return (
        f"{begun}. {folder} has the same {what} and items, and is incomplete: {resubmit} would compute only "
        f"what it lacks, once none of its tasks is alive."
    )
