"""File names of shards and of partial shards."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def shard_name(shard: int, revision: int = 0) -> str:
    """The file name of a shard: `00042.h5`; `00042.r1.h5` if some of its items were recomputed."""
    return f"{shard:05d}.r{revision}.h5" if revision else f"{shard:05d}.h5"


def partial_name(shard: int, attempt: str) -> str:
    """The file name under which this process writes a shard; unique across machines."""
    return f"{shard:05d}.{attempt}.{platform.node()}.{os.getpid()}.partial"


def partials_of(folder: Path, attempt: str) -> list[Path]:
    """The partial files of an attempt on this machine. Its processes must be dead."""
    return sorted(folder.glob(f"*.{attempt}.{platform.node()}.*.partial"))
