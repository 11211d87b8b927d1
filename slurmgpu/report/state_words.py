"""A run's status in words, for a screen, a line or a table, without control characters from the run."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping

from slurmgpu.report.attempts import in_task_order
from slurmgpu.report.queued import is_held, is_suspended, reason_of, requeued
from slurmgpu.report.status import Status, StatusAttempt
from slurmgpu.run.records import ALL_FAIL
from slurmgpu.util.amounts import clock, count_of, rate_in_words, share_of, span_of
from slurmgpu.util.ansi import plain
from slurmgpu.util.array_ids import array_of, task_of_attempt

GRACE_S = 45.0
"""How long to wait once tasks are over: the merge may still run, or the queue was asked too early."""
SETTLED_S = 10.0
"""A task without a shard this long after loading found no free one."""
LINE_S, QUIET_S = 10.0, 300.0
"""The least time between two lines of a log, and the longest while a run is followed."""
PERCENT = 5
"""The least progress that is news."""


def state_of(attempt: StatusAttempt) -> str:
    """An attempt's state, or `failed` or `silent`, in one word."""
    if attempt["failure"]:
        return "failed"
    return "silent" if attempt["silent"] else attempt["state"]


def tasks_of(status: Status) -> list[StatusAttempt]:
    """The latest attempt of each task: first silent and failed ones, then living ones, then ended ones.

    Silent and failed attempts of earlier submissions come last: the last submission computes their shards.
    """
    latest = {task_of_attempt(attempt["attempt"]): attempt for attempt in in_task_order(status["attempts"])}
    newest = max((attempt["submission"] for attempt in latest.values()), default=0)
    order = {"silent": 0, "failed": 1, "ended": 3}

    def place(attempt: StatusAttempt) -> int:
        rank = order.get(state_of(attempt), 2)
        return 3 if rank < 2 and attempt["submission"] < newest else rank

    return sorted(latest.values(), key=place)


def pace_words(status: Status) -> str:
    """The rate of the run and the time left."""
    pace = status["pace"]
    left_s, rate = pace["left_s"], pace["items_per_s"]
    parts = [] if rate is None else [rate_in_words(rate) if rate else "no task computes just now"]
    n_open = status["n_shards"] - status["n_shards_done"]
    if not n_open:
        return ""
    attempts = status["attempts"]
    n_held = min(n_open, sum(each["silent"] and each["shard"] is not None for each in attempts))
    if rate == 0 and n_held:
        return f"{parts[0]}: {count_of(n_held, 'shard')} of silent tasks can be taken over once their leases are stale"
    if left_s is not None:
        parts.append(f"{clock(left_s)} left, until about {moment(status['time'] + left_s, status['time'])}")
    elif pace["n_shards_left_over"] and pace["n_living"]:
        parts.append(f"{count_of(pace['n_shards_left_over'], 'shard')} will be left over when the walltimes end")
    elif pace["n_living"] and status["state"] == "running" and not if_words(status):
        is_overdue = rate and n_open <= sum(not each["silent"] and each["shard"] is not None for each in attempts)
        late = f"{count_of(n_open, 'shard')} in hand, for longer than those before"
        parts.append(late if is_overdue else "time left: not known yet")
    return ", ".join(parts)


def if_words(status: Status) -> str:
    """The time left if all queued tasks started now, if that is shorter."""
    pace = status["pace"]
    left_s, if_s = pace["left_s"], pace["left_if_queued_start_s"]
    if not if_s or not pace["n_waiting"] or (left_s is not None and if_s > 0.95 * left_s):
        return ""
    return f"{clock(if_s)} left if started now"


def merge_words(status: Status) -> str:
    """Progress of the merge once no task computes."""
    if status["state"] != "merging":
        return ""
    newest = max((attempt["submission"] for attempt in status["attempts"]), default=0)
    again = requeued(status["queue"] or ())
    tasks = [
        task
        for task in tasks_of(status)
        if task["submission"] == newest and not (task["silent"] and task_of_attempt(task["attempt"]) in again)
    ]
    n_ended = sum(task["state"] == "ended" or task["silent"] for task in tasks)
    jobs = [job for job in status["queue"] or () if not job["n_tasks"]]
    at_work = any(job["state"] == "RUNNING" for job in jobs)
    n_tasks = len(tasks) + status["pace"]["n_waiting"]
    told = "waiting for the merge" if n_ended == n_tasks else "the merge follows the last one"
    return f"{n_ended:,} of {count_of(n_tasks, 'task')} ended; {'the merge is running' if at_work else told}"


def parting_words(status: Status) -> str:
    """Why a run without jobs is still watched."""
    if status["state"] != "ended" or status["at_work"] is None or status["cancelled"]:
        return ended_words(status)
    return f"no job is left; watching stops if the merge does not finish within {GRACE_S:.0f} s"


def ended_words(status: Status) -> str:
    """A remark if it is unknown whether more tasks are queued, or if they were cancelled."""
    if status["state"] != "ended":
        return ""
    if status["at_work"] is None:
        return "whether more tasks are queued cannot be seen here"
    return "the last submission was cancelled" if status["cancelled"] else ""


def failure_words(status: Status) -> str:
    """Failures by class: of tasks, workers, items and records."""
    left_out = {"damaged": len(status["damaged_records"]), "unreadable": len(status["unreadable_records"])}
    records = {kind: n for kind, n in left_out.items() if n}
    groups = (
        ("tasks", status["failures"]),
        ("workers", status["worker_deaths"]),
        ("items", status["errors_by_class"]),
        ("records", records),
    )
    texts = {name: ", ".join(f"{n:,} {plain(kind)}" for kind, n in counts.items()) for name, counts in groups}
    return "; ".join(f"{name}: {text}" for name, text in texts.items() if text)


def all_fail_words(status: Status) -> str:
    """How each call has failed so far in a living task, if one says so."""
    told = (attempt["progress"] or "" for attempt in status["attempts"] if not attempt["silent"])
    return next((plain(text) for text in told if text.startswith(ALL_FAIL)), "")


def queue_words(status: Status) -> str:
    """Pending tasks with their reasons, their start, and the time left with them; suspended tasks, and a held merge."""
    queue = status["queue"] or ()
    pending = [job for job in queue if job["state"] == "PENDING" and (job["n_tasks"] or is_held(job))]
    by_reason: Counter[str] = Counter()
    for job in pending:
        until = f", until `scontrol release {array_of(job['job_id'])}`" if is_held(job) else ""
        by_reason[plain(reason_of(job)) + until] += job["n_tasks"] or 1
    parts = [f"{n:,} pending" + f" ({why})" * bool(why) for why, n in by_reason.most_common(3)]
    if n_suspended := sum(map(is_suspended, queue)):
        parts.append(f"{n_suspended:,} suspended")
    if starts := [job["start"] for job in pending if job["start"] is not None]:
        parts.append(f"start about {moment(min(starts), status['time'])}")
    return "; ".join(part for part in (", ".join(parts), if_words(status)) if part)


def moment(epoch: float, now: float) -> str:
    """A time of day, with the date if it is not soon; Slurm counts a year for a job without a walltime."""
    day = "" if epoch - now < 20 * 3600 else "%a %d %b " if epoch - now < 300 * 86_400 else "%a %d %b %Y "
    return time.strftime(f"{day}%H:%M", time.localtime(epoch))


def shard_of(task: StatusAttempt) -> str:
    """The current shard; a dash between two shards."""
    if task["shard"] is None:
        return "–" if task["state"] == "running" else ""
    return str(task["shard"])


def part_of(task: StatusAttempt) -> str:
    """The finished share of the current shard, rounded down."""
    return f"{100 * task['shard_done'] // task['shard_items']}%" if task["shard_items"] else shard_of(task)


def last_message(task: StatusAttempt, words: Mapping[str, str], now: float) -> str:
    """A task's failure, silence, loading time, progress or last log line."""
    if task["failure"]:
        return plain(f"{task['failure']}: {task['message']}")
    if task["silent"]:
        return f"silent for {span_of(task['age_s'])}; its node may be dead"
    if task["state"] == "ended":
        return ""
    said = task["progress"] or words.get(task["attempt"], "")
    since_s = now - task["state_since"]
    parts = [f"{task['last_death']} ×{task['n_deaths']}"] if task["n_deaths"] else []
    if task["state"] != "running":
        parts.append(f"{task['state']} for {span_of(since_s)}")
    elif task["shard"] is None and task["items_per_s"] is None and since_s > SETTLED_S:
        parts.append("idle: other tasks have the last shards")
    return "; ".join(filter(None, [*parts, plain(said)]))


class News:
    """Says when to print a status in a pipe or a log: at news, at most every LINE_S, and after QUIET_S without news.

    The first is printed `at_once`, or after LINE_S.
    """

    def __init__(self, *, at_once: bool = True) -> None:
        self._told: object = None
        self._at = -math.inf if at_once else time.monotonic()

    def is_due(self, status: Status, *, always: bool = False) -> bool:
        """Whether to print this status now; with `always` also one without news."""
        done = status["n_items_done"] * 100 // (status["n_items"] * PERCENT)
        news = done, status["state"], failure_words(status), queue_words(status), all_fail_words(status)
        silent_s = time.monotonic() - self._at
        if silent_s < (LINE_S if always or news != self._told else QUIET_S):
            return False
        self._told, self._at = news, time.monotonic()
        return True


def line_of(status: Status) -> str:
    """A status in a line, for a log."""
    done, total = status["n_items_done"], status["n_items"]
    parts = [
        f"{time.strftime('%H:%M:%S', time.localtime(status['time']))} {plain(status['run'])} {status['state']}",
        f"{done:,} of {count_of(total, 'item')} ({share_of(done, total)})",
        pace_words(status),
        merge_words(status) or parting_words(status),
        failure_words(status),
        all_fail_words(status),
        queue_words(status),
    ]
    return "; ".join(part for part in parts if part)
