"""What a run computes: its workload, and its input."""

from __future__ import annotations

from typing import TypedDict

from slurmgpu.run.frozen_plan import Plan
from slurmgpu.util.redact import hidden

MOST_NAMED = 5
"""How many files of an input are named."""


class InputFiles(TypedDict):
    """The files of an input: their number, and the paths of the first."""

    n_files: int
    files: list[str]


class Origin(TypedDict):
    """The workload and the input of a run."""

    workload: str
    input: InputFiles


def origin_of(plan: Plan) -> Origin:
    """The workload and the input of a plan."""
    paths = [each["path"] for each in plan.named_files[:MOST_NAMED]]
    return {"workload": plan.workload, "input": {"n_files": len(plan.input["files"]), "files": hidden(paths)}}


def origin_in_words(origin: Origin, workload: str) -> str:
    """Workload and input in a line; `workload` is the workload's name."""
    files, n_files = origin["input"]["files"], origin["input"]["n_files"]
    rest = f" and {n_files - 1:,} more" if n_files > 1 else ""
    return f"workload: {workload.strip()}, input: {files[0] if files else '–'}{rest}"
