"""Column types as text (`float32`, `float32[384]`, `int32[]`, `text`, `json`), and the types of values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.shards.columns import Array, Column, Json, Ragged, Text, check_columns, columns_from_json
from slurmgpu.shards.numbers import as_array

WORDS = ("text", "json", "bool", "int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64")
OF_PYTHON = {"str": "text", "string": "text", "dict": "json", "object": "json", "list": "json"}
"""Types that users may write, and the names that we use."""
RESULT = "result"
"""The column of a function that returns a single value instead of a row."""
_TYPE = re.compile(r"(\w+)(?:\[( *(?:\d{1,9} *(?:, *\d{1,9} *)*)?)\])?")


def columns_of(types: Mapping[str, str], owner: str) -> dict[str, Column]:
    """The columns with these types. SlurmGPUError, which begins with `owner`, if a type is unknown."""
    if not types:
        raise SlurmGPUError(
            f"{owner}: columns is empty; expected a type for each column, such as "
            f'{{score = "float32", label = "text"}}.'
        )
    return check_columns({name: _column(name, text, owner) for name, text in types.items()}, owner)


def columns_of_types(types: Mapping[str, Any], owner: str) -> dict[str, Column]:
    """The columns with these types, which are texts, or descriptions as in run.json."""
    texts = {name: kind for name, kind in types.items() if isinstance(kind, str)}
    found = columns_from_json({name: kind for name, kind in types.items() if name not in texts})
    found |= columns_of(texts, owner) if texts or not types else {}
    return check_columns({name: found[name] for name in types}, owner)


def _column(name: str, text: str, owner: str) -> Column:
    match = _TYPE.fullmatch(text.strip())
    word, shape = (match[1], match[2]) if match else (text, None)
    try:
        if word in ("text", "json"):
            if shape is None:
                return Text() if word == "text" else Json()
            raise SlurmGPUError('"json" holds lists of any kind.')
        if shape is None:
            return Array(word)
        return Array(word, tuple(int(size) for size in shape.split(","))) if shape.strip() else Ragged(word)
    except SlurmGPUError as error:
        if word in OF_PYTHON and shape is None:
            raise SlurmGPUError(
                f"{owner}: the column {name!r} has the type {text!r}; for such values use {OF_PYTHON[word]!r}. "
                f"The types are {', '.join(WORDS)}, float32[3,4] for an array and int32[] for one of any length."
            ) from error
        hint = "" if word in WORDS else did_you_mean(word, WORDS)
        raise SlurmGPUError(
            f"{owner}: the column {name!r} has the type {text!r}: {error}{hint} "
            f"Write float32[3,4] for an array of a fixed shape, int32[] for a flat one of any length."
        ) from error


FLATTEN = "For other shapes return a flat list, array.reshape(-1), and list(array.shape) in another column."


def type_of(value: Any) -> str | None:
    """The type of the column that can hold a value; None if the value fits several: None, and an empty list.

    A list of numbers is of any length, an array has a fixed shape. SlurmGPUError for a value that no column can hold.
    """
    if value is None or (isinstance(value, list | tuple) and not value):
        return None
    if isinstance(value, str):
        return "text"
    if isinstance(value, list | tuple):
        kinds = {type(each) for each in value}
        if kinds <= {bool} or kinds <= {int, float} or all(issubclass(kind, np.number | np.bool_) for kind in kinds):
            return _of_numbers(value, is_list=True)
        return "json"
    return "json" if isinstance(value, Mapping) else _of_numbers(value, is_list=False)


def _of_numbers(value: Any, *, is_list: bool) -> str:
    try:
        found = as_array(value)
    except ValueError as error:
        if isinstance(value, int) or is_list:
            return "json"  # integers of more than 64 bits
        what = str(error).partition(", expected")[0]
        raise SlurmGPUError(f"{what}; expected text, a number, an array of numbers, or what JSON can hold") from error
    if found.dtype.kind == "S":
        raise SlurmGPUError(f"found {type(value).__name__}; expected text, numbers, arrays, or what JSON can hold")
    return f"{found.dtype.name}[]" if is_list else _as_text(found.dtype, found.shape)


def _as_text(dtype: np.dtype[Any], shape: Sequence[int]) -> str:
    return _name(dtype) + (f"[{','.join(map(str, shape))}]" if shape else "")


def _name(dtype: np.dtype[Any]) -> str:
    """The name that NumPy reads: of bytes, `dtype.name` is another."""
    return f"S{dtype.itemsize}" if dtype.kind == "S" else str(dtype.name)


def type_for_both(one: str | None, other: str | None) -> str | None:
    """The type of a column that can hold the values of two types; SlurmGPUError if none can."""
    if one is None or other is None or one == other:
        return one or other
    (first, shape), (second, another) = (text.partition("[")[::2] for text in (one, other))
    if not {first, second} & {"text", "json"}:
        numbers = {np.dtype(first).kind, np.dtype(second).kind}
        dtype = str(np.result_type(first, second).name)
        if "b" not in numbers or numbers == {"b"}:
            if shape == another:
                return dtype + (f"[{shape}" if shape else "")
            if shape and another and "," not in shape + another:
                return f"{dtype}[]"
        if "," in shape + another:  # JSON has lists, and no arrays
            raise SlurmGPUError(f"found arrays of the types {one} and {other}; expected one shape. {FLATTEN}")
    return "json"


def type_of_column(column: Column) -> str | None:
    """The type of a column as text; None for one of another kind."""
    if isinstance(column, Json):
        return "json"
    if type(column) is Text:
        return "text"
    if type(column) is Ragged:
        return f"{_name(column.dtype)}[]"
    if type(column) is Array:
        return _as_text(column.dtype, column.shape)
    return None


def types_of_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    """The types of the columns that can hold these rows, in the order in which the rows have them."""
    found: dict[str, str | None] = {}
    for row in rows:
        for name, value in row.items():
            if not isinstance(name, str):
                raise SlurmGPUError(f"the row has the key {name!r}; expected text, the name of a column")
            try:
                found[name] = type_for_both(found.get(name), type_of(value))
            except SlurmGPUError as error:
                raise SlurmGPUError(f"column {name!r}: {error}") from error
    return found
