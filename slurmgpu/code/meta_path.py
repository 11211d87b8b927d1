"""`sys.meta_path` with a finder that stays first."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from importlib.abc import MetaPathFinder
from typing import Any, SupportsIndex


class MetaPath(list[Any]):
    """A `sys.meta_path` in which the finder of a snapshot stays first, whatever the user's code does with the list.

    Positions are those of iteration. A read or a change at the position of the snapshot's finder goes to the next one,
    so that `insert(0, hook)`, `[0]` and `pop(0)` mean the same hook.
    """

    def __init__(self, first: MetaPathFinder, others: Iterable[Any]) -> None:
        super().__init__([first, *(each for each in others if not isinstance(each, type(first)))])
        self._first = first

    def _replace(self, finders: Iterable[Any]) -> None:
        # In one step, because other threads may import: a list is empty while it is sorted in place.
        super().__setitem__(slice(None), MetaPath(self._first, finders))

    def _behind(self, index: Any) -> Any:
        """A position or slice, moved by one if it starts at the snapshot's finder."""
        if not isinstance(index, slice):
            return 1 if operator.index(index) in (0, -len(self)) else index
        start, _, step = index.indices(len(self))
        if start != 0 or step != 1:
            return index
        is_from_end = index.stop is None or operator.index(index.stop) < 0
        return slice(1, index.stop if is_from_end else operator.index(index.stop) + 1)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index if isinstance(index, slice) else self._behind(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        found = list(self)
        found[self._behind(index)] = value
        self._replace(found)

    def __delitem__(self, index: Any) -> None:
        found = list(self)
        del found[self._behind(index)]
        self._replace(found)

    def insert(self, index: SupportsIndex, finder: Any) -> None:
        """Insert before the finder at a position, but always behind the first."""
        self[index:index] = [finder]

    def pop(self, index: SupportsIndex = -1) -> Any:
        """Remove and return a finder, never the first."""
        found = list(self)
        popped = found.pop(self._behind(index))
        self._replace(found)
        return popped

    def remove(self, finder: Any) -> None:
        """Remove a finder; removing the first has no effect."""
        found = list(self)
        found.remove(finder)
        self._replace(found)

    def clear(self) -> None:
        """Remove all but the first."""
        self._replace([])

    def reverse(self) -> None:
        """Reverse the others."""
        self._replace(reversed(list(self)))

    def sort(self, *, key: Any = None, reverse: bool = False) -> None:
        """Sort the others."""
        self._replace(sorted(list(self)[1:], key=key, reverse=reverse))
