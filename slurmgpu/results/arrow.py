"""Results as Arrow tables. Imported on demand, since it needs pyarrow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from slurmgpu.results.views import ArrayData, ColumnData
from slurmgpu.shards.numbers import OFFSET_DTYPE


def to_arrow(
    columns: Mapping[str, ColumnData], failed: npt.NDArray[np.bool_], start: int = 0, stop: int | None = None
) -> pa.Table:
    """The rows from `start` to `stop` - 1 as a table: `index`, the columns, and `error`.

    Numbers, text and ragged values share the file's bytes. The columns of a failed item are null, and the `error` of a
    good one. Complex numbers become structs of `real` and `imag`.
    """
    rows = slice(*slice(start, stop).indices(len(failed))[:2])
    failed = failed[rows]
    nulls = {"index": np.zeros_like(failed), "error": ~failed}
    return pa.table({name: _column(column, rows, nulls.get(name, failed)) for name, column in columns.items()})


def _column(data: ColumnData, rows: slice, null: npt.NDArray[np.bool_]) -> pa.Array:
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

    Lists are not of fixed size: few versions of pyarrow can write these to Parquet with nulls or with size 0.
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
