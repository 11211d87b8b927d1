"""Numbers in words: durations, sizes, moments."""

from __future__ import annotations

import math
import re
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any

from slurmgpu.util.ansi import harmless
from slurmgpu.util.redact import hide_in

UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
NO_LETTERS = re.compile(r"[\ufffe\uffff\ud800-\udfff]")
"""What no file of UTF-8 can hold, or no HTML."""


def duration(seconds: float | None) -> str:
    """A time span in its two largest units, cut and not rounded: "2 h 14 min"; "–" if it is not known."""
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


def moment(time: float | None) -> str:
    """A time of the epoch as this machine's local time, with its zone."""
    if time is None:
        return "–"
    try:
        local = datetime.fromtimestamp(time, tz=timezone.utc).astimezone()
    except (OverflowError, OSError, ValueError):
        return "–"
    return f"{local:%Y-%m-%d %H:%M:%S} {local.tzname() or local.strftime('%z')}"


def rate_of(rate: float) -> str:
    """A rate to about three digits."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def gigabytes(size: float | None) -> str:
    """A number of bytes in GB."""
    return "–" if size is None else f"{size / 1e9:.1f}"


def plain(text: Any) -> str:
    """A text as a page can hold it: without escape sequences of terminals, control characters, and secrets."""
    return hide_in(NO_LETTERS.sub("\ufffd", harmless(str(text))))


def cut(text: Any, n_characters: int) -> str:
    """The beginning of a text, as a page can hold it."""
    whole = plain(str(text)[: 4 * n_characters])
    return whole if len(whole) <= n_characters else whole[: n_characters - 1] + "…"
