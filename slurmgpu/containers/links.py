"""The names of a path through symbolic links, all of which a container must have."""

from __future__ import annotations

import os

MOST_LINKS = 40
"""How many links the kernel follows in one path."""

Known = dict[str, str | None]
"""The targets of links by path, None for no link: each path is read once."""


def names(path: str, known: Known) -> list[str]:
    """An absolute path, and the path after each link that is followed; the last one has no link in it."""
    found: list[str] = []
    done, todo = "", path.split("/")[::-1]
    while todo and len(found) < MOST_LINKS:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            done = done.rpartition("/")[0]
            continue
        here = f"{done}/{part}"
        target = _target(here, known)
        if target is None:
            done = here
            continue
        rest = [part for part in reversed(todo) if part not in ("", ".")]
        if ".." not in rest:
            found.append("/".join([here, *rest]))
        done = "" if target.startswith("/") else done
        todo += target.split("/")[::-1]
    return list(dict.fromkeys([*found, done or "/"]))


def upwards(path: str) -> list[str]:
    """The path, the folder that it is in, and so on up to the root."""
    found = [path]
    while path != "/":
        path = path.rpartition("/")[0] or "/"
        found.append(path)
    return found


def _target(path: str, known: Known) -> str | None:
    if path not in known:
        try:
            known[path] = os.readlink(path)  # as text: Path would drop a `..` or a `//`
        except (OSError, ValueError):
            known[path] = None
    return known[path]
