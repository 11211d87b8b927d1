"""File names of shards and of partial shards."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
from pathlib import Path

_KEY = secrets.token_bytes(16)


def shard_name(shard: int, revision: int = 0) -> str:
    """The file name of a shard: `00042.h5`; `00042.r1.h5` if some of its items were recomputed."""
    return f"{shard:05d}.r{revision}.h5" if revision else f"{shard:05d}.h5"


def partial_name(shard: int, attempt: str) -> str:
    """The file name under which this process writes a shard, also on retries; unique across machines.

    Nobody can guess it: where others may write to the folder, a link of theirs could lead the writer to another file.
    """
    told = f"{shard}.{attempt}.{os.getpid()}".encode()  # a fork has the key of its parent
    token = hashlib.blake2b(told, key=_KEY, digest_size=8).hexdigest()
    return f"{shard:05d}.{attempt}.{platform.node()}.{os.getpid()}.{token}.partial"


def partials_of(folder: Path, attempt: str) -> list[Path]:
    """The partial files of an attempt on this machine. Its processes must be dead."""
    return sorted(folder.glob(f"*.{attempt}.{platform.node()}.*.partial"))
