"""Checks of JSON against the annotations of TypedDicts and dataclasses. Standard library only."""

from __future__ import annotations

import functools
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

ANY = frozenset({object})


def check_objects(where: str, objects: Sequence[Any], wanted: Any) -> None:
    """Raise ValueError if an object lacks a key that the TypedDict `wanted` requires, or has a value of another type.

    Checks key by key, which is quick: there may be a million objects.
    """
    if not objects:
        return
    if not all(isinstance(each, dict) for each in objects):
        raise ValueError(f"{where}not all are objects")
    for key, hint in _hints_of(wanted).items():
        values = [each[key] for each in objects if key in each]
        if len(values) < len(objects) and key in wanted.__required_keys__:
            raise ValueError(f"{where}{key} is missing")
        _check_values(f"{where}{key}", values, hint)


def check_kinds(value: Mapping[str, Any], wanted: type, required: Collection[str]) -> None:
    """Raise ValueError if a key in `required` is missing, or a value has another type than the class `wanted` says.

    Elements of lists are checked, values in objects are not. A key that is not required may be null.
    """
    if lacks := [name for name in required if name not in value]:
        raise ValueError(f"it lacks {lacks[0]}")
    for name, (kinds, within) in _kinds_of(wanted).items():
        if name in value and type(value[name]) not in kinds and (name in required or value[name] is not None):
            raise ValueError(f"its {name} is {value[name]!r:.80}")
        if within and type(value.get(name)) is list and not set(map(type, value[name])) <= within:
            raise ValueError(f"its {name} is {value[name]!r:.80}")


@functools.cache
def _kinds_of(wanted: type) -> dict[str, tuple[frozenset[type], frozenset[type]]]:
    """For each key with a restricted type: its types, and the types of the elements if it may be a list."""
    found = {}
    for name, hint in _hints_of(wanted).items():
        hints = _hints_in(hint)
        lists = [each for each in hints if list in _types_of(each) and get_args(each)]
        kinds, within = (_types_of_all(each) for each in (hints, [x for a in lists for x in _hints_in(get_args(a)[0])]))
        if not kinds >= ANY:
            found[name] = kinds, frozenset() if within >= ANY else within
    return found


# Cached, as `list` checks thousands of reports: typing takes longer to evaluate annotations than the checks take.
@functools.cache
def _hints_of(wanted: Any) -> Mapping[str, Any]:
    return get_type_hints(wanted)


@functools.cache
def _hints_in(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _types_of_all(hints: Sequence[Any]) -> frozenset[type]:
    kinds = frozenset[type]().union(*map(_types_of, hints))
    return kinds | {bool} if int in kinds else kinds


def _check_values(where: str, values: Sequence[Any], hint: Any) -> None:
    hints = _hints_in(hint)
    allowed = frozenset[type]().union(*map(_types_of, hints))
    if allowed >= ANY:
        return
    if not set(map(type, values)) <= allowed:
        found = next(value for value in values if type(value) not in allowed)
        raise ValueError(f"{where} is {found!r:.80}")
    for each in hints if values else ():
        kind = _types_of(each)
        inner = [value for value in values if type(value) in kind]
        if is_typeddict(each):
            check_objects(f"{where}: ", inner, each)
        elif list in kind:
            _check_values(where, [value for part in inner for value in part], get_args(each)[0])
        elif dict in kind:
            _check_values(where, [value for part in inner for value in part.values()], get_args(each)[1])


@functools.cache
def _types_of(hint: Any) -> frozenset[type]:
    """The types of JSON values that fit an annotation other than a union."""
    kind = get_origin(hint) or hint
    if hint is Any:
        return ANY
    if hint is float:
        return frozenset({int, float})
    if is_typeddict(hint) or kind is dict or kind is Mapping:
        return frozenset({dict})
    return frozenset({list if kind in (Sequence, tuple) else kind})
