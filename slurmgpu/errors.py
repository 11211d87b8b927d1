"""The three kinds of error: the user can fix it, one item is bad, or it is a bug (which is any other exception)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SlurmGPUError(Exception):
    """What was found, what was expected and what to do, in a sentence or two; the command line exits with 2."""


class ItemError(Exception):
    """One item cannot be computed: a workload returns it in place of a row, or raises it.

    The message becomes the item's `error`; the other items of the batch are not affected.
    `way`, if there is one, is equal for items that failed for the same reason.
    """

    way: tuple[str, ...] | None = None


class Interrupted(Exception):  # noqa: N818 - no error: the item goes on where another task, or a later one, takes it up
    """An item is left for later: a workload that keeps its progress raises it when `task.stopping()` says so."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence that names the closest known word, else all of them; with a leading blank, to append to another."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(names)}." if names else ""
