"""What an attempt writes of itself while it lives: its state, its shard in hand, where its seconds went.

docs/reference/files.md has the fields. Everything is by this node's clock.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from slurmgpu.run.directory import Run
from slurmgpu.run.records import Attempt, Death, Record, Usage, new_record, node_name
from slurmgpu.util import gpus
from slurmgpu.util.atomic_files import write_json_text
from slurmgpu.util.env_info import Surroundings

log = logging.getLogger(__name__)

PROGRESS_S = 3.0
"""How often an attempt's record is written again; `status` reads it."""
SHARE = 0.02
"""More rarely, if writing it would take more than this part of the time …"""
LONGEST_S = 10.0
"""… but not so rarely that `status` would take the attempt for a dead one."""
END_PATIENCE_S = 10.0
"""So long an attempt tries to write its end: Slurm's KillWait is 30 s by default."""
PROGRESS_LENGTH = 200
"""What a workload says of an item's progress is cut at this many characters."""


class Recording:
    """The record of an attempt, kept up to date and written; `usage` tells what it has used so far."""

    def __init__(
        self,
        run: Run,
        attempt: Attempt,
        usage: Callable[[], Usage] = Usage,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        now = clock()
        self.record = new_record(attempt, node_name(), os.getpid(), gpus.visible_ids() or [], now)
        self.record["phases"].append([round(now, 3), "starting"])
        self._path = run.tasks / f"{attempt.name}.json"
        self._usage = usage
        self._due = time.monotonic() + PROGRESS_S
        # Several, while the first waits for the second to show that it is not the workload that fails.
        self._in_hand: set[int] = set()
        self._since = now  # what came before is accounted for; of use while something is in hand
        self._kept_here = 0.0
        self._call: frozenset[int] = frozenset()

    def enter(self, state: str) -> None:
        """Note a change of the state, if it is one."""
        if state != self.record["state"]:
            self.record["state"] = state
            self.record["phases"].append([round(self._clock(), 3), state])

    def fail(self, failure: str, message: str, trace: str = "") -> None:
        """Note why the attempt fails."""
        log.error("%s: %s", failure, message)
        self.record["failure"], self.record["message"], self.record["traceback"] = failure, message, trace

    def hear(self, event: Mapping[str, Any]) -> None:
        """Note what an event of the worker says."""
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
                record["gpus"] = list(event["names"])
            case "ready":
                self.enter("running")
                record["load_s"] = event["load_s"]
            case "claim":
                self._begin(event["shard"])
            case "batch":
                self._count(event["items"])
            case "tell":
                self._note_progress(str(event["text"]))
            case "progress":
                self._note_progress(str(event["text"]))
                self._keep()
            case "published":
                self._publish(event)
            case "takeover":
                record["takeovers"].append({"shard": event["shard"], "from": event["from"], "host": event["host"]})

    def leave(self, is_kept: bool) -> None:
        """The shard in hand was left for later; `is_kept`: all that was done of it."""
        if is_kept:
            self._keep()
        self._drop()

    def bury(self, death: Death) -> None:
        """A worker died: of the shard that it had in hand is left what is kept."""
        self.record["deaths"].append({**death, "at": self._clock(), "state": self.record["state"]})
        self._drop()

    def end(self) -> None:
        """The attempt ends, and gives back what it has in hand."""
        self._drop()
        self.enter("ended")
        self.record["ended"] = self._clock()
        self.write()

    def write_if_due(self) -> None:
        """Write the record, unless that was done just now, or the attempt has ended."""
        if time.monotonic() >= self._due and self.record["state"] != "ended":
            self.write()

    def write(self) -> None:
        """Write the record."""
        begun = time.monotonic()
        self.record["updated"] = self._clock()
        self.record["usage"] = self._usage()
        has_ended = self.record["state"] == "ended"
        try:
            # Progress is written again soon, and leases are to be renewed meanwhile.
            options = {"durable": has_ended, "in_place_if_full": has_ended}
            patience_s = END_PATIENCE_S if has_ended else 0.0
            write_json_text(self._path, _as_json(self.record), **options, patience_s=patience_s)
        except OSError as error:
            # Progress, or an end, that nobody learns of is no reason to give up shards that can be written.
            log.warning("%s cannot be written: %s", self._path, error)
        self._due = begun + until_next(time.monotonic() - begun)

    def _begin(self, shard: int) -> None:
        now = self._clock()
        if not self._in_hand:
            self._since = now
        self._in_hand.add(shard)
        self._kept_here = 0.0
        self._hold(shard, now)

    def _hold(self, shard: int | None, started: float | None = None) -> None:
        self.record["shard"], self.record["shard_started"] = shard, started
        self.record["shard_kept"] = None
        self.record["shard_done"], self._call = 0, frozenset()

    def _count(self, items: Sequence[int]) -> None:
        """Another call of the workload: the one before has come back, and was of use unless this repeats some of it."""
        call = frozenset(items)
        if not call & self._call:
            self.record["shard_done"] += len(self._call)
        self._call = call

    def _note_progress(self, text: str) -> None:
        # It is shown on terminals, and may be what no terminal takes.
        printable = "".join(letter if letter.isprintable() else " " for letter in text)
        self.record["progress"] = " ".join(printable.split())[:PROGRESS_LENGTH]

    def _keep(self) -> None:
        """What was done until now is kept, whatever becomes of this worker."""
        if self._in_hand:
            now = self._clock()
            self._kept_here += now - self._since
            self.record["kept_s"] = round(self.record["kept_s"] + now - self._since, 3)
            self._since = self.record["shard_kept"] = now

    def _publish(self, event: Mapping[str, Any]) -> None:
        record = self.record
        if event["won"]:
            record["n_items"] += event["items"]
            record["n_errors"] += sum(event["errors"].values())
            if event["errors"]:
                record["failed"].append([event["shard"], event["errors"]])
        times = round(event["started"], 3), round(event["seconds"], 3)
        revision = [event["revision"]] if event.get("revision") else []
        record["published"].append([event["shard"], *times, event["won"], *revision])
        record["kept_s"] = max(0.0, round(record["kept_s"] - self._kept_here, 3))  # it is among these seconds
        self._in_hand.discard(event["shard"])
        self._since, self._kept_here = self._clock(), 0.0
        if not self._in_hand:
            self._hold(None)

    def _drop(self) -> None:
        if self._in_hand:
            self.record["lost_s"] = round(self.record["lost_s"] + self._clock() - self._since, 3)
        self._in_hand.clear()
        self._hold(None)
        self.record["progress"] = None


def until_next(cost_s: float) -> float:
    """Seconds from one writing of a record to the next, if it takes `cost_s`."""
    return min(max(PROGRESS_S, cost_s / SHARE), LONGEST_S)


def _as_json(record: Record) -> str:
    """A line for each field: indented, a hundred thousand shards would take a second."""
    fields = (f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in record.items())
    return "{\n  " + ",\n  ".join(fields) + "\n}\n"
