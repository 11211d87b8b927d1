"""The output of `status`."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from slurmgpu.cli.console import result, say, wide_console
from slurmgpu.cli.views.columns import (
    MAX_ATTEMPTS,
    MAX_LISTED,
    counts_of,
    doing_now,
    show_failures,
    show_rest,
    show_table,
)
from slurmgpu.code.versions import are_told
from slurmgpu.code.versions import in_words as in_words_of
from slurmgpu.loader.names import title_of
from slurmgpu.report.attempts import in_task_order
from slurmgpu.report.next_step import none_began
from slurmgpu.report.origin import origin_in_words
from slurmgpu.report.queued import Job, is_held, is_suspended, reason_of
from slurmgpu.report.state_words import ended_words, if_words, merge_words, moment, pace_words, shard_of, state_of
from slurmgpu.report.status import Status, StatusAttempt
from slurmgpu.run.directory import Run
from slurmgpu.util.amounts import count_of, share_of, span_of
from slurmgpu.util.ansi import plain
from slurmgpu.util.array_ids import array_of


def show_status(status: Status, max_rows: int = MAX_ATTEMPTS, *, tells_origin: bool = False) -> None:
    """Print a run's progress, pace, attempts and queued jobs; of more than `max_rows` attempts not those that ended.

    With `tells_origin` also its workload and its input.
    """
    console = wide_console()
    _show_progress(console, status, tells_origin)
    shown = attempts = in_task_order(status["attempts"])
    if len(attempts) > max_rows:
        shown = [a for a in attempts if state_of(a) != "ended"][:max_rows]
    if shown:
        _show_living(console, shown)
    show_rest(len(attempts), "status --json lists them", len(shown))
    show_failures(console, attempts)
    _show_unrecorded(status)
    lines = list(filter(None, (_job_words(job, status["time"]) for job in status["queue"] or ())))
    for line in lines[:MAX_LISTED]:
        result(line)
    show_rest(len(lines), "status --json lists them")
    is_over = status["state"] == "ended" and status["at_work"] is False and not status["cancelled"]
    if (is_over or status["state"] == "incomplete") and not status["attempts"]:
        say(none_began(Run.open(Path(status["run_dir"]))))
    if command := next_command(status):
        say(f"next: {command}")


def _show_progress(console: Console, status: Status, tells_origin: bool) -> None:
    done, total = status["n_items_done"], status["n_items"]
    state = status["state"]
    if state == "complete" and status["n_errors"] == total:
        state = "[bold red]complete, every item failed[/]"
    console.print(
        f"[bold]{escape(plain(status['run']))}[/]  {state}  {done:,} of {count_of(total, 'item')} "
        f"({share_of(done, total)}), {status['n_shards_done']:,} of {count_of(status['n_shards'], 'shard')}"
    )
    if tells_origin:
        result(plain(origin_in_words(status, title_of(status["workload"], ""))))
    knows_pace = status["pace"]["items_per_s"] is not None or status["pace"]["left_s"]
    going = [pace_words(status), if_words(status)] if knows_pace else []
    if told := [part for part in (*going, merge_words(status), ended_words(status)) if part]:
        result("; ".join(told))
    if are_told(versions := status["code"]):
        result(f"code: {in_words_of(versions)}")
    if status["n_errors"]:
        result(f"failed items: {', '.join(f'{n:,} {name}' for name, n in status['errors_by_class'].items())}")
    if status["last_failed"]:
        result(f"one of the last: {plain(status['last_failed'])}")


def _show_unrecorded(status: Status) -> None:
    """Print the failures of attempts without a record, and records that cannot be used."""
    unseen = Counter(status["failures"]) - Counter(a["failure"] or "" for a in status["attempts"])
    if unseen:
        counts = ", ".join(f"{n:,} {plain(kind)}" for kind, n in unseen.items())
        result(f"failed without a record: {counts}; slurmgpu report {shlex.quote(status['run_dir'])} names them")
    for name in status["damaged_records"]:
        result(f"record damaged: {name}")
    for name in status["unreadable_records"]:
        result(f"record cannot be read at present: {name}")


def _job_words(job: Job, now: float) -> str:
    """The line on a queued job: why it waits, and what lets it go on; "" for one that runs."""
    if is_held(job):
        free = array_of(job["job_id"]) if "[" in job["job_id"] else job["job_id"]
        return (
            f"held: {job['job_id']} ({job['reason']}); release it with `scontrol release {free}`, or ask an "
            f"administrator to, if Slurm refuses that"
        )
    if job["state"] == "PENDING":
        start = f"start estimated for {moment(job['start'], now)}" if job["start"] else ""
        told = ", ".join(filter(None, (reason_of(job), start)))
        return f"queued: {'job' if job['n_tasks'] else 'merge job'} {job['job_id']}" + f" ({told})" * bool(told)
    if is_suspended(job):
        return f"suspended by Slurm: {job['job_id']}; its tasks stay silent until Slurm resumes them"
    return ""


def _show_living(console: Console, attempts: Sequence[StatusAttempt]) -> None:
    names = {"attempt": [a["attempt"] for a in attempts]}
    progress = [a["progress"] or "" for a in attempts]
    columns = {
        **names,
        "node": [a["node"] for a in attempts],
        "state": list(map(state_of, attempts)),
        "shard": list(map(shard_of, attempts)),
        **({"progress": progress} if any(progress) else {}),
        **counts_of(attempts, [(a["n_deaths"], a["last_death"]) for a in attempts]),
        "last heard": [_last_heard(attempt) for attempt in attempts],
    }
    show_table(console, names, columns, doing_now(attempts))


def _last_heard(attempt: StatusAttempt) -> str:
    if attempt["failure"] or attempt["state"] == "ended":
        return attempt["failure"] or ""
    return f"{span_of(attempt['age_s'])} ago"


def next_command(status: Status) -> str | None:
    """The command to type next; None if there is nothing to do."""
    folder = shlex.quote(status["run_dir"])
    if status["state"] == "planned":
        return f"slurmgpu resubmit {folder}, or the two sbatch commands that `slurmgpu plan` printed"
    if status["state"] == "incomplete" or (status["state"] == "ended" and status["at_work"] is not None):
        verb = "merge" if status["n_shards_done"] == status["n_shards"] else "resubmit"
        return f"slurmgpu {verb} {folder}"
    if status["state"] == "complete" and status["n_errors"]:
        return f"slurmgpu report {folder} lists the failed items; slurmgpu logs {folder} --item N explains one"
    return None
