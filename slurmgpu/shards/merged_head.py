"""The identity of merged.h5 from its user block. Standard library only, for `status`.

docs/reference/hdf5.md has the byte layout; `merge.merged_file` writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurmgpu.shards.userblock import DamagedShardError, Reader, read_userblock

_BUFFER_BYTES = 16 << 10


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
        with Reader(path, buffer_bytes=_BUFFER_BYTES, patience_s=patience_s) as reader:
            # The merge checks large blocks, which hold the pieces of many shards.
            directory, _, _ = read_userblock(reader, quick=True)
        attributes = directory["attributes"]
        return MergedHead(
            str(attributes["fingerprint"]),
            int(attributes["n_items"]),
            int(directory["n_rows"]),
            int(directory["n_errors"]),
        )
    except (FileNotFoundError, DamagedShardError, ValueError, KeyError, TypeError):
        return None
