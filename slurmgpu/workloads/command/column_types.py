"""Columns from their types as text: `float32`, `float32[384]`, `int32[]`, `text`, `json`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.shards.columns import Array, Column, Json, Ragged, Text, check_columns

WORDS = ("text", "json", "bool", "int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64")
_TYPE = re.compile(r"(\w+)(?:\[( *(?:\d{1,9} *(?:, *\d{1,9} *)*)?)\])?")


def columns_of(types: Mapping[str, str]) -> dict[str, Column]:
    """The columns of the setting `columns`; SlurmGPUError where a type is unknown."""
    if not types:
        raise SlurmGPUError(
            'command: columns is empty; expected a type for each column, as in {score = "float32", label = "text"}.'
        )
    return check_columns({name: _column(name, text) for name, text in types.items()}, "command")


def _column(name: str, text: str) -> Column:
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
        hint = "" if word in WORDS else did_you_mean(word, WORDS)
        raise SlurmGPUError(
            f"command: the column {name!r} has the type {text!r}, which is none: {error}{hint} "
            f"An array of a fixed shape is float32[3,4], one of any length int32[]."
        ) from error
