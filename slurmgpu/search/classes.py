"""All failures of a class, and their lines in the logs."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.logs.files import LogFile, files_of
from slurmgpu.logs.places import raw_lines
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import POLICIES
from slurmgpu.search.cached_run import CachedRun, cached
from slurmgpu.search.excerpts import (
    NAME,
    TRACEBACK_ELSEWHERE,
    Excerpt,
    excerpt_around,
    excerpt_of_attempt,
    excerpt_of_death,
)
from slurmgpu.util.regular_files import open_file

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """A failure: `what` failed, in which attempt, and its line, if any. `find` makes an excerpt of several lines."""

    what: str
    attempt: str | None
    message: str
    file: LogFile | None = None
    offset: int = 0
    number: int = 0
    item: int | None = None
    find: Callable[[int], Excerpt | None] | None = None

    def excerpt(self, max_lines: int) -> Excerpt | None:
        """The line with its context."""
        if self.find is not None:
            return self.find(max_lines)
        return None if self.file is None else excerpt_around(self.file, self.offset, max_lines)


def events_of_class(run: Run, name: str) -> Iterator[Event]:
    """All failures of a class: of attempts, of workers, and of items as logged."""
    if name not in POLICIES:
        raise SlurmGPUError(f"{name!r} is not a failure class.{did_you_mean(name, POLICIES)}")
    return _events(run, name)


def events_of_failed_items(run: Run) -> Iterator[Event]:
    """The last failure of each item that the last report has as failed, class by class."""
    run = cached(run)
    for name in sorted({kind for kind, _ in run.failed_items.values()}):
        failed = {index for index, (kind, _) in run.failed_items.items() if kind == name}
        last = {event.item: event for event in _of_items(run, name) if event.item in failed}
        yield from last.values()


def _events(run: Run, name: str) -> Iterator[Event]:
    run = cached(run)
    for attempt in run.judged.values():
        if attempt["failure"] == name:
            who = attempt["attempt"]
            yield _event(f"attempt {who}", who, attempt["message"], partial(excerpt_of_attempt, run, who))
    for record in run.attempts():
        for death in record["deaths"]:
            if death["class"] == name:
                find = partial(excerpt_of_death, run, record, death)
                yield _event("a worker", record["attempt"], death["message"], find)
    yield from _of_items(run, name)


def _event(what: str, attempt: str, message: str, find: Callable[[int], Excerpt | None]) -> Event:
    if (place := find(4)) is None:
        return Event(what, attempt, message)
    line = place.lines[place.mark]
    return Event(what, attempt, message, line.file, line.offset, place.number, find=find)


def _of_items(run: CachedRun, name: str) -> Iterator[Event]:
    """The failed items. A quarantined item is in two logs: its task's and that of the worker that writes its row."""
    told: set[int] = set()
    quarantined: dict[int | None, Event] = {}
    seen: set[Path] = set()
    for attempt, record in run.logged.items():
        for file in files_of(run, record, run.submissions()):
            if file.path in seen:
                continue
            seen.add(file.path)
            for event in _scan(file, attempt, name):
                if event.item is None:
                    yield event
                elif event.what.endswith(QUARANTINED):
                    quarantined[event.item] = event
                else:
                    told.add(event.item)
                    yield replace(event, what=quarantined[event.item].what) if event.item in quarantined else event
    yield from (event for item, event in quarantined.items() if item not in told)
    yield from _only_in_report(run, name, {*told, *quarantined})


QUARANTINED = ", quarantined"


def _scan(file: LogFile, attempt: str, name: str) -> Iterator[Event]:
    """The failures of a class in a log, in one pass."""
    patterns = {
        rf"\bitem (\d+){NAME}: {name}: (.*)".encode(): "item {}",
        rf"\bitem (\d+) is quarantined: {name}: (.*)".encode(): f"item {{}}{QUARANTINED}",
    }
    if logged := POLICIES[name].logged.encode():
        patterns[rb"slurmgpu\.[a-z_.]+: ()(" + re.escape(logged) + rb".*)"] = "batch"
    words = {logged or name.encode(), name.encode()}
    number = 1
    try:
        with open_file(file.path) as stream:
            for offset, raw in raw_lines(stream):
                found = _first_match(patterns, raw) if any(word in raw for word in words) else None
                if found is not None:
                    what, match = found
                    item = int(match[1]) if match[1] else None
                    message = re.sub(TRACEBACK_ELSEWHERE, "", match[2].decode(errors="replace").strip())
                    yield Event(what.format(item), attempt, message, file, offset, number, item)
                number += raw.endswith(b"\n")
    except OSError as error:
        log.debug("%s cannot be read: %s", file.path, error)


def _first_match(patterns: Mapping[bytes, str], raw: bytes) -> tuple[str, re.Match[bytes]] | None:
    """What the first pattern that matches stands for, and its match."""
    matches = ((what, re.search(pattern, raw)) for pattern, what in patterns.items())
    return next(((what, match) for what, match in matches if match), None)


def _only_in_report(run: CachedRun, name: str, told: set[int | None]) -> Iterator[Event]:
    """Failed items without a line in the logs, which may have been removed."""
    for index, (kind, message) in run.failed_items.items():
        if kind == name and index not in told:
            yield Event(f"item {index}", None, message, item=index)
