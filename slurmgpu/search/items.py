"""The outcome of one item, its attempts, and its place in their logs."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass
from itertools import islice
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.logs.files import UNKNOWN, LogFile, files_of
from slurmgpu.logs.lines import Line, read_lines, text_of
from slurmgpu.logs.places import line_around, matches_of, places_of
from slurmgpu.report.completeness import is_complete
from slurmgpu.report.ledger import counting
from slurmgpu.report.makings import makings_of
from slurmgpu.report.states import is_at_work, is_told
from slurmgpu.run.crash_history import read_history
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import class_and_message
from slurmgpu.run.liveness import is_alive, last_heard, patience
from slurmgpu.run.records import Death, Record
from slurmgpu.run.submissions import is_over
from slurmgpu.search.cached_run import cached
from slurmgpu.search.excerpts import (
    MARGIN_S,
    N_LINES,
    TRACEBACK_ELSEWHERE,
    Excerpt,
    excerpt_around,
    excerpt_of_attempt,
    excerpt_of_death,
    failure_of,
    part_between,
    pick,
    workers_of,
)
from slurmgpu.util.amounts import span_of, stretch_of, three_digits
from slurmgpu.util.item_ranges import ranges_said
from slurmgpu.util.shared_files import exists

log = logging.getLogger(__name__)

NOBODY = "no attempt is known to have computed it"
"""The end of a sentence on an item on which there is nothing."""
N_NAMED = 10
"""The most lines that are shown for an item with a row."""

_MARK = re.compile(rb"\bitems (\d{1,18})\.\.(\d{1,18}) \| ")
"""What `mark_of` writes before the lines that a program has printed for several items."""


@dataclass(frozen=True)
class Story:
    """The outcome of an item.

    `ended` is `ok`, `failed`, or `missing` for an item without a row. `failure` and `message` are those of the item,
    or of the attempt that did not finish it. `attempts` worked on its shard, in order.
    """

    index: int
    shard: int
    ended: str
    sentence: str
    failure: str | None
    message: str
    attempts: tuple[str, ...]
    excerpt: Excerpt | None


def excerpt_of_item(run: Run, index: int, max_lines: int) -> Excerpt | None:
    """The lines of the logs on an item; None without any."""
    return story_of_item(run, index, max_lines).excerpt


def story_of_item(run: Run, index: int, max_lines: int = N_LINES) -> Story:
    """The outcome of an item and its place in the logs, during the run and after."""
    plan = run.plan
    if plan.place(index) is None:
        raise SlurmGPUError(f"There is no item {index}: {run.folder} has the items {ranges_said(plan.ranges)}.")
    return _Search(run, index, max_lines).story()


class _Search:
    """The search for one item."""

    def __init__(self, run: Run, index: int, max_lines: int) -> None:
        self.run, self.index, self.max_lines = cached(run), index, max_lines
        self.shard = run.plan.shard_of(index)
        indices = run.plan.indices(*run.plan.bounds(self.shard))
        self.which = f"shard {self.shard} ({stretch_of(indices[0], indices[-1], 'item')})"
        self.records = self.run.attempts()
        self.maker: str | None = None
        self.begun = 0
        self.computed = [
            (record, entry) for record in self.records for entry in record["published"] if entry[0] == self.shard
        ]
        self.deaths = sorted(
            (
                (death, record)
                for record in self.records
                for death in record["deaths"]
                if death.get("shard") == self.shard
            ),
            key=lambda pair: float(pair[0]["at"]),
        )

    def story(self) -> Story:
        # Shards of a complete run may have been removed: merged.h5 has their rows.
        if not exists(self.run.shard_path(self.shard)) and not is_complete(self.run):
            return self._missing()
        record, entry = self._winner()
        told, marks = (None, []) if record is None else self._lines_of(record, entry)
        failure = self._failure(told)
        if failure is None:
            # The context of these lines is about other items.
            return self._fine(record, entry, Excerpt(*pick(marks, 0, (), self.max_lines)) if marks else None)
        kind, message = failure
        line = self._around(told or next(iter(marks), None))
        mine = [pair for pair in self.deaths if self._was_in_flight(pair[0])]
        by, excerpt = record, line
        if mine and kind == mine[-1][0]["class"]:
            by = mine[-1][1]
            excerpt = excerpt_of_death(self.run, by, mine[-1][0], self.max_lines) or line
        doer = "" if by is None else f" in attempt {by['attempt']}{_on(by, ', on ')}"
        said = f"Item {self.index} failed{doer}: {kind}: {_first_line(message)}"
        return self._tell("failed", said, kind, message, excerpt)

    def _tell(self, ended: str, sentence: str, kind: str | None, message: str, excerpt: Excerpt | None) -> Story:
        if sentence[-1] not in ".!?":
            sentence += "."
        names = [record["attempt"] for record, _ in self.computed] + [record["attempt"] for _, record in self.deaths]
        names += [record["attempt"] for record in self.records if record["shard"] == self.shard]
        names += [t["from"] for r in self.records for t in r["takeovers"] if t["shard"] == self.shard]
        names += [self.maker] if self.maker is not None else []
        order = {record["attempt"]: number for number, record in enumerate(self.records)}
        attempts = sorted(set(names), key=lambda name: (order.get(name, -1), name))
        return Story(self.index, self.shard, ended, sentence, kind, message, tuple(attempts), excerpt)

    def _winner(self) -> tuple[Record | None, list[Any]]:
        """The attempt whose copy of the shard counts, and its entry in the record."""
        for making in makings_of(self.run, [self.shard], self.run.plan.place(self.index)):
            if (record := self.run.logged.get(making.attempt)) is not None:
                self.maker = making.attempt
                return record, [self.shard, making.started, making.seconds, True]
        counts = counting(self.records, {self.shard}).get(self.shard, ())
        found = [(record, entry) for record, entry in self.computed if (record["attempt"], entry[1]) in counts]
        return next(iter(found), (None, []))

    def _failure(self, told: Line | None) -> tuple[str, str] | None:
        """Class and message of a failed item, from the report or, if the row is newer, from the logs."""
        if (known := self._in_report()) is not None:
            return known or None
        if told is not None and (match := failure_of(self.index).search(told.text)):
            return match[1], re.sub(TRACEBACK_ELSEWHERE, "", match[2])
        quarantined = read_history(self.run.claims.folder, self.shard).quarantined.get(self.index)
        return None if quarantined is None else class_and_message(quarantined)

    def _in_report(self) -> tuple[str, str] | tuple[()] | None:
        """The item's failure in the report, () for a good row, None if the report is out of date."""
        lines = self.run.submissions()
        # While the run works the report is out of date, and reading a million failures takes long.
        if not is_over(lines) or (report := self.run.report) is None or not is_told(lines, report["submissions"], None):
            return None
        if any(hole["shard"] == self.shard for hole in report["missing"]):
            return None
        listed = self.run.failed_items
        if self.index in listed or report["n_errors"] == len(listed):
            return listed.get(self.index, ())
        return self._in_merged()

    def _in_merged(self) -> tuple[str, str] | tuple[()] | None:
        """The same from merged.h5, which has what a report does not list; None if it cannot be read."""
        from slurmgpu import results  # imports NumPy

        try:
            with results.open(self.run.merged) as merged:
                row = int(merged.index.searchsorted(self.index))
                [said] = merged["error"][row : row + 1]
        except (OSError, SlurmGPUError, ValueError) as error:
            log.debug("%s", error)
            return None
        return class_and_message(said) if said else ()

    def _was_in_flight(self, death: Death) -> bool:
        items = death.get("items") or ()
        return bool(items) and (self.index in items or min(items) <= self.index <= max(items))

    def _lines_of(self, record: Record, entry: list[Any]) -> tuple[Line | None, list[Line]]:
        """The line of the item's failure in the logs of its attempt; else the lines on the item and its shard."""
        since, until = entry[1] - MARGIN_S, entry[1] + entry[2] + MARGIN_S
        marks: list[Line] = []
        for file in workers_of(files_of(self.run, record)):
            start, stop = part_between(file, record, since, until)
            begun = _first(file, f"shard {self.shard}: items ", start, stop)
            start = begun[0].offset if begun else start
            named = self._naming(file, start, stop)
            if named and failure_of(self.index).search(named[-1].text):
                self.begun = start
                return named[-1], []
            found = [*begun, *named, *_first(file, f"shard {self.shard}: published", start, stop)]
            marks += {line.offset: line for line in found}.values()
        return None, marks

    def _naming(self, file: LogFile, start: int, stop: int) -> list[Line]:
        """The first lines on the item; the last is that of its failure, if there is one."""
        named, told = re.compile(rf"\bitem {self.index}\b"), failure_of(self.index)
        found: dict[int, Line] = {}
        for place in places_of(file.path, f"item {self.index}".encode(), start, stop):
            begin, raw = line_around(file.path, place)
            has_failed = told.search(text := text_of(raw))
            if has_failed or (len(found) < N_NAMED and named.search(text)):
                found.update((begin, line) for line in islice(read_lines(file, begin), 1))
            if has_failed:
                break
        else:
            marks = matches_of(file.path, _MARK, start, stop)
            mine = (place for place, mark in marks if int(mark[1]) <= self.index <= int(mark[2]))
            for place in islice(mine, N_NAMED):
                begin, _ = line_around(file.path, place)
                found.update((begin, line) for line in islice(read_lines(file, begin), 1))
        return sorted(found.values(), key=lambda line: line.offset)

    def _fine(self, record: Record | None, entry: list[Any], excerpt: Excerpt | None) -> Story:
        who = f"{self.which} is published"
        if record is not None:
            who = f"attempt {record['attempt']} computed {self.which}{_on(record)} in {three_digits(entry[2])} s"
        return self._tell("ok", f"Item {self.index} has its row: {who}", None, "", excerpt)

    def _missing(self) -> Story:
        said = f"Item {self.index} has no row: {self.which} is not published"
        if (damage := self.run.damaged().get(self.shard)) is not None:
            return self._gone(f"{said}; a merge found it damaged and set it aside: {damage}")
        computed = max((entry[1] + entry[2] for _, entry in self.computed), default=0.0)
        deaths = [pair for pair in self.deaths if float(pair[0]["at"]) > computed]
        claim, history = self.run.claims.read(self.shard), read_history(self.run.claims.folder, self.shard)
        holder = next((record for record in self.records if claim and record["attempt"] == claim.attempt), None)
        if holder is not None and claim is not None and not claim.parked and holder["state"] != "ended":
            excerpt = excerpt_of_attempt(self.run, holder["attempt"], self.max_lines)
            now, patience_s = time.time(), patience(self.run.plan.lease_s, is_at_work(self.run.submissions(), None))
            is_silent = not is_alive(holder, patience_s, now)
            said += f"; attempt {holder['attempt']} {'was' if is_silent else 'is'} computing it on {holder['node']}"
            lost = [t["from"] for t in holder["takeovers"] if t["shard"] == self.shard]
            said += f", taken over from attempt {lost[-1]}, which stopped responding" if lost else ""
            died = f"{len(deaths)} workers have" if len(deaths) > 1 else "a worker has"
            said += f"; {died} died with it" if deaths else ""
            said += f"; it has been silent for {span_of(now - last_heard(holder))}" if is_silent else ""
            return self._tell("missing", said, None, "", excerpt)
        if deaths:
            death, record = deaths[-1]
            why = " and it is left for a submission with more memory" if history.parked_by else ""
            said += f": a worker of attempt {record['attempt']} died with it{why}: {death['class']}: {death['message']}"
            excerpt = excerpt_of_death(self.run, record, death, self.max_lines)
            return self._tell("missing", said, death["class"], death["message"], excerpt)
        if self.computed:
            return self._gone(f"{said}, because its file is gone")
        if (left := self._left(said)) is not None:
            return left
        return self._tell("missing", f"{said}, and {NOBODY}", None, "", None)

    def _gone(self, said: str) -> Story:
        """The story of an item in a shard that was damaged or removed: the attempt that computed it, and its log."""
        record, entry = self._winner()
        told, marks = (None, []) if record is None else self._lines_of(record, entry)
        kind, message = self._failure(told) or (None, "")
        said += "" if record is None else f"; attempt {record['attempt']} had computed it{_on(record)}"
        return self._tell("missing", said, kind, message, self._around(told or next(iter(marks), None)))

    def _around(self, place: Line | None) -> Excerpt | None:
        return None if place is None else excerpt_around(place.file, place.offset, self.max_lines, self.begun)

    def _left(self, said: str) -> Story | None:
        """The story of an item in a shard that an attempt did not finish, as its log says."""
        for name, record in reversed(self.run.logged.items()):
            about = self.run.judged.get(name)
            kind, message = (about["failure"], about["message"]) if about else (None, "")
            is_unknown = record["state"] == UNKNOWN
            if not (kind or is_unknown) or self.run.last_begun(name) != self.shard:
                continue
            self.maker = name
            said += f": attempt {name} was computing it "
            said += f"when it ended: {kind}: {_first_line(message)}" if kind else "last, and its record cannot be read"
            excerpt = excerpt_of_attempt(self.run, name, self.max_lines)
            return self._tell("missing", said, kind, message, excerpt)
        return None


def _first(file: LogFile, words: str, start: int, stop: int) -> list[Line]:
    for place in islice(places_of(file.path, words.encode(), start, stop), 1):
        return list(islice(read_lines(file, line_around(file.path, place)[0]), 1))
    return []


def _on(record: Record, word: str = " on ") -> str:
    return f"{word}{record['node']}" if record["node"] else ""


def _first_line(message: str) -> str:
    return message.partition("\n")[0]
