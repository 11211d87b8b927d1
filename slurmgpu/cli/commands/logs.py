"""`logs`: print logs of tasks, workers and merges, by task, item or failure class."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from slurmgpu.cli.console import result, result_json, say
from slurmgpu.cli.views.log_follower import LogFollower, follow_run
from slurmgpu.cli.views.log_lines import Printer, labels_of, print_files, print_run, records_of
from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.logs.files import attempts_with_logs, merge_files
from slurmgpu.logs.lines import Line
from slurmgpu.report.attempts import in_task_order
from slurmgpu.report.report_file import read_report
from slurmgpu.report.states import is_at_work
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import ENDS, is_over, job_here
from slurmgpu.search.cached_run import cached
from slurmgpu.search.classes import Event, events_of_class, events_of_failed_items
from slurmgpu.search.excerpts import N_LINES, Excerpt
from slurmgpu.search.index import FileRecord, LoggedAttempt, read_index
from slurmgpu.search.items import story_of_item
from slurmgpu.util.amounts import count_of, size_of
from slurmgpu.util.ansi import plain
from slurmgpu.util.array_ids import task_of_attempt
from slurmgpu.util.shared_files import exists

N_EXCERPTS = 3
"""Failures of a class that are shown with the lines around them."""


def print_task(run: Run, task: str, n_lines: int | None, *, follow: bool) -> None:
    """Print the logs of a task's attempts, ordered by time; with `follow` also new lines."""
    records = records_of(run, task)
    if not records:
        refuse_unstarted(run, task, waits=follow)
    labels = labels_of(run, records)
    if not labels and not follow:
        raise SlurmGPUError(f"Task {task} of {run.folder} has no log in {run.logs}.")
    since = min((record["started"] for record in records), default=0.0)
    printer = Printer({file.path: label for file, label in labels.items()})
    stops = print_files(list(labels), printer, n_lines, since, whole=follow)
    if follow:
        LogFollower(run, printer, stops, lambda: records_of(run, task)).go_on()
        if not records and not records_of(run, task):
            refuse_unstarted(run, task, waits=False)


def print_merge(run: Run, n_lines: int | None, *, follow: bool) -> None:
    """Print the logs of the merge jobs."""
    files = merge_files(run)
    lines = run.submissions()
    if not files and (is_over(lines) or not follow):
        why = (
            "no merge has started, or the command that submitted merged the run itself (as with the executor local) "
            "and wrote to its terminal"
        )
        if lines and lines[-1].get("by_hand"):
            why = (
                "it was submitted by hand. If sbatch/merge.sbatch has run, its output is in "
                f"slurmgpu-merge-{lines[-1].get('merge_job', 'JOB')}.out, in the folder where you ran sbatch"
            )
        raise SlurmGPUError(
            f"{run.folder} has no log of a merge: {why}. `slurmgpu report {run.typed}` shows the result of a merge."
        )
    printer = Printer({file.path: file.source for file in files})
    stops = print_files(files, printer, n_lines, 0.0, whole=follow)
    if follow:
        LogFollower(run, printer, stops, None).go_on()


def print_item(run: Run, asked: str, n_lines: int | None) -> None:
    """Print what happened to an item, given by its number or name, and the lines of the logs that say so."""
    from slurmgpu.merge.item_names import find_item, name_by_key  # reads inputs

    index = find_item(run, asked)
    story = story_of_item(run, index, n_lines or N_LINES)
    name = name_by_key(run, index)
    numbered = f"Item {index}"
    result(story.sentence.replace(numbered, f"{numbered} ({plain(name)})", 1) if name else story.sentence)
    if story.excerpt is not None:
        result(f"{story.excerpt.where}\n")
        show_excerpt(story.excerpt)
    else:
        result("The logs say no more about it." if story.attempts else "No log mentions it.")
    if story.ended == "missing" and is_at_rest(run):
        say(f"next: slurmgpu resubmit {run.typed}")


def show_excerpt(excerpt: Excerpt) -> None:
    """Print the lines of an excerpt, with "…" where some are left out."""
    printer = Printer({line.file.path: line.file.source for line in excerpt.lines})
    for number, line in enumerate(excerpt.lines):
        if excerpt.is_gap(number):
            sys.stdout.write("…\n")
        printer.show(line, mark=number == excerpt.mark)


def print_class(run: Run, name: str, n_lines: int | None) -> None:
    """List every failure of a class with its place in the logs, and show the first ones."""
    count = _print_events(events_of_class(run, name), n_lines)
    tells = "mentions" if count == 1 else "mention"
    said = f"{count_of(count, 'line')} {tells} {name}" if count else f"No log and no report mentions {name}"
    say(f"{said}. next: slurmgpu logs {run.typed} --item N" if count else f"{said}.")


def print_failed(run: Run, n_lines: int | None) -> None:
    """List every failed item of the last report with its place in the logs, and show the first ones."""
    run = cached(run)
    if run.report is None:
        read_report(run)  # says so if it is damaged
        say(f"No merge has listed failed items yet; `slurmgpu show {run.typed} --failed` shows those that have rows.")
        return
    count, n_failed = _print_events(events_of_failed_items(run), n_lines), run.report["n_errors"]
    said = f"{count_of(n_failed, 'item')} failed" if count else "No item failed, by the last report"
    if n_failed > count:
        said += (
            f"; the first {count:,} are listed, as in the report. `slurmgpu show {run.typed} --failed` shows the others"
        )
    say(f"{said}. next: slurmgpu logs {run.typed} --item N" if count else f"{said}.")


def _print_events(events: Iterable[Event], n_lines: int | None) -> int:
    count, shown = 0, set[Line]()
    for event in events:
        count += 1
        where = f"  {event.file.path}:{event.number}" if event.file else ""
        whose = f" in attempt {event.attempt}" if event.attempt and event.attempt not in event.what else ""
        sys.stdout.write(f"{event.what}{whose}: {event.message.partition(chr(10))[0]}{where}\n")
        excerpt = event.excerpt(n_lines or N_LINES // 2) if count <= N_EXCERPTS else None
        if excerpt is not None:
            show_excerpt(excerpt.without(shown))
            shown.update(excerpt.lines)
            sys.stdout.write("\n")
    return count


def show_index(run: Run) -> None:
    """Print each attempt in task order with its state and its non-empty log files."""
    index = read_index(run)
    if not index["attempts"]:
        if is_at_rest(run):
            if run.published() or exists(run.merged):
                raise SlurmGPUError(
                    f"{run.folder} has no logs and no records of tasks any more. `slurmgpu status {run.typed}` shows "
                    "what it has."
                )
            raise SlurmGPUError(
                f"No task of {run.folder} has started, and none is queued. `slurmgpu resubmit {run.typed}` submits it."
            )
        raise SlurmGPUError(f"No task of {run.folder} has started yet. `slurmgpu status {run.typed}` says why.")
    rows = [
        (about["attempt"], _end_of(about), about["files"])
        for about in sorted(in_task_order(index["attempts"]), key=lambda about: about["submission"] or 0)
    ]
    rows += [("merge", "", index["merge"])] if index["merge"] else []
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, end, files in rows:
        line = f"{name:<{widths[0]}}  {end:<{widths[1]}}  {_files(files)}"
        sys.stdout.write(f"{line.rstrip()}\n")
    say(f"files in {run.logs}\nnext: slurmgpu logs {run.typed} TASK, or --item N, or --failed, or --class NAME")


def _end_of(about: LoggedAttempt) -> str:
    """An attempt's failure, or `ok`, or its state if it may be alive."""
    if about["failure"]:
        return about["failure"]
    return "ok" if about["state"] == "ended" else "silent" if about["silent"] else about["state"]


def _files(files: Sequence[FileRecord]) -> str:
    """Names and sizes, worker logs first: they are needed most."""
    written = [file for file in files if file["size_bytes"]]
    written.sort(key=lambda file: (not file["source"].startswith("worker"), file["source"].endswith(".out")))
    return "  ".join(f"{Path(file['path']).name} ({size_of(file['size_bytes'])})" for file in written)


def known_tasks(run: Run) -> dict[str, bool]:
    """The submitted and started tasks, and whether their submission is still active."""
    names = {task_of_attempt(name): False for name in attempts_there(run)}
    for line in run.submissions():
        here = "pids" in line
        job = job_here(line["executor"], line["submission"]) if here else line.get("array_job")
        goes_on = line["state"] not in ENDS
        names |= {f"{job}_{number}": goes_on for number in range(line["n_tasks"]) if job}
    return names


def attempts_there(run: Run) -> list[str]:
    """The names of the attempts that there are."""
    return [record["attempt"] for record in attempts_with_logs(run)]


def refuse_unstarted(run: Run, task: str, *, waits: bool) -> None:
    """Raise SlurmGPUError on an unknown task or attempt, unless the command `waits` and it may still start."""
    known, there = known_tasks(run), attempts_there(run)
    base = re.sub(r"\.\d+$", "", task)
    meant = [name for name in known if base in (name, name.rpartition("_")[2])]
    if not meant:
        raise SlurmGPUError(f"{run.folder} has no task {task!r}." + did_you_mean(task, {*known, *there}))
    goes_on = any(known[name] for name in meant)
    if goes_on and waits:
        return
    yet, hint = (" yet", " --follow waits for it.") if goes_on else ("", "")
    if others := [name for name in there if task_of_attempt(name) in meant]:
        are = "is" if len(others) == 1 else "are"
        raise SlurmGPUError(f"{run.folder} has no attempt {task}{yet}: there {are} {', '.join(others)}.{hint}")
    if goes_on:
        raise SlurmGPUError(f"Task {task} of {run.folder} has not started yet.{hint}")
    raise SlurmGPUError(
        f"Task {task} of {run.folder} never started, and its submission is over. "
        f"`slurmgpu report {run.typed}` shows the result."
    )


def refuse_unsubmitted(run: Run, *, waits: bool) -> None:
    """Raise SlurmGPUError on a run without submissions, unless the command `waits` and Slurm has its jobs."""
    from slurmgpu.executors import live_tasks

    if run.submissions() or run.attempts():
        return
    queued = live_tasks.alive(run)
    if queued is None:
        raise SlurmGPUError(
            f"{run.folder} is planned but not submitted. Submit it by `slurmgpu resubmit {run.typed}`, "
            f"or by the two sbatch commands that `slurmgpu plan` printed."
        )
    if not waits:
        raise SlurmGPUError(f"No task of {run.folder} has started yet: {queued}. --follow waits for it.")


def is_at_rest(run: Run) -> bool:
    """Whether nothing is known to compute missing items, neither a process of this machine nor a job in the queue."""
    from slurmgpu.executors.registry import queued_jobs

    lines, queue = run.submissions(), queued_jobs(run)
    return not queue and (not lines or is_at_work(lines, queue) is False)


def _refuse_contradiction(asked: Sequence[str], *, follow: bool, has_lines: bool) -> None:
    """Raise SlurmGPUError if more than one of these arguments is given, or if they exclude --follow or --lines."""
    if len(asked) > 1:
        raise SlurmGPUError(f"{' and '.join(asked)} exclude each other: give one of them.")
    if follow and asked and asked[0] not in ("TASK", "--merge"):
        raise SlurmGPUError(f"--follow does not work with {asked[0]}: use it with TASK, with --merge or alone.")
    if has_lines and "--json" in asked:
        raise SlurmGPUError("--lines and --json exclude each other: give one of them.")


def show_logs(
    run: Run,
    task: str | None,
    item: str | None,
    failure: str | None,
    *,
    failed: bool,
    merge: bool,
    follow: bool,
    n_lines: int | None,
    as_json: bool,
) -> None:
    """Print what the command's arguments ask for; without any, the index."""
    given = {"TASK": task, "--item": item, "--class": failure}
    asked = [name for name, value in given.items() if value is not None]
    asked += ["--failed"] * failed + ["--merge"] * merge + ["--json"] * as_json
    _refuse_contradiction(asked, follow=follow, has_lines=n_lines is not None)
    if not as_json and item is None:
        refuse_unsubmitted(run, waits=follow)
    if as_json:
        result_json(read_index(run))
    elif item is not None:
        print_item(run, item, n_lines)
    elif failed:
        print_failed(run, n_lines)
    elif failure is not None:
        print_class(run, failure, n_lines)
    elif merge:
        print_merge(run, n_lines, follow=follow)
    elif task is not None:
        print_task(run, task, n_lines, follow=follow)
    elif follow:
        follow_run(run, n_lines)
    elif n_lines is not None:
        print_run(run, n_lines)
    else:
        show_index(run)
