"""Export the rows of all runs of a sweep as one JSONL or CSV: `run`, the values that vary, and the columns.

All column names differ. The names and the condition are checked for every run, and every byte of each merged.h5 is
verified, before the first row is written.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.merge.beside_items import PREFIX, BesideItems, fields_among, refuse_bare_fields, refuse_unknown_fields
from slurmgpu.merge.export import LINE_FORMATS, OF_LINES, Exported, refuse_output
from slurmgpu.results.published import RunRows
from slurmgpu.results.selection import Selection, check_names
from slurmgpu.run.directory import Run
from slurmgpu.run.sweep_file import listed_runs, was_submitted
from slurmgpu.shards.columns import columns_from_json, stored_columns
from slurmgpu.util.atomic_files import whole_file
from slurmgpu.util.packages import check_pyarrow
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, cause_raised, exists, retried
from slurmgpu.util.toml import parts_of

if TYPE_CHECKING:
    from slurmgpu.results.constants import Constants

RUN = "run"
"""The column of the runs' names."""
OF_SWEEP = "sweep."
"""The prefix of a column whose name is taken; columns of runs have no dot."""


@dataclass(frozen=True)
class SweepExported(Exported):
    """The `Exported` of a sweep, with the number of items without a row by run, and the runs that were not made.

    `n_missing` counts only runs that were made: the number of items in the others is unknown.
    """

    missing: Mapping[str, int] = field(default_factory=dict)
    not_made: Sequence[Path] = ()


def export_sweep(
    folder: Path,
    format: str,
    output: Path | IO[bytes],
    columns: Sequence[str],
    where: str | None,
) -> SweepExported:
    """Write the rows that the runs of a sweep have now to a file or a stream, run by run. Raises as `export` does.

    `columns` and `where` are as in `export`, and may name the columns of the sweep; a column that a run lacks is null
    in its rows.
    """
    if format not in LINE_FORMATS:
        raise SlurmGPUError(f"The rows of a sweep can be written as {OF_LINES}, not as {format!r}.")
    if not isinstance(output, Path):
        return _written(folder, format, output, columns, where)
    path = output
    for name in listed_runs(folder) if exists(path) else ():
        if was_submitted(folder / name):
            refuse_output(Run.open(folder / name), path)

    def write() -> SweepExported:
        with whole_file(path) as file:
            return _written(folder, format, file, columns, where)

    return retried(lambda: cause_raised(write), BRIEF_PATIENCE_S)


def _written(folder: Path, format: str, file: IO[bytes], columns: Sequence[str], where: str | None) -> SweepExported:
    listed = listed_runs(folder)
    not_made = [folder / name for name in listed if not was_submitted(folder / name)]
    runs = [(Run.open(folder / name), values) for name, values in listed.items() if folder / name not in not_made]
    rows = SweepRows(runs, columns, where)
    if not rows.check():
        typed = shlex.quote(str(folder))
        raise SlurmGPUError(f"The runs in {folder} have no rows. `slurmgpu status {typed}` shows why.")
    n_rows = LINE_FORMATS[format](rows, file)
    missing = {run.name: run.plan.n_items - n_seen for (run, _), n_seen in zip(runs, rows.n_seen, strict=True)}
    missing = {name: n_items for name, n_items in missing.items() if n_items}
    n_missing, problems = sum(missing.values()), tuple(rows.problems)
    return SweepExported(n_rows, None, n_missing, problems, rows.n_failed, missing, not_made)


@dataclass
class SweepRows:
    """The rows of the runs of a sweep, one run after the other, each with its run's name and values.

    `names` are columns; by default all. `n_seen` counts the rows of each run that were read, chosen or not; `n_failed`
    counts the chosen rows of failed items.
    """

    runs: Sequence[tuple[Run, Mapping[str, Any]]]
    names: Sequence[str]
    where: str | None
    n_seen: list[int] = field(default_factory=list, init=False)
    n_failed: int = field(default=0, init=False)
    problems: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._own = [columns_from_json(run.plan.columns) for run, _ in self.runs]
        known = dict.fromkeys(name for own in self._own for name in stored_columns(own))
        keys = dict.fromkeys(key for _, values in self.runs for key in values)
        run_name, names = sweep_columns(list(keys), known)
        self._fixed = [
            {run_name: run.name, **{names[key]: values.get(key) for key in names}} for run, values in self.runs
        ]
        everything = [run_name, *names.values(), *known]
        of_items = [name for name in self.names if name.startswith(PREFIX)]
        for run, _ in self.runs[:1]:
            refuse_bare_fields(run, self.names, [*everything, *of_items])
        check_names(self.names, [*everything, *of_items])
        self.columns = list(self.names) or everything
        self._constants = [None] * len(self.runs) if self.where is None else self._as_constants()

    def check(self) -> int:
        """The number of existing rows.

        Raises SlurmGPUError if a run is damaged or does not fit the condition, or if no chosen item has a field.
        """
        n_rows, wanted, known = 0, set(fields_among(self.columns)), set[str]()
        for number, (run, _) in enumerate(self.runs):
            try:
                with RunRows(run, verify=True) as rows:
                    selection = self._selection(number, rows)
                    if isinstance(selection, BesideItems) and not known.issuperset(wanted):
                        known |= selection.known_fields()
                    n_rows += len(rows)
            except SlurmGPUError as error:
                raise SlurmGPUError(f"Run {run.name}: {error}") from error
        refuse_unknown_fields(self.columns, known)
        return n_rows

    def plain_rows(self, *, as_cells: bool = False) -> Iterator[tuple[Any, ...]]:
        """The rows as JSON values, or as cells of CSV, in the order of `columns`."""
        self.n_seen.clear()
        self.n_failed = 0
        for number, (run, _) in enumerate(self.runs):
            with RunRows(run) as rows:  # its blocks are verified one by one
                selection = self._selection(number, rows)
                for row in selection.plain_rows(as_cells=as_cells):
                    found = {**dict(zip(selection.columns, row, strict=True)), **self._fixed[number]}
                    yield tuple(found.get(name) for name in self.columns)
                self.n_seen.append(selection.n_seen)
                self.n_failed += selection.n_failed
                self.problems += [f"{run.name}: {problem}" for problem in dict.fromkeys(rows.problems)]

    def _selection(self, number: int, rows: RunRows) -> Selection | BesideItems:
        own, constants = stored_columns(self._own[number]), self._constants[number]
        names = [name for name in self.columns if name in own or name.startswith(PREFIX)] or ["index"]
        if any(name.startswith(PREFIX) for name in names):
            return BesideItems(rows, rows.run, names, self.where, constants)
        return Selection(rows, names, self.where, constants=constants)

    def _as_constants(self) -> Sequence[Constants]:
        check_pyarrow("A condition needs")
        from slurmgpu.results.constants import constants_of

        return constants_of(self._fixed, [stored_columns(own) for own in self._own])


def sweep_columns(keys: Sequence[str], known: Mapping[str, object]) -> tuple[str, dict[str, str]]:
    """The names of the columns for the runs' names and for their values by key of [sweep], given the `known` columns.

    A value's column is named by the last part of its key. If that name is taken, by the whole key, such as
    `resources.gpus`, or by the key after `sweep.`.
    """
    taken = set(known)
    lasts = Counter(parts_of(key)[-1] for key in keys)

    def free(*names: str) -> str:
        longer = [OF_SWEEP * number + names[-1] for number in range(1, len(taken) + 2)]
        name = next(each for each in (*names, *longer) if each not in taken and not each.startswith(PREFIX))
        taken.add(name)
        return name

    run_name = free(RUN)
    found = {}
    for key in keys:
        last, whole = parts_of(key)[-1], key.removeprefix(".")
        found[key] = free(last, whole) if lasts[last] == 1 else free(whole)
    return run_name, found
