"""The record that an attempt writes while it lives: its state, its current shard, where its seconds went.

docs/reference/files.md has the fields. All times are by this node's clock, as it is set when the record is written.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from slurmgpu.run.directory import Run
from slurmgpu.run.records import Attempt, Death, Record, Usage, new_record, node_name
from slurmgpu.run.worker_events import Published
from slurmgpu.task.worker_process import TaskEvent
from slurmgpu.util import gpus
from slurmgpu.util.amounts import count_of
from slurmgpu.util.ansi import plain
from slurmgpu.util.atomic_files import write_json_text
from slurmgpu.util.env_info import Surroundings

log = logging.getLogger(__name__)

PROGRESS_S = 3.0
"""How often an attempt's record is written; `status` reads it."""
SHARE = 0.02
"""Less often, if writing it would take more than this share of the time …"""
LONGEST_S = 10.0
"""… but at least so often that `status` does not take the attempt for dead."""
END_PATIENCE_S = 10.0
"""How long an attempt tries to write its end: Slurm's KillWait is 30 s by default."""
PROGRESS_LENGTH, LINE_LENGTH = 200, 500
"""A workload's progress text, and the line on the last failed item, are cut at this many characters."""
STEP_S = 1.0
"""A clock that moves more than this against the monotonic clock was set; slewing moves it less between two looks."""


def _clocks() -> tuple[float, float]:
    """Seconds since the epoch, and seconds of the monotonic clock."""
    return time.time(), time.monotonic()


class AttemptWriter:
    """Keeps an attempt's record up to date and writes it; `usage` returns what the attempt has used so far."""

    def __init__(
        self,
        run: Run,
        attempt: Attempt,
        usage: Callable[[], Usage] = Usage,
        clocks: Callable[[], tuple[float, float]] = _clocks,
    ) -> None:
        self._clocks = clocks
        now, steady = clocks()
        self._ahead = now - steady
        self.record = new_record(attempt, node_name(), os.getpid(), gpus.visible_ids() or [], now)
        self._path = run.tasks / f"{attempt.name}.json"
        self._usage = usage
        self._due = time.monotonic() + PROGRESS_S
        # Several, while a shard whose items all failed waits for the next to show whether the workload is at fault.
        self._in_hand: dict[int, float] = {}  # with the times of their claims
        self._since = now  # the time before is accounted for
        self._kept_here = 0.0
        self._call: frozenset[int] = frozenset()
        self._has_waited = False

    def now(self) -> float:
        """The time; if the clock was set, earlier times are shifted by as much, so that durations stay the same."""
        now, steady = self._clocks()
        step, self._ahead = now - steady - self._ahead, now - steady
        if abs(step) > STEP_S:
            log.warning("the clock of this node was set by %+.0f s", step)
            self._move(step)
        return now

    def _move(self, step: float) -> None:
        times = cast(dict[str, Any], self.record)
        for name in ("started", "end_time", "shard_started", "shard_kept"):
            if times[name] is not None:
                times[name] = round(times[name] + step, 3)
        for phase in self.record["phases"]:
            phase[0] = round(phase[0] + step, 3)
        for entry in self.record["published"]:
            entry[1] = round(entry[1] + step, 3)
        for death in self.record["deaths"]:
            death["at"] = round(death["at"] + step, 3)
        self._since += step
        self._in_hand = {shard: claimed + step for shard, claimed in self._in_hand.items()}

    def enter(self, state: str) -> None:
        """Note a change of the state, if it is one."""
        if state != self.record["state"]:
            self.record["state"] = state
            self.record["phases"].append([round(self.now(), 3), state])

    def fail(self, failure: str, message: str, trace: str = "") -> None:
        """Note why the attempt fails."""
        log.error("%s: %s", failure, message)
        self.record["failure"], self.record["message"], self.record["traceback"] = failure, message, trace

    def add_event(self, event: TaskEvent) -> None:
        """Record what an event tells of the worker."""
        self.now()  # the event's times use the clock as it is set now
        record = self.record
        match event["event"]:
            case "loading":
                self.enter("loading")
            case "surroundings":
                record["surroundings"] = cast(
                    Surroundings, {key: value for key, value in event.items() if key != "event"}
                )
            case "used":
                record["surroundings"]["used"] = event["packages"]
            case "gpus":
                record["gpus"] = event["names"]
            case "ready":
                self.enter("running")
                record["load_s"], record["progress"] = event["load_s"], None
            case "claim":
                self.wait(event["idle_s"])
                self._begin(event["shard"])
            case "batch":
                self._count(event["items"])
                if self._has_waited:
                    self._has_waited, record["progress"] = False, None
            case "tell":
                self._note_progress(event["text"])
            case "progress":
                self._note_progress(event["text"])
                self._keep()
            case "waiting":
                self._note_retry(event["items"], event["seconds"])
            case "published":
                self._publish(event)
            case "skipped":
                self._give_back(event["shard"])
            case "joined":
                self.wait(event["idle_s"])
                record["kept_s"] = round(record["kept_s"] + event["seconds"], 3)
                record["progress"] = None
            case "done":
                self.wait(event["idle_s"])
            case "takeover":
                record["takeovers"].append({"shard": event["shard"], "from": event["from"], "host": event["host"]})

    def wait(self, seconds: float) -> None:
        """Count seconds in which the attempt waited for other tasks."""
        self.record["idle_s"] = round(self.record["idle_s"] + seconds, 3)

    def leave(self, is_kept: bool) -> None:
        """The current shard was left for later; `is_kept` if its progress is kept."""
        if is_kept:
            self._keep()
        self._drop()

    def add_death(self, death: Death, at: float) -> None:
        """A worker died, as was seen at a time of `now`: only the kept progress of its shard is left."""
        self.record["deaths"].append({**death, "at": at, "state": self.record["state"]})
        self._drop()

    def end(self) -> None:
        """The attempt ends, and gives its shard back."""
        self._drop()
        self.enter("ended")
        self.record["ended"] = self.now()
        self.write()

    def write_if_due(self) -> None:
        """Write the record, unless it was just written, or the attempt has ended."""
        if time.monotonic() >= self._due and self.record["state"] != "ended":
            self.write()

    def write(self) -> None:
        """Write the record; an error is logged."""
        begun = time.monotonic()
        self.record["updated"] = self.now()
        self.record["usage"] = self._usage()
        has_ended = self.record["state"] == "ended"
        try:
            # No retries for progress: it is written again soon, and leases must be renewed meanwhile.
            options = {"durable": has_ended, "in_place_if_full": has_ended}
            patience_s = END_PATIENCE_S if has_ended else 0.0
            write_json_text(self._path, _as_json(self.record), **options, patience_s=patience_s)
        except OSError as error:
            # A record that cannot be written is no reason to give up shards that can be written.
            log.warning("%s cannot be written: %s", self._path, error)
        self._due = begun + until_next(time.monotonic() - begun)

    def _begin(self, shard: int) -> None:
        now = self.now()
        if not self._in_hand:
            self._since = now
        self._in_hand[shard] = now
        self._kept_here = 0.0
        self._hold(shard, now)

    def _hold(self, shard: int | None, started: float | None = None) -> None:
        self.record["shard"], self.record["shard_started"] = shard, started
        self.record["shard_kept"] = None
        self.record["shard_done"], self._call = 0, frozenset()

    def _count(self, items: Sequence[int]) -> None:
        """Another call of the workload; the one before counts as done unless this call repeats some of its items."""
        call = frozenset(items)
        if not call & self._call:
            self.record["shard_done"] += len(self._call)
        self._call = call

    def _note_retry(self, n_items: int, seconds: float) -> None:
        record = self.record
        record["n_retried"] += n_items
        record["waited_s"] = round(record["waited_s"] + seconds, 3)
        self._has_waited = True
        self._note_progress(f"waiting {seconds:.0f} s before retrying {count_of(n_items, 'item')}")

    def _note_progress(self, text: str) -> None:
        self.record["progress"] = plain(text)[:PROGRESS_LENGTH]

    def _keep(self) -> None:
        if self._in_hand:
            now = self.now()
            self._kept_here += now - self._since
            self.record["kept_s"] = round(self.record["kept_s"] + now - self._since, 3)
            self._since = self.record["shard_kept"] = now

    def _publish(self, event: Published) -> None:
        record = self.record
        if event["won"]:
            record["n_items"] += event["items"]
            record["n_errors"] += sum(event["errors"].values())
            if event["errors"]:
                record["failed"].append([event["shard"], event["errors"]])
                record["last_failed"] = plain(event["last_failed"] or "")[:LINE_LENGTH]
        times = round(event["started"], 3), round(event["seconds"], 3)
        revision = [event["revision"]] if event["revision"] else []
        record["published"].append([event["shard"], *times, event["won"], *revision])
        record["kept_s"] = max(0.0, round(record["kept_s"] - self._kept_here, 3))  # `times` include them
        self._in_hand.pop(event["shard"], None)
        self._since, self._kept_here = self.now(), 0.0
        if not self._in_hand:
            self._hold(None)

    def _give_back(self, shard: int) -> None:
        """A shard is given back; its seconds are lost if it was begun, not only claimed ahead."""
        started = self._in_hand.pop(shard, None)
        if started is None:
            return
        now = self.now()
        until = min((later for later in self._in_hand.values() if later > started), default=now)
        self.record["lost_s"] = round(self.record["lost_s"] + until - started, 3)
        self._since = min(self._in_hand.values(), default=now)
        if not self._in_hand:
            self._hold(None)

    def _drop(self) -> None:
        if self._in_hand:
            self.record["lost_s"] = round(self.record["lost_s"] + self.now() - self._since, 3)
        self._in_hand.clear()
        self._hold(None)
        self.record["progress"] = None


def until_next(cost_s: float) -> float:
    """Seconds between two writes of a record, if one takes `cost_s`."""
    return min(max(PROGRESS_S, cost_s / SHARE), LONGEST_S)


def _as_json(record: Record) -> str:
    """A line for each field: with indented lists, a hundred thousand shards would take a second."""
    fields = (f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in record.items())
    return "{\n  " + ",\n  ".join(fields) + "\n}\n"
