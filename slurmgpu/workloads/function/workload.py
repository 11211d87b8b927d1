"""A function as a workload: one call for each item, or for each batch; `slurmgpu.map` writes its settings."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, cast

import numpy as np

from slurmgpu.code import importer
from slurmgpu.code.functions import PICKLE, import_named, path_of, unpack
from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs.python_items import UNWRAP
from slurmgpu.run.submissions import Pickled
from slurmgpu.shards.column_types import FLATTEN, RESULT, columns_of_types, type_for_both, type_of_column, types_of_rows
from slurmgpu.shards.columns import Array, Column, Json
from slurmgpu.workload import Item, Placement, Row, Share, TaskContext
from slurmgpu.workloads.function.event_loop import EventLoop


class Function:
    """The rows that a function returns.

    `function` and `load` are names, `package.module:function`; `load` is called once in each worker, and its result is
    the function's second argument. With `pickled`, the functions are in the run directory, in a pickle with that digest
    from that version of Python. Functions given at a resubmission replace them. `columns` has a type for each column,
    or its description in run.json. With `batched` the function takes a list of items, and returns a list or columns.
    With `learn` the rows are the types of their columns. None in a column of floats or complex numbers is NaN, as in
    pandas. `argv` is the command line for modules that parse one when they are imported.
    """

    def __init__(
        self,
        *,
        function: str,
        load: str | None = None,
        pickled: dict[str, str] | None = None,
        columns: dict[str, Any] | None = None,
        items: str = "mapping",
        batched: bool = False,
        learn: bool = False,
        argv: list[str] | None = None,
    ) -> None:
        self.columns: Mapping[str, Column] = {"types": Json()} if learn else columns_of_types(columns or {}, "function")
        self._with_nan = [name for name, column in self.columns.items() if _has_nan(column)]
        self.takes_one = not batched
        self._names, self._learns = (function, load), learn
        self._pickled = cast(Pickled | None, pickled)
        self._batched, self._unwrap, self._argv = batched, UNWRAP[items], argv
        self._event_loop = EventLoop()

    def place(self, share: Share) -> Placement:
        """One process, which has all GPUs of its task."""
        if share.processes == "per-gpu":
            raise SlurmGPUError(
                'processes = "per-gpu" is for workloads whose processes form one group. To call the function on each '
                "GPU, set array=True."
            )
        return Placement()

    def load(self, task: TaskContext) -> None:
        """Import or unpickle the function, and call `load`."""
        if self._argv and self._argv != sys.argv:
            sys.argv = self._argv  # before a module parses it as it is imported
        given = importer.functions_given()  # by a resubmission
        functions = {role: unpack(path_of(task.run_dir, pickled), pickled)[role] for role, pickled in given.items()}
        needed = {"function", "load"} if self._names[1] else {"function"}
        if needed - functions.keys():
            functions = {**self._planned(task.run_dir), **functions}
        function, load = functions["function"], functions.get("load")
        assert function is not None
        self._function = function
        self._loaded = () if load is None else (self._event_loop.result_of(_called(load, task)),)

    def _planned(self, run: Path) -> dict[str, Callable[..., Any] | None]:
        if self._pickled is not None:
            return unpack(run / PICKLE, self._pickled)
        name, load_name = self._names
        return {"function": import_named(name), "load": import_named(load_name) if load_name else None}

    def __call__(self, items: Sequence[Item]) -> list[Row | ItemError] | Any:
        """The rows that the function returns."""
        data = [self._unwrap(item.data) for item in items]
        if not self._batched:
            return [self._row(self._event_loop.result_of(self._function(data[0], *self._loaded)))]
        returned = self._event_loop.result_of(self._function(data, *self._loaded))
        if isinstance(returned, Set):
            raise TypeError(f"a {type(returned).__name__} has no order; expected a list with a result for each item")
        if isinstance(returned, Mapping) or hasattr(returned, "columns"):
            returned = rows_of(returned, len(items))
        if isinstance(returned, str | bytes) or not isinstance(returned, Iterable):
            return returned  # the worker reports what is wrong with it
        return [self._row(value) for value in returned]

    def explain_misfit(self, row: Any) -> str:
        """A sentence for a row that does not fit the columns: the line that would make it fit, if one would."""
        if not isinstance(row, Mapping):
            return ""
        if RESULT in row and RESULT not in self.columns:  # `as_row` has named it
            value = row[RESULT]
            found = "None" if value is None else f"a {type(value).__name__}"
            return f"The function returned {found}; expected a mapping with {', '.join(map(repr, self.columns))}."
        try:
            declared: dict[str, str | None] = {name: type_of_column(column) for name, column in self.columns.items()}
            types = dict(declared)
            of_row = types_of_rows([row])
        except SlurmGPUError:
            return ""
        try:
            for name, kind in of_row.items():
                types[name] = type_for_both(types.get(name), kind) if kind or name in types else "json"
        except SlurmGPUError:
            return FLATTEN
        # None and missing values fit only a JSON column; None has become NaN among floats.
        types |= {name: "json" for name in types if row.get(name) is None}
        if types == declared:
            return ""
        line = ", ".join(f"{name!r}: {kind!r}" for name, kind in types.items())
        return f"If it is right, submit with columns={{{line}}}."

    def _row(self, value: Any) -> Any:
        if isinstance(value, BaseException):
            return value  # the item's error
        row = as_row(value)
        if not self._learns:
            missing = [name for name in self._with_nan if name in row and row[name] is None]
            return {**row, **dict.fromkeys(missing, math.nan)} if missing else row
        try:
            return {"types": types_of_rows([row])}
        except SlurmGPUError as error:
            return ItemError(str(error))


def _has_nan(column: Column) -> bool:
    return isinstance(column, Array) and not column.shape and column.dtype.kind in "fc"


def as_row(value: Any) -> Row:
    """The result of a function as a row: a mapping, the fields of a dataclass or a named tuple, else one column."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        found: Row = value._asdict()
        return found
    return {RESULT: value}


def rows_of(columns: Any, n_items: int) -> list[Row]:
    """The rows of columns: a mapping, as a function for `datasets.map` returns it, a data frame or an Arrow table."""
    names = columns if isinstance(columns, Mapping) else getattr(columns, "column_names", columns.columns)
    found = {name: _values(name, columns[name]) for name in names}
    for name, values in found.items():
        if (
            len(values) != n_items
        ):  # the worker reports it, and does not try single items, which would get others' values
            return [{name: value} for value in values]
    if not found:
        raise TypeError("no column was returned; expected at least one, with a value for each item")
    return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]


def _values(name: str, column: Any) -> Any:
    """A column that has a length; Arrow columns as they are.

    A missing value of a pandas extension type is None, and NaN among floats.
    """
    if hasattr(column, "columns"):  # iteration would give its names
        found = f"is a {type(column).__name__}, as where two columns have one name"
    elif isinstance(column, str | bytes | Mapping | Set) or not getattr(column, "ndim", hasattr(column, "__len__")):
        found = f"is a {type(column).__name__}"
    else:
        if hasattr(column, "isna") and not isinstance(column.dtype, np.dtype):  # as str, where None reads as nan
            missing = float("nan") if column.dtype.kind == "f" else None
            return [
                missing if lacks else value for value, lacks in zip(column.astype(object), column.isna(), strict=True)
            ]
        return column.to_pylist() if hasattr(column, "to_pylist") else column
    raise TypeError(f"column {name!r} {found}; expected a list, or an array, with a value for each item")


def _called(load: Callable[..., Any], task: TaskContext) -> Any:
    """The result of `load`, which gets the task if it has a required parameter."""
    try:
        parameters = inspect.signature(load).parameters.values()
    except ValueError:  # some of C
        return load()
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return load(task) if positional and positional[0].default is inspect.Parameter.empty else load()
