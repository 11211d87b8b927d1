"""Counts in words."""

from __future__ import annotations


def count_of(count: int, thing: str) -> str:
    """A number of things, in the plural unless there is one."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
