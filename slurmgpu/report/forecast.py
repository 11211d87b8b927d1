"""The forecast of a run's time and cost from the records of a probe."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from slurmgpu.run.frozen_plan import SPARE_SHARE, Plan
from slurmgpu.run.records import Record
from slurmgpu.run.submissions import Submission, megabytes_of
from slurmgpu.util.amounts import about, size_of, slurm_size, time_words

FORECAST_FORMAT = "slurmgpu forecast"
FORECAST_VERSION = 1

STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11)
"""Student's t at 97.5 % by degrees of freedom from 1: the 95 % interval of a mean in standard errors.

With more degrees of freedom it is 1.96 + 2.5 / degrees, to 0.002.
"""
ENOUGH_BATCHES = 3
"""With at least this many batches, the first is separate: it compiles, allocates and fills caches."""
MARGINS = {1: 0.5, 2: 0.3}
"""The least relative margin of the bounds, by the number of batches; for more it is MARGIN."""
MARGIN = 0.05
"""Covers other nodes and busy file systems, which a single task does not show."""
QUICK_START, SLOW_START, SLOW_START_TOGETHER = 0.75, 1.25, 2.0
"""Factors of the observed start time: for the low bound, for one task, and for many that load at once."""
NEAR_FULL, HARDLY_USED = 0.9, 0.25
"""Shares of memory above and below which there is a note."""


class Observed(TypedDict):
    """The results of a probe. Bytes are peaks, per GPU; None is unknown.

    `start_s` is the time from the task's start to its first batch; `first_s` is how much longer that took than the
    others, `batch_s`. `between_s` is the time between two shards. `walltime_s` is what Slurm granted.
    """

    n_items: int
    n_batches: int
    n_errors: int
    start_s: float
    load_s: float | None
    first_s: float
    batch_s: Sequence[float]
    between_s: float
    walltime_s: float | None
    gpu_peak_bytes: int | None
    gpu_total_bytes: int | None
    host_peak_bytes: int | None
    host_total_bytes: int | None


class Spread(TypedDict):
    """An expected value and its bounds."""

    low: float
    expected: float
    high: float


class Forecast(TypedDict):
    """The forecast of a run: docs/reference/cli.md has the keys."""

    format: str
    version: int
    run: str
    probe: Observed
    n_items: int
    n_shards: int
    n_tasks: int
    n_concurrent: int
    gpus_per_task: int
    walltime_s: float | None
    batch_s: Spread
    shard_s: Spread
    run_s: Spread
    gpu_hours: Spread
    starting_share: float
    shards_per_task: int | None
    n_tasks_needed: int
    notes: list[str]
    assumptions: list[str]


@dataclass(frozen=True)
class Times:
    """Times if a batch takes `batch_s`: of a shard, of the run without waiting in the queue, and of all GPUs."""

    batch_s: float
    shard_s: float
    run_s: float
    gpu_hours: float
    starting_share: float
    shards_per_task: int | None
    n_tasks_needed: int


@dataclass(frozen=True)
class _Asked:
    """The run of a forecast: what the probe has seen, and the walltime of a task, None without one.

    `resumes`: items can continue in another task.
    """

    plan: Plan
    submission: Submission
    seen: Observed
    walltime_s: float | None
    resumes: bool


@dataclass(frozen=True)
class _Speed:
    """How fast a run is assumed to be.

    A batch takes `batch_s`, a shard as long as `shard_batches` of them, and all shards together as long as `n_batches`.
    The start takes `start_factor` times as long as in the probe, and the last shard `slack_s` longer than others.
    """

    batch_s: float
    shard_batches: float
    n_batches: int
    start_factor: float
    slack_s: float = 0.0


def observe(records: Sequence[Record]) -> Observed | None:
    """The results of a probe, in which each shard is one batch; None if no shard was published."""
    records = [record for record in records if record["published"]]
    if not records:
        return None
    record = records[0]
    batches = [entry[:3] for each in records for entry in each["published"]]
    seconds = [float(entry[2]) for entry in batches]
    first_s = 0.0
    if len(seconds) >= ENOUGH_BATCHES:
        first_s = max(0.0, seconds[0] - statistics.fmean(seconds[1:]))
        seconds = seconds[1:]
    gaps = [
        max(0.0, after[1] - before[1] - before[2])
        for each in records
        for before, after in zip(each["published"], each["published"][1:], strict=False)
    ]
    usage = record["usage"]
    memory_mb, end_time = record["memory_mb"], record["end_time"]
    return Observed(
        n_items=sum(each["n_items"] for each in records),
        n_batches=len(batches),
        n_errors=sum(each["n_errors"] for each in records),
        start_s=max(0.0, record["published"][0][1] - record["started"]),
        load_s=record["load_s"],
        first_s=first_s,
        batch_s=seconds,
        between_s=statistics.median(gaps) if gaps else 0.0,
        walltime_s=None if end_time is None else 60.0 * round((end_time - record["started"]) / 60),
        gpu_peak_bytes=usage.get("gpu_memory_peak_bytes"),
        gpu_total_bytes=usage.get("gpu_memory_total_bytes"),
        host_peak_bytes=usage.get("host_memory_peak_bytes"),
        host_total_bytes=memory_mb * 1024**2 if memory_mb else None,
    )


def forecast(plan: Plan, submission: Submission, seen: Observed, *, resumes: bool, queues: bool = True) -> Forecast:
    """The estimates for a run, with `notes` on problems and the `assumptions`; docs/reference/cli.md has the keys.

    `resumes`: items can continue in another task. `queues`: tasks are jobs with a walltime, on other nodes.
    """
    walltime_s = (submission.walltime_s or seen["walltime_s"]) if queues else None
    low, mean, high = mean_within(seen["batch_s"])
    asked = _Asked(plan, submission, seen, walltime_s, resumes)
    # A shard's last batch may be smaller; at worst it takes as long as the others.
    share, whole = plan.shard_items / plan.batch_size, math.ceil(plan.shard_items / plan.batch_size)
    n_full, n_left = divmod(plan.n_items, plan.shard_items)
    n_fewest, n_most = math.ceil(plan.n_items / plan.batch_size), n_full * whole + math.ceil(n_left / plan.batch_size)
    slack_s = (max(seen["batch_s"]) - mean) * whole
    slowly = SLOW_START if submission.n_concurrent == 1 else SLOW_START_TOGETHER
    speeds = (
        _Speed(low, share, n_fewest, QUICK_START),
        _Speed(mean, share, n_fewest, 1.0),
        _Speed(high, whole, n_most, slowly, slack_s),
    )
    times = [_times_at(asked, speed) for speed in speeds]

    def spread(name: str) -> Spread:
        low, expected, high = (round(float(getattr(each, name)), 4) for each in times)
        return {"low": low, "expected": expected, "high": high}

    expected = times[1]
    return {
        "format": FORECAST_FORMAT,
        "version": FORECAST_VERSION,
        "run": plan.name,
        "probe": {**seen, "batch_s": [round(each, 4) for each in seen["batch_s"]]},
        "n_items": plan.n_items,
        "n_shards": plan.n_shards,
        "n_tasks": submission.n_tasks,
        "n_concurrent": submission.n_concurrent,
        "gpus_per_task": submission.gpus_per_task,
        "walltime_s": walltime_s,
        "batch_s": spread("batch_s"),
        "shard_s": spread("shard_s"),
        "run_s": spread("run_s"),
        "gpu_hours": spread("gpu_hours"),
        "starting_share": round(expected.starting_share, 4),
        "shards_per_task": expected.shards_per_task,
        "n_tasks_needed": expected.n_tasks_needed,
        "notes": _notes(asked, times),
        "assumptions": _assumptions(submission, seen, queues=queues),
    }


def mean_within(seconds: Sequence[float]) -> tuple[float, float, float]:
    """The 95 % interval of the mean time of batches: low, mean, high.

    For fewer than three batches the bounds are the smallest and the largest; they are at least `MARGINS` apart.
    """
    mean, n = statistics.fmean(seconds), len(seconds)
    low, high = min(seconds), max(seconds)
    if n >= ENOUGH_BATCHES:
        t = STUDENT[n - 2] if n - 2 < len(STUDENT) else 1.96 + 2.5 / (n - 1)
        margin = t * statistics.stdev(seconds) / math.sqrt(n)
        low, high = max(low, mean - margin), mean + margin
    least = mean * MARGINS.get(n, MARGIN)
    return min(low, mean - least), mean, max(high, mean + least)


def _times_at(asked: _Asked, speed: _Speed) -> Times:
    """The times of a run at this speed, if all requested tasks run at once."""
    plan, submission, seen = asked.plan, asked.submission, asked.seen
    shard_s = speed.shard_batches * speed.batch_s + seen["between_s"]
    work_s = speed.n_batches * speed.batch_s + plan.n_shards * seen["between_s"]
    n_parts = plan.most_tasks(plan.n_shards)
    n_slots = min(submission.n_concurrent, n_parts)
    slot_s = min(-(-n_parts // n_slots) * shard_s / plan.parts, work_s)
    start_s = speed.start_factor * (seen["start_s"] + seen["first_s"])
    per_task, n_lives = None, 1
    left_s = None if asked.walltime_s is None else asked.walltime_s - plan.margin_s - start_s
    if left_s is not None and asked.resumes:
        n_lives = math.ceil(slot_s / left_s) if left_s > 0 else 0
    elif left_s is not None:
        per_task = max(0, math.floor((left_s - SPARE_SHARE * shard_s) / shard_s)) if shard_s else plan.n_shards
        n_lives = -(-math.ceil(plan.n_shards / n_slots) // per_task) if per_task else 0
    n_starts = n_slots * max(1, n_lives)
    all_s = work_s + n_starts * start_s
    return Times(
        batch_s=speed.batch_s,
        shard_s=shard_s,
        run_s=max(1, n_lives) * start_s + slot_s + speed.slack_s,
        gpu_hours=submission.gpus_per_task * all_s / 3600,
        starting_share=n_starts * start_s / all_s if all_s else 0.0,
        shards_per_task=per_task,
        n_tasks_needed=max(n_slots, -(-plan.n_shards // per_task)) if per_task else n_slots * n_lives,
    )


def _notes(asked: _Asked, times: Sequence[Times]) -> list[str]:
    """Notes for the user before the run is queued."""
    plan, seen = asked.plan, asked.seen
    notes = _on_memory(asked.submission, seen)
    if asked.walltime_s is not None:
        notes = [*_on_walltime(asked, asked.walltime_s, times), *notes]
    if seen["n_errors"]:
        failed = f"{seen['n_errors']} of {seen['n_items']} items"
        notes.insert(0, f"{failed} of the probe failed; the run may fail likewise.")
    if len(seen["batch_s"]) < ENOUGH_BATCHES:
        said = "1 batch says" if seen["n_batches"] == 1 else f"{seen['n_batches']} batches say"
        more = min(8 * plan.batch_size, plan.n_items // 2)
        then = f": probe {more:,} items for a range that can be relied on" if more > seen["n_items"] else ""
        notes.append(f"{said} little of the spread{then}.")
    return notes


def _on_walltime(asked: _Asked, walltime_s: float, times: Sequence[Times]) -> list[str]:
    plan, n_tasks = asked.plan, asked.submission.n_tasks
    _, expected, slow = times
    walltime, longer = f"the walltime of {time_words(walltime_s)}", "set a longer time under [slurm]"
    if not expected.n_tasks_needed:
        smaller = f", or a smaller shard_items; a batch is {plan.batch_size}"
        can_shrink = not asked.resumes and plan.shard_items > plan.batch_size
        return [f"No shard of {about(expected.shard_s)} fits {walltime}: {longer}{smaller if can_shrink else ''}."]
    enough = max(expected.n_tasks_needed, slow.n_tasks_needed)
    if n_tasks < expected.n_tasks_needed:
        return [
            f"{n_tasks} × {walltime} is too short for {plan.n_shards:,} shards. Ask for more tasks with "
            f"--tasks {enough}; a task that finds no shard left ends at once."
        ]
    if n_tasks < slow.n_tasks_needed or not slow.n_tasks_needed:
        then = f"--tasks {enough} would" if slow.n_tasks_needed else longer
        return [f"{n_tasks} × {walltime} may be too short, if batches are as slow as the upper estimate: {then}."]
    return []


def _on_memory(submission: Submission, seen: Observed) -> list[str]:
    notes = []
    gpu_peak, gpu_total = seen["gpu_peak_bytes"], seen["gpu_total_bytes"]
    if gpu_peak and gpu_total and gpu_peak > NEAR_FULL * gpu_total:
        notes.append(
            f"GPU memory is nearly full: {size_of(gpu_peak)} of {size_of(gpu_total)}. "
            f"Items larger than the probe's may not fit; a smaller batch_size leaves room."
        )
    host_peak, host_total = seen["host_peak_bytes"], seen["host_total_bytes"]
    if not host_peak or not host_total:
        return notes
    share = host_peak / host_total
    peak, total = slurm_size(host_peak), slurm_size(host_total)
    n_enough = max(1, math.ceil(1.5 * host_peak / 1024**3))
    enough = f"{n_enough}G"
    asked = megabytes_of(str(submission.slurm.get("mem")))  # 0 is all memory
    if share > NEAR_FULL:
        notes.append(f'Host memory is nearly full: {peak} of {total}. mem = "{enough}" under [slurm] leaves room.')
    elif share < HARDLY_USED and asked and n_enough * 1024 < asked:
        notes.append(f'Host memory is hardly used: {peak} of {total}. mem = "{enough}" under [slurm] may start sooner.')
    return notes


def _assumptions(submission: Submission, seen: Observed, *, queues: bool) -> list[str]:
    said = [
        f"{submission.n_concurrent} at once from the first minute: waiting in the queue and the merge are not included"
        if submission.n_concurrent > 1
        else "waiting in the queue and the merge are not included",
        "the items of the probe, spread evenly over the input, are typical",
        "other nodes, and file systems with all tasks running, are about as fast as in the probe",
    ]
    if not queues and submission.n_concurrent > 1:
        said.append(f"the probe had this machine to itself; {submission.n_concurrent} tasks will share it")
    if submission.shares_gpus:
        said.append("tasks share GPUs, and each counts as if it had one of its own")
    if seen["gpu_peak_bytes"] or seen["host_peak_bytes"]:
        said.append("memory peaks come from samples some seconds apart")
    return said
