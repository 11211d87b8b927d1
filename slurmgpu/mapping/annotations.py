"""The columns of a function, from its return annotation."""

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
_LISTS_OF = {int: "int64[]", float: "float64[]", bool: "bool[]"}
_ABSTRACT = (np.integer, np.signedinteger, np.unsignedinteger, np.floating)
"""Abstract NumPy types, which stand for several dtypes."""

Type = str | Mapping[str, Any] | None
"""The type of a column as text, or its description in run.json; None if it is unknown."""


def annotated_types(function: Callable[..., Any], *, batched: bool) -> dict[str, Type]:
    """The types of the columns by name; empty if the annotation does not name the columns."""
    hint = _hints(function if hasattr(function, "__annotations__") else type(function).__call__).get("return")
    if batched:
        kinds = _members(hint)
        hint = kinds[0] if len(kinds) == 1 else None
    return _of_row(hint)


def _hints(of: Any) -> dict[str, Any]:
    """The annotations of a function or a class; empty if they cannot be evaluated, such as prose."""
    try:
        return typing.get_type_hints(of, include_extras=True)
    except Exception:  # annotations may run any code, and some exist for type checkers only
        return {}


def _members(hint: Any) -> list[Any]:
    """The distinct element types in a list's annotation; empty if it is no list, or has no element type."""
    inner = typing.get_args(hint) if typing.get_origin(hint) in _LISTS else ()
    found: list[Any] = []
    for each in inner:
        if each is not ... and each not in found:
            found.append(each)
    return found


def _of_row(hint: Any) -> dict[str, Type]:
    is_class = isinstance(hint, type)
    if typing.is_typeddict(hint) or (is_class and (dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"))):
        return {name: _of_value(inner) for name, inner in _hints(hint).items()}
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
        kinds = _members(hint)
        if int in kinds and float in kinds and len(kinds) == 2:
            return "float64[]"
        return _LISTS_OF.get(kinds[0], "json") if len(kinds) == 1 else "json"
    if origin in (dict, collections.abc.Mapping) or hint in (dict, list):
        return "json"
    if origin is not None or not isinstance(hint, type):  # Python 3.10 takes set[int] for a type
        return None
    if issubclass(hint, np.integer | np.floating | np.bool_):
        return None if hint in _ABSTRACT else np.dtype(hint).name
    return {str: "text", bool: "bool", int: "int64", float: "float64"}.get(hint)


def described(column: Column) -> str | Mapping[str, Any]:
    """A column's type, or, if the type has no name, its description in run.json."""
    found: Mapping[str, Any] = columns_to_json({RESULT: column})[RESULT]
    return type_of_column(column) or found
