"""A run's rate and its time left, from the attempts' records of the last minutes.

The time left is simulated: tasks take the open shards one after another, each at its own rate.
Standard library only: `status` reads it on login nodes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypedDict, cast

from slurmgpu.report.queued import Queue, is_suspended, requeued, startable, tasks_of_job
from slurmgpu.run.frozen_plan import Plan
from slurmgpu.run.liveness import is_alive, last_heard, own_time, patience
from slurmgpu.run.records import ALL_FAIL, BriefRecord, task_of

WINDOW_S = 300.0
"""A rate covers the shards that ended in the last five minutes …"""
MIN_SHARDS = 3
"""… or the last three if shards take longer."""
LATE = 1.5
"""A current shard without progress is late after this multiple of the usual time."""
BETWEEN_S = 5.0
"""The longest time without a shard between two shards; a longer one means that none is free."""
SHARE = 4
"""A task takes at most its share of the open shards divided by this at once."""


NONE: Mapping[int, int] = MappingProxyType({})
"""No shard of which some items are computed again."""


class PaceRecord(TypedDict):
    """The value of `pace` in the JSON of status."""

    items_per_s: float | None
    left_s: float | None
    left_if_queued_start_s: float | None
    n_shards_left_over: int
    n_living: int
    n_waiting: int


@dataclass(frozen=True)
class Pace:
    """The rate of a run; None is unknown.

    `items_per_s` is the rate of all computing tasks together, `rates` that of each attempt. `left_s` is the time until
    the last shard is published by living tasks and by tasks with a start time from Slurm; `left_if_queued_start_s` is
    that if all queued tasks started now. `n_shards_left_over` are shards that do not fit in the walltimes; 0 if that
    depends on tasks with unknown start times.
    """

    items_per_s: float | None = None
    left_s: float | None = None
    left_if_queued_start_s: float | None = None
    n_shards_left_over: int = 0
    n_living: int = 0
    n_waiting: int = 0
    rates: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> PaceRecord:
        """The value of `pace` in the JSON of status."""
        values = {key: getattr(self, key) for key in PaceRecord.__annotations__}
        seconds = ("left_s", "left_if_queued_start_s")
        rounded = {key: round(values[key], 1) for key in seconds if values[key] is not None}
        return cast(PaceRecord, {**values, **rounded, "items_per_s": rounded_rate(self.items_per_s)})


@dataclass(frozen=True, order=True)
class Slot:
    """A task that takes shards: when it is free, items per second, and its end; times are seconds from now."""

    free_s: float
    rate: float
    until_s: float = math.inf
    shard_s: float = 0.0  # the part of free_s for the current shard


def rounded_rate(rate: float | None) -> float | None:
    """A rate to four digits: to four decimals, that of items which take hours would be 0."""
    return None if rate is None else float(f"{rate:.4g}")


def living_of(records: Iterable[BriefRecord], queue: Queue | None, now: float, patience_s: float) -> list[BriefRecord]:
    """The attempts that were heard within `patience_s`, except those whose task Slurm has queued again."""
    gone = requeued(queue or ())
    return [record for record in records if is_alive(record, patience_s, now) and task_of(record) not in gone]


def pace_of(
    plan: Plan,
    records: Sequence[BriefRecord],
    published: Collection[int],
    queue: Queue | None,
    now: float,
    patience_s: float | None = None,
    again: Mapping[int, int] = NONE,
) -> Pace:
    """The pace of a run at the time `now`; `queue` are its jobs as in the JSON of status.

    Ignores attempts that have written nothing for `patience_s`, by default a lease, and suspended ones. `again` is how
    many items of a shard the current submission recomputes.
    """
    patience_s = patience(plan.lease_s) if patience_s is None else patience_s
    stopped = {task for job in queue or () if is_suspended(job) for task in tasks_of_job(job)}
    living = [r for r in living_of(records, queue, now, patience_s) if task_of(r) not in stopped]
    waiting = startable(queue or (), living)
    n_waiting = sum(job["n_tasks"] for job, _ in waiting)
    n_startable = sum(n_tasks for _, n_tasks in waiting)
    own = {record["attempt"]: rate for record in records if (rate := rate_of(plan, record, again)) is not None}
    rates = {r["attempt"]: own[r["attempt"]] for r in living if r["attempt"] in own and computes(r)}
    counts: dict[str, Any] = {"n_living": len(living), "n_waiting": n_waiting, "rates": rates}
    n_open = plan.n_shards - len(published)
    if not n_open:
        return Pace(left_s=0.0, left_if_queued_start_s=0.0, **counts)
    if not own:
        return Pace(**counts)
    usual_rate = _mean([own[r["attempt"]] for r in living if r["attempt"] in own] or list(own.values())) or 0.0
    together = sum(own.get(r["attempt"], usual_rate) for r in living if computes(r))
    load_s = _mean([record["load_s"] for record in records if record["load_s"] is not None]) or 0.0
    slots = [_slot_of(plan, r, own.get(r["attempt"], usual_rate), load_s, own_time(r, now), again) for r in living]
    held = {record["shard"] for record in living if record["shard"] is not None} - set(published)
    free = _available(plan, records, set(published) | held, now)
    walltime_s = max((r["end_time"] - r["started"] for r in records if r["end_time"]), default=math.inf)

    def joining(start_s: float) -> Slot:
        """A task that starts then."""
        return Slot(start_s + load_s, usual_rate, start_s + walltime_s - plan.margin_s)

    known = [
        joining(max(0.0, job["start"] - now))
        for job, n_tasks in waiting
        if job["start"] is not None
        for _ in range(n_tasks)
    ]
    mean_items = _mean_items(plan, n_open, [n for shard, n in again.items() if shard not in published])
    at_once, throttled = [joining(0.0)] * n_startable, n_waiting - n_startable
    left_s, n_over = _simulate(plan.margin_s, mean_items, [*slots, *known], free, joining, throttled)
    left_s = left_s or None  # the last shards are overdue: nothing tells how long their items still take
    if_s = _simulate(plan.margin_s, mean_items, [*slots, *at_once], free, joining, throttled)[0] if at_once else left_s
    n_over = n_over if len(known) == n_startable else 0
    return Pace(together if living else None, left_s, if_s, n_over, **counts)


def computes(record: BriefRecord) -> bool:
    """Whether a live attempt was computing at its last record: on a shard, or between two."""
    if record["state"] != "running":
        return False
    since = max([record["phases"][-1][0], *(entry[1] + entry[2] for entry in record["published"][-1:])])
    return record["shard"] is not None or record["updated"] - since < BETWEEN_S


def rate_of(plan: Plan, record: BriefRecord, again: Mapping[int, int] = NONE) -> float | None:
    """An attempt's items per second over its last minutes, including the time between shards; None before any.

    None also while all of its calls fail or all its items have failed: calls that work take other times.
    """
    if (record["progress"] or "").startswith(ALL_FAIL) or 0 < record["n_items"] == record["n_errors"]:
        return None
    recent = _recent(record)
    n_items, seconds = 0.0, 0.0
    begins = [*(entry[1] for entry in recent[1:]), record["shard_started"]]
    for (shard, started, took, _, *revision), following in zip(recent, begins, strict=False):
        between = following - started - took if following is not None else 0.0
        n_items += _size(plan, shard, again if revision else NONE)
        seconds += took + (between if 0 < between < max(took, BETWEEN_S) else 0.0)
    rate = n_items / seconds if n_items and seconds > 0 else None
    if record["shard_started"] is None or record["shard"] is None:
        return rate
    done, in_hand_s = record["shard_done"], record["updated"] - record["shard_started"]
    if rate is None:
        return done / in_hand_s if done and in_hand_s > 0 else None
    # The attempt has slowed down if its current shard takes longer than those before.
    is_late = in_hand_s * rate > _size(plan, record["shard"], again) * (1.0 if done else LATE)
    return (n_items + done) / (seconds + in_hand_s) if is_late else rate


def _recent(record: BriefRecord) -> list[Sequence[Any]]:
    entries = record["published"]
    since = (entries[-1][1] + entries[-1][2] if entries else 0.0) - WINDOW_S
    for count, (_, started, took, *_) in enumerate(reversed(entries)):
        if started + took < since and count >= MIN_SHARDS:
            return list(entries[-count:])
    return list(entries)


def _size(plan: Plan, shard: int, again: Mapping[int, int]) -> int:
    """The items of a shard, or those of them that are computed again."""
    if (n_items := again.get(shard)) is not None:
        return n_items
    start, stop = plan.bounds(shard)
    return max(0, stop - start)  # a damaged record may name a shard that does not exist


def _mean_items(plan: Plan, n_open: int, again: Sequence[int]) -> float:
    """The mean number of items of the open shards; `again` has those of shards of which some are computed again."""
    return (sum(again) + (n_open - len(again)) * plan.n_items / plan.n_shards) / n_open


def _slot_of(plan: Plan, record: BriefRecord, rate: float, load_s: float, now: float, again: Mapping[int, int]) -> Slot:
    """A living task as a `Slot`: free after loading or after its current shard; `now` is by its clock."""
    until = math.inf if record["end_time"] is None else record["end_time"] - plan.margin_s - now
    age = now - record["updated"]
    if record["state"] != "running":
        since = record["phases"][-1][0]
        # A shard that it holds after a worker's death comes first.
        held_s = 0.0 if record["shard"] is None else _size(plan, record["shard"], again) / rate
        free = max(0.0, load_s - (now - since)) + held_s
        return Slot(free, rate, until, held_s)
    started = record["shard_started"]
    if record["shard"] is None or started is None:
        return Slot(0.0, rate, until)
    size, done = _size(plan, record["shard"], again), record["shard_done"]
    # Progress is known to the batch: estimate by the clock within the current batch.
    least, most = ((size - done - n) / rate - age for n in (plan.batch_size, 0))
    left = max(0.0, least, min(most, size / rate - (now - started)))
    return Slot(left, rate, until, left)


def _available(plan: Plan, records: Iterable[BriefRecord], taken: set[int], now: float) -> list[tuple[float, int]]:
    """Available shards as (seconds until then, number): those of dead tasks once their leases are over."""
    stale: dict[int, float] = {}
    for record in records:
        shard = record["shard"]
        if shard is not None and shard not in taken and record["state"] != "ended":
            stale[shard] = max(0.0, last_heard(record) + plan.lease_s - now)
    n_free = plan.n_shards - len(taken) - len(stale)
    return sorted([(0.0, n_free)] * (n_free > 0) + [(at, 1) for at in stale.values()])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _simulate(
    margin_s: float,
    mean_items: float,
    slots: Sequence[Slot],
    free: Sequence[tuple[float, int]],
    joining: Callable[[float], Slot],
    n_throttled: int,
) -> tuple[float | None, int]:
    """Seconds until the last shard is published, None if not all fit; and the number left over.

    A task whose walltime ends is replaced by a throttled one.
    """
    ends = [slot.until_s + margin_s for slot in slots]
    # Shards that a walltime cuts off go to others.
    cut = [slot.shard_s > 0 and slot.free_s > end for slot, end in zip(slots, ends, strict=True)]
    heap = [(end if is_cut else slot.free_s, slot) for slot, end, is_cut in zip(slots, ends, cut, strict=True)]
    pools = sorted([*free, *((end, 1) for end, is_cut in zip(ends, cut, strict=True) if is_cut)])
    last_s = max(
        (slot.free_s for slot, is_cut in zip(slots, cut, strict=True) if slot.shard_s and not is_cut), default=0.0
    )
    heapq.heapify(heap)
    n_left = sum(n for _, n in pools)
    together = sum(slot.rate for slot in slots)
    while n_left and heap:
        at, slot = heapq.heappop(heap)
        since_s, n_here = pools[0]
        at, seconds = max(at, since_s), mean_items / slot.rate
        n = min(n_here, max(1, int(n_left * slot.rate / together / SHARE)))
        if slot.until_s < math.inf:
            n = min(n, int((slot.until_s - at) / seconds))
        if n > 0:
            at += n * seconds
            last_s, n_left = max(last_s, at), n_left - n
            pools[:1] = [(since_s, n_here - n)] if n < n_here else []
            heapq.heappush(heap, (at, slot))
            continue
        together -= slot.rate
        if n_throttled:
            n_throttled -= 1
            following = joining(min(at, slot.until_s))
            together += following.rate
            heapq.heappush(heap, (following.free_s, following))
    return (None if n_left else last_s), n_left
