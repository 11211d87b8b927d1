"""Dotted keys of TOML, such as `settings.lr`, whose names are in quotes if they have a dot."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parts_of(key: str) -> list[str]:
    """The names of a dotted key, which are quoted as in TOML if they have a dot."""
    try:
        value = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return key.split(".")
    parts = []
    while isinstance(value, dict):
        [(name, value)] = value.items()
        parts.append(name)
    return parts
