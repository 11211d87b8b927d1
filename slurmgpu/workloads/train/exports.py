"""The formats of `slurmgpu export` for train: a line for each configuration, and the points of the curves."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from slurmgpu.shards.columns import Json, Ragged
from slurmgpu.util.amounts import count_of
from slurmgpu.workloads.train.rows import COLUMNS

if TYPE_CHECKING:
    from slurmgpu.results import Merged

SCALARS = tuple(name for name, kind in COLUMNS.items() if not isinstance(kind, Ragged | Json))


def write_csv(merged: Merged, file: IO[bytes]) -> str:
    """Write a line for each configuration: its settings, its scalar columns, its evaluations and its error.

    Names of settings begin with "config.", those of evaluations with "final." and "best."; missing values are empty.
    """
    tables = {name: merged[name][:] for name in ("config", "final", "best")}
    for number, failed in enumerate(merged.failed.tolist()):
        if failed:
            for values in tables.values():
                values[number] = {}
    names = {name: dict.fromkeys(key for each in values for key in each) for name, values in tables.items()}
    header = {table: [f"{table}.{name}" for name in names[table]] for table in tables}
    columns = {name: merged[name][:] for name in SCALARS}
    errors = merged["error"][:]

    def lines() -> Iterator[Sequence[Any]]:
        for number, index in enumerate(merged.index.tolist()):
            cells = {table: [_cell(each[number].get(name)) for name in names[table]] for table, each in tables.items()}
            failed = bool(merged.failed[number])
            scalars = ["" if failed else _cell(column[number]) for column in columns.values()]
            yield [index, *cells["config"], *scalars, *cells["final"], *cells["best"], errors[number]]

    columns_of = [*header["config"], *SCALARS, *header["final"], *header["best"]]
    n_lines = _write(file, ["index", *columns_of, "error"], lines())
    return count_of(n_lines, "configuration")


def write_curves(merged: Merged, file: IO[bytes]) -> str:
    """Write a line for each point: the configuration's index, the name of the value, the step, the value."""
    metrics = merged["metric"][:]

    def lines() -> Iterator[Sequence[Any]]:
        for number, index in enumerate(merged.index.tolist()):
            for name, steps, curve in (
                ("train_loss", "curve_steps", "curve"),
                (metrics[number], "eval_steps", "eval_curve"),
            ):
                for step, value in zip(merged[steps][number].tolist(), merged[curve][number].tolist(), strict=True):
                    yield [index, name, step, _cell(value)]

    return f"{_write(file, ['index', 'what', 'step', 'value'], lines()):,} points"


def _write(file: IO[bytes], header: Sequence[str], lines: Iterable[Sequence[Any]]) -> int:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.writer(text)
    writer.writerow(header)
    n_lines = 0
    for line in lines:
        writer.writerow(line)
        n_lines += 1
    text.detach()
    return n_lines


def _cell(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return json.dumps(value) if isinstance(value, bool | list | Mapping) else value
