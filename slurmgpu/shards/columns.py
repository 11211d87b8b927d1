"""Columns: the named outputs of a workload, each of a kind that fixes its values and how they are stored."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from slurmgpu.errors import SlurmGPUError, did_you_mean

RESERVED_NAMES = ("index", "error")

_INSTEAD = {
    "U": "use Text() for strings",
    "O": "use Text() for strings, Ragged(dtype) for lists whose length varies",
    "M": "use Array('int64') and say the unit in the column's name",
    "m": "use Array('int64') and say the unit in the column's name",
    "V": "use one column for each field, and 'float32' for bfloat16",
}
# Kinds of NumPy's dtypes, by the kind that they are stored as.
_COMES_FROM = {"b": "biuf", "i": "biuf", "u": "biuf", "f": "biuf", "c": "biufc", "S": "SU"}
_KIND_NAMES = {"U": "text", "S": "bytes", "c": "complex numbers"}


@dataclass(frozen=True, init=False)
class Array:
    """A column of one array for each item, of the same `dtype` and `shape` in every row; () is one number."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    _bounds: Mapping[type, tuple[float, float]] = field(repr=False, compare=False)

    def __init__(self, dtype: npt.DTypeLike, shape: int | Sequence[int] = ()) -> None:
        # A frozen dataclass has no other way to set a field from its own __init__.
        object.__setattr__(self, "dtype", _stored_dtype(dtype))
        object.__setattr__(self, "shape", _checked_shape(shape))
        object.__setattr__(self, "_bounds", {} if self.shape else _scalar_bounds(self.dtype))

    def convert(self, value: Any) -> npt.NDArray[Any]:
        """A copy of `value` as it is stored; ValueError when that would lose anything but precision."""
        bounds = self._bounds.get(type(value))
        if bounds is not None and bounds[0] <= value <= bounds[1]:
            return np.array(value, self.dtype)
        found = _as_array(value)
        if found.shape != self.shape:
            raise ValueError(f"found shape {found.shape}, expected {self.shape}")
        return _cast(found, self.dtype)

    def blank(self) -> npt.NDArray[Any]:
        """What an item without a row gets: NaN where the dtype has one, zero otherwise."""
        return np.full(self.shape, np.nan if self.dtype.kind in "fc" else self.dtype.type(), self.dtype)


@dataclass(frozen=True)
class Text:
    """A column of one string for each item, of any length, stored as UTF-8."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the stored values: bytes."""
        return np.dtype("uint8")

    def convert(self, value: Any) -> bytes:
        """The string as UTF-8; ValueError for anything but a string."""
        if not isinstance(value, str):
            raise ValueError(f"found {_name(value)}, expected a str")
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"found a str that UTF-8 cannot hold ({error.reason})") from error

    def blank(self) -> bytes:
        """What an item without a row gets: the empty string."""
        return b""


@dataclass(frozen=True)
class Json(Text):
    """A column of one JSON value for each item: lists and mappings of text, numbers, booleans and None.

    It is stored as its text, and read back as `json.loads` has it: tuples are lists then, and keys are strings.
    """

    def convert(self, value: Any) -> bytes:
        """The value as compact JSON in UTF-8; ValueError for what JSON has no words for, NaN among them."""
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"found {_name(value)} that JSON cannot hold: {error}") from error
        return super().convert(text)


@dataclass(frozen=True, init=False)
class Ragged:
    """A column of one 1-d array for each item, of a length that may differ from row to row."""

    dtype: np.dtype[Any]

    def __init__(self, dtype: npt.DTypeLike) -> None:
        object.__setattr__(self, "dtype", _stored_dtype(dtype))

    def convert(self, value: Any) -> npt.NDArray[Any]:
        """A copy of `value` as it is stored; ValueError when that would lose anything but precision."""
        found = _as_array(value)
        if found.ndim != 1:
            raise ValueError(f"found shape {found.shape}, expected one dimension")
        return _cast(found, self.dtype)

    def blank(self) -> npt.NDArray[Any]:
        """What an item without a row gets: an array of length 0."""
        return np.empty(0, self.dtype)


Column: TypeAlias = Array | Text | Json | Ragged


def check_columns(columns: Mapping[str, Column], owner: str) -> dict[str, Column]:
    """The columns that the workload `owner` declares, in order; SlurmGPUError unless a file can hold them."""
    if not isinstance(columns, Mapping) or not columns:
        raise SlurmGPUError(
            f"{owner}: columns is {columns!r}; expected a mapping of names to Array, Text, Json or Ragged,"
            ' such as {"score": Array("float32")}, with at least one.'
        )
    for name, column in columns.items():
        if not isinstance(name, str) or not name or any(character in name for character in "/.\0"):
            raise SlurmGPUError(
                f"{owner}: {name!r} is not a column's name; expected a string without '/' and '.'. Rename it."
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
    """The columns of a file, in order: `index`, the workload's, `error`."""
    return {"index": Array("int64"), **columns, "error": Text()}


def columns_to_json(columns: Mapping[str, Column]) -> dict[str, Any]:
    """The columns as plain values for JSON: `{"score": {"kind": "array", "dtype": "<f4", "shape": [3]}}`."""
    return {name: _column_to_json(column) for name, column in columns.items()}


def columns_from_json(value: Mapping[str, Any]) -> dict[str, Column]:
    """The columns that `columns_to_json` wrote, in the same order."""
    return {name: _column_from_json(name, column) for name, column in value.items()}


def convert_row(columns: Mapping[str, Column], row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as it is stored: ndarrays for Array and Ragged, bytes for Text and Json; a copy that shares no memory.

    Raises ValueError, naming the column, what was found and what was expected: a column missing or unknown,
    a wrong shape, or a value that its dtype cannot hold. Floats may lose precision, nothing else may be lost.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"a row is a mapping of each column to its value; found {_name(row)}")
    if row.keys() != columns.keys():
        raise ValueError(_wrong_names(columns, row))
    converted = {}
    for name, column in columns.items():
        try:
            converted[name] = column.convert(row[name])
        except ValueError as error:
            raise ValueError(f"column {name!r}: {error}") from error
    return converted


def _stored_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """The little-endian dtype of that name, if every reader of HDF5 has it."""
    try:
        stored: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise SlurmGPUError(f"{dtype!r} is not a NumPy dtype; write one such as 'float32'.") from error
    if dtype is None:
        instead = "say which, such as 'float32'"  # np.dtype(None) is float64
    elif stored.kind in _INSTEAD:
        instead = _INSTEAD[stored.kind]
    elif stored.kind == "S" and stored.itemsize == 0:
        instead = "say the length, such as 'S8', or use Text()"
    elif stored.kind in "fc" and stored.itemsize > (8 if stored.kind == "f" else 16):
        instead = "use 'float64' or 'complex128': its bytes differ between machines"
    else:
        little_endian: np.dtype[Any] = stored.newbyteorder("<")
        return little_endian
    raise SlurmGPUError(f"A column cannot have the dtype {dtype!r}; {instead}.")


def _checked_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        dims = tuple(map(operator.index, shape if isinstance(shape, Sequence) else (shape,)))
    except TypeError:
        dims = (-1,)
    if any(dim < 0 for dim in dims) or len(dims) > 31:  # HDF5 has 32 dimensions; the first one is the rows
        raise SlurmGPUError(f"A column cannot have the shape {shape!r}; expected at most 31 sizes, such as (3, 4).")
    return dims


def _scalar_bounds(dtype: np.dtype[Any]) -> dict[type, tuple[float, float]]:
    """The types of value that need no closer look: what lies between the bounds can be stored as it is."""
    if dtype.kind in "biu":
        limits = _integer_limits(dtype)
        return dict.fromkeys((int, bool, np.int64, dtype.type), limits)
    if dtype.kind == "f":
        largest = float(np.finfo(dtype).max)
        return dict.fromkeys((float, int, bool, np.float64, dtype.type), (-largest, largest))
    return {}


def _integer_limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    return (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))


def _as_array(value: Any) -> npt.NDArray[Any]:
    try:
        found: npt.NDArray[Any] = np.asarray(value)
    # A tensor that needs .cpu(), .detach() or .float() first says so itself, with various classes of error.
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"found {_name(value)} that NumPy cannot read: {error}") from error
    if found.dtype.kind not in "biufcSU":
        raise ValueError(f"found {_name(value)} (dtype {found.dtype}), expected numbers or bytes")
    return found


def _cast(found: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A contiguous copy as `dtype`; ValueError that names the first value which `dtype` cannot hold."""
    if found.dtype == dtype:
        return np.array(found, order="C")
    if found.size and found.dtype.kind not in _COMES_FROM[dtype.kind]:  # [] is float64 whatever was meant
        raise ValueError(f"found {_KIND_NAMES.get(found.dtype.kind, found.dtype)}, expected {dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        stored: npt.NDArray[Any] = found.astype(dtype, order="C")
    if np.can_cast(found.dtype, dtype, "safe"):
        return stored
    if dtype.kind in "fc":
        fits = np.isfinite(stored) | ~np.isfinite(found)
    elif dtype.kind == "S":
        fits = stored == found.astype("S")
    else:
        fits = _is_whole_between(found, *_integer_limits(dtype))
    if not fits.all():
        raise ValueError(f"found {found[~fits][0].item()!r}, which {dtype} cannot hold")
    return stored


def _is_whole_between(found: npt.NDArray[Any], low: int, high: int) -> npt.NDArray[np.bool_]:
    if found.dtype.kind != "f":
        return (low <= found) & (found <= high)
    # As float64 the largest int64 is rounded up to 2**63, so the bound that is exact is the one above it.
    wide = found.astype(np.float64)
    fits: npt.NDArray[np.bool_] = (np.trunc(wide) == wide) & (float(low) <= wide) & (wide < float(high + 1))
    return fits


def _wrong_names(columns: Mapping[str, Column], row: Mapping[str, Any]) -> str:
    problems = [f"column {name!r} is missing" for name in columns if name not in row]
    for name in row:
        if name in RESERVED_NAMES:
            problems.append(f"column {name!r} is written by slurmgpu itself")
        elif name not in columns:
            problems.append(f"column {name!r} is not declared.{did_you_mean(str(name), columns)}")
    return "; ".join(problems)


def _name(value: Any) -> str:
    return type(value).__name__


def _column_to_json(column: Column) -> dict[str, Any]:
    match column:
        case Array():
            return {"kind": "array", "dtype": column.dtype.str, "shape": list(column.shape)}
        case Ragged():
            return {"kind": "ragged", "dtype": column.dtype.str}
        case Json():  # before Text, which it is, too
            return {"kind": "json"}
        case Text():
            return {"kind": "text"}


def _column_from_json(name: str, value: Mapping[str, Any]) -> Column:
    match value:
        case {"kind": "array", "dtype": dtype, "shape": shape}:
            return Array(dtype, shape)
        case {"kind": "ragged", "dtype": dtype}:
            return Ragged(dtype)
        case {"kind": "text"}:
            return Text()
        case {"kind": "json"}:
            return Json()
    raise SlurmGPUError(
        f"The column {name!r} is described as {value!r}, which this slurmgpu does not know;"
        " use the version that wrote it."
    )
