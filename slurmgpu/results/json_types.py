"""The common type of all values of a JSON column, for formats with typed columns. Needs pyarrow.

Numbers are integers, or floats if one has a fraction and none would be rounded. The elements of lists have one type,
and so has each field of mappings; a field that a value lacks is null. Any other column has no common type, and is
written as JSON text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

_MOST_FIELDS = 256
"""A mapping with more keys counts as a dictionary, not as a record with fields."""
_MOST_LEVELS = 16
_EXACT, _LONG = 1 << 53, 1 << 63

Kind: TypeAlias = str | tuple["Kind"] | dict[str, "Kind"] | None
"""A key of `_TYPES`, (the elements' kind,), or the fields' kinds by name; None if all values are null."""

_TYPES = {"text": "large_string", "bool": "bool", "exact": "int64", "long": "int64", "float": "double"}


class MixedError(ValueError):
    """Values have no common type."""


def common_kind(found: Kind, values: Sequence[Any]) -> Kind:
    """The common kind of values, and of earlier ones of kind `found`; MixedError if there is none."""
    if {str} >= set(map(type, values)) and found in (None, "text"):  # a quick path for most columns
        return "text" if values else found
    for value in values:
        found = _merged(found, _kind_of(value, 0))
    return found


def type_of(kind: Kind) -> pa.DataType | None:
    """The Arrow type of a kind; None for mappings without keys, which Arrow cannot represent."""
    if kind is None:
        return pa.null()
    if isinstance(kind, str):
        return pa.type_for_alias(_TYPES[kind])
    if isinstance(kind, tuple):
        element = type_of(kind[0])
        return None if element is None else pa.large_list(element)
    fields = {name: type_of(each) for name, each in kind.items()}
    return pa.struct(list(fields.items())) if fields and None not in fields.values() else None


def common_types(
    names: Collection[str], parts: Iterable[Callable[[str], Sequence[Any]]]
) -> dict[str, pa.DataType | None]:
    """The common Arrow type of each column's values: the null type if all are null, None if they have none.

    Each of `parts` returns the values of a column, given its name, in some of the rows. The parts are read once.
    """
    kinds: dict[str, Kind] = dict.fromkeys(names)
    for values_of in parts if kinds else ():
        for name in list(kinds):
            try:
                kinds[name] = common_kind(kinds[name], values_of(name))
            except MixedError:
                del kinds[name]
        if not kinds:
            break
    return {name: type_of(kinds[name]) if name in kinds else None for name in names}


def _kind_of(value: Any, level: int) -> Kind:
    match value:
        case None:
            return None
        case bool():
            return "bool"
        case str():
            return "text"
        case float():
            return "float"
        case int() if -_LONG <= value < _LONG:
            return "exact" if abs(value) <= _EXACT else "long"
    if level == _MOST_LEVELS or not isinstance(value, (list, dict)):
        raise MixedError
    if isinstance(value, list):
        found: Kind = None
        for each in value:
            found = _merged(found, _kind_of(each, level + 1))
        return (found,)
    if len(value) > _MOST_FIELDS:
        raise MixedError
    return {name: _kind_of(each, level + 1) for name, each in value.items()}


def _merged(one: Kind, other: Kind) -> Kind:
    if one is None or one == other:
        return other
    if other is None:
        return one
    if isinstance(one, tuple) and isinstance(other, tuple):
        return (_merged(one[0], other[0]),)
    if isinstance(one, dict) and isinstance(other, dict):
        fields = {name: _merged(one.get(name), other.get(name)) for name in {**one, **other}}
        if len(fields) <= _MOST_FIELDS:
            return fields
    elif isinstance(one, str) and isinstance(other, str):
        if {one, other} == {"exact", "long"}:
            return "long"
        if {one, other} == {"exact", "float"}:
            return "float"
    raise MixedError
