"""The items of published shards that a submission computes again (`resubmit --failed`), in recompute.json.

Such a shard is not changed. The new rows are published beside it as its next revision, `00005.r1.h5`, a whole shard
that also holds all good rows of the former one; so no row is missing at any time. A revision is created exclusively: a
task that comes later publishes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.atomic_files import write_json
from slurmgpu.util.shared_files import UnusableFileError, read_bytes

RECOMPUTE_FORMAT = "slurmgpu recompute"
RECOMPUTE_VERSION = 1
MOST_BYTES = 4 << 30
"""More than the list of 50 million items that are computed again."""

Spans = Sequence[tuple[int, int]]
"""Items as (start, stop), ascending."""


@dataclass(frozen=True)
class Again:
    """The items of one shard that are computed again, and its new revision."""

    revision: int
    items: Spans


@dataclass(frozen=True)
class Recompute:
    """The items that a submission computes again, by shard."""

    submission: int
    shards: Mapping[int, Again]

    @property
    def n_items(self) -> int:
        """How many items are computed again."""
        return sum(stop - start for again in self.shards.values() for start, stop in again.items)


def recompute_path(run_folder: Path) -> Path:
    """The file's path: one for each run, of the last submission that computed items again."""
    return run_folder / "recompute.json"


def write_recompute(run_folder: Path, value: Recompute) -> None:
    """Write the items that a submission computes again, before anything of it is queued."""
    shards = {
        str(shard): [again.revision, [list(span) for span in again.items]] for shard, again in value.shards.items()
    }
    head = {"format": RECOMPUTE_FORMAT, "version": RECOMPUTE_VERSION, "submission": value.submission}
    write_json(recompute_path(run_folder), {**head, "shards": shards})


def read_recompute(run_folder: Path, submission: int) -> Recompute | None:
    """The items that a submission computes again; None if it computes missing shards only. SlurmGPUError if damaged."""
    path = recompute_path(run_folder)
    try:
        value = json.loads(read_bytes(path, max_bytes=MOST_BYTES))
        found = _parsed(value)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, UnusableFileError) as error:
        raise SlurmGPUError(
            f"{path} is damaged ({type(error).__name__}: {error}). Remove it: no row is lost by that, "
            f"and `slurmgpu resubmit --failed` computes the failed items that are left."
        ) from error
    return found if found.submission == submission else None


def _parsed(value: Any) -> Recompute:
    if value["format"] != RECOMPUTE_FORMAT or value["version"] != RECOMPUTE_VERSION:
        raise ValueError(f"its format is {value['format']!r} version {value['version']!r}")
    shards = {
        int(shard): Again(int(revision), tuple((int(start), int(stop)) for start, stop in spans))
        for shard, (revision, spans) in value["shards"].items()
    }
    if not all(again.revision > 0 and again.items for again in shards.values()):
        raise ValueError("a shard in it has no revision or no items")
    return Recompute(int(value["submission"]), shards)


def spans_of(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending indices as spans: [3, 4, 7] are (3, 5) and (7, 8)."""
    spans: list[tuple[int, int]] = []
    for index in indices:
        if spans and spans[-1][1] == index:
            spans[-1] = spans[-1][0], index + 1
        else:
            spans.append((index, index + 1))
    return spans
