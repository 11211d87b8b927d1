"""What the last run by the same name is to a new one, which takes the next name that is free and computes all items."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from slurmgpu.code.former import changed_since
from slurmgpu.errors import SlurmGPUError
from slurmgpu.plan.planner import Draft
from slurmgpu.report.build import is_complete
from slurmgpu.run.directory import Run
from slurmgpu.run.frozen_plan import Plan


def earlier_run_dir(target: Path, name: str) -> Path | None:
    """The last run directory by a name, of which `target` is the next that is free; None for the first."""
    if target.name == name:
        return None
    number = int(target.name.removeprefix(f"{name}-"))
    return target.with_name(name if number == 2 else f"{name}-{number - 1}")


def compare_earlier(
    folder: Path, draft: Draft, what: str, rows: str, resubmit: str, plan_as_in: Callable[[Plan], Plan]
) -> str:
    """A sentence on an earlier run: whether it is of the same `what`, items and code, and how to go on with it.

    `rows` says where its rows are, and `resubmit` computes what it lacks; `plan_as_in` is the plan of the draft, with
    what no two drafts have alike taken from the earlier plan. A run that cannot be read stands in nobody's way.
    """
    begun = f"This run computes all items, in {draft.run_dir}"
    try:
        run = Run.open(folder)
        if not run.plan.computes_same(plan_as_in(run.plan)):
            return f"{begun}: {folder} is of another {what}, other items or other columns."
        if changed := changed_since(run, draft.code):
            return f"{begun}: {folder} is of the same {what} and items, and of other code: {changed}"
        if is_complete(run):
            return f"{begun}. {folder} is of the same {what} and items, and complete: {rows}."
    except (SlurmGPUError, OSError):
        return f"{begun}, as {folder} exists."
    return (
        f"{begun}. {folder} is of the same {what} and items, and incomplete: {resubmit} would compute only "
        f"what it lacks, once nothing of it is alive."
    )
