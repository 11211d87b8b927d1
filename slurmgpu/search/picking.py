"""Which of many lines an excerpt shows: the one that was looked for, those that say most of it, those around it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slurmgpu.logs.files import LogFile
from slurmgpu.logs.lines import Line, read_lines, without_colours

TRACEBACK_BEGINS = "Traceback (most recent call last)"
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
"""How the line begins that is between the tracebacks of one error."""
LOOK_LINES = 440
"""So many lines are looked through for the one to mark, and no excerpt is longer: its place depends on nothing else."""


def pick(lines: Sequence[Line], mark: int, first: Iterable[int], n_lines: int) -> tuple[tuple[Line, ...], int]:
    """So many of the lines in their order, and where the marked one is among them.

    It is always there; next come the places in `first`, then what is near.
    """
    near = sorted(range(len(lines)), key=lambda place: (abs(place - mark), place))
    chosen = sorted([*dict.fromkeys([mark, *first, *near])][: max(1, n_lines)])
    return tuple(lines[place] for place in chosen), chosen.index(mark)


def first_whole(lines: Sequence[Line], start: int) -> int:
    """The first place, from `start` on, that is in no traceback of a line before."""
    is_open = False
    for place, line in enumerate(lines):
        text = without_colours(line.text)
        is_open = not line.is_dated and (is_open or TRACEBACK_BEGINS in text)
        if place >= start and not is_open:
            return place
        if is_open and text.strip() and not text[0].isspace() and TRACEBACK_BEGINS not in text:
            is_open = False  # the exception itself
    return len(lines)


def with_traceback(file: LogFile, offset: int, n_more: int) -> tuple[list[Line], int]:
    """The line at an offset with the traceback under it, and more lines; where the traceback ends, or 0."""
    lines: list[Line] = []
    end, is_open, is_own, may_follow = 0, False, True, True
    for line in read_lines(file, offset):
        text = without_colours(line.text)
        if TRACEBACK_BEGINS in text and lines:
            is_open = is_own and may_follow  # any other is of what was printed later
        elif text.startswith(CHAINED):
            may_follow = True
        elif line.is_dated and lines:
            # What comes with a time of its own tells of something else.
            end, is_open, is_own = (len(lines) - 1 if is_open else end), False, False
        elif is_open and text.strip() and not text[0].isspace():
            end, is_open, may_follow = len(lines), False, False  # the exception itself
        lines.append(line)
        if len(lines) >= LOOK_LINES or (not is_open and len(lines) - 1 - end >= n_more):
            break
    return lines, len(lines) - 1 if is_open else end
