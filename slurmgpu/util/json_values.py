"""Values for JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_SINGLE = frozenset((str, int, float, bool, type(None)))


def json_value(value: Any) -> Any:
    """A value for JSON: NaN and infinities become null, arrays and tuples lists, dates and decimals text.

    What is no UTF-8 in bytes, or in the name of a file, is written with backslashes.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {json_value(str(name)): json_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(inner) for inner in value]
    return value if value is None or isinstance(value, int | float) else str(value)


def nearest_float(number: float) -> float:
    """The nearest float; an infinite one for an integer that is beyond all others."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def check_keys(value: Any) -> None:
    """Raise ValueError if JSON, which makes text of keys, would make one of two in a mapping: 1 and "1", say.

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
            raise ValueError(f"the keys {found[text]!r} and {key!r} of a dict are one in JSON; make them differ")
        found[text] = key
