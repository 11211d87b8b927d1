"""Export the rows of all runs of a sweep as one JSONL or CSV: `run`, the values that vary, and the columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.merge.beside_items import PREFIX, BesideItems
from slurmgpu.merge.export import LINE_FORMATS, Exported, write_whole
from slurmgpu.results import BLOCK_BYTES
from slurmgpu.results.published import RunRows
from slurmgpu.results.selection import Selection
from slurmgpu.run.directory import Run
from slurmgpu.run.sweep_file import values_of_runs
from slurmgpu.shards.columns import columns_from_json, stored_columns
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, cause_raised, retried

RUN = "run"
"""The column of the runs' names."""


def export_sweep(
    folder: Path,
    format: str,  # noqa: A002 - the word of the command line
    output: Path | IO[bytes],
    columns: Sequence[str] = (),
    where: str | None = None,
) -> Exported:
    """Write the rows that the runs of a sweep have now to a file or a stream, run by run; SlurmGPUError as `export`.

    `columns` and `where` are as of `export`; a column that a run lacks is null in its rows.
    """
    if format not in LINE_FORMATS:
        raise SlurmGPUError(f"The rows of a sweep are written as {' or '.join(LINE_FORMATS)}, not as {format!r}.")
    if not isinstance(output, Path):
        return _written(folder, format, output, columns, where)
    target = output

    def write(file: IO[bytes]) -> Exported:
        return _written(folder, format, file, columns, where)

    return retried(lambda: cause_raised(lambda: write_whole(target, write)), BRIEF_PATIENCE_S)


def _written(folder: Path, format: str, file: IO[bytes], columns: Sequence[str], where: str | None) -> Exported:  # noqa: A002
    runs = [(Run.open(folder / name), values) for name, values in values_of_runs(folder).items()]
    rows = SweepRows(runs, columns, where)
    n_rows = LINE_FORMATS[format](rows, file)
    return Exported(n_rows, None, rows.n_items - rows.n_seen, tuple(rows.problems))


@dataclass
class SweepRows:
    """The rows of the runs of a sweep, one run after the other, beside its name and its values.

    A value goes by the last part of its key, or by the whole key where that is also another's, or a column's.
    """

    runs: Sequence[tuple[Run, Mapping[str, Any]]]
    names: Sequence[str] = ()
    where: str | None = None
    n_seen: int = field(default=0, init=False)
    problems: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._own = [list(stored_columns(columns_from_json(run.plan.columns))) for run, _ in self.runs]
        known = dict.fromkeys(name for names in self._own for name in names)
        keys = dict.fromkeys(key for _, values in self.runs for key in values)
        lasts = Counter(key.rpartition(".")[2] for key in keys)
        short = {key: key.rpartition(".")[2] for key in keys}
        self._values = {
            key: last if lasts[last] == 1 and last not in {*known, RUN} else key for key, last in short.items()
        }
        everything = [*([] if RUN in known else [RUN]), *self._values.values(), *known]
        for name in self.names:
            if name not in everything and not name.startswith(PREFIX):
                raise SlurmGPUError(f"There is no column {name!r}.{did_you_mean(name, everything)}")
        self.columns = list(self.names) or everything

    @property
    def n_items(self) -> int:
        """The number of items of all runs."""
        return sum(run.plan.n_items for run, _ in self.runs)

    def plain_rows(self, n_bytes: int = BLOCK_BYTES, *, as_cells: bool = False) -> Iterator[tuple[Any, ...]]:
        """The rows as JSON values, or as cells of CSV, in the order of `columns`."""
        self.n_seen = 0
        for (run, values), own in zip(self.runs, self._own, strict=True):
            fixed = {RUN: run.name, **{self._values[key]: value for key, value in values.items()}}
            names = [name for name in self.columns if name in own or name.startswith(PREFIX)] or ["index"]
            with RunRows(run, verify=True) as rows:
                reads_items = any(name.startswith(PREFIX) for name in names)
                selection = (
                    BesideItems(rows, run, names, self.where) if reads_items else Selection(rows, names, self.where)
                )
                for row in selection.plain_rows(n_bytes, as_cells=as_cells):
                    found = {**fixed, **dict(zip(selection.columns, row, strict=True))}
                    yield tuple(found.get(name) for name in self.columns)
                self.n_seen += selection.n_seen
                self.problems += [f"{run.name}: {problem}" for problem in dict.fromkeys(rows.problems)]
