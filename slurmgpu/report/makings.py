"""Which attempts made published shards, as the shards' files say; reading these needs NumPy and h5py."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from slurmgpu.run.directory import Run
from slurmgpu.shards.made_by import Maker

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Making:
    """Which attempt made a published shard, and when, as the shard's file says."""

    shard: int
    attempt: str
    started: float
    seconds: float
    n_items: int
    n_errors: int


def makings_of(run: Run, shards: Iterable[int], item: int | None = None) -> list[Making]:
    """The attempts that made published shards, from the files; unreadable files are left out.

    With `item`, an item's place in the run, it is the attempt that made the item's row: that of the last revision that
    names the item.
    """
    from slurmgpu.shards.shard_file import read_directory
    from slurmgpu.shards.userblock import DamagedShardError

    found = []
    files = run.shard_files()
    for shard in sorted(shards):
        try:
            revision = files[shard][-1] if shard in files and item is not None else 0
            directory = read_directory(run.revision_path(shard, revision))
            if directory.fingerprint in run.plan.extends:
                continue  # another run's attempt made it, which may have the same name as one of this run
            by: Maker = directory.made_by
            n_items = directory.stop - directory.start
            for later in directory.made_by.get("revisions", ()):
                by = later if any(start <= (item or 0) < stop for start, stop in later["items"]) else by
            times = round(float(by["started"]), 3), round(float(by["seconds"]), 3)
            found.append(Making(shard, str(by["attempt"]), *times, n_items, directory.n_errors))
        except (OSError, DamagedShardError, KeyError, TypeError, ValueError) as error:
            log.debug("the attempt that made shard %d is unknown: %s", shard, error)
    return found
