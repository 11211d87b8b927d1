"""Whether a program has written a field of an item back, or computed another value for it."""

from __future__ import annotations

import contextlib
import json
import math
import re
from datetime import date, datetime, timedelta, timezone
from typing import Any

from slurmgpu.workloads.command.items_file import BOOLEANS, as_field

_EPOCH = datetime.fromtimestamp(0, timezone.utc)
_DATES = re.compile(r"(?i)timestamp.*|.*_(?:at|time)|modified|date")
"""The names of fields in JSON that pandas takes for dates, or for seconds since 1970, and writes in milliseconds."""


def is_written_back(name: str, value: Any, given: Any) -> bool:
    """Whether a row's value of a field is the one that the item has, white space aside: many scripts strip texts.

    pandas writes 7 for `007`, 7.0 for 7, True or 1.0 for `true`, ten decimals of a number and ten digits of one above
    1e16, nothing for what is missing, and milliseconds for the date in a field such as `created_at`. R writes NA for
    what is missing, a table of structs null for a key that another row has, and a CSV writer of Python `['a']` for a
    list.
    """
    if isinstance(given, list | dict) and isinstance(value, str) and value != str(given):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, list) and isinstance(given, list):
        return len(value) == len(given) and all(is_written_back("", *pair) for pair in zip(value, given, strict=True))
    if isinstance(value, dict) and isinstance(given, dict):
        return given.keys() <= value.keys() and all(is_written_back(key, value[key], given.get(key)) for key in value)
    if isinstance(value, date):  # of Parquet, from the text that the item has
        value = value.isoformat()
    one, other = map(_without_space, (as_field(value), as_field(given)))
    if one in ("", "NaN", _without_space(str(given)), other) or (one == "NA" and not other):
        return True
    amount, its = _amount(one), _amount(other)
    is_date = _DATES.fullmatch(name) is not None
    if amount is None or its is None:
        return is_date and isinstance(value, int)  # of a date in words
    exact = 1e-9 if abs(its) >= 1e16 else 1e-15
    units = (1, 1000, 1e-3, 1e-6) if is_date else (1,)
    return any(math.isclose(amount, its * unit, rel_tol=exact, abs_tol=1e-10) for unit in units)


def _amount(text: str) -> float | None:
    """A number, 1 for true and 0 for false, or milliseconds of a date in ISO 8601 since 1970; None for other texts."""
    if text.lower() in BOOLEANS:
        return float(BOOLEANS[text.lower()])
    with contextlib.suppress(ValueError):
        return float(text)
    with contextlib.suppress(ValueError):
        moment = datetime.fromisoformat(text.removesuffix("Z"))  # which Python 3.10 does not read
        since = (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)) - _EPOCH
        return float(since // timedelta(milliseconds=1))
    return None


def _without_space(text: str) -> str:
    """The text with single blanks for all white space."""
    return " ".join(text.split())
