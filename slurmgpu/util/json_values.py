"""Values for JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MOST_LEVELS = 256
"""The most levels of nested lists and mappings that every reader of rows accepts: Python's calls end at 1,000."""
_SINGLE = frozenset((str, int, float, bool, type(None)))


def json_value(value: Any, level: int = 0) -> Any:
    """A value for JSON: NaN and infinities become null, arrays and tuples lists, dates and decimals text.

    Bytes that are not UTF-8, also in file names, are written with backslashes. Lists and mappings nested deeper than
    MOST_LEVELS become text.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if level == MOST_LEVELS and isinstance(value, Mapping | list | tuple):
        return _as_text(value)
    if isinstance(value, Mapping):
        return {json_value(str(name)): json_value(inner, level + 1) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(inner, level + 1) for inner in value]
    return value if value is None or isinstance(value, int | float) else str(value)


def _as_text(value: Any) -> str:
    try:
        return json.dumps(value, default=str)
    except (RecursionError, TypeError, ValueError):
        return "…"


def is_utf8(text: str) -> bool:
    """Whether a text can be encoded as UTF-8, as JSON and TOML need; file names with other bytes cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_too_deep(value: Any) -> bool:
    """Whether lists and mappings lie within MOST_LEVELS others."""
    found = [value]
    for _ in range(MOST_LEVELS):
        inner = [each.values() if isinstance(each, Mapping) else each for each in found if _holds(each)]
        if not inner:
            return False
        found = [each for values in inner for each in values]
    return any(map(_holds, found))


def _holds(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


def nearest_float(number: float) -> float:
    """The nearest float; infinite for an integer beyond the range of floats."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def check_keys(value: Any) -> None:
    """Raise ValueError if two keys of a mapping have the same text in JSON, such as 1 and "1".

    The value is one that `json.dumps` takes.
    """
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            if not {str} >= set(map(type, each)):
                _check_texts(each)
            each = each.values()
        elif not isinstance(each, list | tuple):
            continue
        if not set(map(type, each)) <= _SINGLE:
            left += each


def _check_texts(value: Mapping[Any, Any]) -> None:
    found: dict[str, Any] = {}
    for key in value:
        text = key if isinstance(key, str) else next(iter(json.loads(json.dumps({key: None}))))
        if text in found:
            raise ValueError(
                f"the keys {found[text]!r} and {key!r} of a dict are the same key in JSON; make them differ"
            )
        found[text] = key
