"""Printing of log lines in order of time, each with its source."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console
from rich.style import Style

from slurmgpu.logs.files import LogFile, attempts_with_logs, files_of, merge_files
from slurmgpu.logs.lines import Line, merged, without_colours
from slurmgpu.logs.places import last_end, tail_start
from slurmgpu.run.directory import Run
from slurmgpu.run.records import Record, task_of

COLOURS = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green", "bright_magenta")


class Printer:
    """Prints log lines, with their source if there are several, and in colour on a terminal."""

    def __init__(self, labels: Mapping[Path, str], *, always: bool = False) -> None:
        self._always = always
        console = Console()
        self._is_coloured = console.is_terminal and not console.no_color
        self._labels: dict[Path, str] = {}
        self.add(labels)

    def add(self, labels: Mapping[Path, str]) -> None:
        """Add files with their labels."""
        many = self._always or len({*labels.values(), *self._labels.values()}) > 1
        width = max(map(len, labels.values()), default=0)
        for number, (path, label) in enumerate(labels.items()):
            style = Style.parse(COLOURS[number % len(COLOURS)])
            shown = style.render(f"{label:<{width}}") if self._is_coloured else f"{label:<{width}}"
            self._labels[path] = f"{shown} | " if many else ""

    def show(self, line: Line, mark: bool = False) -> None:
        """Print a line; in bold with `mark`."""
        text = line.text if self._is_coloured else without_colours(line.text)
        if self._is_coloured and mark:
            text = Style(bold=True).render(without_colours(text))
        end = "\x1b[0m\n" if "\x1b" in text else "\n"
        sys.stdout.write(f"{self._labels.get(line.file.path, '')}{text}{end}")


def records_of(run: Run, task: str) -> list[Record]:
    """The attempts named by `1234_7.0` (an attempt), `1234_7` (its task) or `7` (task 7 of every submission)."""
    records = attempts_with_logs(run)
    return [r for r in records if task in (r["attempt"], task_of(r), str(r["task"]))]


def print_run(run: Run, n_lines: int) -> dict[Path, int]:
    """Print the last lines of all attempts, each with its attempt; the end positions of the files."""
    lines: list[Line] = []
    labels: dict[Path, str] = {}
    stops: dict[Path, int] = {}
    merges = {file: file.source for file in merge_files(run)}
    for record in [*attempts_with_logs(run), None]:
        own = merges if record is None else labels_of(run, [record], named=True)
        files = [file for file in own if file.path not in stops]
        labels |= {file.path: own[file] for file in files}
        stops |= {file.path: last_end(file.path) for file in files}
        starts = {file.path: tail_start(file.path, n_lines, stops[file.path]) for file in files}
        # Attempt by attempt: thousands of files would be open at once.
        since = 0.0 if record is None else record["started"]
        lines += deque(merged(files, since=since, starts=starts, stops=stops), maxlen=n_lines)
    printer = Printer(labels, always=True)
    for line in sorted(lines, key=lambda line: line.time)[-n_lines:]:
        printer.show(line)
    return stops


def labels_of(run: Run, records: Iterable[Record], *, named: bool = False) -> dict[LogFile, str]:
    """The files of attempts with labels: the source, with the attempt if `named` or if there are several."""
    records, lines = list(records), run.submissions()
    labels: dict[LogFile, str] = {}
    for record in records:
        for file in files_of(run, record, lines):
            whose = record["attempt"] if file.is_worker else task_of(record)
            labels.setdefault(file, f"{whose} {file.source}" if named or len(records) > 1 else file.source)
    return labels


def print_files(
    files: list[LogFile], printer: Printer, n_lines: int | None, since: float, *, whole: bool
) -> dict[Path, int]:
    """Print files or their last lines, with `whole` only complete lines; the ends of complete lines."""
    stops = {file.path: last_end(file.path) for file in files}
    ends = stops if whole else {}
    starts = {path: tail_start(path, n_lines, ends.get(path)) for path in stops if n_lines is not None}
    lines: Iterable[Line] = merged(files, since=since, starts=starts, stops=ends)
    for line in lines if n_lines is None else deque(lines, maxlen=n_lines):
        printer.show(line)
    return stops
