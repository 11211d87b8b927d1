"""Replay what the tasks of a run logged to trackers, in the order of steps.

A run has one tracker run, or one for each item if the workload takes one item at a time, as `train` does. Points are
sorted in a temporary SQLite database, on disk rather than in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs import open_items
from slurmgpu.plan.trackers import TRACKERS, Destination
from slurmgpu.report.report_file import read_report
from slurmgpu.run.directory import Run
from slurmgpu.run.metric_log import Logged, MetricReader
from slurmgpu.run.records import Unread
from slurmgpu.run.submissions import ENDS
from slurmgpu.trackers.interface import TrackedRun, Tracker
from slurmgpu.util.exceptions import described
from slurmgpu.util.redact import hidden
from slurmgpu.util.shared_files import list_names

log = logging.getLogger(__name__)

WHOLE = -1
"""The item number that stands for the whole run."""
MOST_OPEN = 32
"""The most trackers that are open at once for one destination: each may have a process."""
BATCH = 10_000
SCHEMA = """
create table points (
    item integer, step integer, name text, value real, time real, submission integer,
    primary key (item, step, name)
) without rowid;
create table late (item integer, step integer, primary key (item, step)) without rowid;
"""
INSERT = """
insert into points values (?, ?, ?, ?, ?, ?)
on conflict do update set value = excluded.value, time = excluded.time, submission = excluded.submission
where (excluded.submission, excluded.time) >= (submission, time)
"""
SELECT = """
select step, name, value, time from points where item = ? and step > ? and (? is null or step < ?) order by step, name
"""
LATE = """
insert or ignore into late select ?1, ?2 where not exists (
    select 1 from points where item = ?1 and step = ?2 and name = ?3 and value is ?4
)
"""
HELD = "select count(*) from (select distinct step from points where item = ? and step >= ?)"


@dataclass(frozen=True)
class Sent:
    """The number of tracker runs, and of their steps, that a destination got."""

    destination: Destination
    n_runs: int
    n_steps: int


class Points:
    """Logged values by item, step and name; the last attempt wins.

    `passed` has the last step sent for each item; values that are logged for it or an earlier step later are late.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._reader = MetricReader(run.folder)
        self._database = sqlite3.connect("")  # on disk, and gone with this process
        self._database.executescript(SCHEMA)
        self.passed: dict[int, int] = {}
        # For each item and attempt: when it was heard last, and of which step.
        self._heard: dict[int, dict[str, tuple[tuple[int, float], int]]] = {}
        self._living: set[str] = set()
        self._ended: set[str] = set()

    def look(self) -> None:
        """Read what is new."""
        self._find_living()  # before the points: all is read then of those that have ended
        has = self._run.plan.place
        news = (point for point in self._reader.news() if point.item is None or has(point.item) is not None)
        while points := list(itertools.islice(news, BATCH)):
            rows = [row for point in points for row in self._rows(point)]
            with self._database:
                self._database.executemany(LATE, (row[:4] for row in rows if row[1] <= self.passed.get(row[0], -1)))
                self._database.executemany(INSERT, rows)

    @property
    def n_late(self) -> int:
        """The number of steps whose values were logged after they, or later steps, had been sent."""
        return int(self._database.execute("select count(*) from late").fetchone()[0])

    @property
    def n_held(self) -> int:
        """The number of steps that are not sent yet, because a running task may add to them."""
        opened = ((item, self._open_step(item)) for item in self._heard)
        found = (self._database.execute(HELD, each).fetchone() for each in opened if each[1] is not None)
        return sum(int(count) for (count,) in found)

    def items(self) -> list[int]:
        """The items with logged values; WHOLE for values logged without an item."""
        return sorted(self._heard)

    def steps(self, item: int, after: int, *, final: bool) -> Iterator[tuple[int, dict[str, float], float]]:
        """Each step after `after` with its values and time; without `final` only those that no task can add to."""
        below = None if final else self._open_step(item)
        rows = self._database.execute(SELECT, (item, after, below, below))
        for step, group in itertools.groupby(rows, key=lambda row: int(row[0])):
            found = list(group)
            # SQLite keeps NaN as null.
            values = {name: math.nan if value is None else value for _, name, value, _ in found}
            yield step, values, max(time for *_, time in found)

    def _rows(self, point: Logged) -> Iterator[tuple[Any, ...]]:
        item = WHOLE if point.item is None else point.item
        self._heard.setdefault(item, {})[point.attempt] = (point.submission, point.time), point.step
        for name, value in point.values.items():
            yield item, point.step, name, value, point.time, point.submission

    def _open_step(self, item: int) -> int | None:
        """The first step that may still change. An item belongs to one attempt at a time, the run to all attempts."""
        heard = self._heard[item]
        # One that has not logged yet may begin anywhere.
        names = [max(heard, key=lambda name: heard[name])] if item != WHOLE else heard.keys() | self._living
        return min((heard[name][1] if name in heard else 0 for name in names if name not in self._ended), default=None)

    def _find_living(self) -> None:
        over = {line["submission"] for line in self._run.submissions() if line["state"] in ENDS}
        names = {name.removesuffix(".json") for name in list_names(self._run.tasks) if name.endswith(".json")}
        for name in names - self._ended:
            record = self._run.attempt(name)
            if not isinstance(record, Unread) and (record["ended"] is not None or record["submission"] in over):
                self._ended.add(name)
        self._living = {name for name in names if not name.startswith(".")} - self._ended


@dataclass
class _Open:
    tracker: Tracker
    last: int


@dataclass
class Replay:
    """Sends logged values to destinations; call `look` as often as wanted, then `close`.

    A tracker that has a part of a run already gets what comes after its last step. After an error, a tracker gets
    nothing more, and `failed` says why. `points` are the values logged so far.
    """

    run: Run
    destinations: Sequence[Destination]
    failed: dict[Destination, str] = field(default_factory=dict)
    points: Points = field(init=False)
    _open: dict[tuple[Destination, int], _Open] = field(default_factory=dict)
    _closed_early: set[tuple[Destination, int]] = field(default_factory=set)
    _sent: dict[tuple[Destination, int], tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.points = Points(self.run)

    def look(self, *, final: bool) -> None:
        """Send what is new; with `final`, when the run is over, also the steps to which a task could add."""
        self.points.look()
        for destination in self.destinations:
            with self._guarded(destination):
                for item in self.points.items() if destination not in self.failed else ():
                    self._send(destination, item, final=final)

    def close(self, *, finished: bool) -> list[Sent]:
        """Close all trackers; return what each destination got."""
        for destination, item in list(self._open):
            with self._guarded(destination):
                self._close(destination, item, finished=finished)
        return [self._what_got(destination) for destination in self.destinations]

    @contextlib.contextmanager
    def _guarded(self, destination: Destination) -> Iterator[None]:
        """Note an error of a tracker: its package has classes of its own for them."""
        try:
            yield
        except SlurmGPUError as error:
            self.failed.setdefault(destination, str(error))
        except Exception as error:
            log.debug("%s", destination, exc_info=True)
            self.failed.setdefault(
                destination,
                f"{destination} failed with {described(error)}. The run keeps all logged values; repeat the command "
                f"to send the rest.",
            )

    def _what_got(self, destination: Destination) -> Sent:
        counts = [n_steps for (which, _), (_, n_steps) in self._sent.items() if which == destination]
        return Sent(destination, len(counts), sum(counts))

    def _send(self, destination: Destination, item: int, *, final: bool) -> None:
        key = destination, item
        last, n_sent = self._sent.get(key, (None, 0))
        has_news = last is None or next(self.points.steps(item, last, final=final), None) is not None
        # At the end also one without news: it has to be finished before it makes room for others.
        if not has_news and not (final and (key in self._open or key in self._closed_early)):
            return
        opened = self._opened(destination, item)
        for step, values, time in self.points.steps(item, opened.last, final=final):
            opened.tracker.log(step, values, time)
            opened.last = step
            n_sent += last is None or step > last
        self._sent[key] = opened.last, n_sent
        self.points.passed[item] = max(opened.last, self.points.passed.get(item, -1))
        if final:
            self._close(destination, item, finished=True)

    def _opened(self, destination: Destination, item: int) -> _Open:
        if (found := self._open.pop((destination, item), None)) is not None:
            self._open[destination, item] = found  # the last: the first has been idle for longest
            return found
        of_this = [key for key in self._open if key[0] == destination]
        if len(of_this) >= MOST_OPEN:
            self._close(*of_this[0], finished=False)
            self._closed_early.add(of_this[0])
        tracker: Tracker = TRACKERS.make(destination.tracker)
        last = tracker.open(destination.where, self._tracked(item))
        # One that has been closed may not tell yet what it has. One without any step begins again: wandb offline.
        former, _ = self._sent.get((destination, item), (-1, 0))
        self._open[destination, item] = found = _Open(tracker, max(last, former) if last >= 0 else -1)
        return found

    def _close(self, destination: Destination, item: int, *, finished: bool) -> None:
        opened = self._open.pop((destination, item))
        opened.tracker.close(self._summary() if item == WHOLE else {}, finished=finished)

    def _tracked(self, item: int) -> TrackedRun:
        plan, name = self.run.plan, self.run.name
        # The time tells a run from a removed one of the same name; a run that was moved keeps its ids.
        began = next((line.get("time") for line in self.run.submissions()), None)
        identity = hashlib.blake2b(f"{plan.fingerprint}:{began}:{item}".encode(), digest_size=6).hexdigest()
        config: dict[str, Any] = {"workload": plan.workload, "seed": plan.seed, **plan.settings}
        if item != WHOLE:
            name = f"{name}/{item:05d}"
            config |= self._item(item)
        return TrackedRun(identity, name, self.run.name, hidden(json.loads(json.dumps(config, default=str))))

    def _item(self, item: int) -> Mapping[str, Any]:
        try:
            with open_items(self.run) as read:
                [data] = read([item])
        except (OSError, SlurmGPUError) as error:  # the input may have been moved since
            log.warning(
                "item %d cannot be read, so the config of its tracker run lacks the item's fields: %s", item, error
            )
            return {}
        return {} if isinstance(data, ItemError) else data

    def _summary(self) -> dict[str, float]:
        """The numbers of the report's summary."""
        report = read_report(self.run)
        if report is None:
            return {}
        counts = {"n_rows": report["n_rows"], "n_errors": report["n_errors"]}
        return {**counts, **dict(_numbers(report.get("summary") or {}))}


def _numbers(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, each in value.items():
        if isinstance(each, Mapping):
            yield from _numbers(each, f"{prefix}{name}/")
        elif isinstance(each, int | float) and not isinstance(each, bool):
            yield f"{prefix}{name}", each
