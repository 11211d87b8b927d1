"""Checks of JSON against TypedDicts. Standard library only."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

ANY = frozenset({object})


def check_objects(where: str, objects: Sequence[Any], wanted: Any) -> None:
    """ValueError if an object lacks a key that the TypedDict `wanted` requires, or has a value of another type.

    Checks key by key, which is quick: there may be a million objects.
    """
    if not all(isinstance(each, dict) for each in objects):
        raise ValueError(f"{where}not all are objects")
    for key, hint in get_type_hints(wanted).items():
        values = [each[key] for each in objects if key in each]
        if len(values) < len(objects) and key in wanted.__required_keys__:
            raise ValueError(f"{where}{key} is missing")
        _check_values(f"{where}{key}", values, hint)


def _check_values(where: str, values: Sequence[Any], hint: Any) -> None:
    hints = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    allowed = frozenset[type]().union(*map(_types_of, hints))
    if allowed >= ANY:
        return
    if not set(map(type, values)) <= allowed:
        found = next(value for value in values if type(value) not in allowed)
        raise ValueError(f"{where} is {found!r:.80}")
    for each in hints:
        kind = _types_of(each)
        inner = [value for value in values if type(value) in kind] if values else []
        if is_typeddict(each):
            check_objects(f"{where}: ", inner, each)
        elif list in kind:
            _check_values(where, [value for part in inner for value in part], get_args(each)[0])
        elif dict in kind:
            _check_values(where, [value for part in inner for value in part.values()], get_args(each)[1])


def _types_of(hint: Any) -> frozenset[type]:
    """The types of JSON values that fit an annotation other than a union."""
    kind = get_origin(hint) or hint
    if hint is Any:
        return ANY
    if hint is float:
        return frozenset({int, float})
    if is_typeddict(hint) or kind is dict or kind is Mapping:
        return frozenset({dict})
    return frozenset({list if kind is Sequence else kind})
