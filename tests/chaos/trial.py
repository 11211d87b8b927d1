"""One run on pretended nodes, what happens to it, and what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h5py

import slurmgpu
from tests.pretend_nfs.client import Behaviour
from tests.pretend_nfs.nodes import REPOSITORY, Node, Server
from tests.support.runs import make_project

SHARD_ITEMS, ITEM_S, LEASE_S = 8, 0.01, 4.0
PATIENCE_S = 120.0
"""Tasks that have not ended so long after the last thing that was done to them are taken for hung."""
MEND_S = 2.0
"""So long, on average, `resubmit --failed` and the merge after it hold the lock before they are killed."""
MOST_TRIES = 20
"""Commands that compute or merge the rest, also those that end with an error."""
PRIME = """
import os, sys
shards = os.path.join(sys.argv[1], "shards")
os.listdir(sys.argv[1]), os.listdir(shards), [os.path.exists(os.path.join(shards, name)) for name in sys.argv[2:]]
"""
"""What has a node believe a listing, and that these names are missing."""
SHARDS_APPEAR = "merge: shards appear while it is at work, and its node believes old listings"
TYPED = (sys.executable, "-m", "tests.chaos.steps", "type")
Disturbance = Callable[["Trial"], None]


@dataclass(frozen=True)
class Setting:
    """How nodes mount the file server, and the share of requests that fail, by the kind of fault."""

    name: str
    behaviour: Behaviour
    rates: Mapping[str, float] = field(default_factory=dict)


CACHING = Behaviour(ac_min_s=0.3, ac_max_s=1.5)
FAULTS = {"EIO": 1e-3, "ESTALE": 1e-3, "ETIMEDOUT": 7e-4, "EINTR": 1e-3, "EDQUOT": 1e-4, "lost": 1e-2, "slow": 3e-4}
SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("no caches", Behaviour(ac_min_s=0, ac_max_s=0, names=False, listings=False, contents=False)),
        Setting("caches", CACHING),
        Setting("no close-to-open", replace(CACHING, close_to_open=False)),
        Setting("times of a second", replace(CACHING, tick_s=1.0)),
        Setting("faults", CACHING, FAULTS),
        Setting("faults, times of a second", replace(CACHING, tick_s=1.0, skew_s=1800.0), FAULTS),
        Setting("faults, no close-to-open", replace(CACHING, close_to_open=False), FAULTS),
    )
}


@dataclass
class Outcome:
    """What came of a trial: sentences of what should not be, and counts."""

    seed: int
    setting: str
    n_items: int
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    misreported: list[str] = field(default_factory=list)
    failed_commands: list[str] = field(default_factory=list)
    failed_tasks: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    n_computed: int = 0
    n_rounds: int = 0
    seconds: float = 0.0

    @property
    def computed_again(self) -> float:
        """The share of the items that was computed a second time."""
        return max(0, self.n_computed - self.n_items) / self.n_items

    @property
    def is_right(self) -> bool:
        """Whether nothing was lost, doubled or misreported."""
        return not (self.lost or self.doubled or self.misreported)


class Trial:
    """A run of three tasks on three nodes; `disturb` gives what is done to it when so many shards are published."""

    def __init__(self, folder: Path, setting: Setting, seed: int, *, n_items: int = 400, n_nodes: int = 3) -> None:
        self.setting, self.seed = setting, seed
        self.random = random.Random(seed)
        self.outcome = Outcome(seed, setting.name, n_items)
        self.server = Server(folder, seed=seed)
        self.project, self.run = self.server.shared / "project", self.server.shared / "project" / "run"
        self.kept = self.server.exported / "project" / "run"
        self.marks = self.server.local / "marks"
        self.failing = self.server.local / "failing"
        settings = {"marks": str(self.marks), "item_s": ITEM_S, "failing": str(self.failing)}
        make_project(
            self.server.exported / "project",
            n_items=n_items,
            shard_items=SHARD_ITEMS,
            lease_s=LEASE_S,
            workload="Counted",
            settings=settings,
            resources={"executor": "local", "gpus": 0, "tasks": n_nodes},
        )
        self._put_code()
        self.n_nodes = n_nodes
        self.nodes: list[Node] = []
        self.tasks: list[subprocess.Popen] = []
        self.unblamed: set[int] = set()
        self.kills_merge, self.merges_at_once = False, 1
        self.asleep: dict[int, Node] = {}
        self.n_late_shards, self.n_mends_killed, self.is_mended_merge_killed = 0, 0, False
        self.n_deleted = 0
        self._best: set[int] = set()
        self._good: set[int] = set()
        self._mend = ("resubmit", self.run, "--failed", "--tasks", "1")
        self._merging = True
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def __enter__(self) -> Trial:
        self._begun = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.__exit__()
        for task in self.tasks:
            task.wait()

    def _put_code(self) -> None:
        shutil.copy(Path(__file__).with_name("workload.py"), self.server.exported / "project" / "workloads.py")

    # What disturbances use

    def note(self, kind: str) -> None:
        """Count a fault that is not the file system's."""
        self.outcome.faults[kind] += 1

    def later(self, seconds: float, then: Callable[[], None]) -> None:
        """Do something in a while; the trial does not end before."""
        self._timers.append((time.monotonic() + seconds, then))

    def start_node(self, clock_s: float = 0.0) -> Node:
        """Another node, with a task."""
        number = len(self.nodes)
        node = self.server.node(f"n{number}", self.setting.behaviour, self.setting.rates, clock_s)
        self.nodes.append(node)
        step = [sys.executable, "-m", "tests.chaos.steps", "task", str(self.run), str(number)]
        output = self.server.local / f"n{number}.out"
        self.tasks.append(node.start(*step, cwd=REPOSITORY, output=output, OMP_NUM_THREADS="1"))
        return node

    def published(self) -> int:
        """How many shards lie at the server."""
        return len(list((self.kept / "shards").glob("[0-9]*.h5")))

    # The way of a trial

    def go(self, disturbances: Sequence[tuple[float, Disturbance]] = (), n_late: int = 0) -> Outcome:
        """Plan, compute, merge, and resubmit until all is there; what came of it."""
        login = self.server.node("login", self.setting.behaviour)
        done = login.run(
            sys.executable, "-m", "tests.chaos.steps", "plan", self.project / "slurmgpu.toml", cwd=REPOSITORY
        )
        assert done.returncode == 0, done.stderr
        for _ in range(self.n_nodes - n_late):
            self.start_node()
        waiting = sorted(disturbances, key=lambda pair: pair[0])
        late = [(0.3 + 0.2 * number, self._start_late) for number in range(n_late)]
        self._watch(sorted([*waiting, *late], key=lambda pair: pair[0]))
        self._note_failed_tasks()
        self._merge_and_mend()
        self.outcome.n_computed = len(self.marks.read_text().split("\n")) - 1
        self.outcome.faults += self.server.counts()
        self.outcome.seconds = time.monotonic() - self._begun
        return self.outcome

    @staticmethod
    def _start_late(trial: Trial) -> None:
        trial.note("node: starts late")
        trial.start_node()

    def _watch(self, waiting: list[tuple[float, Disturbance]]) -> None:
        n_shards = -(-self.outcome.n_items // SHARD_ITEMS)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            share = self.published() / n_shards
            ended = all(task.poll() is not None or number in self.asleep for number, task in enumerate(self.tasks))
            while waiting and (share >= waiting[0][0] or ended):
                waiting.pop(0)[1](self)
                deadline, ended = time.monotonic() + PATIENCE_S, False
            now = time.monotonic()
            due = [timer for timer in self._timers if timer[0] <= now]
            self._timers = [timer for timer in self._timers if timer[0] > now]
            for _, then in due:
                then()
                deadline, ended = now + PATIENCE_S, False
            if ended and not self._timers:
                return
            if now > deadline:
                alive = [node.name for node, task in zip(self.nodes, self.tasks, strict=True) if task.poll() is None]
                self.outcome.misreported.append(f"tasks on {', '.join(alive)} did not end")
                for node in self.nodes:
                    node.kill()
                return
            time.sleep(0.05)

    def _note_failed_tasks(self) -> None:
        for path in sorted((self.kept / "tasks").glob("[!.]*.json")):
            with contextlib.suppress(ValueError):
                record = json.loads(path.read_text())
                if record["failure"] and record["task"] not in self.unblamed:
                    self.outcome.failed_tasks.append(f"{record['node']}: {record['failure']}, {record['message']}")

    def _merge_and_mend(self) -> None:
        # Tasks shall have computed by the code as it was planned; later submissions go by what lies there now.
        self._put_code()
        node = self._client("merger")
        hidden = self._hide_shards(node)
        if self.kills_merge:
            self._kill_a_merge()
        others = [self._client(f"merger{number}") for number in range(1, self.merges_at_once)]
        typed = [*TYPED, "merge", str(self.run)]
        at_once = [other.start(*typed, cwd=REPOSITORY, output=self.server.local / "merges") for other in others]
        waker = threading.Thread(target=self._wake_sleepers, name="waker")
        waker.start()
        shower = threading.Thread(target=self._show, args=(hidden,), name="shower")
        shower.start()
        is_complete = self.command(node, "merge", self.run, is_alone=not at_once)
        self._merging = False
        waker.join()
        shower.join()
        for merge in at_once:
            merge.wait()
        self._go_on(is_complete, "again")
        if self.failing.exists():
            self.failing.unlink()
            self._kill_mends()
            self._go_on(self.command(self._client("merged"), "merge", self.run), "rest")
            if len(self.good_rows()) < self.outcome.n_items:
                self._go_on(self.command(self._client("mended"), *self._mend), "last")
        self._check_all()

    def _go_on(self, is_complete: bool, name: str) -> None:
        """Resubmit until all is there."""
        what: tuple[object, ...] = ("resubmit", self.run, "--tasks", "1")
        for number in range(MOST_TRIES):
            if is_complete:
                break
            n_failed = len(self.outcome.failed_commands)
            is_complete = self.command(self._client(f"{name}{number}"), *what)
            # One that ended with an error may have computed all, and not have merged.
            is_merge_due = what[0] == "resubmit" and len(self.outcome.failed_commands) > n_failed
            what = ("merge", self.run) if is_merge_due else ("resubmit", self.run, "--tasks", "1")
            if not is_complete:
                self._remove_dead_lock()

    def _client(self, name: str) -> Node:
        rates, behaviour = dict(self.setting.rates), self.setting.behaviour
        if (self.asleep or self.n_late_shards) and name == "merger":
            rates["slow"] = 0.03  # so that there is time to wake up in
        if self.n_late_shards and name == "merger":
            # Linux believes a missing name for up to a minute, and a listing as long as its folder's time is the same.
            behaviour = replace(behaviour, ac_min_s=60.0, ac_max_s=60.0, names=True, listings=True)
        return self.server.node(name, behaviour, rates)

    # A merge while shards appear

    def _hide_shards(self, node: Node) -> list[str]:
        """Take shards away, and have a node believe that they are not there, and that a partial file is."""
        shards = self.kept / "shards"
        names = sorted(path.name for path in shards.glob("[0-9]*.h5") if path.is_file() and not path.is_symlink())
        hidden = sorted(self.random.sample(names, min(self.n_late_shards, len(names))))
        if not hidden:
            return []
        (self.server.exported / "hidden").mkdir()
        for name in hidden:
            (shards / name).rename(self.server.exported / "hidden" / name)
        stale = self.kept / ".merged.h5.merger.1.1.partial"
        stale.write_bytes(b"\0" * 100)
        times = self.kept.stat()
        node.run(sys.executable, "-c", PRIME, self.run, *hidden)
        stale.unlink()
        os.utime(self.kept, ns=(times.st_atime_ns, times.st_mtime_ns))
        return hidden

    def _show(self, hidden: Sequence[str]) -> None:
        """Put the shards back while the merge is at work, within one tick of the folder's time."""
        if not hidden:
            return
        while self._merging and not list(self.kept.glob(".merged.h5*")):
            time.sleep(0.01)
        if self._merging:
            self.note(SHARDS_APPEAR)
        times = (self.kept / "shards").stat()
        for name in hidden:
            (self.server.exported / "hidden" / name).rename(self.kept / "shards" / name)
            time.sleep(self.random.uniform(0, 0.05))
        os.utime(self.kept / "shards", ns=(times.st_atime_ns, times.st_mtime_ns))

    # `resubmit --failed` that is killed

    def _kill_mends(self) -> None:
        """Kill `resubmit --failed` and the merge after it at random moments; every good row must stay merged."""
        for number in range(self.n_mends_killed):
            self._kill_one(self._mend, f"mend{number}", "process: resubmit --failed is killed")
            if self.is_mended_merge_killed:
                self._kill_one(("merge", self.run), f"after{number}", "process: the merge after it is killed")
            self._check_good_rows(f"killed mend {number}")
            self.command(self._client(f"look{number}"), "merge", self.run)
            self._check_good_rows(f"merge after killed mend {number}")

    def _kill_one(self, argv: Sequence[object], name: str, kind: str) -> None:
        node = self._client(name)
        started = node.start(*TYPED, *argv, cwd=REPOSITORY, OMP_NUM_THREADS="1")
        # Before it holds the lock it has changed nothing: the moments that count are those of its work.
        while started.poll() is None and not (self.kept / ".submitting").exists():
            time.sleep(0.01)
        until = time.monotonic() + self.random.expovariate(1 / MEND_S)
        while started.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        if started.poll() is None:
            self.note(kind)
        node.kill()
        self._remove_dead_lock()

    def _check_good_rows(self, said: str) -> None:
        good = self.good_rows()
        if gone := len(self._good - good):
            self.outcome.lost.append(f"{said}: {gone} good rows are gone")
        self._good = good

    def _wake_sleepers(self) -> None:
        """Let the tasks that sleep go on once the merge has begun to join, and wait for their end."""
        while self.asleep and self._merging and not list(self.kept.glob(".merged*")):
            time.sleep(0.01)
        for number, node in self.asleep.items():
            node.signal(signal.SIGCONT)
            self.tasks[number].wait()

    def _kill_a_merge(self) -> None:
        """Have a node die while it merges, as soon as there is something of its work."""
        node = self._client("doomed")
        started = node.start(*TYPED, "merge", str(self.run), cwd=REPOSITORY)
        while started.poll() is None and not list(self.kept.glob(".merged*")):
            time.sleep(0.01)
        time.sleep(self.random.uniform(0, 0.3))
        node.kill()
        self._remove_dead_lock()

    def _remove_dead_lock(self) -> None:
        """Do what the refusal says when the lock's holder is known to be dead."""
        (self.kept / ".submitting").unlink(missing_ok=True)

    def command(self, node: Node, *argv: object, is_alone: bool = True) -> bool:
        """Type a command that merges, and check what it says; whether it says that the run is complete."""
        before = self._stamp()
        done = node.run(*TYPED, *argv, cwd=REPOSITORY, OMP_NUM_THREADS="1")
        said = f"{argv[0]} on {node.name}"
        self.outcome.n_rounds += argv[0] == "resubmit"
        if done.returncode not in (0, 3):
            last = (done.stderr.strip().splitlines() or [""])[-1]
            self.outcome.failed_commands.append(f"{said}: exit code {done.returncode}, {last:.160}")
            self._check_no_fewer(said)
            return False
        if self._stamp() == before:
            return done.returncode == 0  # nothing was lacking, so nothing was merged
        if is_alone:  # else the report may be the other one's
            self._check_report(said, done.returncode)
        return done.returncode == 0

    def _stamp(self) -> Any:
        with contextlib.suppress(FileNotFoundError):
            found = (self.kept / "report.json").stat()
            return found.st_ino, found.st_mtime_ns
        return None

    # What is compared

    def rows(self) -> tuple[list[int], bool | None]:
        """The items whose rows lie in the merged file, and what its attribute `complete` says."""
        path = self.kept / "merged.h5"
        if not path.exists():
            return [], None
        with h5py.File(path, "r") as file:
            complete = bool(file.attrs["complete"])
        with slurmgpu.open(path) as merged:
            return [int(index) for index in merged.index[:]], complete

    def good_rows(self) -> set[int]:
        """The items whose merged rows are no failed items'."""
        path = self.kept / "merged.h5"
        if not path.exists():
            return set()
        with slurmgpu.open(path) as merged:
            return {int(index) for index in merged.index[:]} - set(merged.errors)

    def _check_report(self, said: str, code: int) -> None:
        report = json.loads((self.kept / "report.json").read_text())
        rows, in_file = self.rows()
        lacking = set(range(self.outcome.n_items)) - set(rows)
        named = {index for hole in report["missing"] for index in range(hole["start"], hole["stop"])}
        claims = {"exit code": code == 0, "report": report["complete"], "merged.h5": in_file or False}
        told = self.outcome.misreported
        told += [
            f"{said}: {what} says {says}, {len(lacking)} rows lack"
            for what, says in claims.items()
            if says == bool(lacking)
        ]
        if named != lacking:
            told.append(f"{said}: {len(named)} items are named as missing, {len(lacking)} are")
        n_failed = len(rows) - len(self.good_rows())
        if report["n_errors"] != n_failed:
            told.append(f"{said}: the report says {report['n_errors']} failed items, there are {n_failed}")
        if report["n_rows"] != len(rows):
            told.append(f"{said}: the report says {report['n_rows']} rows, there are {len(rows)}")
        self._check_no_fewer(said)

    def _check_no_fewer(self, said: str) -> None:
        rows = set(self.rows()[0])
        if gone := len(self._best - rows):
            self.n_deleted -= gone
            if self.n_deleted < 0:
                self.outcome.lost.append(f"{said}: {gone} rows are gone that a former merge had")
        self._best = rows

    def _check_all(self) -> None:
        rows, _ = self.rows()
        if lacking := set(range(self.outcome.n_items)) - set(rows):
            self.outcome.lost.append(f"{len(lacking)} rows after {self.outcome.n_rounds} rounds")
        if failed := set(rows) - self.good_rows():
            self.outcome.lost.append(f"{len(failed)} good rows, which are of failed items still")
        if len(rows) != len(set(rows)):
            self.outcome.doubled.append(f"{len(rows) - len(set(rows))} rows")
        if rows != sorted(rows):
            self.outcome.misreported.append("rows are out of order")
        if rows:
            with slurmgpu.open(self.kept / "merged.h5") as merged:
                values, shouts = merged["double"][:].tolist(), merged["shout"][:]
            wrong = [
                index
                for index, value, shout in zip(rows, values, shouts, strict=True)
                if value != 2.0 * index or shout != f"ITEM {index} OF MANY"
            ]
            if wrong:
                self.outcome.misreported.append(f"{len(wrong)} rows are not those of the planned code: {wrong[:4]}")
        looking = self.server.node("looker", self.setting.behaviour)
        done = looking.run(*TYPED, "status", self.run, "--json", cwd=REPOSITORY)
        if done.returncode not in (0, 3):
            self.outcome.failed_commands.append(f"status: exit code {done.returncode}, {done.stderr[-160:]}")
        else:
            status = json.loads(done.stdout)
            if status["n_shards_done"] * SHARD_ITEMS != len(rows):
                self.outcome.misreported.append(f"status says {status['n_shards_done']} shards")
            if status["n_errors"] != len(rows) - len(self.good_rows()):
                self.outcome.misreported.append(f"status says {status['n_errors']} failed items")

    def datasets(self) -> dict[str, bytes]:
        """The bytes of every dataset of the merged file."""
        found: dict[str, bytes] = {}

        def visit(name: str, node: Any) -> None:
            if isinstance(node, h5py.Dataset):
                found[name] = node[()].tobytes()

        with h5py.File(self.kept / "merged.h5", "r") as file:
            file.visititems(visit)
        return found
