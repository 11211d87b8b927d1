"""Columns: the named outputs of a workload."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.shards.numbers import as_array, as_lists, cast, checked_shape, scalar_bounds, stored_dtype
from slurmgpu.util.exceptions import message_of
from slurmgpu.util.json_values import MOST_LEVELS, check_keys, is_too_deep, is_utf8
from slurmgpu.util.plugins import Plugins

RESERVED_NAMES = ("index", "error")

KINDS = Plugins(
    "slurmgpu.columns",
    "column kind",
    "slurmgpu.shards.columns.Column",
    {kind: f"slurmgpu.shards.columns:{kind.capitalize()}" for kind in ("array", "text", "json", "ragged")},
)
"""Column kinds by the name that files give them."""


class Column(ABC):
    """A kind of column: how its values are checked, stored, read and exported.

    Each row is stored as an array of `dtype`. With a `shape`, all rows have it, and they form the dataset NAME.
    Without one (None), rows are one-dimensional and of any length: NAME/values has their values one after the other,
    NAME/offsets where each row begins. Below, `stored` holds what `convert` returned: a list of rows, or a single
    array if they have one shape.

    `class Date(Array, kind="date")` registers a kind when it is imported. Files name the kind. Where no imported
    module and no entry point `slurmgpu.columns` has it, values are read as stored.
    """

    kind: ClassVar[str]
    is_tensor: ClassVar[bool] = True
    """Whether PyTorch gets the stored values, not the read ones."""
    arrow: ClassVar[str | None] = None
    """Arrow's name for the type of a row, such as "timestamp[us]"; None for plain numbers."""
    typed_by_values: ClassVar[bool] = False
    """Whether a table takes a row's type from the read values, if they have one type in common."""
    blank_is_none: ClassVar[bool] = False
    """Whether a blank is read as None, so that a failed item shows whether it has a value."""
    nan_is_unknown: bool = False
    """Whether NaN in a good row is a value that nobody has measured, which the report does not mention."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None = None

    def __init_subclass__(cls, kind: str | None = None) -> None:
        if kind is not None:
            cls.kind = kind
            KINDS.register(kind, cls)

    @abstractmethod
    def convert(self, value: Any) -> npt.NDArray[Any] | bytes:
        """A copy of `value` as stored; ValueError if anything but precision would be lost."""

    def convert_all(self, values: Sequence[Any]) -> Sequence[npt.NDArray[Any] | bytes]:
        """The result of `convert` for each value; ValueError if one does not fit."""
        return [self.convert(value) for value in values]

    @abstractmethod
    def blank(self) -> npt.NDArray[Any] | bytes:
        """The stored value of an item without a row."""

    def arguments(self) -> dict[str, Any]:
        """The arguments that make this column again, as JSON values."""
        return {}

    def split(self, values: npt.NDArray[Any], bounds: Sequence[int]) -> Sequence[Any]:
        """The stored rows between consecutive `bounds`, for rows of any length."""
        return [values[first:last] for first, last in pairwise(bounds)]

    def read(self, stored: Any) -> Any:
        """The rows as users read them: a list, or an uncopied array if they have one shape."""
        return stored

    def plain(self, stored: Any) -> list[Any]:
        """The rows as JSON values."""
        return as_lists(stored) if self.shape is not None else list(map(as_lists, stored))

    def cells(self, stored: Any) -> list[Any]:
        """The rows as CSV cells; lists and booleans are written as JSON."""
        return self.plain(stored)

    @property
    def pandas(self) -> str | None:
        """The dtype of the rows in pandas; None to let pandas infer it."""
        return "object"


@dataclass(frozen=True, init=False)
class Array(Column, kind="array"):
    """A column of arrays, all of one `dtype` and `shape`; shape () is one number.

    With `nan_is_unknown`, NaN stands for a value that is not known, and the report does not warn of it.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nan_is_unknown: bool
    _bounds: Mapping[type, tuple[float, float]] = field(repr=False, compare=False)

    def __init__(self, dtype: npt.DTypeLike, shape: int | Sequence[int] = (), *, nan_is_unknown: bool = False) -> None:
        # A frozen dataclass cannot set its own fields otherwise.
        object.__setattr__(self, "dtype", stored_dtype(dtype))
        object.__setattr__(self, "shape", checked_shape(shape))
        object.__setattr__(self, "nan_is_unknown", nan_is_unknown)
        object.__setattr__(self, "_bounds", {} if self.shape else scalar_bounds(self.dtype))

    def convert(self, value: Any) -> npt.NDArray[Any]:
        """A copy of `value` as stored; ValueError if anything but precision would be lost."""
        bounds = self._bounds.get(type(value))
        if bounds is not None and bounds[0] <= value <= bounds[1]:
            return np.array(value, self.dtype)
        found = as_array(value)
        if found.shape != self.shape:
            raise ValueError(f"found shape {found.shape}, expected {self.shape}")
        return cast(found, self.dtype)

    def convert_all(self, values: Sequence[Any]) -> Sequence[npt.NDArray[Any]]:
        """The same as one by one; arrays with the column's dtype and shape are copied at once."""
        is_own = type(self).convert is Array.convert and self.shape != ()
        if is_own and all(
            type(each) is np.ndarray and each.dtype == self.dtype and each.shape == self.shape for each in values
        ):
            return list(np.array(values, self.dtype))
        return [self.convert(value) for value in values]

    def blank(self) -> npt.NDArray[Any]:
        """NaN if the dtype has it, else zero."""
        return np.full(self.shape, np.nan if self.dtype.kind in "fc" else self.dtype.type(), self.dtype)

    def arguments(self) -> dict[str, Any]:
        """The dtype in NumPy's notation, the shape, and `nan_is_unknown` if it is true."""
        known = {"dtype": self.dtype.str, "shape": list(self.shape)}
        return {**known, "nan_is_unknown": True} if self.nan_is_unknown else known

    @property
    def pandas(self) -> str | None:
        """Inferred for single numbers; object for arrays and bytes."""
        return "object" if self.shape or self.dtype.kind == "S" else None


@dataclass(frozen=True)
class Text(Column, kind="text"):
    """A column of strings of any length, stored as UTF-8."""

    is_tensor = False
    arrow = "large_string"
    dtype: np.dtype[Any] = field(default=np.dtype("uint8"), init=False, repr=False)

    def convert(self, value: Any) -> bytes:
        """The string as UTF-8; ValueError for other values."""
        if not isinstance(value, str):
            if isinstance(value, float | np.floating) and np.isnan(value):
                raise ValueError("found nan, expected text; for a missing text use '', or None in a json column")
            found = "None" if value is None else type(value).__name__
            raise ValueError(f"found {found}, expected text")
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"found a str that UTF-8 cannot hold ({error.reason})") from error

    def blank(self) -> bytes:
        """The empty string."""
        return b""

    def split(self, values: npt.NDArray[Any], bounds: Sequence[int]) -> list[bytes]:
        """The UTF-8 of each row."""
        content = values.tobytes()
        return [content[first:last] for first, last in pairwise(bounds)]

    def read(self, stored: Sequence[bytes]) -> list[Any]:
        """The strings."""
        return [text.decode() for text in stored]

    def plain(self, stored: Sequence[bytes]) -> list[Any]:
        """The rows as they are read."""
        return self.read(stored)

    @property
    def pandas(self) -> str | None:
        """Inferred: pandas has string types."""
        return None


READ_AT_ONCE = 1024
"""Rows of JSON that are decoded together: one by one, two million numbers take six times as long."""


def _plain(value: Any) -> Any:
    """The Python value of a number or boolean of NumPy, or of a tensor; TypeError or ValueError for all else."""
    if getattr(value, "ndim", None) == 0:
        return as_array(value).item()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


_COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)


@dataclass(frozen=True)
class Json(Text, kind="json"):
    """A column of JSON values: lists and mappings of text, numbers, booleans and None.

    Values are stored as JSON text. Reading returns what `json.loads` returns: lists for tuples, string keys, and
    Python's numbers for NumPy's.
    """

    typed_by_values = True
    blank_is_none = True

    def convert(self, value: Any) -> bytes:
        """The value as compact JSON in UTF-8. ValueError for what JSON cannot hold: NaN, or the keys 1 and "1"."""
        try:
            text = _COMPACT.encode(value)
            check_keys(value)
        except (TypeError, ValueError, RecursionError) as error:
            said = message_of(error)
            if said.startswith("Out of range float"):
                said = "it has NaN or an infinity; use None instead"
            raise ValueError(f"found {type(value).__name__} that JSON cannot hold: {said}") from error
        if text.count("[") + text.count("{") > MOST_LEVELS and is_too_deep(value):
            raise ValueError(
                f"found {type(value).__name__} with more than {MOST_LEVELS} nested lists and mappings, which not all "
                f"JSON parsers accept"
            )
        return super().convert(text)

    def read(self, stored: Sequence[bytes]) -> list[Any]:
        """The values; None for a failed item without a value."""
        read: list[Any] = []
        # Not all rows at once: the joined text may take four bytes for each character.
        for start in range(0, len(stored), READ_AT_ONCE):
            some = stored[start : start + READ_AT_ONCE]
            read += json.loads(f"[{b','.join(text or b'null' for text in some).decode()}]")
        return read

    def cells(self, stored: Sequence[bytes]) -> list[Any]:
        """The JSON text; strings without quotes, None for null and for an item that has no value."""
        return [
            json.loads(text) if text[:1] == b'"' else None if text in (b"", b"null") else text.decode()
            for text in stored
        ]

    @property
    def pandas(self) -> str | None:
        """Python objects."""
        return "object"


@dataclass(frozen=True, init=False)
class Ragged(Column, kind="ragged"):
    """A column of 1-d arrays whose length may differ from row to row."""

    dtype: np.dtype[Any]

    def __init__(self, dtype: npt.DTypeLike) -> None:
        object.__setattr__(self, "dtype", stored_dtype(dtype))

    def convert(self, value: Any) -> npt.NDArray[Any]:
        """A copy of `value` as stored; ValueError if anything but precision would be lost."""
        found = as_array(value)
        if found.ndim != 1:
            raise ValueError(f"found shape {found.shape}, expected one dimension")
        return cast(found, self.dtype)

    def blank(self) -> npt.NDArray[Any]:
        """An array of length 0."""
        return np.empty(0, self.dtype)

    def arguments(self) -> dict[str, Any]:
        """The dtype in NumPy's notation."""
        return {"dtype": self.dtype.str}


_INDEX, _ERROR = Array("int64"), Text()


class _Unknown(Column):
    """A column of an unknown kind; its values are read as stored."""

    def __init__(self, described: Mapping[str, Any], dtype: str, shape: Sequence[int] | None) -> None:
        self.described = described
        self.kind = described["kind"]  # type: ignore[misc]  # other columns have it from their class
        self.dtype = stored_dtype(dtype)
        self.shape = None if shape is None else checked_shape(shape)

    def convert(self, value: Any) -> npt.NDArray[Any]:
        raise SlurmGPUError(f"No class for the column kind {self.kind!r} has been imported. Import its module first.")

    def blank(self) -> npt.NDArray[Any]:
        return self.convert(None)


def check_columns(columns: Mapping[str, Column], owner: str) -> dict[str, Column]:
    """The columns of the workload `owner`, in order; SlurmGPUError if a file cannot hold them."""
    if not isinstance(columns, Mapping) or not columns:
        raise SlurmGPUError(
            f"{owner}: columns is {columns!r}; expected a mapping of names to Array, Text, Json or Ragged,"
            ' such as {"score": Array("float32")}, with at least one.'
        )
    for name, column in columns.items():
        is_text = isinstance(name, str) and name and is_utf8(name)
        if not is_text or any(character in name for character in "/.\0"):
            raise SlurmGPUError(
                f"{owner}: {name!r} is not a valid column name; expected text in UTF-8 without '/' and '.'. Rename it."
            )
        if name in RESERVED_NAMES:
            raise SlurmGPUError(f"{owner}: the column {name!r} is written by slurmgpu itself; choose another name.")
        if not isinstance(column, Column):
            raise SlurmGPUError(
                f"{owner}: the column {name!r} is {column!r}; expected Array(dtype, shape), Text(), Json()"
                " or Ragged(dtype)."
            )
    return dict(columns)


def stored_columns(columns: Mapping[str, Column]) -> dict[str, Column]:
    """All columns of a file, in order: `index`, the workload's, `error`."""
    return {"index": _INDEX, **columns, "error": _ERROR}


def columns_to_json(columns: Mapping[str, Column]) -> dict[str, Any]:
    """The columns as JSON values: `{"score": {"kind": "array", "dtype": "<f4", "shape": [3]}}`."""
    return {name: _column_to_json(column) for name, column in columns.items()}


def columns_from_json(value: Mapping[str, Any]) -> dict[str, Column]:
    """The columns that `columns_to_json` described, in the same order."""
    return {name: _column_from_json(name, column) for name, column in value.items()}


def convert_row(columns: Mapping[str, Column], row: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the row as stored: ndarrays for Array and Ragged, bytes for Text and Json.

    ValueError names the column, what was found and what was expected: a missing or unknown column, a wrong shape, or a
    value that the dtype cannot hold. Only the precision of floats may be lost.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"a row is a mapping of each column to its value; found {type(row).__name__}")
    if row.keys() != columns.keys():
        raise ValueError(_wrong_names(columns, row))
    converted = {}
    for name, column in columns.items():
        try:
            converted[name] = column.convert(row[name])
        except ValueError as error:
            raise ValueError(f"column {name!r}: {error}") from error
    return converted


def convert_rows(columns: Mapping[str, Column], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The result of `convert_row` for each row, in less time; ValueError, which names no row, if one does not fit."""
    names = columns.keys()
    if any(row.keys() != names for row in rows):
        raise ValueError("a row has other columns")
    converted: list[dict[str, Any]] = [{} for _ in rows]
    for name, column in columns.items():
        values = column.convert_all([row[name] for row in rows])
        for stored, value in zip(converted, values, strict=True):
            stored[name] = value
    return converted


def _wrong_names(columns: Mapping[str, Column], row: Mapping[str, Any]) -> str:
    problems = [f"column {name!r} is missing" for name in columns if name not in row]
    is_any_missing = bool(problems)
    for name in row:
        if name in RESERVED_NAMES:
            problems.append(f"column {name!r} is written by slurmgpu itself")
        elif name not in columns:  # either of two names may be the wrong one
            hint = "" if is_any_missing else f".{did_you_mean(str(name), columns)}".removesuffix(".")
            problems.append(f"column {name!r} is not declared{hint}")
    return "; ".join(problems)


def _column_to_json(column: Column) -> dict[str, Any]:
    if isinstance(column, _Unknown):
        return dict(column.described)
    described = {"kind": column.kind, **column.arguments()}
    if column.kind not in KINDS.built_in:  # then other installations may not know it
        shape = None if column.shape is None else list(column.shape)
        described["stored"] = {"dtype": column.dtype.str, "shape": shape}
    return described


def _column_from_json(name: str, value: Mapping[str, Any]) -> Column:
    match value:
        case {"kind": str(kind), **arguments}:
            stored = arguments.pop("stored", None)
            with suppress(TypeError):  # another version of the class took other arguments
                if made := KINDS.find(kind):
                    column: Column = made(**arguments)
                    return column
            if stored is not None:
                return _Unknown(value, **stored)
    raise SlurmGPUError(
        f"The column {name!r} is described as {value!r}, which this slurmgpu does not know."
        " Use the version that wrote it."
    )
