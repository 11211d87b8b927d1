"""Times and texts for a page."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import Any

from slurmgpu.util.ansi import harmless
from slurmgpu.util.redact import hide_in

NO_LETTERS = re.compile(r"[\ufffe\uffff\ud800-\udfff]")
"""Characters that UTF-8 or HTML cannot hold."""


def moment(time: float | None) -> str:
    """A time since the epoch as local time with its zone."""
    if time is None:
        return "–"
    try:
        local = datetime.fromtimestamp(time, tz=timezone.utc).astimezone()
    except (OverflowError, OSError, ValueError):
        return "–"
    return f"{local:%Y-%m-%d %H:%M:%S} {local.tzname() or local.strftime('%z')}"


def plain(text: Any) -> str:
    """A text for a page, without terminal escapes, control characters and secrets."""
    return hide_in(as_typed(text))


def as_typed(text: Any) -> str:
    """A command, or a path in one, for a page: as `plain`, but texts that look like secrets stay (sk-learn-runs)."""
    return NO_LETTERS.sub("\ufffd", harmless(str(text)))


def cut(text: Any, n_characters: int) -> str:
    """The beginning of a text, for a page."""
    whole = plain(str(text)[: 4 * n_characters])
    return whole if len(whole) <= n_characters else whole[: n_characters - 1] + "…"
