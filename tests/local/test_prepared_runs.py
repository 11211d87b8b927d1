"""Runs of a workload that prepares its next batch in a thread, and of which tasks claim and read shards ahead."""

from __future__ import annotations

import errno
import json
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MethodType
from typing import Any, cast

import pytest

import slurmgpu
from slurmgpu import Merged
from slurmgpu.run.directory import Run
from slurmgpu.worker import publisher, shard_source
from slurmgpu.worker.assignment import Assignment, WorkerFailedError
from slurmgpu.worker.publisher import Publisher
from slurmgpu.worker.worker import Worker
from tests.support.runs import datasets, records, report, wait_until

WORKLOAD = """
import os
from pathlib import Path

from slurmgpu import Array, ItemError


class Plain:
    columns = {"x": Array("int64")}
    batch_size = 4

    def __init__(self, *, deadly: int = -1, once: str = ""):
        self.deadly, self.once = deadly, once

    def sort_key(self, item):
        return -item.data["x"] % 7

    def _rows(self, items):
        for item in items:
            if item.index == self.deadly and not (self.once and Path(self.once).exists()):
                if self.once:
                    Path(self.once).touch()
                os._exit(3)
        return [ItemError("no") if item.index % 11 == 5 else {"x": 2 * item.data["x"]} for item in items]

    def __call__(self, items):
        return self._rows(items)


class Prepared(Plain):
    def prepare(self, items):
        return self._rows(items)

    def __call__(self, items, prepared):
        return prepared
"""
EXPECTED = {i: 2 * i for i in range(40) if i % 11 != 5}


def make(project: Any, workload: str, shard_items: int, **settings: Any) -> Path:
    folder = Path(project(40, workload=workload, shard_items=shard_items, settings=settings))
    (folder / "workloads.py").write_text(WORKLOAD)
    return folder


def in_this_process(folder: Path) -> Mapping[str, Any]:
    """The report of a run by one task."""
    slurmgpu.submit(folder / "slurmgpu.toml", executor="debug", gpus=0)
    found: Mapping[str, Any] = json.loads((folder / "run/report.json").read_text())
    return found


def rows(folder: Path) -> dict[int, int]:
    with Merged(folder / "run/merged.h5") as merged:
        return {i: int(x) for i, x in enumerate(merged["x"][:]) if not merged.failed[i]}


def test_an_item_that_kills_its_worker_while_it_is_prepared_is_quarantined_and_no_other(project, slurmgpu):
    folder = make(project, "Prepared", 40, deadly=25)
    slurmgpu("submit", "--executor", "local", "--gpus", "0", cwd=folder, expect=0)
    assert rows(folder) == {i: x for i, x in EXPECTED.items() if i != 25}
    assert "crash" in {error["class"] for error in report(folder)["errors"]}
    # The batch that was computed while the item was prepared, or its own; then the item alone.
    [_, last] = [death["items"] for death in records(folder)[0]["deaths"]]
    assert last == [25]


@pytest.mark.parametrize("shard_items", [4, 12])
def test_shards_that_are_claimed_read_and_published_beside_others_have_the_same_bytes(project, slurmgpu, shard_items):
    plain = make(project, "Plain", shard_items)
    in_this_process(plain)
    expected = datasets(plain)
    assert rows(plain) == EXPECTED
    (plain / "run").rename(plain / "before")
    ahead = make(project, "Prepared", shard_items, deadly=25, once=str(plain / "once"))
    slurmgpu("submit", "--executor", "local", "--gpus", "0", "--tasks", "2", cwd=ahead, expect=0)
    assert datasets(ahead) == expected
    assert sum(len(record["deaths"]) for record in records(ahead)) == 1
    # A worker may die between publishing the shard before and its word of it.
    assert 40 - sum(record["n_items"] for record in records(ahead)) in (0, shard_items)


AFTER_THE_REPORT = """
import time
from pathlib import Path

from slurmgpu import Array


class After:
    columns = {"x": Array("int64")}
    batch_size = 4

    def prepare(self, items):
        return None

    def __call__(self, items, prepared):
        if items[0].index == 24:
            Path("called").touch()
            until = time.monotonic() + 60
            while not Path("reported").exists() and time.monotonic() < until:
                time.sleep(0.01)
            if Path("reported").exists():
                Path("seen").touch()
        return [{"x": 1} for _ in items]
"""


def test_a_shard_that_is_published_while_the_next_is_computed_is_reported_at_once(project, slurmgpu, monkeypatch):
    folder = make(project, "After", 4)
    (folder / "workloads.py").write_text(AFTER_THE_REPORT)
    slurmgpu("plan", "--gpus", "0", cwd=folder, expect=0)
    reported = []

    def report(event: Mapping[str, Any]) -> None:
        if event["event"] == "published":
            reported.append((event["shard"], event["items"], event["errors"]))
            if event["shard"] == 5:
                (folder / "reported").touch()

    def in_the_next_call(partial: Path, path: Path, **given: Any) -> bool:
        if path.name == "00005.h5":
            wait_until((folder / "called").exists, "the call of shard 6", 60)
        return original(partial, path, **given)

    original = publisher.publish
    monkeypatch.setattr(publisher, "publish", in_the_next_call)
    monkeypatch.setattr(shard_source, "AHEAD_S", math.inf)
    Worker(Run.open(folder / "run"), Assignment("job_0", "job_0.0"), report, reports_in_threads=True).work()
    assert (folder / "seen").exists()
    assert reported == [(shard, 4, {}) for shard in range(10)]
    events: list[Mapping[str, Any]] = []  # of a worker that follows one that died before its last word
    Worker(Run.open(folder / "run"), Assignment("job_0", "job_0.0", resume=[2]), events.append).work()
    assert [event["shard"] for event in events if event["event"] == "skipped"] == [2]
    assert "claim" not in [event["event"] for event in events]


def test_a_shard_that_is_published_while_the_next_ends_the_task_is_not_lost(project, slurmgpu, monkeypatch):
    folder = make(project, "After", 4)
    ends = "from slurmgpu.errors import NodeError; raise NodeError('no GPU')"
    (folder / "workloads.py").write_text(AFTER_THE_REPORT.replace("until = time.monotonic() + 60", ends))
    slurmgpu("plan", "--gpus", "0", cwd=folder, expect=0)
    run, is_awaited = Run.open(folder / "run"), threading.Event()

    def end(by: Publisher, *, waits: bool = True) -> None:
        if waits and (folder / "called").exists():
            is_awaited.set()
        original_end(by, waits=waits)

    def once_it_is_awaited(partial: Path, path: Path, **given: Any) -> bool:
        assert path.name != "00005.h5" or is_awaited.wait(60)
        return original(partial, path, **given)

    original, original_end = publisher.publish, Publisher.end
    monkeypatch.setattr(publisher, "publish", once_it_is_awaited)
    monkeypatch.setattr(Publisher, "end", end)
    monkeypatch.setattr(shard_source, "AHEAD_S", math.inf)
    with pytest.raises(WorkerFailedError, match="no GPU"):
        Worker(run, Assignment("job_0", "job_0.0"), lambda event: None).work()
    found = run.published()
    is_awaited.set()
    assert found == {0, 1, 2, 3, 4, 5}


def test_a_task_that_is_told_to_stop_gives_back_what_it_has_claimed_ahead(project, slurmgpu, monkeypatch):
    folder = make(project, "Prepared", 4)
    events = []

    def note(by: Publisher, *published: Any) -> None:
        original(by, *published)
        found = cast(Worker, cast(MethodType, by.on_published).__self__)
        events.append([*found._claimer.held])
        if len(events) == 3:
            found.stopping.set()

    original = Publisher._note
    monkeypatch.setattr(Publisher, "_note", note)
    found = in_this_process(folder)
    assert found["failures"] == {"preempted": 1}
    run = Run.open(folder / "run")
    published = {*run.shard_files()}
    assert max(events[2]) > max(published)  # some were claimed ahead
    assert run.claims.numbers() <= published
    monkeypatch.undo()
    slurmgpu("resubmit", "run", cwd=folder, expect=0)
    assert rows(folder) == EXPECTED


def test_a_shard_that_cannot_be_written_beside_the_next_ends_the_task_and_costs_no_other(project, monkeypatch):
    folder = make(project, "Prepared", 4)

    def full(path: Path, columns: Any, *, start: int, **given: Any) -> None:
        if start == 16:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        original(path, columns, start=start, **given)

    original = publisher.write_shard
    monkeypatch.setattr(publisher, "write_shard", full)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    found = in_this_process(folder)
    [attempt] = found["attempts"]
    assert attempt["failure"] == "disk_full"
    assert "shard 4 cannot be written" in attempt["message"]
    assert not Run.open(folder / "run").claims.numbers() - {0, 1, 2, 3}
    assert sorted(rows(folder)) == [i for i in EXPECTED if i < 16]
