"""Results as Arrow tables. Imported on demand, since it needs pyarrow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from slurmgpu.results.json_types import common_types
from slurmgpu.results.views import ArrayData, ColumnData, ListData, without_value
from slurmgpu.shards.columns import Column
from slurmgpu.shards.numbers import OFFSET_DTYPE

Types = Mapping[str, pa.DataType | None]
"""The common type of the values of each JSON column, by name; None without one, the null type if all are null.

A column of None or the null type becomes the text of its JSON.
"""


def to_arrow(
    columns: Mapping[str, ColumnData], failed: npt.NDArray[np.bool_], start: int, stop: int, types: Types
) -> pa.Table:
    """The rows from `start` to `stop` - 1 of `columns` as a table; `failed` is a mask of these rows.

    The columns of a failed item are null, except for fields that it keeps. The `error` of a good item is null, and JSON
    null is null. Complex numbers become structs of `real` and `imag`.
    """
    rows, nulls = slice(start, stop), {"index": np.zeros_like(failed), "error": ~failed}
    return pa.table(
        {
            name: _column(data, rows, nulls.get(name, without_value(data, failed, start, stop)), types.get(name))
            for name, data in columns.items()
        }
    )


def value_types(
    columns: Mapping[str, Column], parts: Iterable[Callable[[str], Sequence[Any]]]
) -> dict[str, pa.DataType | None]:
    """The common types of the values of columns that declare none; `parts` as in `common_types`."""
    return common_types([name for name, column in columns.items() if column.typed_by_values], parts)


def array_of_json(values: Sequence[Any], kind: pa.DataType | None) -> pa.Array:
    """JSON values of a type by `common_types` as an array; the text of their JSON if it is None or the null type."""
    if kind is not None and not pa.types.is_null(kind):
        return pa.array(values, kind)
    texts = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    return pa.array(texts, pa.large_string())


def empty(columns: Mapping[str, Column], types: Types) -> pa.Table:
    """A table of these columns without rows."""
    none: dict[str, ColumnData] = {
        name: ListData(column, np.empty(0, column.dtype), np.zeros(1, OFFSET_DTYPE))
        if column.shape is None
        else ArrayData(column, np.empty((0, *column.shape), column.dtype))
        for name, column in columns.items()
    }
    return to_arrow(none, np.empty(0, bool), 0, 0, types)


def _column(
    data: ColumnData, rows: slice, null: npt.NDArray[np.bool_], of_values: pa.DataType | None = None
) -> pa.Array:
    if data.column.typed_by_values:  # null is null, and a failed item without a value is None
        read = data.python_values(rows.start, rows.stop)
        if of_values is not None and of_values != pa.null():
            return pa.array(read, of_values)
        null = np.array([value is None for value in read], bool)
    kind = data.column.arrow and pa.type_for_alias(data.column.arrow)
    if isinstance(data, ArrayData):
        found = _array(data.content[rows], null)
        return found.view(kind) if kind else found
    offsets = data.offsets[rows.start : rows.stop + 1]
    values = data.values[offsets[0] : offsets[-1]]
    if offsets[0]:  # the Parquet writer requires lists to start at the first value
        offsets = offsets - offsets[0]
    buffers = [_bitmap(~null), pa.py_buffer(offsets)]
    if kind:
        return pa.Array.from_buffers(kind, len(null), [*buffers, pa.py_buffer(values)])
    items = _not_null(values)
    return pa.Array.from_buffers(pa.large_list(items.type), len(null), buffers, children=[items])


def _array(values: npt.NDArray[Any], null: npt.NDArray[np.bool_]) -> pa.Array:
    """An array along the first dimension; further dimensions become lists.

    They are no fixed-size lists, because few versions of pyarrow can write those to Parquet with nulls or size 0.
    """
    valid = _bitmap(~null)
    if values.ndim > 1:
        kept = values[~null] if null.any() else values  # the Parquet writer refuses null lists with values
        items = _not_null(kept.reshape(len(kept) * values.shape[1], *values.shape[2:]))
        offsets = np.concatenate([np.zeros(1, OFFSET_DTYPE), np.cumsum(~null)]) * values.shape[1]
        buffers = [valid, pa.py_buffer(offsets)]
        return pa.Array.from_buffers(pa.large_list(items.type), len(values), buffers, children=[items])
    if values.dtype.kind == "c":
        parts = [_not_null(np.ascontiguousarray(part)) for part in (values.real, values.imag)]
        kind = pa.struct([("real", parts[0].type), ("imag", parts[1].type)])
        return pa.Array.from_buffers(kind, len(values), [valid], children=parts)
    if values.dtype.kind == "S":
        return pa.array(values.tolist(), pa.binary(), mask=null)
    if values.dtype.kind == "b":
        return pa.Array.from_buffers(pa.bool_(), len(values), [valid, _bitmap(values)])
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(values)])


def _not_null(values: npt.NDArray[Any]) -> pa.Array:
    return _array(values, np.zeros(len(values), bool))


def _bitmap(flags: npt.NDArray[Any]) -> pa.Buffer:
    """Booleans in Arrow's format: one bit each, lowest first."""
    return pa.py_buffer(np.packbits(flags, bitorder="little"))
