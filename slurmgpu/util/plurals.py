"""Numbers of things in words."""

from __future__ import annotations


def count_of(count: int, thing: str) -> str:
    """So many of a thing, in the plural where there are more or fewer than one."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
