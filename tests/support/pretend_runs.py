"""Run directories as they are at a given moment of a simulated run: for screens, pages and estimates.

Tasks take shards by the same rule as real ones; times are made up from a seed, so that they are always the same.
"""

import heapq
import json
import random
import struct
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurmgpu.report.build import Joined, build_report, count_failed
from slurmgpu.run.creation import create_run
from slurmgpu.run.directory import Run
from slurmgpu.run.records import Attempt, new_record
from slurmgpu.run.submissions import Submission
from slurmgpu.task.telemetry import GPU_VALUES, HOST_VALUES, TELEMETRY_FORMAT, TELEMETRY_VERSION
from slurmgpu.util.atomic_files import write_json_text
from tests.support.runs import make_plan

BEGIN = 1_750_000_000.0
"""When pretended runs are submitted, in seconds since the epoch."""


@dataclass
class Pretended:
    """A simulated run: `n_concurrent` of `n_tasks` start at once, a minute apart if `staggered`, and load.

    `faulty` makes every seventh task meet something: a worker's death, a dead node, a preemption.
    `seconds` is what a shard takes; it varies by `spread`, a share of it; every third task takes `slow` times as long.
    """

    n_tasks: int = 8
    n_concurrent: int | None = None
    n_shards: int = 200
    shard_items: int = 16
    seconds: float = 60.0
    spread: float = 0.1
    slow: float = 1.0
    load_s: float = 40.0
    staggered: bool = False
    faulty: bool = False
    executor: str = "slurm"
    n_gpus: int = 1
    sample_s: float = 5.0
    walltime_s: float | None = 14_400.0
    job: str = "4711"
    seed: int = 7
    lease_s: float = 120.0
    settings: dict = field(default_factory=dict)
    look: str = ""

    def plan(self, name="judge"):
        """The plan of such a run."""
        ranges = {"ranges": [[0, self.n_items]]} if self.look else {}
        plan = make_plan(
            name=name,
            input_digest="d",
            n_items=self.n_items,
            workload="slurmgpu.workloads.judge:Judge",
            search_path="/",
            settings=self.settings,
            columns={"score": {"kind": "array", "dtype": "<f4", "shape": []}},
            batch_size=self.shard_items,
            shard_items=self.shard_items,
            lease_s=self.lease_s,
            margin_s=60.0,
            resources={"gpus": self.n_tasks * self.n_gpus, "array": True, "executor": self.executor},
            slurm={"time": "04:00:00"},
            provenance={
                "run_file": "/home/ada/judge/slurmgpu.toml",
                "versions": {"python": "3.11.7", "slurmgpu": "0.1.0"},
                "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": True},
                "container": {},
            },
            sample_s=self.sample_s,
            look=self.look,
        )
        return replace(plan, input={**plan.input, **ranges})

    @property
    def n_items(self):
        """Items of the run; the last shard lacks some."""
        return self.n_shards * self.shard_items - self.shard_items // 2

    def records(self, now):
        """The attempts' records at a moment, in seconds since BEGIN, and the shards that are published by then."""
        rng = random.Random(self.seed)
        open_shards = list(range(self.n_shards))
        waiting = list(range(self.n_tasks))
        lives = []
        slots = [(60.0 * slot if self.staggered else 0.0, slot) for slot in range(self.n_concurrent or self.n_tasks)]
        published = set()
        heap = []
        for at, _ in slots:
            if waiting:
                heapq.heappush(heap, (at, len(lives), "start", waiting.pop(0), 0))
                lives.append(None)
        counter = len(lives)
        records = {}
        while heap:
            at, _, what, task, restart = heapq.heappop(heap)
            if at > now:
                continue
            counter += 1
            record = records.get((task, restart))
            if what == "start":
                record = records[task, restart] = self._record(task, restart, at)
                heapq.heappush(heap, (at + 2.0, counter, "load", task, restart))
            elif what == "load":
                _enter(record, at, "loading")
                heapq.heappush(heap, (at + self.load_s * rng.uniform(0.9, 1.1), counter, "ready", task, restart))
            elif what == "ready":
                _enter(record, at, "running")
                record["load_s"] = record["load_s"] or at - record["phases"][-2][0]
                heapq.heappush(heap, (at, counter, "take", task, restart))
            elif what == "done":
                seconds = at - record["shard_started"]
                won = record["shard"] not in published
                record["published"].append(
                    [record["shard"], round(BEGIN + record["shard_started"], 3), round(seconds, 3), won]
                )
                if won:
                    published.add(record["shard"])
                    record["n_items"] += self._size(record["shard"])
                record["shard"], record["shard_started"] = None, None
                heapq.heappush(heap, (at, counter, "take", task, restart))
            elif what == "die":
                record["deaths"].append(
                    {"class": "crash", "message": "the worker died by SIGSEGV", "at": BEGIN + at, "state": "running"}
                    | {"shard": record["shard"], "items": [record["shard"] * self.shard_items]}
                )
                record["lost_s"] += at - record["shard_started"]
                open_shards.insert(0, record["shard"])
                record["shard"], record["shard_started"] = None, None
                heapq.heappush(heap, (at, counter, "load", task, restart))
            elif what == "vanish":
                record["pid"] = -1
                open_shards.insert(0, record["shard"])
            elif what == "preempt":
                record["lost_s"] += at - record["shard_started"]
                open_shards.insert(0, record["shard"])
                record["shard"], record["shard_started"] = None, None
                record["failure"], record["message"] = "preempted", "stopped by SIGTERM; its shards were given back"
                _enter(record, at, "ended")
                record["ended"] = at
                heapq.heappush(heap, (at + 300.0, counter, "start", task, restart + 1))
            elif what == "take":
                if not open_shards:
                    record["reason"] = "complete" if len(published) == self.n_shards else "others"
                    _enter(record, at, "ended")
                    record["ended"] = at
                    if waiting:
                        heapq.heappush(heap, (at + 5.0, counter, "start", waiting.pop(0), 0))
                    continue
                record["shard"], record["shard_started"] = open_shards.pop(0), at
                took = self._pace(task) * rng.uniform(1 - self.spread, 1 + self.spread)
                fault = self._fault(task, restart, record)
                heapq.heappush(heap, (at + (took / 2 if fault else took), counter, fault or "done", task, restart))
        for record in records.values():
            self._finish(record, now)
        return [records[key] for key in sorted(records)], published

    def _fault(self, task, restart, record):
        if not self.faulty or task % 7 != 3 or restart or len(record["published"]) != 3 or record["deaths"]:
            return None
        return ("die", "vanish", "preempt")[task // 7 % 3]

    def _pace(self, task):
        return self.seconds * (self.slow if task % 3 == 2 else 1.0)

    def _size(self, shard):
        return min(self.shard_items, self.n_items - shard * self.shard_items)

    def _record(self, task, restart, at):
        attempt = Attempt(
            self.job,
            task,
            restart,
            executor=self.executor,
            n_gpus=self.n_gpus,
            device="auto" if self.n_gpus else "cpu",
            memory_mb=64_000,
            end_time=None if self.walltime_s is None else BEGIN + at + self.walltime_s,
        )
        gpus = ["NVIDIA H100 80GB HBM3"] * self.n_gpus
        return new_record(attempt, f"gpu{task // 8:03d}", 1000 + task, gpus, at)

    def _finish(self, record, now):
        """Turn a record's times into those of the epoch, and say what it was doing at this moment."""
        if record["pid"] == -1 and record["shard"] is not None:  # killed with its node, in the middle of a shard
            now = min(now, record["shard_started"] + self._pace(record["task"]) / 2)
        if record["shard"] is not None:
            done = (now - record["shard_started"]) / self._pace(record["task"])
            record["shard_done"] = min(self._size(record["shard"]) - 1, int(done * self.shard_items))
            record["shard_started"] += BEGIN
        record["started"] += BEGIN
        record["updated"] = (BEGIN + now) if record["ended"] is None else BEGIN + record["ended"]
        record["ended"] = None if record["ended"] is None else BEGIN + record["ended"]
        record["phases"] = [[BEGIN + at, state] for at, state in record["phases"]]
        record["usage"] = {
            "n_samples": 100, "n_samples_ready": 90, "gpu_utilisation": 83.5, "gpu_memory_peak_bytes": 61_000_000_000,
            "gpu_memory_total_bytes": 85_000_000_000, "temperature_max_c": 71, "power_mean_w": 512.3,
            "energy_j": round(512.3 * (record["updated"] - record["started"]), 1), "throttled": {}, "ecc_errors": 0,
            "xids": [], "host_memory_peak_bytes": 12_000_000_000, "cpu_cores": 1.4,
        }  # fmt: skip


def _enter(record, at, state):
    record["state"] = state
    record["phases"].append([at, state])


def pretend_run(folder, now_s, **what):
    """A run directory as it is `now_s` seconds after the submission; `what` are Pretended's fields."""
    pretended = Pretended(**what)
    run = create_run(Path(folder), pretended.plan(Path(folder).name), [])
    submission = Submission(
        1, pretended.executor, "auto", pretended.n_tasks, pretended.n_concurrent or pretended.n_tasks, pretended.n_gpus,
        slurm={"time": "04:00:00"}, resources=dict(run.plan.resources),
    )  # fmt: skip
    run.record_submission({**submission.to_json(), "time": BEGIN})
    run.record_submission({"submission": 1, "state": "queued", "array_job": pretended.job, "merge_job": "4712"})
    update(run, pretended, now_s)
    return run


def update(run: Run, pretended: Pretended, now_s):
    """Write the records, shards, telemetry and logs of a later moment.

    As attempts do, each record as another file: one that is written over within a tick of the clock seems unchanged.
    """
    records, published = pretended.records(now_s)
    for shard in published - run.published():
        run.shard_path(shard).touch()
    for record in records:
        text = json.dumps(record)
        path = run.tasks / f"{record['attempt']}.json"
        if not path.exists() or path.read_text() != text:
            write_json_text(path, text, durable=False)
        _write_telemetry(run, pretended, record)
    return records


def _write_telemetry(run, pretended, record):
    if not pretended.sample_s:
        return
    rng = random.Random(record["attempt"])
    lines = [
        {
            "format": TELEMETRY_FORMAT,
            "version": TELEMETRY_VERSION,
            "sample_s": pretended.sample_s,
            "driver": "570.86",
            "gpus": [{"name": name, "uuid": f"GPU-{number}"} for number, name in enumerate(record["gpus"])],
            "gpu_values": GPU_VALUES,
            "host_values": HOST_VALUES,
        }
    ]
    n_samples = int((record["updated"] - record["started"]) / pretended.sample_s)
    ready_at = next((at for at, state in record["phases"] if state == "running"), float("inf"))
    energy = 1e6
    for number in range(n_samples):
        at = record["started"] + number * pretended.sample_s
        ready = at >= ready_at
        power = rng.uniform(450, 600) if ready else rng.uniform(70, 90)
        energy += power * pretended.sample_s
        busy = rng.randint(70, 99) if ready else 0
        memory = 61_000_000_000 if ready else 500_000_000
        gpu = [busy, memory, rng.randint(55, 71), round(power, 1), round(energy, 1), 0, 0]
        host = [12_000_000_000, round(number * 1.4, 2), 3]
        lines.append({"time": round(at, 3), "ready": ready, "gpus": [gpu] * pretended.n_gpus, "host": host})
    path = run.folder / "telemetry" / f"{record['attempt']}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def reported(run, errors=(), **more):
    """The report of a merge that has joined what is published."""
    shards = frozenset(run.published())
    n_rows = sum(stop - start for start, stop in map(run.plan.bounds, shards))
    n_failed = count_failed(error for _, error in errors)
    return build_report(run, joined=Joined(n_rows, shards, (), (), n_failed, list(errors), {}, ()), **more)


def write_merged_head(run, n_rows):
    """A merged.h5 that says how many rows it holds, and holds none."""
    attributes = {"fingerprint": run.plan.fingerprint, "n_items": run.plan.n_items}
    head = {"attributes": attributes, "n_errors": 0, "n_rows": n_rows, "file_size": 4096}
    content = json.dumps(head).encode()
    behind = (struct.pack("<QQQ", 4096, len(content), 0) + content).ljust(4080, b"\0")
    run.merged.write_bytes(b"slurmgpu" + struct.pack("<II", 1, zlib.crc32(behind)) + behind)
