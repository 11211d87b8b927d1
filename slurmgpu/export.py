"""Export: the rows of a merged file as JSONL, CSV or Parquet, in bounded memory, written whole or not at all.

Every row has `index`, the columns and `error`. The columns of a failed item are null, and so is `error` where there
was none; so are NaN and the infinities in JSONL and CSV, for JSON has no words for them. In CSV null is empty.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from slurmgpu import results
from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.files import fsync_dir
from slurmgpu.results import Merged
from slurmgpu.results.views import ArrayData, ColumnData, TextData

_BLOCK_BYTES = 4 << 20  # as Python's objects they take some ten times as much
_ROW_GROUP_BYTES = 32 << 20


def export(path: Path, format: str, output: Path) -> int:  # noqa: A002 - the word of the command line
    """Write the rows of a merged file to `output` in one of `FORMATS`; how many they are."""
    if format not in FORMATS:
        raise SlurmGPUError(f"There is no export to {format!r}.{did_you_mean(format, FORMATS)}")
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    with results.open(path) as merged:
        try:
            with open(partial, "wb") as file:
                FORMATS[format](merged, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(output)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    fsync_dir(output.parent)
    return len(merged)


def _write_jsonl(merged: Merged, file: IO[bytes]) -> None:
    names = ("index", *merged.columns, "error")
    for row in _plain_rows(merged):
        line = json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False, allow_nan=False)
        file.write(f"{line}\n".encode())


def _write_csv(merged: Merged, file: IO[bytes]) -> None:
    """RFC 4180. Numbers and text are as they are, everything else is JSON."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.writer(text)
    writer.writerow(("index", *merged.columns, "error"))
    for row in _plain_rows(merged):
        writer.writerow(json.dumps(value) if isinstance(value, list | bool) else value for value in row)
    text.detach()


def _write_parquet(merged: Merged, file: IO[bytes]) -> None:
    try:
        from pyarrow.parquet import ParquetWriter
    except ImportError as error:
        raise SlurmGPUError("Parquet needs pyarrow: pip install 'slurmgpu[parquet]'") from error
    with ParquetWriter(file, merged.to_arrow(0, 0).schema) as writer:
        for start, stop in _blocks(merged, _ROW_GROUP_BYTES):
            writer.write_table(merged.to_arrow(start, stop))


FORMATS: dict[str, Callable[[Merged, IO[bytes]], None]] = {
    "jsonl": _write_jsonl,
    "csv": _write_csv,
    "parquet": _write_parquet,
}


def _blocks(merged: Merged, n_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that take about `n_bytes` each."""
    n_rows = max(1, len(merged) * n_bytes // merged.path.stat().st_size)
    for start in range(0, len(merged), n_rows):
        yield start, min(start + n_rows, len(merged))


def _plain_rows(merged: Merged) -> Iterator[tuple[Any, ...]]:
    """The rows as JSON has them: index, columns, error."""
    for start, stop in _blocks(merged, _BLOCK_BYTES):
        values = [_plain_column(merged[name], start, stop) for name in merged.columns]
        for row in np.flatnonzero(merged.failed[start:stop]):
            for column in values:
                column[row] = None
        errors = [message or None for message in merged["error"][start:stop]]
        yield from zip(merged.index[start:stop].tolist(), *values, errors, strict=True)


def _plain_column(column: ColumnData, start: int, stop: int) -> list[Any]:
    if isinstance(column, ArrayData):
        return _plain(column[start:stop])
    found: list[Any] = column[start:stop]
    return found if isinstance(column, TextData) else [_plain(values) for values in found]


def _plain(values: npt.NDArray[Any]) -> list[Any]:
    """Nested lists. A complex number is [real, imaginary]; bytes are read as UTF-8."""
    if values.dtype.kind == "c":
        return _plain(np.stack([values.real, values.imag], axis=-1))
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8", "backslashreplace")
    elif values.dtype.kind == "f" and not np.isfinite(values).all():
        unspeakable = ~np.isfinite(values)
        values = values.astype(object)
        values[unspeakable] = None
    plain: list[Any] = values.tolist()
    return plain
