"""Whether a run has all its rows, and the command that gets it the rest."""

from __future__ import annotations

from collections.abc import Sequence

from slurmgpu.run.directory import Run
from slurmgpu.run.frozen_plan import Plan
from slurmgpu.run.submissions import SubmissionLine, is_over
from slurmgpu.shards.merged_head import MergedHead, read_merged_head
from slurmgpu.util.shared_files import PATIENCE_S


def is_complete(run: Run) -> bool:
    """Whether the merged file has a row for every item, and no submission will replace it."""
    return has_every_row(read_merged_head(run.merged, PATIENCE_S), run.plan) and is_final(run.submissions())


def has_every_row(head: MergedHead | None, plan: Plan) -> bool:
    """Whether a merged file is the plan's and has a row for every item."""
    return head is not None and head.complete and head.fingerprint == plan.fingerprint


def is_final(lines: Sequence[SubmissionLine]) -> bool:
    """Whether no submission will replace the merged file; with none, submissions.jsonl may have been lost."""
    return not lines or is_over(lines)


def command_to_continue(run: Run) -> str:
    """The command to type once nothing of an incomplete run is alive: `merge` if every shard is published."""
    verb = "merge" if len(run.published(fresh=True)) == run.plan.n_shards else "resubmit"
    return f"slurmgpu {verb} {run.typed}"
