"""Counts, durations, sizes, rates and shares in words."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from itertools import pairwise

UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))

LEAST_PER_S = 0.1
"""Lower rates are told per hour."""


def count_of(count: int, thing: str) -> str:
    """A number of things, in the plural unless there is one."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def stretch_of(first: int, last: int, thing: str) -> str:
    """Things from the first number to the last: `shards 7..9`, or `shard 7` if it is one."""
    return f"{thing} {first}" if first == last else f"{thing}s {first}..{last}"


def some_of(names: Iterable[str], most: int) -> str:
    """The first names, and how many more there are: `a, b and 3 more`."""
    names = [*names]
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def clock(seconds: float) -> str:
    """Hours, minutes and seconds; days if there are any."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours}:{minutes:02} h" if days else f"{hours}:{minutes:02}:{seconds:02}"


def wide_clock(seconds: float) -> str:
    """Hours, minutes and seconds of fixed width, for tables; days if there are any."""
    return time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds < 86400 else f"{seconds / 86400:.1f} d"


def span_of(seconds: float) -> str:
    """A duration to about two digits, in one unit."""
    for size, unit in UNITS[:-1]:
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def duration(seconds: float | None) -> str:
    """A duration in its two largest units, rounded down: "2 h 14 min"; "–" if it is not known."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    tenths = max(0, int(10 * seconds + 0.001))  # differences of times of the epoch are a bit off
    if tenths < 100:
        return f"{tenths / 10:g} s"
    whole = tenths // 10
    for (size, unit), (smaller, minor) in pairwise(UNITS):
        if whole >= size:
            parts = (whole // size, unit), (whole % size // smaller, minor)
            return " ".join(f"{count:,} {name}" for count, name in parts if count)
    return f"{whole} s"


def time_words(seconds: float) -> str:
    """A duration that was set, exactly: "20 min", "1 h 30 min", "2 d"."""
    parts, rest = [], round(seconds)
    for size, unit in UNITS:
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts) or "0 s"


def about(seconds: float) -> str:
    """An estimated duration to two digits, in one unit."""
    for unit, size, most in (("s", 1.0, 100.0), ("min", 60.0, 6_000.0), ("h", 3_600.0, 360_000.0)):
        if seconds < most:
            return f"{digits(seconds / size)} {unit}"
    return f"{digits(seconds / 86_400)} d"


def digits(value: float) -> str:
    """An estimated number to two digits."""
    return f"{float(f'{value:.2g}'):,.12g}"


def three_digits(value: float) -> str:
    """A number to three digits, or all those before its point."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def rate_of(rate: float) -> str:
    """Items per second, with about three digits, and at least two."""
    if 0 < rate < 0.01:
        return f"{rate:.{1 - math.floor(math.log10(rate))}f}"
    return f"{rate:,.{0 if rate >= 99.95 else 1 if rate >= 10 else 2 if rate >= 1 else 3}f}"


def rate_in_words(rate: float) -> str:
    """Items per second, or per hour if they take long, with the unit."""
    return f"{rate_of(rate)} items/s" if rate >= LEAST_PER_S else f"{rate_of(3600 * rate)} items/h"


def size_of(size: int) -> str:
    """A number of bytes to three digits, in one unit."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:  # what is rounded to 1000 is 1 of the next unit
            return f"{three_digits(value)} {unit}"
        value /= 1000
    return f"{three_digits(value)} TB"


def slurm_size(size_bytes: int) -> str:
    """A number of bytes to three digits as Slurm counts memory, for comparisons with `mem`: "15.5G" of 1024³ bytes."""
    value, unit = (size_bytes / 1024**3, "G") if size_bytes >= 1024**3 else (size_bytes / 1024**2, "M")
    return f"{value:.3g}{unit}" if value < 999.5 else f"{value:.0f}{unit}"


def gb(size_bytes: float) -> str:
    """A number of bytes in GB, or in MB if there are few."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"


def share_of(done: int, total: int) -> str:
    """The share that is done, in percent with one decimal, rounded down: 100.0% is all of it."""
    return f"{1000 * done // total / 10:.1f}%" if total else "–"
