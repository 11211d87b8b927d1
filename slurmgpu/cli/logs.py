"""`logs`: what tasks, their workers and the merge wrote, by task, by item and by failure class."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.style import Style

from slurmgpu.cli.log_index import show_index
from slurmgpu.cli.output import result, result_json, say
from slurmgpu.cli.unstarted import is_at_rest, refuse_unstarted, refuse_unsubmitted
from slurmgpu.errors import SlurmGPUError
from slurmgpu.logs import (
    Line,
    LogFile,
    attempts_with_logs,
    files_of,
    last_end,
    merge_files,
    merged,
    tail_start,
    without_colours,
)
from slurmgpu.plurals import count_of
from slurmgpu.runs import Run
from slurmgpu.searching import Excerpt, Story, events_of_class, read_index, story_of_item
from slurmgpu.searching.excerpts import N_LINES
from slurmgpu.submissions import is_over

N_EXCERPTS = 3
"""So many failures of a class are shown with the lines around them."""
COLOURS = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green", "bright_magenta")


class Printer:
    """Prints lines of logs, each with its source where there are several; colours on a terminal alone."""

    def __init__(self, labels: Mapping[Path, str], *, always: bool = False) -> None:
        self._always = always
        console = Console()
        self._is_coloured = console.is_terminal and not console.no_color
        self._labels: dict[Path, str] = {}
        self.add(labels)

    def add(self, labels: Mapping[Path, str]) -> None:
        """Know more files."""
        many = self._always or len({*labels.values(), *self._labels.values()}) > 1
        width = max(map(len, labels.values()), default=0)
        for number, (path, label) in enumerate(labels.items()):
            style = Style.parse(COLOURS[number % len(COLOURS)])
            shown = style.render(f"{label:<{width}}") if self._is_coloured else f"{label:<{width}}"
            self._labels[path] = f"{shown} | " if many else ""

    def show(self, line: Line, mark: bool = False) -> None:
        """One line."""
        text = line.text if self._is_coloured else without_colours(line.text)
        if self._is_coloured and mark:
            text = Style(bold=True).render(without_colours(text))
        end = "\x1b[0m\n" if "\x1b" in text else "\n"
        sys.stdout.write(f"{self._labels.get(line.file.path, '')}{text}{end}")


def records_of(run: Run, task: str) -> list[dict[str, Any]]:
    """The attempts that "1234_7.0" (an attempt), "1234_7" (its task) or "7" (this task of every submission) names."""
    records = attempts_with_logs(run)
    return [r for r in records if task in (r["attempt"], f"{r['job']}_{r['task']}", str(r["task"]))]


def print_task(run: Run, task: str, n_lines: int | None, *, follow: bool) -> None:
    """Print what the attempts of a task wrote, in the order of time; and what they write."""
    from slurmgpu.cli.following import Following

    records = records_of(run, task)
    if not records:
        refuse_unstarted(run, task, waits=follow)
    labels = labels_of(run, records)
    since = min((record.get("started", 0.0) for record in records), default=0.0)
    printer = Printer({file.path: label for file, label in labels.items()})
    stops = print_files(list(labels), printer, n_lines, since, whole=follow)
    if follow:
        Following(run, printer, stops, lambda: records_of(run, task)).go_on()
        if not records and not records_of(run, task):
            refuse_unstarted(run, task, waits=False)


def print_merge(run: Run, n_lines: int | None, *, follow: bool) -> None:
    """Print what the merge jobs wrote."""
    from slurmgpu.cli.following import Following

    files = merge_files(run)
    lines = run.submissions()
    if not files and lines and lines[-1].get("by_hand") and (is_over(lines) or not follow):
        job = lines[-1].get("merge_job", "JOB")
        raise SlurmGPUError(
            f"{run.folder} has no log of a merge: it was submitted by hand. If sbatch/merge.sbatch has run, its output "
            f"is in slurmgpu-merge-{job}.out, where you typed sbatch. "
            f"`slurmgpu report {run.typed}` shows what came of it."
        )
    if not files and (is_over(lines) or not follow):
        raise SlurmGPUError(
            f"{run.folder} has no log of a merge: none has started, or the command itself merged, as with the executor "
            f"local, and what it said went to its terminal. `slurmgpu report {run.typed}` shows what came of it."
        )
    printer = Printer({file.path: file.source for file in files})
    stops = print_files(files, printer, n_lines, 0.0, whole=follow)
    if follow:
        Following(run, printer, stops, None).go_on()


def print_run(run: Run, n_lines: int) -> dict[Path, int]:
    """Print the last lines of all attempts together, each with its attempt; where the files ended."""
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
        # Attempt by attempt: thousands of files are not open at once.
        since = 0.0 if record is None else record.get("started", 0.0)
        lines += deque(merged(files, since=since, starts=starts, stops=stops), maxlen=n_lines)
    printer = Printer(labels, always=True)
    for line in sorted(lines, key=lambda line: line.time)[-n_lines:]:
        printer.show(line)
    return stops


def labels_of(run: Run, records: Iterable[Mapping[str, Any]], *, named: bool = False) -> dict[LogFile, str]:
    """The files of attempts, each once, with their sources; with the attempt if `named`, or where there are several."""
    records, lines = list(records), run.submissions()
    labels: dict[LogFile, str] = {}
    for record in records:
        for file in files_of(run, record, lines):
            whose = record["attempt"] if file.is_worker else f"{record['job']}_{record['task']}"
            labels.setdefault(file, f"{whose} {file.source}" if named or len(records) > 1 else file.source)
    return labels


def print_files(
    files: list[LogFile], printer: Printer, n_lines: int | None, since: float, *, whole: bool
) -> dict[Path, int]:
    """Print files, or their last lines, in the order of time; where each of them ended, if only `whole` lines count."""
    stops = {file.path: last_end(file.path) for file in files}
    ends = stops if whole else {}
    starts = {path: tail_start(path, n_lines, ends.get(path)) for path in stops if n_lines is not None}
    lines: Iterable[Line] = merged(files, since=since, starts=starts, stops=ends)
    for line in lines if n_lines is None else deque(lines, maxlen=n_lines):
        printer.show(line)
    return stops


def print_item(run: Run, index: int, n_lines: int | None) -> None:
    """Say what became of an item, and show the place in the logs that tells of it."""
    story = story_of_item(run, index, n_lines or N_LINES)
    result(story.sentence)
    show_story(story)
    if story.ended == "missing" and is_at_rest(run):
        say(f"next: slurmgpu resubmit {run.typed}")


def show_story(story: Story) -> None:
    """The place that tells of an item, if any does."""
    if story.excerpt is None:
        says = "say" if len(story.attempts) > 1 else "says"
        result(f"No log {says} more of it." if story.attempts else "No log tells of it.")
        return
    result(f"{story.excerpt.where}\n")
    show_excerpt(story.excerpt)


def show_excerpt(excerpt: Excerpt) -> None:
    """The lines of an excerpt, with a sign where some are left out."""
    printer = Printer({line.file.path: line.file.source for line in excerpt.lines})
    for number, line in enumerate(excerpt.lines):
        if excerpt.is_gap(number):
            sys.stdout.write("…\n")
        printer.show(line, mark=number == excerpt.mark)


def print_class(run: Run, name: str, n_lines: int | None) -> None:
    """Name every failure of a class with its place, and show the first ones."""
    count = 0
    for event in events_of_class(run, name):
        count += 1
        where = f"  {event.file.path}:{event.number}" if event.file else ""
        whose = f" in attempt {event.attempt}" if event.attempt and event.attempt not in event.what else ""
        sys.stdout.write(f"{event.what}{whose}: {event.message.partition(chr(10))[0]}{where}\n")
        excerpt = event.excerpt(n_lines or N_LINES // 2) if count <= N_EXCERPTS else None
        if excerpt is not None:
            show_excerpt(excerpt)
            sys.stdout.write("\n")
    tells = "tells" if count == 1 else "tell"
    said = f"{count_of(count, 'line')} {tells} of {name}" if count else f"No log and no report tells of {name}"
    say(f"{said}. next: slurmgpu logs {run.typed} --item N" if count else f"{said}.")


def show_logs(
    run: Run,
    task: str | None,
    item: int | None,
    failure: str | None,
    *,
    merge: bool,
    follow: bool,
    n_lines: int | None,
    as_json: bool,
) -> None:
    """What the command's arguments ask for; without any, the index."""
    asked = [name for name, value in {"TASK": task, "--item": item, "--class": failure}.items() if value is not None]
    asked += ["--merge"] * merge + ["--json"] * as_json
    if len(asked) > 1:
        raise SlurmGPUError(f"{' and '.join(asked)} do not go together: give one of them.")
    if follow and asked and asked[0] not in ("TASK", "--merge"):
        raise SlurmGPUError(f"--follow does not go with {asked[0]}: give it a TASK, or --merge, or nothing else.")
    if as_json and n_lines is not None:
        raise SlurmGPUError("--lines and --json do not go together: give one of them.")
    if not as_json and item is None:
        refuse_unsubmitted(run, waits=follow)
    if as_json:
        result_json(read_index(run))
    elif item is not None:
        print_item(run, item, n_lines)
    elif failure is not None:
        print_class(run, failure, n_lines)
    elif merge:
        print_merge(run, n_lines, follow=follow)
    elif task is not None:
        print_task(run, task, n_lines, follow=follow)
    elif follow:
        from slurmgpu.cli.following import follow_run

        follow_run(run, n_lines)
    elif n_lines is not None:
        print_run(run, n_lines)
    else:
        show_index(run)
