"""Stretches: which code has computed which rows. Standard library only: `status` tells it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypedDict

from slurmgpu.code.snapshots import short


class RowsByCode(TypedDict):
    """How many rows are by a code, in the JSON of reports and status; None where that is not known."""

    digest: str | None
    items: int


class Stretch(NamedTuple):
    """The items from `start` to `stop` - 1 have rows by the code of this digest; None where that is not known."""

    start: int
    stop: int
    digest: str | None


def stretches_of(made_by: Mapping[str, Any], start: int, stop: int) -> list[Stretch]:
    """Whose the rows of a shard are, from what its file says of its makers."""
    whole = Stretch(start, stop, made_by.get("code"))
    if not made_by.get("revisions"):
        return [whole]
    rows = [whole.digest] * (stop - start)
    for later in made_by["revisions"]:
        for first, end in later["items"]:
            first, end = max(first, start), min(end, stop)
            rows[first - start : end - start] = [later.get("code")] * (end - first)
    return compact(Stretch(start + i, start + i + 1, digest) for i, digest in enumerate(rows))


def compact(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The same, with those that lie side by side and are by the same code as one."""
    found: list[Stretch] = []
    for start, stop, digest in stretches:
        if found and found[-1].stop == start and found[-1].digest == digest:
            found[-1] = Stretch(found[-1].start, stop, digest)
        else:
            found.append(Stretch(start, stop, digest))
    return found


def within(stretches: Iterable[Stretch], start: int, stop: int) -> list[Stretch]:
    """The parts of stretches that lie between two items."""
    cut = (Stretch(max(start, each.start), min(stop, each.stop), each.digest) for each in stretches)
    return [each for each in cut if each.start < each.stop]


def makers_of(stretches: Sequence[Stretch]) -> dict[str, Any]:
    """What a file says of its makers so that `stretches_of` finds these: of its code alone."""
    digests = {each.digest for each in stretches}
    if len(digests) == 1:
        return {"code": digests.pop()}
    by = sorted(stretches, key=lambda each: each.digest or "")
    later = [
        {"code": digest, "items": [[each.start, each.stop] for each in group]}
        for digest, group in groupby(by, key=lambda each: each.digest)
    ]
    return {"code": None, "revisions": later}


def rows_by_code(stretches: Iterable[Stretch]) -> dict[str | None, int]:
    """How many rows are by each code; that of the first row comes first."""
    found: Counter[str | None] = Counter()
    for start, stop, digest in stretches:
        found[digest] += stop - start
    return dict(found)


def in_words(versions: Sequence[RowsByCode]) -> str:
    """How many rows are whose, from the report's `code`: "1,920 rows by 9f2c, 80 by 77ab"."""
    digests = [version["digest"] for version in versions if version["digest"]]
    parts: list[str] = []
    for version in versions:
        word = "" if parts else " row" if version["items"] == 1 else " rows"
        by = short(version["digest"], digests) if version["digest"] else "code that is not known"
        parts.append(f"{version['items']:,}{word} by {by}")
    return ", ".join(parts)
