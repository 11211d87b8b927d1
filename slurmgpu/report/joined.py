"""What a join has put into merged.h5. Standard library only: the report is made of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurmgpu.code.versions import Stretch

Errors = list[tuple[int, str]]
"""The index of each failed item, and what went wrong."""


@dataclass(frozen=True)
class Joined:
    """What a join made.

    `shards` are those whose rows it holds. `damaged` has those that were left out, and why; `aside` each file whose
    bytes are wrong, and why. `errors` are the failed items. `not_finite` has in how many rows columns have NaN, and in
    how many infinities; None where shards of an older slurmgpu do not tell. `code` tells which code has
    computed which rows.
    """

    n_rows: int
    n_errors: int
    shards: frozenset[int]
    damaged: tuple[tuple[int, str], ...]
    aside: tuple[tuple[Path, str], ...]
    errors: Errors
    not_finite: dict[str, dict[str, int]] | None = None
    code: tuple[Stretch, ...] = ()
