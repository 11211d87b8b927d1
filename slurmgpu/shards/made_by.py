"""Which attempt made a shard's rows, as its file says: see docs/reference/hdf5.md. Standard library only."""

from __future__ import annotations

from typing import TypedDict


class Maker(TypedDict, total=False):
    """An attempt, when it began the shard and for how long it computed, and its code's digest; None is unknown."""

    attempt: str
    started: float
    seconds: float
    code: str | None


class LaterMaker(Maker, total=False):
    """The maker of a later revision, which made the rows of `items`, as [start, stop]."""

    items: list[list[int]]


class MadeBy(Maker, total=False):
    """The maker of a shard, and those of its later revisions: the last one that names an item made its row."""

    revisions: list[LaterMaker]
