"""Selection of the lines of an excerpt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slurmgpu.logs.files import LogFile
from slurmgpu.logs.lines import Line, read_lines, without_colours

TRACEBACK_BEGINS = "Traceback (most recent call last)"
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
"""The lines between chained tracebacks."""
LOOK_LINES = 440
"""The number of lines that are searched for the marked one, and the longest excerpt."""


def pick(lines: Sequence[Line], mark: int, first: Iterable[int], n_lines: int) -> tuple[tuple[Line, ...], int]:
    """`n_lines` of the lines in order, and the index of the marked one: it, then those in `first`, then the nearest."""
    near = sorted(range(len(lines)), key=lambda place: (abs(place - mark), place))
    chosen = sorted([*dict.fromkeys([mark, *first, *near])][: max(1, n_lines)])
    return tuple(lines[place] for place in chosen), chosen.index(mark)


def is_exception(text: str) -> bool:
    """Whether a line of a traceback is its last, the exception."""
    return bool(text.strip()) and not text[0].isspace()


def first_whole(lines: Sequence[Line], start: int) -> int:
    """The first index from `start` on that is not within a traceback."""
    is_open = False
    for place, line in enumerate(lines):
        text = without_colours(line.text)
        is_open = not line.is_dated and (is_open or TRACEBACK_BEGINS in text)
        if place >= start and not is_open:
            return place
        if is_open and is_exception(text) and TRACEBACK_BEGINS not in text:
            is_open = False
    return len(lines)


def with_traceback(file: LogFile, offset: int, n_more: int) -> tuple[list[Line], int]:
    """The line at an offset, its traceback and `n_more` lines; and the index of the traceback's end, or 0."""
    lines: list[Line] = []
    end, is_open, is_own, may_follow = 0, False, True, True
    for line in read_lines(file, offset):
        text = without_colours(line.text)
        if TRACEBACK_BEGINS in text and lines:
            is_open = is_own and may_follow  # others were printed later
        elif text.startswith(CHAINED):
            may_follow = True
        elif line.is_dated and lines:
            # A dated line is about something else.
            end, is_open, is_own = (len(lines) - 1 if is_open else end), False, False
        elif is_open and is_exception(text):
            end, is_open, may_follow = len(lines), False, False
        lines.append(line)
        if len(lines) >= LOOK_LINES or (not is_open and len(lines) - 1 - end >= n_more):
            break
    return lines, len(lines) - 1 if is_open else end
