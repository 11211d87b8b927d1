"""The columns of a function by the annotation of what it returns."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from slurmgpu.shards.column_types import RESULT, type_of_column
from slurmgpu.shards.columns import Column, columns_to_json

_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, tuple)

Type = str | Mapping[str, Any] | None
"""The type of a column as text, or its description in run.json; None if it is not known."""


def annotated_types(function: Callable[..., Any], *, batched: bool) -> dict[str, Type]:
    """The types of the columns; empty if the annotation does not say which columns there are."""
    try:
        target = function if hasattr(function, "__annotations__") else type(function).__call__
        hint = typing.get_type_hints(target, include_extras=True).get("return")
    except (NameError, TypeError, AttributeError):
        return {}  # annotations that exist for type checkers only
    if batched:
        origin, inner = typing.get_origin(hint), typing.get_args(hint)
        hint = inner[0] if origin in _LISTS and inner else None
    return _of_row(hint)


def _of_row(hint: Any) -> dict[str, Type]:
    is_class = isinstance(hint, type)
    if typing.is_typeddict(hint) or (is_class and (dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"))):
        try:
            fields = typing.get_type_hints(hint, include_extras=True)
        except NameError:
            return {}
        return {name: _of_value(inner) for name, inner in fields.items()}
    found = _of_value(hint)
    return {} if found is None or found == "json" else {RESULT: found}


def _of_value(hint: Any) -> Type:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        declared = [each for each in inner[1:] if isinstance(each, Column)]
        return described(declared[0]) if declared else _of_value(inner[0])
    if origin in (typing.Union, types.UnionType):
        return "json" if all(_of_value(each) for each in inner if each is not type(None)) else None
    if origin is typing.Literal:
        return "text" if all(isinstance(each, str) for each in inner) else None
    if origin in _LISTS:
        numbers = {int: "int64[]", float: "float64[]", bool: "bool[]"}
        return numbers.get(inner[0], "json") if inner else "json"
    if origin in (dict, collections.abc.Mapping) or hint in (dict, list):
        return "json"
    if not isinstance(hint, type):
        return None
    if issubclass(hint, np.number | np.bool_) and hint is not np.number:
        return np.dtype(hint).name if not np.issubdtype(hint, np.complexfloating) else None
    return {str: "text", bool: "bool", int: "int64", float: "float64"}.get(hint)


def described(column: Column) -> str | Mapping[str, Any]:
    """A column as its type, or where that has no name as in run.json."""
    found: Mapping[str, Any] = columns_to_json({RESULT: column})[RESULT]
    return type_of_column(column) or found
