"""recompute.json: the items of published shards that a submission recomputes (`resubmit --failed`).

Such a shard is not changed. The new rows are published next to it as its next revision, `00005.r1.h5`, a whole shard
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
from slurmgpu.util.regular_files import UnusableFileError
from slurmgpu.util.shared_files import read_bytes

RECOMPUTE_FORMAT = "slurmgpu recompute"
RECOMPUTE_VERSION = 2
MOST_BYTES = 4 << 30
"""More than the list of 400 million recomputed items."""

Spans = Sequence[tuple[int, int]]
"""Items as (start, stop), ascending."""


@dataclass(frozen=True, init=False)
class Again:
    """The items of one shard that are recomputed, and its new revision.

    `text` has the `n_items` items as in the file, `3,6:9`: each task holds those of all shards, maybe millions.
    """

    revision: int
    text: str
    n_items: int

    def __init__(self, revision: int, items: Spans) -> None:
        # A frozen dataclass cannot set its own fields otherwise.
        object.__setattr__(self, "revision", revision)
        object.__setattr__(self, "text", ",".join(_said(*span) for span in items))
        object.__setattr__(self, "n_items", sum(stop - start for start, stop in items))

    @property
    def items(self) -> Spans:
        """The items as spans."""
        return [_span(part) for part in self.text.split(",")]

    @classmethod
    def from_json(cls, revision: int, text: str) -> Again:
        """Read an entry of the file; ValueError if it is not one."""
        found = cls(revision, [_span(part) for part in text.split(",")])
        if revision < 1 or found.n_items < 1:
            raise ValueError("a shard in it has no revision or no items")
        return found


@dataclass(frozen=True)
class Recompute:
    """The items that a submission recomputes, by shard."""

    submission: int
    shards: Mapping[int, Again]

    @property
    def n_items(self) -> int:
        """How many items are recomputed."""
        return sum(again.n_items for again in self.shards.values())


def recompute_path(run_folder: Path) -> Path:
    """The path of the run's recompute.json, which belongs to the last submission that recomputed items."""
    return run_folder / "recompute.json"


def write_recompute(run_folder: Path, value: Recompute) -> None:
    """Write the items that a submission recomputes, before anything of it is queued."""
    shards = {str(shard): [again.revision, again.text] for shard, again in value.shards.items()}
    head = {"format": RECOMPUTE_FORMAT, "version": RECOMPUTE_VERSION, "submission": value.submission}
    write_json(recompute_path(run_folder), {**head, "shards": shards})


def read_recompute(run_folder: Path) -> Recompute | None:
    """The items of the last submission that recomputes some; None without one. SlurmGPUError if damaged."""
    path = recompute_path(run_folder)
    try:
        value = json.loads(read_bytes(path, max_bytes=MOST_BYTES))
        return _parsed(value)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, UnusableFileError) as error:
        raise SlurmGPUError(
            f"{path} is damaged ({type(error).__name__}: {error}). Remove it: that loses no row, "
            f"and `slurmgpu resubmit --failed` recomputes the failed items that are left."
        ) from error


def _parsed(value: Any) -> Recompute:
    if value["format"] != RECOMPUTE_FORMAT or value["version"] != RECOMPUTE_VERSION:
        raise ValueError(f"its format is {value['format']!r} version {value['version']!r}")
    shards = {int(shard): Again.from_json(*again) for shard, again in value["shards"].items()}
    return Recompute(int(value["submission"]), shards)


def _said(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}:{stop}"


def _span(text: str) -> tuple[int, int]:
    start, colon, stop = text.partition(":")
    return int(start), int(stop) if colon else int(start) + 1


def spans_of(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending indices as spans: [3, 4, 7] are (3, 5) and (7, 8)."""
    spans: list[tuple[int, int]] = []
    for index in indices:
        if spans and spans[-1][1] == index:
            spans[-1] = spans[-1][0], index + 1
        else:
            spans.append((index, index + 1))
    return spans
