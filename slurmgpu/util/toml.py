"""TOML by the standard library, or by tomli before Python 3.11, and its dotted keys."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["parts_of", "tomllib"]


def parts_of(key: str) -> list[str]:
    """The names of a dotted key, such as `settings.lr`, which are quoted as in TOML if they have a dot."""
    try:
        value = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return key.split(".")
    parts = []
    while isinstance(value, dict):
        [(name, value)] = value.items()
        parts.append(name)
    return parts
