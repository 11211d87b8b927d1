"""Columns with one value for all rows of a run, for conditions on several runs. Imported on demand: needs pyarrow."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from slurmgpu.results.json_types import common_types


@dataclass(frozen=True)
class Constants:
    """Columns with one value each, by name: arrays of one element."""

    values: Mapping[str, pa.Array]

    def beside(self, table: pa.Table, names: Collection[str], n_rows: int) -> pa.Table:
        """The table with the constants among `names` added as columns; its own columns take precedence."""
        places = pa.array(np.zeros(n_rows, np.int64))
        columns = dict(zip(table.column_names, table.columns, strict=True))
        own = {name: array.take(places) for name, array in self.values.items() if name in names}
        return pa.table({**own, **columns})


def constants_of(values: Sequence[Mapping[str, Any]], columns: Sequence[Collection[str]]) -> list[Constants]:
    """The `values` of each of several runs as columns, with null for `columns` that only other runs have.

    A column has one type for all runs: the common type of its values, else the text of their JSON.
    """
    names = list(dict.fromkeys(name for each in values for name in each))
    types = common_types(names, [lambda name: [each.get(name) for each in values]])
    known = dict.fromkeys(name for each in columns for name in each)
    return [
        Constants(
            {name: _array(own.get(name), types[name]) for name in names}
            | {name: pa.nulls(1) for name in known if name not in has}
        )
        for own, has in zip(values, columns, strict=True)
    ]


def _array(value: Any, kind: pa.DataType | None) -> pa.Array:
    if kind is not None:
        return pa.array([value], kind)
    return pa.array([None if value is None else json.dumps(value, ensure_ascii=False)], pa.large_string())
