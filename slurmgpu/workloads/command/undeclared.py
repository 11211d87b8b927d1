"""Names in a program's rows that are not columns: left out of printed rows, with how to declare them."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Mapping

from slurmgpu.errors import SlurmGPUError
from slurmgpu.shards.column_types import types_of_rows
from slurmgpu.shards.columns import Column
from slurmgpu.util.amounts import some_of
from slurmgpu.workload import Row
from slurmgpu.workloads.command.written_back import is_written_back

log = logging.getLogger(__name__)


class Undeclared:
    """The names that printed rows have beside `columns`; each is logged once."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._columns = columns
        self._told: set[str] = set()

    def left_out_of(self, row: Row, data: Mapping[str, object]) -> Row:
        """The printed row of a call without names that are not columns; unchanged if it lacks a column.

        It may repeat fields of the item's `data` as they are, which the run may keep by itself. The log has the whole
        row. A row in `{out}`, or from a stream, is nowhere else, so there an extra name is an error.
        """
        if not self._columns.keys() < row.keys():
            return row
        others = {
            name: value
            for name, value in row.items()
            if name not in self._columns and not (name in data and is_written_back(name, value, data[name]))
        }
        if not self._told.issuperset(others):
            self._told.update(others)
            log.warning(
                "not a column, so not kept: %s.%s", some_of(map(repr, others), 10), as_columns(others, self._columns)
            )
        return {name: row[name] for name in self._columns}


def as_columns(row: Mapping[str, object], columns: Mapping[str, Column]) -> str:
    """How to declare names that are not columns, to append to a sentence; "" if their types are not known."""
    try:
        types = types_of_rows([{name: value for name, value in row.items() if name not in columns}])
    except SlurmGPUError:
        return ""
    line = ", ".join(
        f"{json.dumps(name, ensure_ascii=False)} = {json.dumps(kind or 'json')}" for name, kind in types.items()
    )
    options = shlex.join(text for name, kind in types.items() for text in ("--col", f"{name}:{kind or 'json'}"))
    return (
        f" To keep them, add {line} to the columns (with `slurmgpu run`: {options}), and submit again into another "
        f"run directory."
    )
