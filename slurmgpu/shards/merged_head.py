"""The identity of merged.h5 from its user block. Standard library only, for `status`.

docs/reference/hdf5.md has the byte layout; `merge.join` writes and verifies it.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from slurmgpu.util.shared_files import UnusableFileError, open_regular, retried

_HEADER = struct.Struct("<8sIIQQQ")
_MAGIC = b"slurmgpu"
_LARGEST_JSON = 1 << 31
_SMALL_BLOCK = 1 << 20


@dataclass(frozen=True)
class MergedHead:
    """The identity of a merged file."""

    fingerprint: str
    n_items: int
    n_rows: int
    n_errors: int

    @property
    def complete(self) -> bool:
        """Whether it has a row for every planned item. This defines a complete run."""
        return self.n_rows == self.n_items


def read_merged_head(path: Path, patience_s: float = 1.0) -> MergedHead | None:
    """The head of a merged file; None if the file is missing or damaged.

    An OSError that remains after retries is raised: it says nothing about the content.
    """
    try:
        return retried(lambda: _read(path), patience_s)
    except (FileNotFoundError, UnusableFileError, ValueError, KeyError, TypeError, RecursionError, struct.error):
        return None


def _read(path: Path) -> MergedHead:
    with os.fdopen(open_regular(path), "rb") as file:
        begin = file.read(_HEADER.size)
        magic, _, crc32, size, n_json, _ = _HEADER.unpack(begin)
        if magic != _MAGIC or n_json > _LARGEST_JSON:
            raise ValueError("it does not begin with slurmgpu's user block")
        content = file.read(n_json)
        # The merge checks larger blocks, which hold the pieces of many shards.
        if size <= _SMALL_BLOCK and zlib.crc32(begin[16:] + content + file.read(size - _HEADER.size - n_json)) != crc32:
            raise ValueError("the checksum of its user block differs")
        directory = json.loads(content)
        if directory["file_size"] != os.fstat(file.fileno()).st_size:
            raise ValueError("its size differs from when it was written")
    attributes = directory["attributes"]
    return MergedHead(
        str(attributes["fingerprint"]),
        int(attributes["n_items"]),
        int(directory["n_rows"]),
        int(directory["n_errors"]),
    )
