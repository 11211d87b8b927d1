"""What merged.h5 says of itself: how many rows it holds, of which plan. Standard library only, for `status`.

The bytes are those of docs/reference/hdf5.md; `joins` writes and verifies them.
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
        """Whether it holds a row for every item that was planned: the one meaning of complete."""
        return self.n_rows == self.n_items


def read_merged_head(path: Path, patience_s: float = 1.0) -> MergedHead | None:
    """The head of a merged file; None where there is none, or one that is damaged.

    An OSError that remains is raised: it says nothing of the file.
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
        # Of a larger block, with the pieces of many shards, the checksum is for the merge to look at.
        if size <= _SMALL_BLOCK and zlib.crc32(begin[16:] + content + file.read(size - _HEADER.size - n_json)) != crc32:
            raise ValueError("the checksum of its user block differs")
        directory = json.loads(content)
        if directory["file_size"] != os.fstat(file.fileno()).st_size:
            raise ValueError("it has another size than when it was written")
    attributes = directory["attributes"]
    return MergedHead(
        str(attributes["fingerprint"]),
        int(attributes["n_items"]),
        int(directory["n_rows"]),
        int(directory["n_errors"]),
    )
