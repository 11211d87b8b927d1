"""Every failure of a class, and the line of a log that tells of it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.failures import POLICIES
from slurmgpu.logs import LogFile, attempts_with_logs, files_of
from slurmgpu.logs.places import LINE_BYTES
from slurmgpu.report import attempts_of, read_report
from slurmgpu.runs import Run
from slurmgpu.searching.excerpts import (
    N_LINES,
    TRACEBACK_ELSEWHERE,
    Excerpt,
    excerpt_around,
    excerpt_of_attempt,
    excerpt_of_death,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """A failure of a class: `what` failed, in words, in which attempt; `file` and `number` are its line, if any."""

    what: str
    attempt: str | None
    message: str
    file: LogFile | None = None
    offset: int = 0
    number: int = 0
    death: tuple[Run, Mapping[str, Any], Mapping[str, Any]] | None = None

    def excerpt(self, max_lines: int = N_LINES) -> Excerpt | None:
        """The place, with the lines around it."""
        if self.death is not None:
            return excerpt_of_death(*self.death, max_lines)
        return None if self.file is None else excerpt_around(self.file, self.offset, max_lines)


def events_of_class(run: Run, name: str) -> Iterator[Event]:
    """Every failure of a class: of attempts, of workers, and of items, these as the logs tell of them."""
    if name not in POLICIES:
        raise SlurmGPUError(f"{name!r} is no failure class.{did_you_mean(name, POLICIES)}")
    return _events(run, name)


def _events(run: Run, name: str) -> Iterator[Event]:
    told: set[int] = set()
    seen: set[Path] = set()
    lines = run.submissions()
    for attempt in attempts_of(run, None):
        # Of an attempt that lives no end is recorded either.
        if attempt["failure"] == name and (name != "lost" or lines[-1]["state"] == "ended"):
            place = excerpt_of_attempt(run, attempt["attempt"], 4)
            yield _event(f"attempt {attempt['attempt']}", attempt["attempt"], attempt["message"], place)
    for record in run.attempts():
        for death in record["deaths"]:
            if death["class"] == name:
                event = _event("a worker", record["attempt"], death["message"], excerpt_of_death(run, record, death))
                yield replace(event, death=(run, record, death))
    for record in attempts_with_logs(run):
        for file in files_of(run, record, lines):
            if file.path not in seen:
                seen.add(file.path)
                yield from _scan(file, record["attempt"], name, told)
    yield from _only_in_report(run, name, told)


def _event(what: str, attempt: str, message: str, place: Excerpt | None) -> Event:
    if place is None:
        return Event(what, attempt, message)
    line = place.lines[place.mark]
    return Event(what, attempt, message, line.file, line.offset, place.number)


def _scan(file: LogFile, attempt: str, name: str, told: set[int]) -> Iterator[Event]:
    """What a log says of failures of a class, in one pass."""
    patterns = {
        rb"\bitem (\d+): " + name.encode() + rb": (.*)": "item {}",
        rb"\bitem (\d+) is quarantined: " + name.encode() + rb": (.*)": "item {}, quarantined",
    }
    if name == "cuda_oom":
        patterns[rb"slurmgpu\.computing: ()(out of memory with a batch.*)"] = "batch"
    word = b"out of memory" if name == "cuda_oom" else name.encode()
    offset, number = 0, 1
    try:
        with open(file.path, "rb") as stream:
            while raw := stream.readline(LINE_BYTES):
                if word in raw or name.encode() in raw:
                    for pattern, what in patterns.items():
                        if match := re.search(pattern, raw):
                            told.update([int(match[1])] if match[1] else [])
                            message = re.sub(TRACEBACK_ELSEWHERE, "", match[2].decode(errors="replace").strip())
                            yield Event(what.format(match[1].decode()), attempt, message, file, offset, number)
                            break
                offset, number = offset + len(raw), number + raw.endswith(b"\n")
    except OSError as error:
        log.debug("%s cannot be read: %s", file.path, error)


def _only_in_report(run: Run, name: str, told: set[int]) -> Iterator[Event]:
    """Failed items of which no log tells: of a slurmgpu that did not log them all, or whose logs are gone."""
    try:
        report = read_report(run)
    except SlurmGPUError:
        return
    for error in (report or {"errors": ()})["errors"]:
        if error["class"] == name and error["index"] not in told:
            yield Event(f"item {error['index']}", None, error["message"])
