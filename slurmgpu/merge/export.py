"""Export the rows of a merged file as JSONL, CSV, Parquet or tensors, all or nothing.

Every row has `index`, the columns and `error`. A failed item has null columns, a good one a null `error`. NaN and
infinities are null in JSONL and CSV, since JSON lacks them. In CSV null is empty. Memory is bounded, except for
tensors, which torch.save needs all at once. A workload may add formats of its own. Every byte of the merged file is
verified first.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from slurmgpu import results
from slurmgpu.code import importer
from slurmgpu.code.snapshots import code_digest
from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.results import Merged
from slurmgpu.results.views import ArrayData
from slurmgpu.run import owners
from slurmgpu.run.directory import Run
from slurmgpu.shards.numbers import as_lists
from slurmgpu.util.atomic_files import beside, fsync_dir, working_folder, write_json
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, cause_raised, read_bytes, replace, retried
from slurmgpu.workload import build

log = logging.getLogger(__name__)

Writer = Callable[[Merged, IO[bytes]], str | None]
"""Writes the rows; returns a description if it writes anything other than rows."""

_BLOCK_BYTES = 4 << 20  # about ten times as much in Python objects
_ROW_GROUP_BYTES = 32 << 20


@dataclass(frozen=True)
class Exported:
    """The number of exported rows, and the description that a workload gave of its own format."""

    n_rows: int
    said: str | None = None


def export(path: Path, format: str, output: Path) -> Exported:  # noqa: A002 - the word of the command line
    """Write the rows to `output`; SlurmGPUError if a byte differs. Starts again after a transient failure."""
    return retried(lambda: cause_raised(lambda: _export(path, format, output)), BRIEF_PATIENCE_S)


def _export(path: Path, format: str, output: Path) -> Exported:  # noqa: A002
    with results.open(path, verify=True) as merged, beside(output) as partial:
        write = _writer(merged, format)
        with open(partial, "wb") as file:
            said = write(merged, file)
            file.flush()
            os.fsync(file.fileno())
        if write is _write_pt:
            write_json(output.with_name(f"{output.name}.json"), _about(merged))
        replace(partial, output)
    fsync_dir(output.parent)
    return Exported(len(merged), said)


def export_to(path: Path, format: str, file: IO[bytes]) -> int:  # noqa: A002 - the word of the command line
    """Write the rows of a merged file to an open file; the number of rows."""
    with results.open(path, verify=True) as merged:
        write = _writer(merged, format)
        if FORMATS.get(format) is write and format not in STREAMS:
            raise SlurmGPUError(f"Format {format!r} needs a file of its own; a stream gets {' or '.join(STREAMS)}.")
        write(merged, file)
        file.flush()
        return len(merged)


def _write_jsonl(merged: Merged, file: IO[bytes]) -> None:
    names = ("index", *merged.columns, "error")
    for row in _plain_rows(merged):
        line = json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False, allow_nan=False)
        file.write(f"{line}\n".encode())


def _write_csv(merged: Merged, file: IO[bytes]) -> None:
    """RFC 4180. Numbers and text are written plainly, other values as JSON, null as empty."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.writer(text)
    writer.writerow(("index", *merged.columns, "error"))
    for row in _plain_rows(merged, as_cells=True):
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


def _write_pt(merged: Merged, file: IO[bytes]) -> None:
    """A dict for `torch.load`: tensors of numbers, lists of text and JSON, lists of tensors."""
    try:
        import torch
    except ImportError as error:
        raise SlurmGPUError("The format pt needs PyTorch: pip install 'slurmgpu[torch]'") from error

    def tensor(values: npt.NDArray[Any]) -> Any:
        return as_lists(values) if values.dtype.kind == "S" else torch.from_numpy(np.array(values))

    content: dict[str, Any] = {"index": tensor(merged.index)}
    for name, column in merged.columns.items():
        data = merged[name]
        if not column.is_tensor:
            values = data.python_values()
            content[name] = [None if failed else value for failed, value in zip(merged.failed, values, strict=True)]
        else:
            content[name] = tensor(data.stored()) if isinstance(data, ArrayData) else list(map(tensor, data.stored()))
    content["error"] = [message or None for message in merged["error"][:]]
    torch.save(content, file)


def _writer(merged: Merged, format: str) -> Writer:  # noqa: A002 - the word of the command line
    """The writer of a format: the workload's own if it has one of this name."""
    if format in _beside(merged, "run.json").get("exports", ()):
        run = Run.open(merged.path.parent)
        owners.refuse_foreign(run, f"export it as {format}, which its workload writes,")
        return functools.partial(_write_by_workload, run, format)
    if format not in FORMATS:
        raise SlurmGPUError(f"There is no export to {format!r}.{did_you_mean(format, FORMATS)}")
    return FORMATS[format]


def _write_by_workload(run: Run, format: str, merged: Merged, file: IO[bytes]) -> str | None:  # noqa: A002
    # Relative settings are relative to the run file's folder.
    plan, base = run.plan, Path(run.plan.search_path)
    with working_folder(base), importer.using(run.folder, code_digest(run.submissions())):
        exports = build(plan.workload, plan.settings, base).exports
        if format not in exports:
            raise SlurmGPUError(f"Workload {plan.workload} has no export to {format!r} any more.")
        said = exports[format](merged, file)
    return said if isinstance(said, str) else None


def _about(merged: Merged) -> dict[str, Any]:
    """The JSON beside the tensors: totals, and the settings and summary of the run."""
    attributes = merged.attributes
    about = {name: attributes.get(name) for name in ("run", "workload", "seed", "n_items", "complete", "fingerprint")}
    about |= {"n_rows": len(merged), "n_errors": int(merged.failed.sum())}
    about["columns"] = json.loads(str(attributes["columns"]))
    for key, name in (("settings", "run.json"), ("summary", "report.json")):
        about[key] = _beside(merged, name).get(key)
    return about


def _beside(merged: Merged, name: str) -> dict[str, Any]:
    """The JSON file of that name beside a merged file; {} if there is none of the same run."""
    path = merged.path.parent / name
    try:
        found = json.loads(read_bytes(path))
    except FileNotFoundError:
        return {}  # the merged file was copied elsewhere
    except ValueError as error:
        log.warning("%s is damaged, and is not used for the export: %s", path, error)
        return {}
    is_same = isinstance(found, dict) and found.get("fingerprint") == merged.attributes["fingerprint"]
    return found if is_same else {}


FORMATS: dict[str, Writer] = {
    "jsonl": _write_jsonl,
    "csv": _write_csv,
    "parquet": _write_parquet,
    "pt": _write_pt,
}

STREAMS = ("jsonl", "csv")
"""The formats that can be written to a stream."""


def _blocks(merged: Merged, n_bytes: int) -> Iterator[tuple[int, int]]:
    n_rows = max(1, len(merged) * n_bytes // merged.path.stat().st_size)
    for start in range(0, len(merged), n_rows):
        yield start, min(start + n_rows, len(merged))


def _plain_rows(merged: Merged, *, as_cells: bool = False) -> Iterator[tuple[Any, ...]]:
    """The rows as JSON values: index, columns, error."""
    columns = [merged[name] for name in merged.columns]
    for start, stop in _blocks(merged, _BLOCK_BYTES):
        stored = [(each.column, each.stored(start, stop)) for each in columns]
        values = [column.cells(rows) if as_cells else column.plain(rows) for column, rows in stored]
        for row in np.flatnonzero(merged.failed[start:stop]):
            for column in values:
                column[row] = None
        errors = [message or None for message in merged["error"][start:stop]]
        yield from zip(merged.index[start:stop].tolist(), *values, errors, strict=True)
