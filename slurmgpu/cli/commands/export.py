"""The command export."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from slurmgpu.cli.console import result, say
from slurmgpu.errors import SlurmGPUError
from slurmgpu.merge.export import FOLDER, FORMATS, Exported, export
from slurmgpu.merge.sweep_export import export_sweep
from slurmgpu.run.directory import Run
from slurmgpu.run.sweep_file import said_not_submitted
from slurmgpu.util.amounts import count_of
from slurmgpu.util.shared_files import is_file, status_of

MOST_RUNS = 20
"""The most incomplete runs of a sweep that are named in one line."""


def export_rows(
    source: Run | Path,
    output: Path,
    file_format: str | None,
    columns: Sequence[str],
    where: str | None,
    *,
    with_items: bool,
) -> None:
    """Write the rows of a run, or of a merged file, to a file, or to standard output for `-`; say what is missing."""
    chosen = _format(output, file_format)
    if chosen not in (known := [*FORMATS, *(source.plan.exports if isinstance(source, Run) else ())]):
        raise SlurmGPUError(f"Format {chosen!r} is unknown; --format takes {', '.join(known)}.")
    if chosen != FOLDER:
        _refuse_no_file(output)
    to = sys.stdout.buffer if str(output) == "-" else output
    exported = export(source, chosen, to, columns, where, with_items=with_items)
    if to is output:
        result(f"{output}: {exported.said or count_of(exported.n_rows, 'row')}")
    _tell_failed(exported, columns)
    if isinstance(source, Run):
        tell_missing(source, exported.n_missing, exported.problems)
    elif exported.n_missing:
        say(f"The run was incomplete when it was merged: {count_of(exported.n_missing, 'item')} without a row.")


def export_sweep_rows(
    folder: Path, output: Path, file_format: str | None, columns: Sequence[str], where: str | None, *, with_items: bool
) -> None:
    """Write the rows that the runs of a sweep have to one file, or to standard output for `-`."""
    if with_items:
        raise SlurmGPUError("--with-items takes one run; for a sweep, name the fields as item.FIELD in --columns.")
    _refuse_no_file(output)
    to = sys.stdout.buffer if str(output) == "-" else output
    exported = export_sweep(folder, _format(output, file_format), to, columns, where)
    if to is output:
        result(f"{output}: {count_of(exported.n_rows, 'row')}")
    _tell_failed(exported, columns)
    for line in (*map(said_not_submitted, exported.not_made), *exported.problems):
        say(line)
    if missing := exported.missing:
        by_run = [f"{name} {n_items:,}" for name, n_items in missing.items()]
        listed = ", ".join(by_run if len(by_run) <= MOST_RUNS else [*by_run[: MOST_RUNS - 1], "…"])
        typed = shlex.quote(str(folder))
        say(
            f"Runs are incomplete: {count_of(exported.n_missing, 'item')} without a row ({listed}). "
            f"slurmgpu status {typed}"
        )


def _format(output: Path, given: str | None) -> str:
    chosen = given or ("jsonl" if str(output) == "-" else output.suffix.removeprefix("."))
    if not chosen:
        raise SlurmGPUError(f"{output} has no suffix to tell its format: write {output}.csv, for example, or --format.")
    return chosen


def _tell_failed(exported: Exported, columns: Sequence[str]) -> None:
    if n_failed := exported.n_failed:
        verb, whose = ("belongs", "a failed item") if n_failed == 1 else ("belong", "failed items")
        why = (
            ": the column error says why" if not columns or "error" in columns else "; add the column error to see why"
        )
        say(f"{n_failed:,} of the rows {verb} to {whose}{why}.")


def _refuse_no_file(output: Path) -> None:
    if status_of(output) is not None and not is_file(output):
        raise SlurmGPUError(f"{output} is not a regular file; name the file to write with -o.")


def tell_missing(run: Run, n_missing: int, problems: Sequence[str]) -> None:
    """Say on stderr how many items have no row, and which shards are damaged."""
    for problem in problems:
        say(problem)
    if n_missing:
        say(f"The run is incomplete: {count_of(n_missing, 'item')} without a row. slurmgpu status {run.typed}")
