"""Parquet for programs: the items of a call, and its rows. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow.parquet import ParquetFile, write_table

from slurmgpu.results.arrow import array_of_json
from slurmgpu.results.json_types import common_types
from slurmgpu.workloads.command.sinks import OutputError


def write_items(path: Path, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Write the fields of items, and return them as a program reads them.

    A column has the type of its values, or without a common one the text of their JSON. What no UTF-8 can hold, such as
    odd bytes of a path, is escaped by backslashes.
    """
    names = list(dict.fromkeys(name for record in records for name in record))
    columns = {name: [_encodable(record.get(name)) for record in records] for name in names}
    types = common_types(names, [columns.__getitem__])
    table = pa.table({name: array_of_json(values, types[name]) for name, values in columns.items()})
    write_table(table, path)
    written: list[dict[str, Any]] = table.to_pylist()
    return written


def read_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a file; OutputError if it is not Parquet."""
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except PermissionError:
        raise
    except (pa.ArrowException, OSError, ValueError, LookupError) as error:
        raise OutputError(f"{{out}} is not a Parquet file: {error}") from error


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return list(map(_encodable, value))
    return {_encodable(name): _encodable(each) for name, each in value.items()} if isinstance(value, dict) else value
