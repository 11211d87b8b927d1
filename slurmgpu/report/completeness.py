"""Whether a run has all its rows, and the command that gets it the rest."""

from __future__ import annotations

from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import is_over
from slurmgpu.shards.merged_head import read_merged_head
from slurmgpu.util.shared_files import PATIENCE_S


def is_complete(run: Run) -> bool:
    """Whether the merged file has a row for every item, and no submission will replace it.

    submissions.jsonl may have been lost: then no submission is known.
    """
    head = read_merged_head(run.merged, PATIENCE_S)
    if head is None or not head.complete or head.fingerprint != run.plan.fingerprint:
        return False
    return is_over(lines) if (lines := run.submissions()) else True


def command_to_continue(run: Run) -> str:
    """The command to type once nothing of an incomplete run is alive: `merge` if every shard is published."""
    verb = "merge" if len(run.published(fresh=True)) == run.plan.n_shards else "resubmit"
    return f"slurmgpu {verb} {run.typed}"
