"""A folder that `datasets.load_dataset` reads: Parquet files, and a README.md that names them. Needs pyarrow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pyarrow as pa
from pyarrow.parquet import ParquetWriter

from slurmgpu import __version__
from slurmgpu.util.amounts import count_of
from slurmgpu.util.atomic_files import fsync_dir, write_bytes

_FILE_BYTES = 256 << 20

_HEAD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
---
"""
"""The data set card's metadata, by https://huggingface.co/docs/hub/datasets-manual-configuration."""


class Tables(Protocol):
    """Rows as Arrow tables of one schema."""

    @property
    def schema(self) -> pa.Schema:
        """The schema of the tables."""
        ...

    def tables(self) -> Iterator[pa.Table]:
        """The tables, one after another."""
        ...


def write_data_set(selection: Tables, folder: Path) -> int:
    """Write the chosen rows into an empty folder, as one split `train`, and return their number."""
    data = folder / "data"
    data.mkdir()
    schema, n_rows = selection.schema, 0
    for number, tables in enumerate(_files(selection)):
        with open(data / f"train-{number:05d}.parquet", "wb") as file:
            with ParquetWriter(file, schema) as writer:
                for table in tables:
                    writer.write_table(table)
                    n_rows += len(table)
            file.flush()
            os.fsync(file.fileno())
    fields = "".join(f"| `{field.name}` | {field.type} |\n" for field in schema)
    text = f"{_HEAD}\n{count_of(n_rows, 'row')}, written by slurmgpu {__version__}.\n\n"
    text += f"| column | type |\n| --- | --- |\n{fields}"
    write_bytes(folder / "README.md", text.encode("utf-8", "replace"))
    fsync_dir(data)
    return n_rows


def _files(selection: Tables) -> Iterator[Iterator[pa.Table]]:
    """The tables of each file; at least one file, which may have no row."""
    tables = selection.tables()
    first = next(tables, None)
    yield _until_full(first, tables)
    while (first := next(tables, None)) is not None:
        yield _until_full(first, tables)


def _until_full(first: pa.Table | None, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    table, n_bytes = first, 0
    while table is not None:
        n_bytes += table.nbytes
        yield table
        if n_bytes >= _FILE_BYTES:
            return
        table = next(tables, None)
