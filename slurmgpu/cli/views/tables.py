"""The output of `status` and `report`."""

from __future__ import annotations

import json
import keyword
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from slurmgpu.cli.console import result, say, wide_console
from slurmgpu.cli.views.columns import counts_of, doing_now, show_table, used_by
from slurmgpu.code.versions import are_told
from slurmgpu.code.versions import in_words as in_words_of
from slurmgpu.report.attempts import (
    IDLE_PERCENT,
    AttemptRow,
    in_task_order,
    node_of,
    of_last_submission,
    outcome_of,
    versions_in_words,
)
from slurmgpu.report.build import FailedItem, Hole, Report, every_item_failed, faults_of, last_death
from slurmgpu.report.ledger import KINDS, Ledger, energy_in_words, in_words
from slurmgpu.report.queued import Job, is_held, is_suspended, reason_of
from slurmgpu.report.state_words import if_words, merge_words, moment, pace_words, shard_of, state_of, unknown_words
from slurmgpu.report.status import Status, StatusAttempt
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import POLICIES
from slurmgpu.util.amounts import count_of, share_of, some_of, span_of, stretch_of, wide_clock
from slurmgpu.util.ansi import plain
from slurmgpu.util.array_ids import array_of

MAX_LISTED = 20
"""The most failed items, holes and messages that are printed; the JSON has more."""
MAX_ATTEMPTS = 200
MAX_NAMES = 3
EVERYWHERE = ("python", "numpy", "h5py")
"""Packages of every run, whose versions are only on the page and in the JSON."""
MAX_ODD = 8
"""The most columns with NaN or infinities that are named."""
MIN_HOURS = 0.05
"""The ledger of fewer hours is not printed: a few minutes are not representative."""
NONE_BEGAN = "no task has started: slurmgpu logs {} lists what their jobs wrote"
OTHER_RUN = "to change settings or input, which a run freezes, submit a new run with another --run-dir"


def show_status(status: Status, max_rows: int | None = None) -> None:
    """Print a run's progress, pace, attempts and queued jobs; at most `max_rows` attempts, omitting ended ones."""
    console = wide_console()
    _show_progress(console, status)
    attempts = in_task_order(status["attempts"])
    if max_rows is not None and len(attempts) > max_rows:
        attempts = [a for a in attempts if state_of(a) != "ended"][:max_rows]
    if attempts:
        _show_living(console, attempts)
    _more(len(status["attempts"]), "status --json lists them", len(attempts))
    _show_failures(console, attempts)
    _show_unrecorded(status)
    lines = list(filter(None, (_job_words(job, status["time"]) for job in status["queue"] or ())))
    for line in lines[:MAX_LISTED]:
        result(line)
    _more(len(lines), "status --json lists them")
    if status["state"] == "incomplete" and not status["attempts"]:
        say(NONE_BEGAN.format(shlex.quote(status["run_dir"])))
    if command := _next(status):
        say(f"next: {command}")


def _show_progress(console: Console, status: Status) -> None:
    done, total = status["n_items_done"], status["n_items"]
    state = status["state"]
    if state == "complete" and status["n_errors"] == total:
        state = "[bold red]complete, every item failed[/]"
    console.print(
        f"[bold]{escape(plain(status['run']))}[/]  {state}  {done:,} of {count_of(total, 'item')} "
        f"({share_of(done, total)}), {status['n_shards_done']:,} of {count_of(status['n_shards'], 'shard')}"
    )
    knows_pace = status["pace"]["items_per_s"] is not None or status["pace"]["left_s"]
    going = [pace_words(status), if_words(status)] if knows_pace else []
    if told := [part for part in (*going, merge_words(status), unknown_words(status)) if part]:
        result("; ".join(told))
    if are_told(versions := status["code"]):
        result(f"code: {in_words_of(versions)}")
    if status["n_errors"]:
        result(f"failed items: {', '.join(f'{n:,} {name}' for name, n in status['errors_by_class'].items())}")


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


def _next(status: Status) -> str | None:
    """The command to type next; None if there is nothing to do."""
    folder = shlex.quote(status["run_dir"])
    if status["state"] == "planned":
        return f"slurmgpu resubmit {folder}, or the two sbatch commands that `slurmgpu plan` printed"
    if status["state"] in ("incomplete", "ended") and not unknown_words(status):
        verb = "merge" if status["n_shards_done"] == status["n_shards"] else "resubmit"
        return f"slurmgpu {verb} {folder}"
    if status["state"] == "complete" and status["n_errors"]:
        return f"slurmgpu report {folder} lists the failed items; slurmgpu logs {folder} --item N explains one"
    return None


def show_report(report: Report) -> None:
    """Print the report: completeness, missing shards, failed items, attempts, and the command for the rest."""
    from slurmgpu.cli.views.summaries import show_summary

    console = wide_console()
    word = "[bold green]complete[/]" if report["complete"] else "[bold red]incomplete[/]"
    if every_item_failed(report):
        word = "[bold red]complete, every item failed[/]"
    name = escape(plain(report["run"]))
    console.print(
        f"[bold]{name}[/]  {word}  {report['n_rows']:,} of {count_of(report['n_items'], 'row')}, "
        f"{report['n_errors']:,} of them failed, {report['gpu_hours']:.2f} GPU-hours"
    )
    _show_origin(report)
    _show_ledger(report["ledger"])
    show_summary(console, report["summary"])
    _show_holes(console, report)
    _show_errors(console, report)
    _show_attempts(console, report)
    _show_damage(report)
    for trace in {a["traceback"] for a in report["attempts"] if a["traceback"]}:
        result(f"\n{trace.rstrip()}")
    _show_next(report)


def _show_origin(report: Report) -> None:
    """Print where the rows are, and what computed them."""
    if report["merged"]:
        result(f"merged: {report['merged']}")
    if faults := faults_of(report):
        result(f"rehearsal: faults were injected: {faults}")
    if image := report["image"]:
        result(f"image: {image['path']} (sha256 {image.get('sha256', '–')[:12]})")
    if versions := versions_in_words(report["computed_with"], leaving_out=EVERYWHERE):
        result(f"computed with: {plain(versions)}")
    if odd := report["not_finite"]:
        result(f"not finite: {_not_finite(odd)}")
        result(
            f"  These rows are good: the workload gave such values, as for what is unknown.{_which_rows(report, odd)}"
        )
    if are_told(code := report["code"]):
        result(f"code: {in_words_of(code)}")
    if n_retried := sum(a["n_retried"] for a in report["attempts"]):
        waited_s = sum(a["waited_s"] for a in report["attempts"])
        result(f"tried again: {count_of(n_retried, 'item')}, after waiting {waited_s:,.0f} s")


def _show_damage(report: Report) -> None:
    """Print the revisions and records that cannot be used."""
    for name, why in report["damaged_revisions"].items():
        result(f"damaged: shards/{plain(name)}, with recomputed items: {plain(why)}")
        result("  These items keep their former rows, unless merged.h5 already had the new ones.")
    for name in report["damaged_records"]:
        result(f"record damaged: tasks/{name}.json; the work of attempt {name} is unknown")
    for name in report["unreadable_records"]:
        result(f"record could not be read: tasks/{name}.json; run `slurmgpu merge` once it can be read")


def _show_next(report: Report) -> None:
    """Print the next command, and what to change first if the same command would fail again."""
    folder = shlex.quote(report["run_dir"])
    again = report.get("resubmit_failed") or f"slurmgpu resubmit {folder} --failed"
    by = "with" if again.startswith("slurmgpu ") else "in Python, with the edited function, by"
    lines = report["submissions"]
    if report["resubmit"] and lines and lines[-1].get("after") and not of_last_submission(report["attempts"], lines):
        jobs = f"{'jobs' if len(lines[-1]['after']) > 1 else 'job'} {', '.join(lines[-1]['after'])}"
        result(
            f"\nno task has started: the array waited for {jobs} (--after), and Slurm cancels it if that run ends "
            "incomplete. Complete that run first."
        )
    elif report["resubmit"] and all(attempt["submission"] is None for attempt in report["attempts"]):
        result(f"\n{NONE_BEGAN.format(folder)}")
    if report["resubmit"]:
        policies = [POLICIES.get(attempt["failure"]) for attempt in report["attempts"] if attempt["failure"]]
        same = policies and not any(each is None or each.retriable or each.on_purpose for each in policies)
        words = "after fixing the cause, compute the rest with" if same else "to compute the rest"
        result(f"\n{words}: {report['resubmit']}")
        if same and not report["n_rows"]:
            result(OTHER_RUN)
    elif report["n_errors"] == report["n_rows"] > 1 and report["errors"]:
        result(f"\nEvery item failed: slurmgpu logs {folder} --item {report['errors'][0]['index']} shows where.")
        result(f"after fixing the code, recompute them {by}: {again}")
        result(OTHER_RUN)
    elif report["n_errors"]:
        result(f"\nafter fixing the cause, recompute failed items {by}: {again}")


def _not_finite(columns: Mapping[str, Mapping[str, int]]) -> str:
    words, told = (("nan", "NaN"), ("infinite", "infinity")), []
    for name, counts in list(columns.items())[:MAX_ODD]:
        parts = [f"{word} in {count_of(n, 'row')}" for key, word in words if (n := counts.get(key))]
        told.append(f"{plain(name)} ({', '.join(parts)})")
    more = f" and {count_of(len(columns) - MAX_ODD, 'more column')}" if len(columns) > MAX_ODD else ""
    return ", ".join(told) + more


def _which_rows(report: Report, columns: Mapping[str, Mapping[str, int]]) -> str:
    """The command that shows such rows of the first column that has one number a row, behind a blank."""
    of_plan = Run.open(Path(report["run_dir"])).plan.columns
    name = next((name for name in columns if of_plan.get(name, {}).get("shape") == []), None)
    if name is None:
        return ""
    is_word = name.isidentifier() and not keyword.iskeyword(name)
    value = name if is_word else f"col({json.dumps(name, ensure_ascii=False)})"
    condition = f"isnan({value} - {value})" if columns[name].get("infinite") else f"isnan({value})"
    return f" slurmgpu show {shlex.quote(report['run_dir'])} --where {shlex.quote(condition)}"


def _show_ledger(ledger: Ledger) -> None:
    if ledger["allocated"] < MIN_HOURS:
        return
    shown = in_words(ledger)
    parts = ", ".join(f"{shown.texts[kind]} {kind} ({shown.shares[kind]})" for kind in KINDS)
    result(f"allocated: {shown.texts['allocated']} {shown.unit}: {parts}")
    if ledger["energy_kwh"] is not None:
        result(f"energy: {' '.join(energy_in_words(ledger['energy_kwh']))}")


def _show_holes(console: Console, report: Report) -> None:
    if not report["missing"]:
        return
    items, shards = count_of(report["n_missing_items"], "item"), count_of(len(report["missing"]), "shard")
    console.print(f"\n[bold]missing[/]  {items} in {shards}")
    stretches = _stretches(report["missing"])
    for first, last in stretches[:MAX_LISTED]:
        shards = stretch_of(first["shard"], last["shard"], "shard")
        why = f"  damaged: {plain(first['damaged'])}" if first["damaged"] else ""
        result(f"  {shards}: {stretch_of(first['start'], last['stop'] - 1, 'item')}{why}")
    _more(len(stretches), "report --json lists them")


def _stretches(holes: Sequence[Hole]) -> list[tuple[Hole, Hole]]:
    """The first and last hole of each run of adjacent holes; a damaged one stands alone."""
    found: list[tuple[Hole, Hole]] = []
    for hole in holes:
        first, last = found[-1] if found else (hole, hole)
        if found and hole["shard"] == last["shard"] + 1 and not (hole["damaged"] or last["damaged"]):
            found[-1] = first, hole
        else:
            found.append((hole, hole))
    return found


def _show_errors(console: Console, report: Report) -> None:
    """Print each message once, with the first item that failed with it."""
    if not report["errors"]:
        return
    classes = ", ".join(f"{count:,} {name}" for name, count in report["errors_by_class"].items())
    console.print(f"\n[bold]failed items[/]  {classes}")
    met: dict[str, list[FailedItem]] = {}
    for item in report["errors"]:
        first_line = plain(item["message"].partition("\n")[0])
        met.setdefault(f"{item['class']}: {first_line}", []).append(item)
    for message, items in list(met.items())[:MAX_LISTED]:
        name = f" ({plain(known)})" if (known := items[0].get("name")) else ""
        more = f" and {len(items) - 1:,} more" if len(items) > 1 else ""
        result(f"  item {items[0]['index']}{name}{more}: {message}")
    _more(len(met), "report --json lists them")
    if report["n_errors"] > (n_listed := len(report["errors"])):
        folder = shlex.quote(report["run_dir"])
        result(
            f"  Only the first {n_listed:,} failed items are listed; `slurmgpu show {folder} --failed` shows others."
        )


def _show_attempts(console: Console, report: Report) -> None:
    attempts = in_task_order(report["attempts"])
    if not attempts:
        return
    shown = attempts[:MAX_ATTEMPTS]
    names = {"attempt": [a["attempt"] for a in shown]}
    columns = {
        **names,
        "node": list(map(node_of, shown)),
        "GPUs": [str(a["n_gpus"] * a["n_nodes"]) for a in shown],
        "time": [wide_clock(a["seconds"]) for a in shown],
        **counts_of(shown, [(len(a["deaths"]), last_death(a["deaths"])) for a in shown]),
    }
    end = {"end": list(map(outcome_of, shown))}
    used = used_by([a["usage"] for a in shown])
    console.print("\n[bold]attempts[/]")
    show_table(console, names, columns, used, end)
    _more(len(attempts), "report --json lists them", MAX_ATTEMPTS)
    _show_failures(console, attempts)
    _show_idle(attempts)


def _show_failures(console: Console, attempts: Sequence[StatusAttempt] | Sequence[AttemptRow]) -> None:
    """Print each message once, with the attempts that ended with it."""
    met: dict[str, list[str]] = {}
    for a in attempts:
        if a["failure"]:
            met.setdefault(f"{a['failure']}: {a['message']}", []).append(a["attempt"])
    if not met:
        return
    console.print("\n[bold]failures[/]")
    for message, names in list(met.items())[:MAX_LISTED]:
        result(f"  {some_of(names, MAX_NAMES)}: {message}")
    _more(len(met), "--json lists them all")


def _show_idle(attempts: Sequence[AttemptRow]) -> None:
    used = [(a["usage"].get("gpu_utilisation"), a["attempt"]) for a in attempts if a["idle_gpu"]]
    idle = sorted((share, name) for share, name in used if share is not None)
    if not idle:
        return
    share, name = idle[0]
    others = f" (and under {IDLE_PERCENT} % in {len(idle) - 1:,} more)" if len(idle) > 1 else ""
    result(
        f"\nthe GPU of attempt {name} was used {share:.0f} % on average{others}. A larger batch_size gives it more "
        "work at once. If it waits while the workload prepares items on the CPU, several tasks can share it "
        "(docs/how-to/share-a-gpu.md)."
    )


def _more(count: int, where: str, shown: int = MAX_LISTED) -> None:
    if count > shown:
        result(f"  … and {count - shown:,} more; {where}")
