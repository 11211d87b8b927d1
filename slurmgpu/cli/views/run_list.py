"""`list`: the runs under a directory, with at most one call of squeue."""

from __future__ import annotations

import contextlib
import os
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from rich.cells import cell_len
from rich.markup import escape

from slurmgpu.cli.completion import PROBE
from slurmgpu.cli.console import say, wide_console
from slurmgpu.cli.views.columns import bare_table
from slurmgpu.errors import NoAnswerError, SlurmGPUError
from slurmgpu.executors.interface import Executor
from slurmgpu.executors.registry import queued_jobs, queueing
from slurmgpu.report.completeness import has_every_row, is_final
from slurmgpu.report.queued import Queue
from slurmgpu.report.report_file import read_report
from slurmgpu.report.states import is_told
from slurmgpu.report.status import read_status
from slurmgpu.run.directory import Run
from slurmgpu.shards.merged_head import read_merged_head
from slurmgpu.slurm.queue import in_short
from slurmgpu.util.amounts import count_of, share_of, span_of
from slurmgpu.util.exceptions import described
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, PATIENCE_S, status_of
from slurmgpu.util.users import expanded

LIST_FORMAT = "slurmgpu list"
LIST_VERSION = 1

MAX_ENTRIES = 10_000
"""A folder with more entries holds data, and is not searched further."""
SKIPPED = {"node_modules", "__pycache__", "site-packages"}
"""Folders that are not searched, besides hidden ones."""
SIGNS = ("report.json", "submissions.jsonl", "run.json", "tasks", "shards")
"""Entries of a run directory that change while it works: the newest modification is its last activity."""

GAP = 2
NAME_WIDTH = 40
"""The width reserved for names before numbers get any."""
LEFT_OUT = ("GPU-hours", "items", "last activity", "failed", "done", "state")
"""Columns that are left out, in this order, if the terminal is narrow."""


class Row(TypedDict):
    """A run in the list; None is unknown, for example in a damaged run."""

    run: str
    run_dir: str
    state: str
    n_items: int | None
    n_items_done: int | None
    n_errors: int | None
    age_s: float | None
    gpu_hours: float | None
    probe_of: str | None
    problem: str | None


class RunList(TypedDict):
    """The output of `slurmgpu list --json`."""

    format: str
    version: int
    folder: str
    runs: list[Row]
    notes: list[str]


def list_runs(folder: Path) -> RunList:
    """The runs under a folder, latest activity first: what `list --json` prints."""
    folder = expanded(folder).absolute()
    if not folder.is_dir():
        raise SlurmGPUError(f"{folder} is not a directory; name one to search for runs.")
    notes: Counter[str] = Counter()
    opened = {path: _open(path) for path in _once(folder, find_runs(folder, notes))}
    jobs = _ask_queues([run for run in opened.values() if isinstance(run, Run)], notes)
    now = time.time()
    rows = [_row(path, run, jobs, now) for path, run in opened.items()]
    rows.sort(key=lambda row: (row["age_s"] is None, row["age_s"], row["run_dir"]))
    return {
        "format": LIST_FORMAT,
        "version": LIST_VERSION,
        "folder": str(folder),
        "runs": rows,
        "notes": [note.format(count_of(count, "folder")) for note, count in notes.items()],
    }


def find_runs(folder: Path, notes: Counter[str]) -> Iterator[Path]:
    """The run directories in a folder and below; `notes` counts the folders that were skipped, by reason.

    Run directories are not searched. Links to folders are followed one level deep, which avoids cycles.
    """
    try:
        if status_of(folder / "run.json", BRIEF_PATIENCE_S) is not None:
            yield folder
            return
        names = _folders(folder, notes)
    except OSError as error:
        notes[f"{{}} could not be read: {error.strerror}"] += 1
        return
    for name, is_link in names:
        path = folder / name
        yield from _behind_link(path, notes) if is_link else find_runs(path, notes)


def _once(folder: Path, found: Iterable[Path]) -> Iterable[Path]:
    """Each run once, by a path without links if there is one."""
    base = folder.resolve()
    names: dict[Path, Path] = {}
    for path in sorted(found, key=lambda path: (path.resolve() != base / path.relative_to(folder), path)):
        names.setdefault(path.resolve(), path)
    return names.values()


def _behind_link(folder: Path, notes: Counter[str]) -> Iterator[Path]:
    """The run that a link points to, or the runs in the folder that it points to."""
    with contextlib.suppress(OSError):  # a broken link, or a folder that cannot be read
        if _is_run(folder):
            yield folder
        else:
            yield from (folder / name for name, _ in _folders(folder, notes) if _is_run(folder / name))


def _is_run(folder: Path) -> bool:
    return _tried(lambda: status_of(folder / "run.json", BRIEF_PATIENCE_S) is not None)


def _folders(folder: Path, notes: Counter[str]) -> list[tuple[str, bool]]:
    """The folders in a folder that may hold runs: name, and whether it is a link."""
    names = []
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number >= MAX_ENTRIES:
                notes[f"{{}} with more than {MAX_ENTRIES:,} entries, not searched completely"] += 1
                break
            if entry.name == "pyvenv.cfg":
                return []
            if not entry.name.startswith(".") and entry.name not in SKIPPED and _tried(entry.is_dir):
                names.append((entry.name, entry.is_symlink()))
    return sorted(names)


def _tried(check: Callable[[], bool]) -> bool:
    """The result of a check; False if it fails, as for a damaged run or a cycle of links."""
    with contextlib.suppress(Exception):
        return check()
    return False


def _open(folder: Path) -> Run | Exception:
    """The run in a run directory, or what is wrong with it."""
    try:
        return Run.open(folder)
    except Exception as error:  # files may be damaged in any way
        return error


def _ask_queues(runs: Sequence[Run], notes: Counter[str]) -> dict[str, Sequence[Any]]:
    """The user's jobs by executor, with one request each; queues that do not answer are left out and noted."""
    wanted: dict[Executor, bool] = {}
    for run in runs:
        with contextlib.suppress(Exception):  # the run's own row says what is wrong with it
            lines = run.submissions()
            is_queued = any(line["state"] == "queued" for line in lines)
            wanted |= {executor: is_queued or wanted.get(executor, False) for executor in queueing(lines)}
    found: dict[str, Sequence[Any]] = {}
    for executor, is_queued in wanted.items():
        try:
            found[executor.name] = executor.own_jobs()
        except NoAnswerError as error:
            if is_queued:
                notes[f"The queue is not known: {in_short(error).replace('{', '(').replace('}', ')')}."] += 1
    return found


def _row(folder: Path, run: Run | Exception, jobs: Mapping[str, Sequence[Any]], now: float) -> Row:
    row: Row = {
        "run": folder.name,
        "run_dir": str(folder),
        "state": "",
        "n_items": None,
        "n_items_done": None,
        "n_errors": None,
        "age_s": _age(folder, now),
        "gpu_hours": None,
        "probe_of": _probed(run) if isinstance(run, Run) else None,
        "problem": None,
    }
    try:
        if isinstance(run, Exception):
            raise run
        _enter_standing(row, run, queued_jobs(run, among=jobs))
    except Exception as error:
        row["state"] = "unreadable" if isinstance(error, PermissionError) else "damaged"
        row["problem"] = _why(error)
    return row


def _probed(run: Run) -> str | None:
    """The directory of the run that this one is a probe of; None if it is no probe."""
    is_one = run.folder.name.endswith(PROBE) and run.plan.is_probe
    return str(run.folder.with_name(run.folder.name.removesuffix(PROBE))) if is_one else None


def _enter_standing(row: Row, run: Run, queued: Queue | None) -> None:
    """Enter state and counts: from the report if the run has ended, else from the attempts' records."""
    try:
        report, problem = read_report(run), None
    except SlurmGPUError as error:
        report, problem = None, str(error)
    lines = run.submissions()
    merged = is_final(lines) and has_every_row(read_merged_head(run.merged, PATIENCE_S), run.plan)
    if report is None or not is_told(lines, report["submissions"], queued):
        status = read_status(run, queued)
        state, n_done, n_errors = status["state"], status["n_items_done"], status["n_errors"]
    else:
        n_done = run.plan.n_items if merged else sum(b - a for a, b in map(run.plan.bounds, run.published()))
        state, n_errors = "complete" if merged else "incomplete", report["n_errors"]
    row["n_items"], row["n_items_done"], row["problem"] = run.plan.n_items, n_done, problem
    row["state"], row["n_errors"], row["gpu_hours"] = state, n_errors, report["gpu_hours"] if report else None


def _age(folder: Path, now: float) -> float | None:
    times = []
    for name in SIGNS:
        with contextlib.suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return round(max(0.0, now - max(times)), 1) if times else None


def _why(error: Exception) -> str:
    if isinstance(error, SlurmGPUError):
        return str(error)
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} cannot be read: {error.strerror}."
    return textwrap.shorten(described(error), 160, placeholder=" …")


def show_list(value: RunList) -> None:
    """Print a line for each run with the columns that fit, and problems on stderr."""
    folder, runs = Path(value["folder"]), value["runs"]
    if not runs:
        say(f"No run directory under {folder}. `slurmgpu submit` creates one.")
    else:
        console = wide_console()
        lines = [_cells(row, folder) for row in runs]
        shown = _fitting(lines, console.width)
        table = bare_table(GAP)
        for name in shown:
            words = name in ("run", "state")
            table.add_column(name, justify="left" if words else "right", no_wrap=name != "run", overflow="fold")
        for line in lines:
            table.add_row(*(escape(line[name]) for name in shown))
        console.print(table)
        if left_out := [name for name in lines[0] if name not in shown]:
            say(f"Left out for lack of space: {', '.join(left_out)}. A wider terminal or --json shows them.")
    for row in runs:
        if row["problem"]:
            say(f"{row['run_dir']}: {row['problem']}")
    for note in value["notes"]:
        say(note)


def _fitting(lines: Sequence[dict[str, str]], width: int) -> list[str]:
    """The columns that fit: numbers are never cut, and names not below `NAME_WIDTH`."""
    widths = {name: max(len(name), *(cell_len(line[name]) for line in lines)) + GAP for name in lines[0]}
    widths["run"] = min(widths["run"], NAME_WIDTH + GAP)
    for name in LEFT_OUT:
        if sum(widths.values()) - GAP <= width:
            break
        del widths[name]
    return list(widths)


def _cells(row: Row, folder: Path) -> dict[str, str]:
    total, done = row["n_items"], row["n_items_done"]
    return {
        "run": _typed(row["run_dir"], folder),
        "state": row["state"] if row["probe_of"] is None else f"probe, {row['state']}",
        "items": "–" if total is None else f"{done:,} of {total:,}",
        "done": "–" if not total else share_of(done or 0, total),
        "failed": "–" if row["n_errors"] is None else f"{row['n_errors']:,}",
        "GPU-hours": "–" if row["gpu_hours"] is None else f"{row['gpu_hours']:,.2f}",
        "last activity": "–" if row["age_s"] is None else f"{span_of(row['age_s'])} ago",
    }


def _typed(run_dir: str, folder: Path) -> str:
    """The run directory relative to the searched folder, without control characters."""
    near = os.path.relpath(run_dir, folder)
    near = Path(run_dir).name if near == "." else near
    return "".join(letter if letter.isprintable() else "?" for letter in near)
