"""The failed items of a run, for a submission that recomputes them."""

from __future__ import annotations

from collections.abc import Sequence

from slurmgpu.merge.files_to_join import FilesToJoin
from slurmgpu.run.crash_history import history_path
from slurmgpu.run.directory import Run
from slurmgpu.run.recompute import Again, Recompute, spans_of
from slurmgpu.shards.shard_file import examine, read_errors
from slurmgpu.shards.userblock import DamagedShardError, Reader
from slurmgpu.util.shared_files import remove


def failed_again(run: Run, submission: int) -> Recompute:
    """The failed items of all published shards, for a submission that recomputes them."""
    found, sources = {}, FilesToJoin(run, lambda: None)
    with sources.former() as former:
        good = set() if former is None else former.without_failures()
    for shard, revisions in sorted(run.shard_files(fresh=True).items()):
        if shard in good:
            continue  # no later merge takes an error in place of a good row of merged.h5
        try:
            with Reader(run.revision_path(shard, revisions[-1])) as reader:
                errors = reader.twice(lambda: read_errors(reader, examine(reader)))
        except (DamagedShardError, FileNotFoundError):
            continue  # the merge reports it
        if errors:
            found[shard] = Again(revisions[-1] + 1, spans_of([index for index, _ in errors]))
    return Recompute(submission, found)


def forget_deaths(run: Run, shards: Sequence[int]) -> None:
    """Remove the crash histories of shards, so that quarantined items are recomputed."""
    for shard in shards:
        remove(history_path(run.claims.folder, shard))
