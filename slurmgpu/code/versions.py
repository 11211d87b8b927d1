"""Which code computed which rows, as stretches of items. `status` imports this: standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, TypedDict

from slurmgpu.code.snapshots import short
from slurmgpu.shards.made_by import LaterMaker, MadeBy


class RowsByCode(TypedDict):
    """The number of rows by a version of the code, in the JSON of reports and status; None is unknown."""

    digest: str | None
    items: int


class Stretch(NamedTuple):
    """The rows of items `start` to `stop` - 1 are by the code of this digest; None is unknown."""

    start: int
    stop: int
    digest: str | None


def stretches_of(made_by: MadeBy, start: int, stop: int) -> list[Stretch]:
    """The stretches of a shard's items `start` to `stop` - 1, from its file's record of what computed it."""
    whole = Stretch(start, stop, made_by.get("code"))
    if not (revisions := made_by.get("revisions")):
        return [whole]
    rows = [whole.digest] * (stop - start)
    for later in revisions:
        for first, end in later["items"]:
            first, end = max(first, start), min(end, stop)
            rows[first - start : end - start] = [later.get("code")] * (end - first)
    return compact(Stretch(start + i, start + i + 1, digest) for i, digest in enumerate(rows))


def compact(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The stretches, with adjacent ones by the same code merged."""
    found: list[Stretch] = []
    for start, stop, digest in stretches:
        if found and found[-1].stop == start and found[-1].digest == digest:
            found[-1] = Stretch(found[-1].start, stop, digest)
        else:
            found.append(Stretch(start, stop, digest))
    return found


def within(stretches: Iterable[Stretch], start: int, stop: int) -> list[Stretch]:
    """The parts of stretches between two items."""
    cut = (Stretch(max(start, each.start), min(stop, each.stop), each.digest) for each in stretches)
    return [each for each in cut if each.start < each.stop]


def makers_of(stretches: Sequence[Stretch]) -> MadeBy:
    """The record of what computed a shard from which `stretches_of` returns these stretches."""
    digests = {each.digest for each in stretches}
    if len(digests) == 1:
        return {"code": digests.pop()}
    by = sorted(stretches, key=lambda each: each.digest or "")
    later: list[LaterMaker] = [
        {"code": digest, "items": [[each.start, each.stop] for each in group]}
        for digest, group in groupby(by, key=lambda each: each.digest)
    ]
    return {"code": None, "revisions": later}


def rows_by_code(stretches: Iterable[Stretch]) -> dict[str | None, int]:
    """The number of rows by each version of the code, the first row's version first."""
    found: Counter[str | None] = Counter()
    for start, stop, digest in stretches:
        found[digest] += stop - start
    return dict(found)


def are_told(versions: Sequence[RowsByCode]) -> bool:
    """Whether the numbers are worth showing: rows by several versions, or by unknown code."""
    return len(versions) > 1 or any(version["digest"] is None for version in versions)


def in_words(versions: Sequence[RowsByCode]) -> str:
    """The numbers of rows by code as `1,920 rows by 9f2c, 80 by 77ab`."""
    digests = [version["digest"] for version in versions if version["digest"]]
    parts: list[str] = []
    for version in versions:
        word = "" if parts else " row" if version["items"] == 1 else " rows"
        by = short(version["digest"], digests) if version["digest"] else "unknown code"
        parts.append(f"{version['items']:,}{word} by {by}")
    return ", ".join(parts)
