"""Counts, and lists that are cut, in words."""

from __future__ import annotations

from collections.abc import Iterable


def count_of(count: int, thing: str) -> str:
    """A number of things, in the plural unless there is one."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def some_of(names: Iterable[str], most: int) -> str:
    """The first names, and how many more there are: `a, b and 3 more`."""
    names = [*names]
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")
