"""Digests of images, cached in ~/.cache/slurmgpu/digests.json."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from slurmgpu.util.atomic_files import write_json

CHUNK = 1 << 20
MAX_REMEMBERED = 256

Range = tuple[int, int]


def digests(path: Path, part: Range) -> dict[str, str]:
    """The sha256 of the file, and of the bytes `part` (offset, size) in it: `sha256` and `partition_sha256`."""
    status = path.stat()
    key = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}|{status.st_ino}"
    # `~` is no folder if the user has none.
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")  # noqa: PTH111, PTH118
    cache = Path(home, "slurmgpu", "digests.json")
    known = _read(cache)
    if key not in known:
        found = _compute(path, part)
        # Read again: another process may have added to it during the minute that a large image takes.
        known = {**_read(cache), key: found}
        recent = dict(list(known.items())[-MAX_REMEMBERED:])
        with contextlib.suppress(OSError):  # a home that cannot be written: computed again each time
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_json(cache, recent, durable=False)
    return known[key]


def _read(cache: Path) -> dict[str, dict[str, str]]:
    try:
        value = json.loads(cache.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(value, dict):
        return {}
    names = ("sha256", "partition_sha256")
    return {
        key: found
        for key, found in value.items()
        if isinstance(found, dict) and all(isinstance(found.get(name), str) for name in names)
    }


def _compute(path: Path, part: Range) -> dict[str, str]:
    whole, inner = hashlib.sha256(), hashlib.sha256()
    start, end = part[0], part[0] + part[1]
    position = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            whole.update(chunk)
            inner.update(chunk[max(0, start - position) : max(0, end - position)])
            position += len(chunk)
    return {"sha256": whole.hexdigest(), "partition_sha256": inner.hexdigest()}
