"""Whether two values are the same, and by how much numbers differ (exactly for integers)."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[Any]

_MOST_EXACT = 1 << 52
"""Integers up to this, and the differences of two of them, are exact in float64."""


def is_same(one: Any, other: Any, tolerance: float) -> bool:
    """Whether two values are the same; numbers x and y if `|x - y| <= tolerance * max(1, |x|, |y|)`, or both are NaN.

    Applies to numbers within arrays, lists and mappings as well. 1 is the same as 1.0; a boolean is not a number.
    """
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and _are_same(one, other, tolerance)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(is_same(x, y, tolerance) for x, y in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[name], other[name], tolerance) for name in one)
    if not (_is_number(one) and _is_number(other)):
        return type(one) is type(other) and bool(one == other)
    if one == other or (one != one and other != other):
        return True
    if not tolerance:
        return False
    size = max(1.0, _between(one, 0.0), _between(other, 0.0))
    bound = tolerance * size if isinstance(size, float) else Fraction(tolerance) * size
    return bool(_between(one, other) <= bound < math.inf)


def distance_of(one: Any, other: Any) -> float | None:
    """The largest difference of two numbers, or of arrays of one shape; None for other values.

    It is an int if the numbers are integers: two 64-bit integers may differ by a 65-bit one. Differences that float64
    cannot hold, such as those of infinities, are left out; None if there is no other.
    """
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        are_numbers = one.dtype.kind in "biufc" and other.dtype.kind in "biufc"
        return _largest(_distances(one, other)) if are_numbers and one.shape == other.shape else None
    return _largest([_between(one, other)]) if _is_number(one) and _is_number(other) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def _are_same(one: Numbers, other: Numbers, tolerance: float) -> bool:
    if one.dtype.kind not in "iufc" or other.dtype.kind not in "iufc":
        is_comparable = one.dtype.kind == other.dtype.kind or not one.size
        return is_comparable and bool(np.asarray(one == other).all())
    if one.dtype == other.dtype and np.array_equal(one, other):
        return True
    if not (_are_exact_as_floats(one) and _are_exact_as_floats(other)):
        return all(is_same(x, y, tolerance) for x, y in zip(one.ravel().tolist(), other.ravel().tolist(), strict=True))
    with np.errstate(all="ignore"):
        wide, its = _as_floats(one), _as_floats(other)
        same = (wide == its) | (np.isnan(wide) & np.isnan(its))
        if tolerance:
            bound = tolerance * np.maximum(1.0, np.maximum(abs(wide), abs(its)))
            same |= (abs(wide - its) <= bound) & np.isfinite(bound)
    return bool(same.all())


def _distances(one: Numbers, other: Numbers) -> Iterable[Fraction | float]:
    """|one - other| at least for the finite elements that differ most; for all where float64 would round integers."""
    if not (_are_exact_as_floats(one) and _are_exact_as_floats(other)):
        return [_between(x, y) for x, y in zip(one.ravel().tolist(), other.ravel().tolist(), strict=True)]
    with np.errstate(all="ignore"):
        found = np.abs(_as_floats(one) - _as_floats(other))
    finite = found[np.isfinite(found)]
    if not finite.size:
        return []
    largest = float(finite.max())
    return [largest if any(each.dtype.kind in "fc" for each in (one, other)) else int(largest)]


def _largest(distances: Iterable[Fraction | float]) -> float | None:
    found = max((each for each in distances if each <= sys.float_info.max), default=None)
    if isinstance(found, Fraction):
        return int(found) if found.denominator == 1 else float(found)
    return found


def _between(one: Any, other: Any) -> Fraction | float:
    """|one - other| of two numbers: an exact int or Fraction if one is an integer; else a float."""
    if isinstance(one, int) and isinstance(other, int):
        return abs(one - other)
    if (isinstance(one, int) and _is_finite(other)) or (isinstance(other, int) and _is_finite(one)):
        return abs(Fraction(one) - Fraction(other))
    try:
        return float(abs(one - other))
    except OverflowError:  # complex numbers, or an integer and an infinity, that float64 cannot hold
        return math.inf


def _is_finite(number: Any) -> bool:
    return isinstance(number, float) and math.isfinite(number)


def _are_exact_as_floats(values: Numbers) -> bool:
    if values.dtype.kind not in "iu" or values.dtype.itemsize < 8 or not values.size:
        return True
    return int(values.min()) >= -_MOST_EXACT and int(values.max()) <= _MOST_EXACT


def _as_floats(values: Numbers) -> Numbers:
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)
