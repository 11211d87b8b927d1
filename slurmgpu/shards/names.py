"""The names of shards, and of files that are to become one."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def shard_name(shard: int, revision: int = 0) -> str:
    """The name of a shard's file: `00042.h5`, or `00042.r1.h5` where some of its items were computed again."""
    return f"{shard:05d}.r{revision}.h5" if revision else f"{shard:05d}.h5"


def partial_name(shard: int, attempt: str) -> str:
    """The name under which this process writes a shard, which no other one uses, of whatever machine."""
    return f"{shard:05d}.{attempt}.{platform.node()}.{os.getpid()}.partial"


def partials_of(folder: Path, attempt: str) -> list[Path]:
    """What processes of an attempt on this machine have begun to write, if they are dead."""
    return sorted(folder.glob(f"*.{attempt}.{platform.node()}.*.partial"))
