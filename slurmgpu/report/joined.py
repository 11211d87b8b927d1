"""The result of a join. Standard library only: the report is built from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurmgpu.code.versions import Stretch

Errors = list[tuple[int, str]]
"""The index of each failed item, and its error."""


@dataclass(frozen=True)
class Joined:
    """The content of merged.h5 after a join.

    `shards` are in it. `damaged` are the shards left out, and why; `aside` are files with wrong bytes, and why.
    `errors` are the failed items. `not_finite` counts by column the rows with NaN and with infinities; None if shards
    of an older slurmgpu do not say. `code` says which code computed which rows.
    """

    n_rows: int
    n_errors: int
    shards: frozenset[int]
    damaged: tuple[tuple[int, str], ...]
    aside: tuple[tuple[Path, str], ...]
    errors: Errors
    not_finite: dict[str, dict[str, int]] | None = None
    code: tuple[Stretch, ...] = ()
