"""Excerpts of an attempt's logs: its end, a worker's death, or the context of a line."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmgpu.logs.files import LogFile, files_of
from slurmgpu.logs.lines import Line, merged, read_lines, text_of, without_colours
from slurmgpu.logs.places import LINE_BYTES, line_around, line_number, places_of, tail_start, time_start
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import POLICIES
from slurmgpu.run.records import Death, Record
from slurmgpu.search.cached_run import cached

TRACEBACK_BEGINS = "Traceback (most recent call last)"
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
"""The lines between chained tracebacks."""
LOOK_LINES = 440
"""The number of lines that are searched for the marked one, and the longest excerpt."""
N_LINES = 40
BEFORE = 5
"""The number of lines before the marked one."""
MARGIN_S = 2.0
"""Tolerance between the times of a record and of log lines."""
WORKER_BEGINS = " slurmgpu.worker: this worker is process "
STACK_BEGINS, CRASHED = "Fatal Python error", "Current thread "
"""Lines of faulthandler: its first, and the one above the stack of the faulty thread."""
N_VERDICTS = 3
N_FRAMES = 10
"""The number of lines of the faulty stack that are shown first."""
TRACEBACK_ELSEWHERE = r" \[traceback: item (\d+)\]$"
NAME = r"(?: \(.*?\))?"
"""The name of an item after its number, in the worker's lines of a run with a key."""
_OF_SUBMITIT = re.compile(
    r"^submitit INFO \(| INFO submitit: |^(?:submitit WARNING |.* WARNING submitit: ).*Bypassing signal"
)
"""Submitit's own lines; the last says that the job succeeded, even if it did not."""


@dataclass(frozen=True)
class Excerpt:
    """Lines of an attempt's logs ordered by time; `mark` is the index of the line searched for."""

    lines: tuple[Line, ...]
    mark: int = 0

    @property
    def path(self) -> Path:
        """The file of the marked line."""
        return self.lines[self.mark].file.path

    @property
    def number(self) -> int:
        """The line number of the marked line, from 1; 0 if time was up, see `search_until`."""
        return line_number(self.path, self.lines[self.mark].offset)

    @property
    def where(self) -> str:
        """FILE:LINE of the marked line; only FILE if time was up."""
        number = self.number
        return f"{self.path}:{number}" if number else str(self.path)

    def is_gap(self, number: int) -> bool:
        """Whether lines of the same file are omitted before this one."""
        line = self.lines[number]
        before = [other for other in self.lines[:number] if other.file == line.file]
        return bool(before) and before[-1].end != line.offset

    def without(self, others: Collection[Line]) -> Excerpt:
        """The excerpt without these lines, except the marked one."""
        kept = [number for number, line in enumerate(self.lines) if number == self.mark or line not in others]
        return Excerpt(tuple(self.lines[number] for number in kept), kept.index(self.mark))

    def texts(self) -> list[str]:
        """The lines as plain text, with "…" where lines are omitted."""
        return ["…\n" * self.is_gap(n) + without_colours(line.text) for n, line in enumerate(self.lines)]


def excerpt_of_attempt(run: Run, attempt: str, max_lines: int = N_LINES) -> Excerpt | None:
    """The last lines of an attempt's logs, with the mark at the failure; None without logs."""
    run = cached(run)
    record = run.logged.get(attempt)
    files = [] if record is None else files_of(run, record)
    if record is None or not files:
        return None
    ended = record["ended"]
    lines = _tail(files, record, None if ended is None else ended + MARGIN_S)
    lines = [line for line in lines if not _OF_SUBMITIT.search(line.text)] or lines
    # The last line with the failure class is the most informative, unless it is about an item.
    verdict = record["failure"]
    of_item = re.compile(rf"\bitem \d+(?: is quarantined|{NAME}): {verdict}: ")
    found = (place for place, line in enumerate(lines) if verdict and f": {verdict}: " in line.text)
    marks = [place for place in found if not of_item.search(lines[place].text)]
    return Excerpt(*pick(lines, marks[-1] if marks else len(lines) - 1, (), max_lines)) if lines else None


def excerpt_of_death(run: Run, record: Record, death: Death, max_lines: int = N_LINES) -> Excerpt | None:
    """The last lines of a worker before its death, and its task's lines on that; None without logs."""
    files, at = files_of(run, record), float(death["at"])
    words = _tail(workers_of(files), record, at)
    begun = [place for place, line in enumerate(words) if WORKER_BEGINS in line.text]
    words = words[begun[-1] :] if begun else words
    tasks = [file for file in files if not file.is_worker]
    verdicts: list[Line] = []
    for line in lines_between(tasks, record, at - 0.01, at + MARGIN_S):
        if line.is_dated and "slurmgpu." in line.text and len(verdicts) < N_VERDICTS:
            verdicts.append(line)
            if f": {death['class']}: {death['message']}" in line.text and "quarantined" not in line.text:
                break  # the rest is about the next worker
    if not words and not verdicts:
        return None
    lines = [*words, *verdicts]
    stack = max((place for place, line in enumerate(words) if line.text.startswith(STACK_BEGINS)), default=None)
    if stack is None:
        return Excerpt(*pick(lines, len(lines) - 1, (), max_lines))
    return Excerpt(*pick(lines, stack, _of_stack(lines, stack, len(words)), max_lines))


def _of_stack(lines: Sequence[Line], stack: int, n_words: int) -> list[int]:
    """The lines of a crash in order of importance: the task's verdict, then the faulty thread."""
    guilty = next((place for place in range(stack, n_words) if lines[place].text.startswith(CRASHED)), stack + 1)
    verdicts = range(n_words, len(lines))[::-1]
    first = [*verdicts[:1], *range(guilty, n_words)[:N_FRAMES], *verdicts, *range(max(0, stack - 3), stack)]
    return [*first, *range(guilty, n_words)]


def workers_of(files: Iterable[LogFile]) -> list[LogFile]:
    """The workers' files among an attempt's."""
    return [file for file in files if file.is_worker]


def _tail(files: list[LogFile], record: Record, until: float | None) -> list[Line]:
    since = record["started"]
    stops = {} if until is None else {file.path: time_start(file.path, until + 0.001, since=since) for file in files}
    starts = {file.path: tail_start(file.path, LOOK_LINES, stops.get(file.path)) for file in files}
    return list(deque(merged(files, since=since, starts=starts, stops=stops), maxlen=LOOK_LINES))


def part_between(file: LogFile, record: Record, since: float, until: float) -> tuple[int, int]:
    """The range of bytes with an attempt's lines between two times."""
    begun = record["started"]
    start = time_start(file.path, since, since=begun)
    return start, time_start(file.path, until, since=begun, start=start)


def lines_between(files: list[LogFile], record: Record, since: float, until: float) -> Iterator[Line]:
    """The lines of an attempt's files between two times; earlier parts are not read."""
    parts = {file.path: part_between(file, record, since, until) for file in files}
    starts, stops = ({path: part[end] for path, part in parts.items()} for end in (0, 1))
    return merged(files, since=record["started"], starts=starts, stops=stops)


def excerpt_around(file: LogFile, offset: int, max_lines: int, begun: int = 0) -> Excerpt:
    """The line at an offset, a few before it but not before `begun`, and its traceback, also of an earlier line."""
    width = BEFORE + max(0, max_lines - N_LINES) // 2
    before = _lines_before(file, offset, width, begun) if offset else []
    after, end = with_traceback(file, offset, width)
    if not after:
        return Excerpt(tuple(before), len(before) - 1)
    trace: list[Line] = []
    if match := re.search(TRACEBACK_ELSEWHERE, after[0].text):
        trace = _trace_of(file, int(match[1]), offset)
        told = trace[-1].end if trace else 0
        before = [line for line in before if line.offset >= told]
    mark = len(trace) + len(before)
    # Lines after it are about other items: they get the remaining room.
    first = [*range(mark, mark + end + 1)[:0:-1], *range(len(trace))[::-1], *range(len(trace), mark)[::-1]]
    return Excerpt(*pick([*trace, *before, *after], mark, first, max_lines))


def _lines_before(file: LogFile, offset: int, n_lines: int, begun: int) -> list[Line]:
    """The last lines before an offset, and everything that the workload and its children printed just before it.

    The end of another traceback is left out, because it would seem to belong to the line.
    """
    start = max(begun, tail_start(file.path, n_lines + LOOK_LINES, offset))
    lines = list(read_lines(file, start, offset))
    # A line that is too long counts as several.
    return lines[min(first_whole(lines, max(0, len(lines) - n_lines)), _printed_from(lines)) :]


def _printed_from(lines: Sequence[Line]) -> int:
    """The index of the first line that was printed since the last logged line and its traceback.

    Such lines may end with the traceback of a child process, which says more than its parent's error.
    """
    # Parts of a line that is too long count as logged.
    ends = (place for place, line in enumerate(lines) if line.is_dated or line.end - line.offset >= LINE_BYTES)
    last = max(ends, default=-1)
    head = "" if last < 0 else lines[last].text
    if failure_of(r"\d+").search(head) and last + 1 < len(lines) and TRACEBACK_BEGINS in lines[last + 1].text:
        last, head = last + 1, lines[last + 1].text
    if TRACEBACK_BEGINS not in head:
        return last + 1
    below = range(last + 1, len(lines))
    return next((place for place in below if is_exception(lines[place].text)), len(lines) - 1) + 1


def _trace_of(file: LogFile, item: int, stop: int) -> list[Line]:
    """The line and the traceback of an earlier item that raised at the same place in the same process."""
    told = failure_of(item)
    for place in places_of(file.path, f" item {item}: ".encode(), 0, stop, backwards=True):
        begin, raw = line_around(file.path, place)
        if not told.search(text_of(raw)):
            continue
        lines, end = with_traceback(file, begin, 1)
        return [line for line in lines[: end + 1] if line.offset < stop]
    return []


def failure_of(item: int | str) -> re.Pattern[str]:
    """A worker's log line on a failed item: its class and its message."""
    return re.compile(rf"\bitem {item}{NAME}: ({'|'.join(POLICIES)}): (.*)")


def pick(lines: Sequence[Line], mark: int, first: Iterable[int], n_lines: int) -> tuple[tuple[Line, ...], int]:
    """`n_lines` of the lines in order, and the index of the marked one: it, then those in `first`, then the nearest."""
    near = sorted(range(len(lines)), key=lambda place: (abs(place - mark), place))
    chosen = sorted([*dict.fromkeys([mark, *first, *near])][: max(1, n_lines)])
    return tuple(lines[place] for place in chosen), chosen.index(mark)


def is_exception(text: str) -> bool:
    """Whether a line of a traceback is its last, the exception."""
    return bool(text.strip()) and not text[0].isspace()


def first_whole(lines: Sequence[Line], start: int) -> int:
    """The first index from `start` on that is not within a traceback."""
    is_open = False
    for place, line in enumerate(lines):
        text = without_colours(line.text)
        is_open = not line.is_dated and (is_open or TRACEBACK_BEGINS in text)
        if place >= start and not is_open:
            return place
        if is_open and is_exception(text) and TRACEBACK_BEGINS not in text:
            is_open = False
    return len(lines)


def with_traceback(file: LogFile, offset: int, n_more: int) -> tuple[list[Line], int]:
    """The line at an offset, its traceback and `n_more` lines; and the index of the traceback's end, or 0."""
    lines: list[Line] = []
    end, is_open, is_own, may_follow = 0, False, True, True
    for line in read_lines(file, offset):
        text = without_colours(line.text)
        if TRACEBACK_BEGINS in text and lines:
            is_open = is_own and may_follow  # others were printed later
        elif text.startswith(CHAINED):
            may_follow = True
        elif line.is_dated and lines:
            # A dated line is about something else.
            end, is_open, is_own = (len(lines) - 1 if is_open else end), False, False
        elif is_open and is_exception(text):
            end, is_open, may_follow = len(lines), False, False
        lines.append(line)
        if len(lines) >= LOOK_LINES or (not is_open and len(lines) - 1 - end >= n_more):
            break
    return lines, len(lines) - 1 if is_open else end
