"""The status of a run, from its files. Standard library only."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, cast

from slurmgpu.code.versions import RowsByCode
from slurmgpu.errors import SlurmGPUError
from slurmgpu.report.attempts import AttemptRow
from slurmgpu.report.completeness import has_every_row, is_final
from slurmgpu.report.file_cache import UpToDate, mark_of
from slurmgpu.report.origin import Origin, origin_of
from slurmgpu.report.outcomes import Rows, Told, Verdict, is_of, leases_lost, unrecorded, verdict_of
from slurmgpu.report.pace import PaceRecord, living_of, pace_of, rounded_rate
from slurmgpu.report.queued import Job, Queue, of_open, still_waiting
from slurmgpu.report.report_file import last_death, read_report, report_path
from slurmgpu.report.states import Lines, Standing, is_at_work, is_told, state_of
from slurmgpu.run.directory import Run
from slurmgpu.run.liveness import heard_at, last_heard, own_time, patience
from slurmgpu.run.recompute import read_recompute, recompute_path
from slurmgpu.run.records import BriefRecord, Record, Unread, task_of
from slurmgpu.run.submissions import ENDS, ended_jobs, is_of_processes, is_over
from slurmgpu.run.telemetry_log import last_sample, telemetry_path
from slurmgpu.shards.merged_head import read_merged_head
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, exists, list_entries

log = logging.getLogger(__name__)

STATUS_FORMAT = "slurmgpu status"
STATUS_VERSION = 1

KEPT_SHARDS = {True: 4, False: 64}
"""The last shards of an attempt that are kept for its rate, by whether it has ended."""
LEAVING_S = 30.0
"""How long a task may still be in the queue after it recorded its end."""


class GPUSample(TypedDict):
    """The last sample of an attempt's GPUs."""

    time: float
    utilisation: float | None
    memory_bytes: int | None
    temperature_c: int | None
    power_w: float | None


class StatusAttempt(Standing):
    """An attempt in the JSON of status."""

    attempt: str
    node: str
    started: float
    state_since: float
    n_gpus: int
    shard: int | None
    shard_items: int | None
    shard_done: int
    progress: str | None
    items_per_s: float | None
    n_shards: int
    n_items: int
    n_errors: int
    n_deaths: int
    last_death: str | None
    age_s: float
    gpu: GPUSample | None
    failure: str | None
    message: str


class Status(Origin):
    """The output of `slurmgpu status --json`: see docs/reference/report.md."""

    format: str
    version: int
    run: str
    run_dir: str
    time: float
    submitted: float | None
    state: str
    at_work: bool | None
    cancelled: bool
    n_items: int
    n_items_done: int
    n_shards: int
    n_shards_done: int
    n_shards_claimed: int
    n_errors: int
    errors_by_class: dict[str, int]
    last_failed: str | None
    code: list[RowsByCode]
    gpu_hours: float
    pace: PaceRecord
    attempts: list[StatusAttempt]
    damaged_records: list[str]
    unreadable_records: list[str]
    failures: dict[str, int]
    worker_deaths: dict[str, int]
    queue: list[Job] | None
    merged: str | None
    complete: bool


def read_status(run: Run, queued: Queue | None = None, *, now: float | None = None) -> Status:
    """Progress, attempts and failures; `queued` are the run's jobs in Slurm's queue, None if it was not asked."""
    return StatusReader(run).read(queued, now=now)


class StatusReader:
    """Reads the status of a run repeatedly; each time only files that have changed.

    An attempt whose record changes is alive, even if the clocks of its node and this machine differ.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._origin = origin_of(run.plan)
        self._records: dict[str, tuple[object, _Shown | Unread]] = {}
        self._looked = float("inf")
        self._published = UpToDate(run.shards, self._done)
        self._again = UpToDate(recompute_path(run.folder), lambda: read_recompute(run.folder))
        self._head = UpToDate(run.merged, lambda: read_merged_head(run.merged))
        self._claimed = UpToDate(run.claims.folder, run.claims.numbers)
        self._report = UpToDate(report_path(run), lambda: _merged(run))
        self._lines = UpToDate(run.folder / "submissions.jsonl", run.submissions)
        self._gpus: dict[str, UpToDate] = {}
        self._queued: Queue | None = None
        self._asked = 0.0
        self._asked_of: set[int] = set()
        self._over_before: set[str | None] = set()

    def read(
        self, queued: Queue | None = None, *, now: float | None = None, gpus_of: Collection[str] | None = None
    ) -> Status:
        """The JSON of status at the time `now`, in seconds since the epoch.

        The same `queued` may be given again: tasks that have started since are no longer counted as waiting.
        """
        now = time.time() if now is None else now
        run, plan = self.run, self.run.plan
        (published, n_kept, again), claimed = self._published.get(now), self._claimed.get(now)
        records, left_out = self._read_records(now)
        lines = self._lines.get(now)
        queue, leaving = self._compare(queued, records, lines, now)
        at_work = is_at_work(lines, queue)
        patience_s = patience(plan.lease_s, at_work)
        # A task that was killed may have been heard a moment ago.
        may_live = at_work is not False or not is_over(lines)
        alive = living_of(records, queue, now, patience_s) if may_live else []
        living = {record["attempt"] for record in alive}
        pace = pace_of(plan, records, published, queue, now, patience_s, again)
        deaths = Counter(death["class"] for record in records for death in record["deaths"])
        gpus = self._read_gpus(sorted(living), gpus_of, now)
        merged = self._report.get(now)
        try:
            head = self._head.get(now)
        except OSError as error:  # read again at the next look
            log.warning("%s cannot be read: %s", run.merged, error.strerror)
            head = None
        is_complete = has_every_row(head, plan)
        # Shards of merged rows may have been removed.
        done, n_kept = (range(plan.n_shards), 0) if is_complete and is_final(lines) else (published, n_kept)
        verdicts = _verdicts(records, merged.rows, lines, living)
        attempts = [
            _attempt(run, record, pace.rates.get(name), gpus.get(name), name in living, now, verdicts[name], again)
            for name, record in ((record["attempt"], record) for record in records)
        ]
        failures = Counter(failure for failure, _ in verdicts.values() if failure)
        failures.update(row["failure"] for row in unrecorded(merged.rows, verdicts) if row["failure"])
        tells_all = is_told(lines, merged.submissions, queue)
        errors = merged.errors if tells_all else _failed(records, published)
        return {
            "format": STATUS_FORMAT,
            "version": STATUS_VERSION,
            "run": run.name,
            "run_dir": str(run.folder),
            **self._origin,
            "time": round(now, 3),
            "submitted": lines[0].get("time") if lines else None,
            "state": state_of(lines, len(published) == plan.n_shards, is_complete, attempts, queue, leaving, at_work),
            "at_work": at_work,
            "cancelled": bool(lines and lines[-1].get("cancelled")),
            "n_items": plan.n_items,
            "n_items_done": _n_items(run, done) + n_kept,
            "n_shards": plan.n_shards,
            "n_shards_done": len(done),
            "n_shards_claimed": len(claimed - published),
            "n_errors": sum(errors.values()),
            "errors_by_class": dict(sorted(errors.items())),
            "last_failed": None if tells_all or not errors else _last_failed(records),
            "code": list(merged.code),
            "gpu_hours": round(_gpu_hours(records, merged.rows, living, now), 4),
            "pace": pace.to_json(),
            "attempts": attempts,
            "damaged_records": sorted(name for name, why in left_out.items() if why is Unread.DAMAGED),
            "unreadable_records": sorted(name for name, why in left_out.items() if why is Unread.UNREADABLE),
            "failures": dict(sorted(failures.items())),
            "worker_deaths": dict(sorted(deaths.items())),
            "queue": queue,
            "merged": str(run.merged) if exists(run.merged, BRIEF_PATIENCE_S) else None,
            "complete": is_complete,
        }

    def _done(self) -> tuple[set[int], int, Mapping[int, int]]:
        """The published shards, without those in which the current submission recomputes items.

        Also the number of items in the latter whose rows stay, and of each shard the number of recomputed items.
        """
        run, lines = self.run, self.run.submissions()
        if not is_final(lines):
            with contextlib.suppress(SlurmGPUError, OSError):  # its tasks report a damaged file
                run = run.recomputing(self._again.get(time.time()), lines[-1]["submission"])
        published, again = run.published(), {} if run.recompute is None else run.recompute.shards
        open_ones = again.keys() - published
        n_items = sum(stop - start for start, stop in map(run.plan.bounds, open_ones))
        n_kept = n_items - sum(again[shard].n_items for shard in open_ones)
        return published, n_kept, {shard: each.n_items for shard, each in again.items()}

    def _compare(
        self, queued: Queue | None, records: Sequence[_Shown], lines: Lines, now: float
    ) -> tuple[list[Job] | None, set[str]]:
        """The queue without tasks that have started or ended since it was asked, and tasks that are about to leave it.

        None for an empty queue that does not cover some submission: another user's, or a later one.
        """
        if queued is not self._queued:
            self._queued, self._asked = queued, now
            self._over_before = ended_jobs(lines)
            self._asked_of = {line["submission"] for line in lines if line["uid"] == os.getuid()}
        queue = (
            None if queued is None else still_waiting(of_open(queued, lines, self._over_before), records, self._asked)
        )
        open_ones = [line for line in lines if line["state"] not in ENDS and not is_of_processes(line)]
        if queue is None or (not queue and {line["submission"] for line in open_ones} - self._asked_of):
            return None, set()
        left = {task_of(r) for r in records if r["state"] == "ended" and last_heard(r) > self._asked - LEAVING_S}
        return queue, left

    def _read_records(self, now: float) -> tuple[list[_Shown], dict[str, Unread]]:
        """The records sorted by start; and by attempt, why a record is left out."""
        known, self._records = self._records, {}
        looked, self._looked = self._looked, now
        for entry in list_entries(self.run.tasks):
            if entry.name.endswith(".json") and not entry.name.startswith("."):
                mark, record = self._read_record(entry, known.get(entry.name))
                if not isinstance(record, Unread):
                    if "heard" not in record:
                        record["heard"] = heard_at(record["updated"], now, looked if entry.name in known else None)
                    # Not later than now: if the clock was set back, a dead task would seem alive until then.
                    record["heard"] = min(record["heard"], now)
                self._records[entry.name] = mark, record
        records = [record for _, record in self._records.values() if not isinstance(record, Unread)]
        found = ((name.removesuffix(".json"), record) for name, (_, record) in self._records.items())
        left_out = {name: record for name, record in found if isinstance(record, Unread)}
        return sorted(records, key=lambda record: (record["started"], record["attempt"])), left_out

    def _read_record(
        self, entry: os.DirEntry[str], known: tuple[object, _Shown | Unread] | None
    ) -> tuple[object, _Shown | Unread]:
        if known is not None and not isinstance(known[1], Unread) and known[1]["state"] == "ended":
            return known
        mark = mark_of(entry)
        # A record that could not be read is read again even if unchanged.
        if known is not None and known[0] == mark and known[1] is not Unread.UNREADABLE:
            return known
        record = self.run.attempt(entry.name.removesuffix(".json"))
        return mark, record if isinstance(record, Unread) else _shortened(record)

    def _read_gpus(
        self, living: Sequence[str], wanted: Collection[str] | None, now: float
    ) -> dict[str, GPUSample | None]:
        names = [name for name in living if wanted is None or name in wanted]
        self._gpus = {name: self._gpus.get(name) or self._gpu(name) for name in names}
        return {name: remembered.get(now) for name, remembered in self._gpus.items()}

    def _gpu(self, attempt: str) -> UpToDate:
        path = telemetry_path(self.run.folder, attempt)
        return UpToDate(path, lambda: _last_of(path))


class _Shown(BriefRecord):
    """A record with only its last shards and their number; `again` are shards that it may have recomputed."""

    n_shards: int
    again: array[int]


def _shortened(record: Record) -> _Shown:
    """A record without keys that no status shows: thousands are kept in memory."""
    left_out = ("usage", "surroundings", "traceback", "gpus")
    short = cast(_Shown, {key: value for key, value in record.items() if key not in left_out})
    short["n_shards"] = len(record["published"])
    short["published"] = record["published"][-KEPT_SHARDS[record["state"] == "ended"] :]
    again = record["published"] if record["submission"] > 1 else ()
    short["again"] = array("q", (shard for shard, _, _, won, *_ in again if won))
    return short


@dataclass(frozen=True)
class Merged:
    """The last report: failed items by class, outcomes of attempts, and rows by code; empty before the first merge."""

    submissions: Lines = ()
    errors: Mapping[str, int] = field(default_factory=dict)
    rows: Rows = field(default_factory=dict)
    code: Sequence[RowsByCode] = ()


def _told(row: AttemptRow) -> Told:
    """A row without keys that no status shows: thousands are kept in memory."""
    keys = ("attempt", "submission", "updated", "failure", "message", "gpu_hours")
    return cast(Told, {key: value for key, value in row.items() if key in keys})


def _merged(run: Run) -> Merged:
    try:
        report = read_report(run)
    except SlurmGPUError as error:
        log.warning("%s", error)
        return Merged()  # the records have the rest
    if report is None:
        return Merged()
    rows = {row["attempt"]: _told(row) for row in report["attempts"]}
    code: list[RowsByCode] = [{"digest": each["digest"], "items": each["items"]} for each in report["code"]]
    return Merged(report["submissions"], report["errors_by_class"], rows, code)


def _verdicts(records: Sequence[BriefRecord], told: Rows, lines: Lines, living: Collection[str]) -> dict[str, Verdict]:
    cancelled = {line["submission"] for line in lines if line.get("cancelled")}
    lost, has_ended = leases_lost(records), is_over(lines)
    return {
        name: verdict_of(
            record,
            cancelled=record["submission"] in cancelled,
            n_lost=lost[name],
            told=None if name in living else told.get(name),
            may_live=name in living or not has_ended,
        )
        for name, record in ((record["attempt"], record) for record in records)
    }


def _failed(records: Iterable[_Shown], published: Collection[int]) -> Mapping[str, int]:
    """The failed items of published shards by class, as found by the last computation of each shard."""
    found: dict[int, Mapping[str, int]] = {}
    for record in sorted(records, key=lambda record: record["submission"]):
        for shard in record["again"] if found else ():
            found.pop(shard, None)
        found |= {shard: errors for shard, errors in record["failed"] if shard in published}
    counts = Counter[str]()
    for errors in found.values():
        counts.update(errors)
    return counts


def _last_failed(records: Collection[_Shown]) -> str | None:
    """The last failed item of the newest submission: of its attempt that has written last."""
    newest = max((record["submission"] for record in records), default=0)
    told = [record for record in records if record["submission"] == newest and record["last_failed"]]
    return max(told, key=lambda record: record["updated"])["last_failed"] if told else None


def _last_of(path: Path) -> GPUSample | None:
    sample = last_sample(path)
    if sample is None or (sample.utilisation is None and sample.memory_bytes is None):
        return None
    return cast(GPUSample, {key: getattr(sample, key) for key in GPUSample.__annotations__})


def _gpu_hours(records: Iterable[BriefRecord], told: Rows, living: Collection[str], now: float) -> float:
    """The GPU-hours of attempts until their last signs of life; `told` are their rows in the last report."""
    hours = {name: row["gpu_hours"] for name, row in told.items() if "gpu_hours" in row}
    for record in records:
        name = record["attempt"]
        if name in living or name not in hours or not is_of(told[name], record):
            until = own_time(record, now) if name in living else record["ended"] or record["updated"]
            n_gpus = record["n_gpus"] * record["n_nodes"]
            hours[name] = n_gpus * max(0.0, until - record["started"]) / 3600
    return float(sum(hours.values()))


def _n_items(run: Run, published: Collection[int]) -> int:
    plan = run.plan
    last = plan.n_shards - 1
    start, stop = plan.bounds(last)
    return sum(1 for shard in published if shard < last) * plan.shard_items + (stop - start) * (last in published)


def _attempt(
    run: Run,
    record: _Shown,
    rate: float | None,
    gpu: GPUSample | None,
    is_living: bool,
    now: float,
    verdict: Verdict,
    again: Mapping[int, int],
) -> StatusAttempt:
    shard = record["shard"]
    start, stop = (0, 0) if shard is None else run.plan.bounds(shard)
    n_items = None if shard is None else stop - start
    if shard is not None and is_living:
        n_items = again.get(shard, n_items)
    copied = {key: value for key, value in record.items() if key in StatusAttempt.__annotations__}
    derived = {
        "state_since": record["phases"][-1][0],
        "n_gpus": record["n_gpus"] * record["n_nodes"],
        "silent": record["state"] != "ended" and not is_living,
        "shard_items": n_items,
        "items_per_s": rounded_rate(rate),
        "n_deaths": len(record["deaths"]),
        "last_death": last_death(record["deaths"]),
        "age_s": round(now - last_heard(record), 1),
        "gpu": gpu,
        "failure": verdict[0],
        "message": verdict[1],
    }
    return cast(StatusAttempt, {**copied, **derived})
