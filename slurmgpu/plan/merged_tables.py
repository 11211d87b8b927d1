"""Tables of keys, put over one another: the site file, the run file, a profile, options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Part(dict[str, Any]):
    """A table with some keys set: it updates another table instead of replacing it."""


def merge_tables(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`below` updated by `above`, key by key, also within tables; a None in `above` changes nothing.

    A mapping within a table, such as a setting, is replaced as a whole, unless it is a Part.
    """
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping):
            merged[key] = _put_over(merged.get(key), value)
        elif value is not None:
            merged[key] = value
    return merged


def _put_over(table: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Update a table; a Part over a Part, or over nothing, stays a Part."""
    merged = Part() if not isinstance(table, Mapping) or isinstance(table, Part) else dict(table)
    merged.update(table if isinstance(table, Mapping) else {})
    for name, value in given.items():
        if value is not None:
            merged[name] = _put_over(merged.get(name), value) if isinstance(value, Part) else value
    return merged
