"""Whether a run has all its rows, and the command that gets it the rest."""

from __future__ import annotations

from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import is_over
from slurmgpu.shards.merged_head import read_merged_head
from slurmgpu.util.shared_files import PATIENCE_S


def is_complete(run: Run) -> bool:
    """Whether the merged file has a row for every item, and no submission will replace it."""
    head = read_merged_head(run.merged, PATIENCE_S)
    return (
        head is not None and head.complete and head.fingerprint == run.plan.fingerprint and is_over(run.submissions())
    )


def command_to_continue(run: Run) -> str:
    """The command to type once nothing of an incomplete run is alive: `merge` if every shard is published."""
    verb = "merge" if len(run.published(fresh=True)) == run.plan.n_shards else "resubmit"
    return f"slurmgpu {verb} {run.typed}"
