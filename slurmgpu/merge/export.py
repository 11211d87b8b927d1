"""Export the rows of a run as JSONL, CSV, TSV, Parquet, a data set of Hugging Face or tensors, all or nothing.

Every row has `index`, the columns and `error`, or the columns that were asked for. A failed item has null columns, a
good one a null `error`. NaN and infinities are null in JSONL and CSV, because JSON lacks them. In CSV null is empty.
Memory is bounded, except for tensors, which torch.save needs all at once. A workload may add its own formats. Every
byte of the merged file is verified first, and the bytes of other shards before their rows are written.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt

from slurmgpu import results
from slurmgpu.code import importer
from slurmgpu.code.snapshots import code_digest
from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.loader.build import build
from slurmgpu.merge.beside_items import PREFIX, BesideItems, refuse_bare_fields, refuse_unknown_fields
from slurmgpu.report.report_file import MOST_BYTES
from slurmgpu.results import Merged
from slurmgpu.results.published import FileRows, RunRows
from slurmgpu.results.selection import Selection
from slurmgpu.results.views import ArrayData, without_value
from slurmgpu.run import owners
from slurmgpu.run.directory import FOLDERS, Run
from slurmgpu.shards.columns import stored_columns
from slurmgpu.shards.numbers import as_lists
from slurmgpu.util.atomic_files import beside, fsync_dir, whole_file, write_json
from slurmgpu.util.process_wide import working_folder
from slurmgpu.util.shared_files import (
    BRIEF_PATIENCE_S,
    cause_raised,
    is_folder,
    list_names,
    read_bytes,
    replace,
    retried,
    status_of,
)
from slurmgpu.util.users import resolved

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exported:
    """The number of exported rows and of items without a row, and what a workload says about its own format.

    `problems` names damaged shards, whose items count as items without a row. `n_failed` of the rows belong to failed
    items.
    """

    n_rows: int
    said: str | None = None
    n_missing: int = 0
    problems: Sequence[str] = ()
    n_failed: int = 0


class PlainRows(Protocol):
    """Rows as JSON values, or as CSV cells: of one run, with its items, or of several runs."""

    @property
    def columns(self) -> Iterable[str]:
        """The names of the values of each row."""
        ...

    def plain_rows(self, *, as_cells: bool = False) -> Iterator[tuple[Any, ...]]:
        """The rows, in the order of `columns`."""
        ...


@dataclass(frozen=True)
class Choice:
    """The columns and rows that are exported; with `with_items` also the fields of the items."""

    columns: Sequence[str]
    where: str | None = None
    with_items: bool = False

    def __post_init__(self) -> None:
        if self.with_items and self.columns:
            raise SlurmGPUError(
                "--with-items adds all fields. For some, leave it out and name item.FIELD in --columns."
            )

    @property
    def reads_items(self) -> bool:
        """Whether fields of the items are requested."""
        return self.with_items or any(name.startswith(PREFIX) for name in self.columns)


def export(
    source: Path | Run,
    format: str,
    output: Path | IO[bytes],
    columns: Sequence[str] = (),
    where: str | None = None,
    *,
    with_items: bool = False,
) -> Exported:
    """Write the rows of a merged file, or those that a run has now, to a path or an open file.

    Raises SlurmGPUError if a byte differs. `columns` limits the columns, `where` the rows to those for which the
    condition is true. With `with_items`, or columns such as `item.text`, rows of a run include the data of their items.
    If `output` is a path, the export restarts after a transient failure. The merged file, and the files of a run and of
    its input, are not replaced.
    """
    chosen = Choice(columns, where, with_items)
    if isinstance(output, Path):
        path = output
        if isinstance(source, Run):
            refuse_output(source, path)
        elif (own := status_of(source)) and (there := status_of(path)) and os.path.samestat(own, there):
            raise SlurmGPUError(
                f"{path} is the file whose rows are exported, and would be replaced. Name another file."
            )
        return retried(lambda: cause_raised(lambda: _export(source, format, path, chosen)), BRIEF_PATIENCE_S)
    with _opened(source) as rows:
        if format in FORMATS and format not in (*LINE_FORMATS, *_own_formats(rows)):
            raise SlurmGPUError(
                f"Format {format!r} cannot be written to a stream, only to a file; a stream takes {OF_LINES}."
            )
        exported = _write(rows, format, output, chosen)
        output.flush()
        return exported


OWN_FOLDERS = (*FOLDERS, "code", "input", "parts", "checkpoints", "injected")
OWN_FILES = re.compile(
    r"(run|private|recompute|report)\.json|(sweep|items|submissions)\.jsonl|input\.(idx|files)|report\.html"
    r"|merged(\.damaged)?\.h5|function(\.[0-9a-f]{16})?\.(pkl|py)|\..*"
)
"""What a run has in its directory, beside folders: docs/reference/files.md has the list."""


def refuse_output(run: Run, output: Path) -> None:
    """Raise SlurmGPUError if an export to `output` would replace a file of the run, or of its input."""
    if (there := status_of(output)) is None:
        return
    with contextlib.suppress(ValueError):
        first, *rest = resolved(output).relative_to(resolved(run.folder)).parts or (".",)
        if (rest and first in OWN_FOLDERS) or OWN_FILES.fullmatch(first):
            raise SlurmGPUError(f"{output} is a file of the run itself, and would be replaced. Name another file.")
    for file in (*run.input["files"], *run.plan.named_files):
        path = Path(file["path"])
        is_like = path.name == output.name or (file["size_bytes"], file["mtime_ns"]) == (
            there.st_size,
            there.st_mtime_ns,
        )
        if is_like and (its := status_of(path)) is not None and os.path.samestat(its, there):
            raise SlurmGPUError(f"{output} is the input of {run.folder}, and would be replaced. Name another file.")


def _export(source: Path | Run, format: str, output: Path, chosen: Choice) -> Exported:
    if format == FOLDER:
        _refuse_used(output)
    with _opened(source) as rows:
        if format == FOLDER:
            selection = _chosen_rows(rows, chosen)
            with beside(output) as partial:
                partial.mkdir()
                exported = _exported(rows, _write_data_set(selection, partial), selection)
                replace(partial, output)
            fsync_dir(output.parent)
            return exported
        with whole_file(output) as file:
            exported = _write(rows, format, file, chosen)
        if format == "pt" and rows.merged is not None:
            write_json(output.with_name(f"{output.name}.json"), _about(rows.merged))
        return exported


@contextlib.contextmanager
def _opened(source: Path | Run) -> Iterator[RunRows | FileRows]:
    if isinstance(source, Run):
        with RunRows(source, verify=True) as rows:
            if not len(rows):
                raise SlurmGPUError(f"{source.folder} has no rows. `slurmgpu status {source.typed}` shows why.")
            yield rows
    else:
        with results.open(source, verify=True) as merged:
            yield FileRows(merged)


def _write(rows: RunRows | FileRows, format: str, file: IO[bytes], chosen: Choice) -> Exported:
    """Write the rows in a format: the workload's own if it has one of this name."""
    is_own = format in _own_formats(rows)
    if not is_own and format not in FORMATS:
        raise SlurmGPUError(f"There is no export format {format!r}.{did_you_mean(format, FORMATS)}")
    if not is_own and (write := LINE_FORMATS.get(format)):
        lines = _chosen_rows(rows, chosen)
        return _exported(rows, write(lines, file), lines)
    if not is_own and format == "parquet":
        selection = _chosen_rows(rows, chosen)
        return _exported(rows, _write_parquet(selection, file), selection)
    _refuse_items(chosen, format)
    if chosen.columns or chosen.where is not None:
        raise SlurmGPUError(f"Format {format!r} always has all columns and rows: leave out --columns and --where.")
    if (merged := rows.merged) is None:
        raise SlurmGPUError(
            f"Format {format!r} is made from merged.h5, which does not exist yet. Other formats do not need it."
        )
    said = None
    if is_own:
        said = _write_by_workload(format, merged, file)
    else:
        _write_pt(merged, file)
    return Exported(len(merged), said, _n_missing(merged), n_failed=int(merged.failed.sum()))


def _refuse_items(chosen: Choice, format: str) -> None:
    if chosen.reads_items:
        raise SlurmGPUError(
            f"Format {format!r} cannot have fields of the items: leave out --with-items and columns such as item.text. "
            "For all formats, `keep` in the run file makes fields columns of the run."
        )


def _chosen_rows(rows: RunRows | FileRows, chosen: Choice) -> Selection | BesideItems:
    """The chosen rows, with their items if requested."""
    if not chosen.reads_items:
        if isinstance(rows, RunRows):
            refuse_bare_fields(rows.run, chosen.columns, stored_columns(rows.columns))
        return Selection(rows, chosen.columns, chosen.where)
    if isinstance(rows, FileRows):
        raise SlurmGPUError("A merged file does not have the items: name the run directory instead.")
    selection = BesideItems(rows, rows.run, chosen.columns, chosen.where)
    refuse_unknown_fields(selection.columns, selection.known_fields())
    return selection


def _exported(rows: RunRows | FileRows, n_rows: int, selection: Selection | BesideItems) -> Exported:
    if isinstance(rows, RunRows):
        n_missing, problems = rows.run.plan.n_items - selection.n_seen, tuple(dict.fromkeys(rows.problems))
        return Exported(n_rows, None, n_missing, problems, selection.n_failed)
    return Exported(n_rows, None, _n_missing(rows.merged), n_failed=selection.n_failed)


def _n_missing(merged: Merged) -> int:
    """The items of the run that have no row in its merged file; of a shard that is not known."""
    return int(merged.attributes.get("n_items", len(merged))) - len(merged)


def _write_jsonl(selection: PlainRows, file: IO[bytes]) -> int:
    n_rows = 0
    for row in selection.plain_rows():
        line = json.dumps(dict(zip(selection.columns, row, strict=True)), ensure_ascii=False, allow_nan=False)
        file.write(f"{line}\n".encode())
        n_rows += 1
    return n_rows


def _write_csv(selection: PlainRows, file: IO[bytes], delimiter: str = ",") -> int:
    """RFC 4180, or the same with tabs.

    Numbers and text are written plainly, others as JSON, null as empty, errors by their first line.
    """
    text, n_rows = io.TextIOWrapper(file, encoding="utf-8", newline=""), 0
    writer, names = csv.writer(text, delimiter=delimiter), list(selection.columns)
    error = names.index("error") if "error" in names else None
    writer.writerow(names)
    for row in selection.plain_rows(as_cells=True):
        cells = [json.dumps(value) if isinstance(value, list | dict | bool) else value for value in row]
        if error is not None and cells[error] is not None:
            cells[error] = cells[error].partition("\n")[0]
        writer.writerow(cells)
        n_rows += 1
    text.detach()
    return n_rows


def _write_parquet(selection: Selection | BesideItems, file: IO[bytes]) -> int:
    try:
        from pyarrow.parquet import ParquetWriter
    except ImportError as error:
        raise SlurmGPUError("Parquet needs pyarrow: pip install 'slurmgpu[parquet]'") from error
    n_rows = 0
    with ParquetWriter(file, selection.schema) as writer:
        for table in selection.tables():
            writer.write_table(table)
            n_rows += len(table)
    return n_rows


def _write_data_set(selection: Selection | BesideItems, folder: Path) -> int:
    try:
        from slurmgpu.results.data_set import write_data_set
    except ImportError as error:
        raise SlurmGPUError("A data set of Parquet files needs pyarrow: pip install 'slurmgpu[parquet]'") from error
    return write_data_set(selection, folder)


def _refuse_used(output: Path) -> None:
    is_used = status_of(output) is not None and (not is_folder(output) or list_names(output))
    if is_used or not output.name:  # "." or "/"
        raise SlurmGPUError(f"{output} exists. A data set needs a new folder: name one with -o.")


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
            values, missing = data.python_values(), without_value(data, merged.failed, 0, len(merged))
            content[name] = [None if lacks else value for lacks, value in zip(missing, values, strict=True)]
        else:
            content[name] = tensor(data.stored()) if isinstance(data, ArrayData) else list(map(tensor, data.stored()))
    content["error"] = [message or None for message in merged["error"][:]]
    torch.save(content, file)


def _own_formats(rows: RunRows | FileRows) -> Sequence[str]:
    """The formats that the workload writes itself."""
    if isinstance(rows, RunRows):
        return rows.run.plan.exports
    found: Sequence[str] = _beside(rows.merged, "run.json").get("exports", ())
    return found


def _write_by_workload(format: str, merged: Merged, file: IO[bytes]) -> str | None:
    run = Run.open(merged.path.parent)
    owners.refuse_foreign(run, f"export it as {format}, which its workload writes,")
    # Relative settings are relative to the run file's folder.
    plan, base = run.plan, Path(run.plan.search_path)
    with working_folder(base), importer.using(run.folder, code_digest(run.submissions())):
        exports = build(plan.workload, plan.settings, base).exports
        if format not in exports:
            raise SlurmGPUError(f"Workload {plan.workload} no longer has the export format {format!r}.")
        said = exports[format](merged, file)
    return said if isinstance(said, str) else None


def _about(merged: Merged) -> dict[str, Any]:
    """The JSON stored with the tensors: totals, and the settings and summary of the run."""
    attributes = merged.attributes
    about = {name: attributes.get(name) for name in ("run", "workload", "seed", "n_items", "complete", "fingerprint")}
    about |= {"n_rows": len(merged), "n_errors": int(merged.failed.sum())}
    about["columns"] = json.loads(str(attributes["columns"]))
    for key, name in (("settings", "run.json"), ("summary", "report.json")):
        about[key] = _beside(merged, name).get(key)
    return about


def _beside(merged: Merged, name: str) -> dict[str, Any]:
    """The JSON file of that name next to a merged file; {} if there is none of the same run."""
    path = merged.path.parent / name
    try:
        found = json.loads(read_bytes(path, max_bytes=MOST_BYTES))
    except FileNotFoundError:
        return {}  # the merged file was copied elsewhere
    except ValueError as error:
        log.warning("%s is damaged and not used for the export: %s", path, error)
        return {}
    is_same = isinstance(found, dict) and found.get("fingerprint") == merged.attributes["fingerprint"]
    return found if is_same else {}


LINE_FORMATS: Mapping[str, Callable[[PlainRows, IO[bytes]], int]] = {
    "jsonl": _write_jsonl,
    "csv": _write_csv,
    "tsv": partial(_write_csv, delimiter="\t"),
}
"""Writers of chosen columns and rows, row by row, also to a stream; each returns the number of rows."""
OF_LINES = "{}, {} or {}".format(*LINE_FORMATS)
"""Their names in words."""
FOLDER = "hf"
"""The format that makes a folder."""
FORMATS = (*LINE_FORMATS, "parquet", FOLDER, "pt")
