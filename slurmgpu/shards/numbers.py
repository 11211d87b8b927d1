"""Conversion of values to NumPy dtypes without loss, and to JSON."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.exceptions import message_of

OFFSET_DTYPE = np.dtype("<i8")

_INSTEAD = {
    "U": "use Text() for strings",
    "O": "use Text() for strings, Ragged(dtype) for lists whose length varies",
    "M": "use Array('int64') with the unit in the column's name",
    "m": "use Array('int64') with the unit in the column's name",
    "V": "use one column for each field, and 'float32' for bfloat16",
}
# For each kind of NumPy dtype, the kinds whose values it can store.
_COMES_FROM = {"b": "biuf", "i": "biuf", "u": "biuf", "f": "biuf", "c": "biufc", "S": "SU"}
_KIND_NAMES = {"U": "text", "S": "bytes", "c": "complex numbers"}


def stored_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """The little-endian dtype of that name; SlurmGPUError if readers of HDF5 may lack it."""
    try:
        stored: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise SlurmGPUError(f"{dtype!r} is not a NumPy dtype; write one such as 'float32'.") from error
    if dtype is None:
        instead = "name one, such as 'float32'"  # np.dtype(None) is float64
    elif stored.kind in _INSTEAD:
        instead = _INSTEAD[stored.kind]
    elif stored.kind == "S" and stored.itemsize == 0:
        instead = "give the length, such as 'S8', or use Text()"
    elif stored.kind in "fc" and stored.itemsize > (8 if stored.kind == "f" else 16):
        instead = "use 'float64' or 'complex128': its bytes differ between machines"
    else:
        little_endian: np.dtype[Any] = stored.newbyteorder("<")
        return little_endian
    raise SlurmGPUError(f"A column cannot have the dtype {dtype!r}; {instead}.")


def checked_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    """The shape of a row; SlurmGPUError if HDF5 cannot hold it."""
    try:
        dims = tuple(map(operator.index, shape if isinstance(shape, Sequence) else (shape,)))
    except TypeError:
        dims = (-1,)
    if any(dim < 0 for dim in dims) or len(dims) > 31:  # HDF5 has 32 dimensions; the first one is the rows
        raise SlurmGPUError(f"A column cannot have the shape {shape!r}; expected at most 31 sizes, such as (3, 4).")
    return dims


def scalar_bounds(dtype: np.dtype[Any]) -> dict[type, tuple[float, float]]:
    """Types whose values can be stored unchecked if they lie between the bounds."""
    if dtype.kind in "biu":
        limits = _integer_limits(dtype)
        return dict.fromkeys((int, bool, np.int64, dtype.type), limits)
    if dtype.kind == "f":
        largest = float(np.finfo(dtype).max)
        return dict.fromkeys((float, int, bool, np.float64, dtype.type), (-largest, largest))
    return {}


def _integer_limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    return (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))


def as_array(value: Any) -> npt.NDArray[Any]:
    """The value as an array of numbers or bytes; ValueError otherwise."""
    try:
        found: npt.NDArray[Any] = np.asarray(value)
    # Tensors that need .cpu(), .detach() or .float() raise errors of several types, which say so.
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"found {type(value).__name__} that NumPy cannot read: {message_of(error)}") from error
    if value is None:
        raise ValueError("found None, expected numbers or bytes; a column of floats takes NaN for a missing value")
    if found.dtype.kind not in "biufcSU":
        raise ValueError(f"found {type(value).__name__} (dtype {found.dtype}), expected numbers or bytes")
    if np.ma.is_masked(value):  # otherwise the values below the mask would be stored
        raise ValueError(f"found {type(value).__name__} with masked values; fill them, as with .filled(float('nan'))")
    if found.dtype.kind in "SU" and _ends_with_nul(value):
        raise ValueError(
            f"found {value!r:.80}; a dtype of bytes drops NUL bytes at the end, so use Array('uint8', ...)"
        )
    return found


def _ends_with_nul(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_ends_with_nul, value))
    return isinstance(value, bytes | str) and value[-1:] in (b"\0", "\0")


def cast(found: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A contiguous copy as `dtype`; ValueError names the first value that `dtype` cannot hold."""
    if found.dtype == dtype:
        return np.array(found, order="C")
    if found.size and found.dtype.kind not in _COMES_FROM[dtype.kind]:  # [] is float64 whatever was meant
        raise ValueError(f"found {_KIND_NAMES.get(found.dtype.kind, found.dtype)}, expected {dtype}")
    with np.errstate(all="ignore"):  # the workload may have made NumPy raise
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
    # float64 rounds the largest int64 up to 2**63, so compare with the exact bound above it.
    wide = found.astype(np.float64)
    fits: npt.NDArray[np.bool_] = (np.trunc(wide) == wide) & (float(low) <= wide) & (wide < float(high + 1))
    return fits


def as_lists(values: npt.NDArray[Any]) -> list[Any]:
    """Nested lists of JSON values. Complex numbers become [real, imaginary]; bytes are decoded as UTF-8.

    A float has the fewest digits that tell it apart from its neighbours in its dtype: 0.1 in float32 is 0.1.
    """
    if values.dtype.kind == "c":
        return as_lists(np.stack([values.real, values.imag], axis=-1))
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8", "backslashreplace")
    elif values.dtype.kind == "f":
        is_finite = np.isfinite(values)
        if values.dtype.itemsize < 8:
            values = values.astype("S").astype("float64")
        if not is_finite.all():
            values = values.astype(object)
            values[~is_finite] = None
    lists: list[Any] = values.tolist()
    return lists
