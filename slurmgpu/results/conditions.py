"""Conditions on rows, such as `score > 0.5 and label != "no"`. Imported on demand, since it needs pyarrow.

The grammar, in docs/reference/cli.md, is a subset of Python's expressions, read by Python's parser. Arrow computes each
operation; nothing is evaluated as Python. As in SQL, a comparison with null is null, and a row is chosen only if the
condition is true; a comparison with NaN is false, except `!=`. Numbers are compared without rounding, except that, as
in NumPy, a literal takes the precision of a float32 or float16 operand, so that 0.1 equals a stored 0.1.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.results import condition_numbers as numbers

_FUNCTIONS = ("abs", "col", "isnan", "len", "lower", "matches")

_ALLOWED = (
    " A condition may use columns, numbers, texts, + - * /, comparisons, in, is None, and, or, not,"
    ' abs(x), isnan(x), len(x), lower(text), matches(text, "regex") and col("odd name").'
)


class Condition:
    """A condition on rows with columns `names`, of which it uses `columns`. SlurmGPUError if `text` is invalid."""

    def __init__(self, text: str, names: Collection[str]) -> None:
        self.text = text
        self.columns: list[str] = []
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise self._wrong(_about(text, error)) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise self._wrong(f"it cannot be read: {error}") from error
        for node in ast.walk(self._tree):
            if (name := _column_of(node)) is not None:
                if name not in names:
                    raise self._wrong(f"there is no column {name!r}.{did_you_mean(name, names)}")
                self.columns.append(name)
        if not self.columns:
            raise self._wrong(f"it names no column. The columns are {', '.join(names)}.")

    def chosen(self, table: pa.Table) -> npt.NDArray[np.bool_]:
        """A mask (row,) of the rows of a table for which the condition is true.

        SlurmGPUError if the columns have the wrong types, also for an empty table, or if an integer overflows.
        """
        try:
            found = self._value(self._tree, table)
        except pa.ArrowException as error:
            if "overflow" in str(error):  # the one error that depends on values
                how = "Write 1.0 * before a column, such as 1.0 * index, to compute with floats, which may be rounded."
                raise self._wrong(f"a whole number overflows 64 bits. {how}") from error
            raise self._wrong(f"it does not fit the columns: {str(error).splitlines()[0]}") from error
        except (OverflowError, ZeroDivisionError) as error:
            raise self._wrong(f"its numbers cannot be computed: {error}.") from error
        except RecursionError:
            raise self._wrong("it is nested too deeply.") from None
        if not isinstance(found, pa.ChunkedArray | pa.Array) or found.type != pa.bool_():
            raise self._wrong("it is neither true nor false. Compare the value with another, such as score > 0.5.")
        mask: npt.NDArray[np.bool_] = pc.fill_null(found, False).to_numpy(zero_copy_only=False)
        return mask.astype(bool, copy=False)

    def _value(self, node: ast.expr, table: pa.Table) -> Any:
        """An Arrow array or scalar."""
        return numbers.as_arrow(self._operand(node, table))

    def _text(self, node: ast.expr, table: pa.Table) -> Any:
        """An Arrow array or scalar; one with only nulls becomes text."""
        return numbers.given(self._operand(node, table), pa.large_string())

    def _operand(self, node: ast.expr, table: pa.Table) -> numbers.Operand:
        if (name := _column_of(node)) is not None:
            return table[name]
        match node:
            case ast.Constant(bool() | str() as value):
                return pa.scalar(value)
            case ast.Constant(int() | float() as value):
                return value
            case ast.BoolOp(op, values):
                combine = pc.and_kleene if isinstance(op, ast.And) else pc.or_kleene
                found = self._value(values[0], table)
                for each in values[1:]:
                    found = combine(found, self._value(each, table))
                return found
            case ast.UnaryOp(ast.Not(), operand):
                return pc.invert(self._value(operand, table))
            case ast.UnaryOp(ast.USub(), operand):
                return numbers.negated(self._operand(operand, table))
            case ast.BinOp(left, op, right) if numbers.computes(op):
                return numbers.computed(op, self._operand(left, table), self._operand(right, table))
            case ast.Compare(left, ops, comparators):
                return self._comparison([left, *comparators], ops, table)
            case ast.Subscript(value, ast.Constant(str() as key)):
                found = self._value(value, table)
                return found if found.type == pa.null() else pc.struct_field(found, [key])
            case ast.Call(ast.Name(name), arguments, []) if name in _FUNCTIONS:
                return self._call(name, arguments, table)
        raise self._wrong(f"{ast.unparse(node)!r} cannot be used here.{_ALLOWED}")

    def _comparison(self, operands: list[ast.expr], ops: list[ast.cmpop], table: pa.Table) -> Any:
        found = None
        for left, op, right in zip(operands, ops, operands[1:], strict=False):
            each = self._compared(left, op, right, table)
            found = each if found is None else pc.and_kleene(found, each)
        return found

    def _compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr, table: pa.Table) -> Any:
        if numbers.compares(op):
            return numbers.compared(op, self._operand(left, table), self._operand(right, table))
        if isinstance(op, ast.Is | ast.IsNot):
            if not (isinstance(right, ast.Constant) and right.value is None):
                raise self._wrong(f"'is' works only with None, as in error is None; found {ast.unparse(right)}.")
            value = self._value(left, table)
            return pc.is_null(value) if isinstance(op, ast.Is) else pc.is_valid(value)
        match left, right:
            case _, ast.List(elements) | ast.Tuple(elements):
                found = self._is_any(self._operand(left, table), elements)
            case ast.Constant(str() as text), _:
                found = pc.match_substring(self._text(right, table), text)
            case _:
                raise self._wrong(
                    f"{ast.unparse(right)!r} cannot be searched; write column in [1, 2], or 'text' in column."
                )
        return found if isinstance(op, ast.In) else pc.invert(found)

    def _is_any(self, value: numbers.Operand, elements: list[ast.expr]) -> Any:
        try:
            choices = [ast.literal_eval(element) for element in elements]
        except ValueError:
            raise self._wrong("a list may hold only numbers and texts.") from None
        try:
            return numbers.is_any(value, choices)
        except TypeError as error:
            raise self._wrong(f"it does not fit the columns: {error}.") from error

    def _call(self, name: str, arguments: list[ast.expr], table: pa.Table) -> Any:
        match name, arguments:
            case "matches", [text, ast.Constant(str() as pattern)]:
                return pc.match_substring_regex(self._text(text, table), pattern)
            case "len", [value]:
                found = self._text(value, table)
                return pc.list_value_length(found) if pa.types.is_nested(found.type) else pc.utf8_length(found)
            case "lower", [text]:
                return pc.utf8_lower(self._text(text, table))
            case "abs", [value]:
                return numbers.absolute(self._operand(value, table))
            case "isnan", [value]:
                return numbers.is_nan(self._operand(value, table))
        raise self._wrong(f"{name}(…) does not take {', '.join(map(ast.unparse, arguments)) or 'nothing'}.{_ALLOWED}")

    def _wrong(self, what: str) -> SlurmGPUError:
        return SlurmGPUError(f"The condition {self.text!r} cannot be used: {what}")


def _column_of(node: ast.AST) -> str | None:
    """The column that a node names; None if it names none."""
    match node:
        case ast.Call(ast.Name("col"), [ast.Constant(str() as name)], []):
            return name
        case ast.Name(name, ast.Load()) if name not in _FUNCTIONS:
            return name
    return None


def _about(text: str, error: SyntaxError) -> str:
    if "=" in text and not any(sign in text for sign in ("==", "!=", "<=", ">=")):
        return 'a single = does not compare; write ==, as in label == "yes".'
    return f"{error.msg} at character {error.offset}.{_ALLOWED}"
