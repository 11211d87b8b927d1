"""How a run stands, from its files alone, while it works and after. Standard library only."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmgpu.pace import Pace, is_alive, last_heard, own_time, pace_of, still_waiting
from slurmgpu.report import last_death, read_report
from slurmgpu.runs import Run
from slurmgpu.samples import last_sample, telemetry_path

STATUS_FORMAT = "slurmgpu status"
STATUS_VERSION = 1

RELOOK_S = 10.0
"""A folder is listed anew after this time even if it seems unchanged: the time of its last change is a coarse clock."""
KEPT_SHARDS = {True: 4, False: 64}
"""So many of the shards that an attempt computed are kept in mind for its rate; of one that has ended, fewer."""
FRESH_S = 15.0
"""An attempt whose job is out of Slurm's queue lives only if it wrote so lately: it writes every three seconds."""
LEAVING_S = 30.0
"""So long a task may still be in the queue after it has written its end."""
GPU_KEYS = ("time", "utilisation", "memory_bytes", "temperature_c", "power_w")

Queue = Sequence[Mapping[str, Any]]
"""A run's jobs in Slurm's queue, as the JSON of status has them."""


def read_status(
    run: Run, queued: Queue | None = None, *, now: float | None = None, gpus_of: Collection[str] | None = None
) -> dict[str, Any]:
    """Progress, attempts and failures; `queued` are the run's jobs in Slurm's queue, None where it was not asked.

    The last samples of GPUs are read of the attempts in `gpus_of`: without it, of all that are alive.
    """
    return StatusReader(run).read(queued, now=now, gpus_of=gpus_of)


class StatusReader:
    """Reads the status of a run again and again; of its files, only those that have changed.

    An attempt whose record changes is alive, also where its node's clock and this machine's differ.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._records: dict[str, tuple[object, dict[str, Any] | None]] = {}
        self._looked = float("inf")
        self._published = _Remembered(run.shards, run.published)
        self._claimed = _Remembered(run.claims.folder, run.claims.numbers)
        self._report = _Remembered(run.folder / "report.json", lambda: _verdicts(run))
        self._lines = _Remembered(run.folder / "submissions.jsonl", run.submissions)
        self._gpus: dict[str, _Remembered] = {}
        self._queued: Queue | None = None
        self._asked = 0.0
        self._is_own = run.folder.stat().st_uid == os.getuid()

    def read(
        self, queued: Queue | None = None, *, now: float | None = None, gpus_of: Collection[str] | None = None
    ) -> dict[str, Any]:
        """The JSON of status at the moment `now`, in seconds since the epoch.

        The same `queued` may be given again: what has started since it was first given is known to wait no more.
        """
        now = time.time() if now is None else now
        run, plan = self.run, self.run.plan
        published, claimed = self._published.get(now), self._claimed.get(now)
        records, damaged = self._read_records(now)
        lines = self._lines.get(now)
        queue, leaving = self._compare(queued, records, lines, now)
        pace = pace_of(plan, records, published, queue, now)
        cancelled = {line["submission"] for line in lines if line.get("cancelled")}
        deaths = Counter(death["class"] for record in records for death in record["deaths"])
        gpus = self._read_gpus([r["attempt"] for r in records if is_alive(r, plan.lease_s, now)], gpus_of, now)
        was_complete, verdicts = self._report.get(now)
        is_complete = was_complete and len(published) == plan.n_shards
        attempts = [_attempt(run, r, pace, r["submission"] in cancelled, gpus.get(r["attempt"]), now) for r in records]
        for attempt in attempts:
            _settle(attempt, verdicts.get(attempt["attempt"]), queue)
        return {
            "format": STATUS_FORMAT,
            "version": STATUS_VERSION,
            "run": plan.name,
            "run_dir": str(run.folder),
            "time": round(now, 3),
            "submitted": lines[0].get("time") if lines else None,
            "state": _state(lines, len(published) == plan.n_shards, is_complete, attempts, queue, leaving),
            "n_items": plan.n_items,
            "n_items_done": _n_items(run, published),
            "n_shards": plan.n_shards,
            "n_shards_done": len(published),
            "n_shards_claimed": len(claimed - published),
            "n_errors": sum(attempt["n_errors"] for attempt in attempts),
            "gpu_hours": round(sum(_gpu_hours(record, plan.lease_s, now) for record in records), 4),
            "pace": pace.to_json(),
            "attempts": attempts,
            "damaged_records": damaged,
            "failures": dict(sorted(Counter(a["failure"] for a in attempts if a["failure"]).items())),
            "worker_deaths": dict(sorted(deaths.items())),
            "queue": queue,
            "merged": str(run.merged) if run.merged.exists() else None,
            "complete": is_complete,
        }

    def _compare(
        self, queued: Queue | None, records: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]], now: float
    ) -> tuple[list[dict[str, Any]] | None, set[str]]:
        """The queue without what has started or ended since it was asked, and the tasks that are about to leave it."""
        if queued is not self._queued:
            self._queued, self._asked = queued, now
        if queued is None or not (queued or self._is_own):
            return None, set()  # of another user's jobs the user's own queue says nothing
        left = {_task(r) for r in records if r["state"] == "ended" and r["updated"] > self._asked - LEAVING_S}
        return still_waiting(_of_open(queued, lines), records, self._asked), left

    def _read_records(self, now: float) -> tuple[list[dict[str, Any]], list[str]]:
        """The attempts' records by start, and the names of those that are damaged."""
        known, self._records = self._records, {}
        looked, self._looked = self._looked, now
        with os.scandir(self.run.tasks) as entries:
            for entry in entries:
                if entry.name.endswith(".json") and not entry.name.startswith("."):
                    mark, record = self._read_record(entry, known.get(entry.name))
                    if record is not None and "heard" not in record:
                        record["heard"] = _heard(record["updated"], now, looked if entry.name in known else None)
                    self._records[entry.name] = mark, record
        records = [record for _, record in self._records.values() if record is not None]
        damaged = sorted(name.removesuffix(".json") for name, (_, record) in self._records.items() if record is None)
        return sorted(records, key=lambda record: (record["started"], record["attempt"])), damaged

    def _read_record(
        self, entry: os.DirEntry[str], known: tuple[object, dict[str, Any] | None] | None
    ) -> tuple[object, dict[str, Any] | None]:
        if known is not None and known[1] is not None and known[1]["state"] == "ended":
            return known
        mark = _mark(entry)
        if known is not None and known[0] == mark:
            return known
        record = self.run.attempt(entry.name.removesuffix(".json"))
        return mark, None if record is None else _shortened(record)

    def _read_gpus(
        self, living: Sequence[str], wanted: Collection[str] | None, now: float
    ) -> dict[str, dict[str, Any] | None]:
        names = [name for name in living if wanted is None or name in wanted]
        self._gpus = {name: self._gpus.get(name) or self._gpu(name) for name in names}
        return {name: remembered.get(now) for name, remembered in self._gpus.items()}

    def _gpu(self, attempt: str) -> _Remembered:
        path = telemetry_path(self.run.folder, attempt)
        return _Remembered(path, lambda: _last_of(path))


def _heard(updated: float, now: float, changed_since: float | None) -> float:
    """When a record was written, by this machine's clock, if by the node's clock it was `updated`.

    That is what the node says, unless it cannot be: `changed_since` is the look before the one at `now`, and the record
    was written between them; None at the first look at it.
    """
    if changed_since is None:
        return min(updated, now)
    return updated if changed_since <= updated <= now else now


class _Remembered:
    """What `read` makes of a file or folder, and makes anew when that has changed."""

    def __init__(self, path: Path, read: Callable[[], Any]) -> None:
        self._path, self._read = path, read
        self._mark: object = object()
        self._read_at = 0.0
        self._value: Any = None

    def get(self, now: float) -> Any:
        """The value at the moment `now`."""
        mark = _mark(self._path)
        if mark != self._mark or abs(now - self._read_at) > RELOOK_S:
            self._value = self._read()
            self._mark, self._read_at = mark, now
        return self._value


def _mark(path: Path | os.DirEntry[str]) -> object:
    """What is another when a file was written anew; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _shortened(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what no status shows, so that thousands of them can be kept in mind."""
    left_out = ("usage", "surroundings", "traceback", "gpus", "takeovers")
    short = {key: value for key, value in record.items() if key not in left_out}
    short["n_shards"] = len(record["published"])
    short["published"] = record["published"][-KEPT_SHARDS[record["state"] == "ended"] :]
    return short


def _verdicts(run: Run) -> tuple[bool, dict[str, tuple[str | None, str]]]:
    """Whether the last merge found the run complete, and what became of each attempt as far as it knew."""
    report = read_report(run)
    if report is None:
        return False, {}
    return bool(report["complete"]), {a["attempt"]: (a["failure"], a["message"]) for a in report["attempts"]}


def _of_open(queued: Queue, lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The queue without jobs of submissions that have ended since it was asked."""
    over = {line.get(key) for line in lines if line["state"] == "ended" for key in ("array_job", "merge_job")}
    return [job for job in queued if job["job_id"].partition("_")[0] not in over]


def _last_of(path: Path) -> dict[str, Any] | None:
    sample = last_sample(path)
    if sample is None or (sample.utilisation is None and sample.memory_bytes is None):
        return None
    return {key: getattr(sample, key) for key in GPU_KEYS}


def _gpu_hours(record: Mapping[str, Any], lease_s: float, now: float) -> float:
    """What an attempt has held so far, to its last sign of life."""
    until = own_time(record, now) if is_alive(record, lease_s, now) else record["ended"] or record["updated"]
    return float(record["n_gpus"] * record.get("n_nodes", 1) * max(0.0, until - record["started"]) / 3600)


def _n_items(run: Run, published: Collection[int]) -> int:
    plan = run.plan
    last = plan.n_shards - 1
    start, stop = plan.bounds(last)
    return sum(1 for shard in published if shard < last) * plan.shard_items + (stop - start) * (last in published)


def _attempt(
    run: Run, record: Mapping[str, Any], pace: Pace, is_cancelled: bool, gpu: dict[str, Any] | None, now: float
) -> dict[str, Any]:
    shard, has_ended = record["shard"], record["state"] == "ended"
    start, stop = (0, 0) if shard is None else run.plan.bounds(shard)
    # Of one that wrote no end the failure is not known yet: the report, made when none is alive, knows better.
    failure = record["failure"] if has_ended else None
    rate = pace.rates.get(record["attempt"])
    return {
        **{key: record[key] for key in ("attempt", "submission", "node", "state", "started")},
        "state_since": record["phases"][-1][0] if record.get("phases") else record["started"],
        "n_gpus": record["n_gpus"] * record.get("n_nodes", 1),
        "silent": not has_ended and not is_alive(record, run.plan.lease_s, now),
        "shard": shard,
        "shard_items": stop - start if shard is not None else None,
        "shard_done": record.get("shard_done") or 0,
        "progress": record.get("progress"),
        "items_per_s": None if rate is None else round(rate, 4),
        "n_shards": record["n_shards"],
        **{key: record[key] for key in ("n_items", "n_errors")},
        "n_deaths": len(record["deaths"]),
        "last_death": last_death(record),
        "age_s": round(now - last_heard(record), 1),
        "gpu": gpu,
        "failure": "cancelled" if failure == "preempted" and is_cancelled else failure,
        "message": record["message"] if has_ended else "",
    }


def _task(thing: Mapping[str, Any]) -> str:
    """The array task that a record, or a job in the queue, is of: "1234_7"."""
    if "task" in thing:
        return f"{thing['job']}_{thing['task']}"
    return thing["job_id"] if "_" in thing["job_id"] else f"{thing['job_id']}_0"


def _settle(attempt: dict[str, Any], verdict: tuple[str | None, str] | None, queue: Queue | None) -> None:
    """Enter what others know of an attempt that does not live: the report, or the queue in which it is no more."""
    is_slurms = not attempt["attempt"].startswith("local")
    if attempt["state"] != "ended" and queue == [] and is_slurms and attempt["age_s"] > FRESH_S:
        attempt["silent"] = True
    # The merge has asked accounting, which alone knows preemption from scancel, and why somebody wrote no end.
    if verdict is not None and (attempt["silent"] or attempt["state"] == "ended"):
        attempt["failure"], attempt["message"] = verdict


def _state(
    lines: Sequence[Mapping[str, Any]],
    all_published: bool,
    is_complete: bool,
    attempts: Sequence[Mapping[str, Any]],
    queue: Queue | None,
    leaving: Collection[str],
) -> str:
    """One of planned, queued, running, merging, complete, incomplete; "ended" if tasks are over, nothing merged.

    `leaving` are the tasks that have written their end, and may still be in the queue.
    """
    if not lines:
        return "queued" if queue else "planned"
    if lines[-1]["state"] in ("ended", "refused") and not queue:
        return "complete" if is_complete else "incomplete"
    is_at_work = any(attempt["state"] != "ended" and not attempt["silent"] for attempt in attempts)
    if queue is not None and not queue and not is_at_work:
        return "ended"
    if all_published:
        return "merging"
    # A task may have started since the queue was asked, or ended.
    if is_at_work:
        return "running"
    if queue:
        tasks = [job for job in queue if job["n_tasks"] and (job["state"] == "PENDING" or _task(job) not in leaving)]
        if not tasks:
            return "merging" if any(not job["n_tasks"] for job in queue) else "ended"
        return "queued" if all(job["state"] == "PENDING" for job in tasks) else "running"
    if any(attempt["state"] != "ended" for attempt in attempts):
        return "running"
    return "ended" if attempts else "queued"
