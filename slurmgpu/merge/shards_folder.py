"""What lies in a run's folder of shards beside whole ones: damaged files, which are set aside, and unfinished ones."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from slurmgpu.report.build import Joined
from slurmgpu.run.directory import Run
from slurmgpu.run.lock import checked
from slurmgpu.shards.shard_file import verify_shard
from slurmgpu.shards.userblock import DamagedShardError
from slurmgpu.util.atomic_files import write_bytes
from slurmgpu.util.shared_files import exists, list_fresh, list_names, remove, replace, retried

log = logging.getLogger(__name__)

Check = Callable[[], None]
"""Raises if this process may no longer merge."""


def set_aside(path: Path, reason: str) -> None:
    """Rename a damaged file of a shard to `NNNNN.damaged`, with the reason in a file next to it."""
    shard, revision = Run.revision_of(path.name) or (path.name, 0)
    which = f"revision {revision} of shard {shard}" if revision else f"shard {shard}"
    log.error("%s is not merged: %s", which, reason)
    write_bytes(path.with_suffix(".damaged.txt"), f"{reason}\n".encode())
    with contextlib.suppress(FileNotFoundError):
        replace(path, path.with_suffix(".damaged"))


def take_back(run: Run, check: Check) -> None:
    """Publish shards that an earlier merge set aside and that are intact now: only the reading was at fault."""
    for name in checked(list_names(run.shards), check):
        stem = name.removesuffix(".damaged")
        target = run.shards / f"{stem}.h5"
        if stem == name or (revision := run.revision_of(target.name)) is None or exists(target):
            continue
        start, stop = run.plan.bounds(revision[0])
        try:
            verify_shard(run.shards / name, fingerprint=run.plan.fingerprints, start=start, stop=stop)
        except (DamagedShardError, FileNotFoundError):
            continue
        check()  # reading may have taken long
        log.warning("%s is intact and is used again", name)
        replace(run.shards / name, target)


def partials(run: Run) -> dict[str, tuple[int, int]]:
    """Unfinished shards with size and time, which show whether they are still written."""
    found = {}
    for name in list_fresh(run.shards):
        if name.endswith(".partial"):
            with contextlib.suppress(FileNotFoundError):
                stat = retried((run.shards / name).lstat)
                found[name] = stat.st_size, stat.st_mtime_ns
    return found


def clear_away(run: Run, leftovers: Mapping[str, tuple[int, int]], joined: Joined | None, check: Check) -> None:
    """Remove unfinished shards that did not change during the merge, and damaged ones that were replaced."""
    aside = set() if joined is None else {path.stem for path, _ in joined.aside}
    files = run.shard_files()
    for name in checked(list_names(run.shards), check):
        stem = name.removesuffix(".txt").removesuffix(".damaged")
        which = run.revision_of(f"{stem}.h5") if ".damaged" in name else None
        is_replaced = which is not None and max(files.get(which[0], [0])) >= which[1]
        if joined and which and which[0] in joined.shards and is_replaced and stem not in aside:
            with contextlib.suppress(IsADirectoryError, PermissionError):  # not our file
                remove(run.shards / name)
    unchanged = partials(run)
    for name, mark in checked(leftovers.items(), check):
        if unchanged.get(name) == mark:
            remove(run.shards / name)
