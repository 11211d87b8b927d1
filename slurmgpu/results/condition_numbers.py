"""Numbers in conditions: comparisons without rounding, and arithmetic. Imported on demand, since it needs pyarrow.

An operand is an Arrow array or scalar, or a Python int or float of any size, which is a literal in the condition. The
types in which two operands are computed depend on their types and on the literals, never on a value of a column.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slurmgpu.util.json_values import nearest_float

Operand: TypeAlias = Any

INT, UNSIGNED, FLOAT = pa.int64(), pa.uint64(), pa.float64()
_SHORT = (pa.float16(), pa.float32())
_HALF = 1 << 32
_PYTHON = {pa.string(): str, pa.large_string(): str, pa.bool_(): bool}

_COMPARISONS: Mapping[type[ast.cmpop], tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    ast.Eq: (pc.equal, operator.eq), ast.NotEq: (pc.not_equal, operator.ne),
    ast.Lt: (pc.less, operator.lt), ast.LtE: (pc.less_equal, operator.le),
    ast.Gt: (pc.greater, operator.gt), ast.GtE: (pc.greater_equal, operator.ge),
}  # fmt: skip
_ARITHMETIC: Mapping[type[ast.operator], tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    ast.Add: (pc.add_checked, operator.add), ast.Sub: (pc.subtract_checked, operator.sub),
    ast.Mult: (pc.multiply_checked, operator.mul), ast.Div: (pc.divide, operator.truediv),
}  # fmt: skip


def compares(op: ast.cmpop) -> bool:
    """Whether this is `<`, `==` or another comparison of two values."""
    return type(op) in _COMPARISONS


def computes(op: ast.operator) -> bool:
    """Whether this is `+`, `-`, `*` or `/`."""
    return type(op) in _ARITHMETIC


def as_arrow(value: Operand) -> Any:
    """The operand for Arrow. A literal beyond 64 bits becomes a float, so that Arrow can name the types in an error."""
    if not _is_written(value):
        return value
    kind = next((each for each in (INT, UNSIGNED) if isinstance(value, int) and each in _holding(value)), FLOAT)
    return pa.scalar(nearest_float(value) if kind == FLOAT else value, kind)


def given(value: Operand, kind: pa.DataType) -> Any:
    """The operand for Arrow; one with only nulls gets this type."""
    value = as_arrow(value)
    return pc.cast(value, kind) if value.type == pa.null() else value


def compared(op: ast.cmpop, one: Operand, other: Operand) -> Any:
    """Booleans, null where an operand is; numbers are compared exactly, with NaN as in IEEE 754."""
    by_arrow, by_python = _COMPARISONS[type(op)]
    if _is_written(one) and _is_written(other):
        return pa.scalar(by_python(one, other))
    one, other = _typed(one, other)
    if not (_is_number(one) and _is_number(other)):
        return by_arrow(as_arrow(one), as_arrow(other))
    one, other = _rounded(one, other), _rounded(other, one)
    if (kind := _common(one, other)) is not None:
        return by_arrow(_cast(one, kind), _cast(other, kind))
    # No Arrow type holds both. Compare the nearest floats and, if these are equal, the remainders.
    (near, rest), (its_near, its_rest) = _split(one), _split(other)
    is_tie = pc.equal(near, its_near)
    if isinstance(op, ast.Eq | ast.NotEq):
        same = pc.and_(is_tie, pc.equal(rest, its_rest))
        return same if isinstance(op, ast.Eq) else pc.invert(same)
    strictly = pc.less if isinstance(op, ast.Lt | ast.LtE) else pc.greater
    return pc.or_(strictly(near, its_near), pc.and_(is_tie, by_arrow(rest, its_rest)))


def computed(op: ast.operator, one: Operand, other: Operand) -> Operand:
    """The result of an operation: integers in 64 bits, other numbers in floats, which may round.

    ArrowInvalid if an integer overflows; ZeroDivisionError or OverflowError if two literals cannot be computed.
    """
    by_arrow, by_python = _ARITHMETIC[type(op)]
    if _is_written(one) and _is_written(other):
        return by_python(one, other)
    one, other = _typed(one, other)
    if not (_is_number(one) and _is_number(other)):
        return by_arrow(as_arrow(one), as_arrow(other))
    one, other = _rounded(one, other), _rounded(other, one)
    kind = None
    if not isinstance(op, ast.Div) and not any(_is_float(each) for each in (one, other)):
        kind = _common(one, other)
    if kind is None:
        is_short = any(not _is_written(each) and each.type in _SHORT for each in (one, other))
        kind = pa.float32() if is_short and all(_is_in_short(each) for each in (one, other)) else FLOAT
    return by_arrow(*(_cast(each, kind, may_round=True) for each in (one, other)))


def negated(value: Operand) -> Operand:
    """-value; ArrowInvalid if an integer overflows."""
    return -value if _is_written(value) else _applied(pc.negate_checked, value)


def absolute(value: Operand) -> Operand:
    """|value|; ArrowInvalid if an integer overflows."""
    return abs(value) if _is_written(value) else _applied(pc.abs_checked, value)


def is_nan(value: Operand) -> Any:
    """Booleans, null where the value is."""
    value = given(value, FLOAT)
    return pc.is_nan(pc.cast(value, pa.float32()) if value.type == pa.float16() else value)


def _applied(function: Callable[[Any], Any], value: Operand) -> Any:
    """Apply an Arrow function to numbers; float16 as float32, because older versions do not support it."""
    value = _widened(given(value, FLOAT))
    if value.type == pa.float16():
        return pc.cast(function(pc.cast(value, pa.float32())), value.type)
    return function(value)


def is_any(value: Operand, choices: Sequence[Any]) -> Any:
    """Whether the value is one of `choices`: booleans, null where it is null. TypeError for choices of another type."""
    choices = [each for each in choices if each is not None]
    value = given(value, pa.large_string() if any(isinstance(each, str) for each in choices) else FLOAT)
    if _is_number(value):
        value, choices = _with_numbers(value, choices)
    elif kind := _PYTHON.get(value.type):
        for each in choices:
            if not isinstance(each, kind):
                raise TypeError(f"{each!r} is no {'text' if kind is str else 'truth value'}")
    is_plain = _is_number(value) or value.type in _PYTHON
    chosen = pa.array(choices, value.type) if is_plain else pc.cast(pa.array(choices), value.type)  # texts for dates
    found = pc.is_in(value, value_set=chosen)
    return pc.if_else(pc.is_valid(value), found, pa.scalar(None, pa.bool_()))


def _with_numbers(value: Any, choices: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The value in a type that Arrow can look up, and the choices that this type can hold; no others can be equal."""
    for each in choices:
        if not _is_written(each):
            raise TypeError(f"{each!r} is no number")
    rounded = [_rounded(each, value) for each in choices]
    kind = next(each for each in (INT, UNSIGNED, FLOAT) if each in _holding(value))
    held = [float(each) if kind == FLOAT else int(each) for each in rounded if kind in _holding(each)]
    if kind == FLOAT and 0.0 in held:  # in Arrow's sets 0 and -0 differ
        held += [0.0, -0.0]
    return _cast(value, kind), held


def _is_written(value: Operand) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_float(value: Operand) -> bool:
    return isinstance(value, float) if _is_written(value) else bool(pa.types.is_floating(value.type))


def _is_number(value: Operand) -> bool:
    return _is_written(value) or _is_float(value) or bool(pa.types.is_integer(value.type))


def _typed(one: Operand, other: Operand) -> tuple[Operand, Operand]:
    """The operands; one with only nulls gets the other's type."""
    kinds = [FLOAT if _is_written(each) or each.type == pa.null() else each.type for each in (one, other)]
    return _filled(one, kinds[1]), _filled(other, kinds[0])


def _filled(value: Operand, kind: pa.DataType) -> Operand:
    return value if _is_written(value) else given(value, kind)


def _rounded(value: Operand, beside: Operand) -> Operand:
    """A literal with the precision of the float32 or float16 operand, unless it is beyond its range."""
    if not _is_written(value) or _is_written(beside) or beside.type not in _SHORT:
        return value
    with np.errstate(over="ignore"):
        number = float(beside.type.to_pandas_dtype()(nearest_float(value)))
    return number if np.isfinite(number) else value


def _is_in_short(value: Operand) -> bool:
    """Whether float32 holds the number, or all numbers of its type."""
    if _is_written(value):
        with np.errstate(over="ignore"):
            return bool(float(np.float32(nearest_float(value))) == value)
    return value.type in _SHORT or (pa.types.is_integer(value.type) and value.type.bit_width <= 16)


def _holding(value: Operand) -> tuple[pa.DataType, ...]:
    """The types of INT, UNSIGNED and FLOAT that hold the number, or all numbers of its type, without rounding."""
    if _is_written(value):
        is_whole = isinstance(value, int) or value.is_integer()
        is_float = isinstance(value, float) or nearest_float(value) == value
        fits = (is_whole and -(1 << 63) <= value < 1 << 63, is_whole and 0 <= value < 1 << 64, is_float)
    elif pa.types.is_floating(value.type):
        fits = (False, False, True)
    else:
        is_small = value.type.bit_width <= 32
        is_unsigned = pa.types.is_unsigned_integer(value.type)
        fits = (is_small or not is_unsigned, is_unsigned, is_small)
    return tuple(kind for kind, does in zip((INT, UNSIGNED, FLOAT), fits, strict=True) if does)


def _common(one: Operand, other: Operand) -> pa.DataType | None:
    kinds = _holding(one)
    return next((kind for kind in _holding(other) if kind in kinds), None)


def _cast(value: Operand, kind: pa.DataType, *, may_round: bool = False) -> Any:
    if _is_written(value):
        return pa.scalar(float(value) if pa.types.is_floating(kind) else int(value), kind)
    if value.type == pa.float16():
        value = pc.cast(value, pa.float32())
    return value if value.type == kind else pc.cast(value, kind, safe=not may_round)


def _widened(value: Any) -> Any:
    """Integers in 64 bits, so that few overflow."""
    return _cast(value, _holding(value)[0]) if pa.types.is_integer(value.type) else value


def _split(value: Operand) -> tuple[Any, Any]:
    """The nearest float, and the remainder."""
    none = pa.scalar(0.0)
    if _is_written(value):
        near = nearest_float(value)
        rest = 0 if near == value or isinstance(value, float) else value - int(near) if np.isfinite(near) else -near
        return pa.scalar(near), pa.scalar(float(rest))
    if FLOAT in _holding(value):
        return _cast(value, FLOAT), none
    high = pc.divide(value, pa.scalar(_HALF, value.type))
    low = pc.subtract(value, pc.multiply(high, pa.scalar(_HALF, value.type)))
    near = pc.cast(value, FLOAT, safe=False)
    # All terms are integers, and no difference needs more than 53 bits.
    over = pc.subtract(near, pc.multiply(pc.cast(high, FLOAT), pa.scalar(float(_HALF))))
    return near, pc.subtract(pc.cast(low, FLOAT), over)
