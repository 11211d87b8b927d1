"""Items as users name them, `10:20,35`, and as ranges (start, stop)."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from slurmgpu.errors import SlurmGPUError


def n_to_ends(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """The number of items up to the end of each range."""
    return list(accumulate(stop - start for start, stop in ranges))


def spans_within(
    ranges: Sequence[tuple[int, int]], ends: Sequence[int], start: int, stop: int
) -> list[tuple[int, int]]:
    """The items `start` to `stop` - 1 of those in `ranges`, counted from 0 in their order, as ranges.

    `ends` is `n_to_ends` of the ranges.
    """
    number, found = bisect_right(ends, start), list[tuple[int, int]]()
    while start < stop and number < len(ranges) and (before := ends[number - 1] if number else 0) < stop:
        first, end = ranges[number]
        found.append((first + max(start - before, 0), min(end, first + stop - before)))
        number += 1
    return found


def parse_item_ranges(text: str, n_items: int, of: str, *, clip: bool = False) -> list[tuple[int, int]]:
    """The items in a text such as `10:20,35,90:`, as ranges (start, stop), ascending and joined.

    Items count from 0, and the end of a range is excluded, as in Python. SlurmGPUError for other texts, and for items
    that `of`, the input or the run, does not have; with `clip` a range may end beyond the last item.
    """
    found: list[tuple[int, int]] = []
    for start, stop in sorted(_range(part, n_items, of, clip=clip) for part in text.split(",")):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def ranges_said(ranges: Sequence[tuple[int, int]]) -> str:
    """Ranges (start, stop) as words, such as `1, 5 to 6`; at most the first eight."""
    said = ", ".join(str(start) if stop == start + 1 else f"{start} to {stop - 1}" for start, stop in ranges[:8])
    return said + ", …" * (len(ranges) > 8)


def _range(text: str, n_items: int, of: str, *, clip: bool) -> tuple[int, int]:
    if (match := re.fullmatch(r"\s*(?:(\d*):(\d*)|(\d+))\s*", text, re.ASCII)) is None:
        raise SlurmGPUError(f"--items {text!r}: expected items and ranges of items, such as 10:20,35 or 90: or :10.")
    start = int(match[3] or match[1] or 0)
    stop = start + 1 if match[3] else int(match[2] or n_items)
    if clip and start < n_items:
        stop = min(stop, n_items)
    if not start < stop <= n_items:
        what = (
            "is empty" if stop <= start < n_items else f"is not within the {of}, whose items are 0 to {n_items - 1:,}"
        )
        raise SlurmGPUError(f"--items {text.strip()} {what}. The end of a range is excluded: 0:10 is items 0 to 9.")
    return start, stop
