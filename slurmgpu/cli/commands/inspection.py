"""The commands that show runs: status, list, report and logs.

Each imports what it needs when it runs, so `status` starts fast on a login node.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slurmgpu.cli import completion, options
from slurmgpu.cli.exit_codes import EXIT_COMPLETE, EXIT_INCOMPLETE
from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.util.array_ids import task_of_attempt

if TYPE_CHECKING:
    from slurmgpu.report.report_file import Report
    from slurmgpu.run.directory import Run


def status(
    folder: options.RunArgument,
    watching: Annotated[
        bool, typer.Option("--watch", "-w", help="Follow it full-screen until it ends; q quits.")
    ] = False,
    as_json: options.JsonOption = False,
    metrics: Annotated[
        Path | None, typer.Option("--metrics", metavar="FILE", help="Also write its progress for Prometheus.")
    ] = None,
) -> None:
    """Show the status of a run.

    For a sweep, show a line for each of its runs. The command reads the run's files, and calls squeue
    at most once; with --watch, every 30 seconds.
    """
    from slurmgpu.cli.console import result_json
    from slurmgpu.cli.views.status import show_status
    from slurmgpu.executors.registry import queued_jobs
    from slurmgpu.report.metrics import keep_metrics, write_metrics
    from slurmgpu.report.status import read_status

    if not watching and metrics is None and (runs := options.runs_of_sweep(folder)):
        from slurmgpu.cli.commands import sweep

        sweep.status(folder, runs, as_json=as_json)
        return
    run, metrics = options.open_run(folder), options.metrics_file(metrics)
    if watching:
        from slurmgpu.cli.views.watch import watch

        if metrics is None:
            raise typer.Exit(watch(run, as_json=as_json))
        write_metrics(read_status(run), metrics)  # fails before the screen is cleared
        raise typer.Exit(watch(run, as_json=as_json, on_look=lambda status: keep_metrics(status, metrics)))
    value = read_status(run, queued_jobs(run))
    if metrics is not None:
        write_metrics(value, metrics)
    if as_json:
        result_json(value)
    else:
        show_status(value, tells_origin=True)


def list_runs(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="The directory to search; default: here.",
            show_default=False,
            autocompletion=completion.complete_folder,
        ),
    ] = Path(),
    as_json: options.JsonOption = False,
) -> None:
    """List the runs under a directory, the newest first.

    Reads their files, and calls squeue at most once for all of them.
    """
    from slurmgpu.cli.console import result_json
    from slurmgpu.cli.views import run_list

    value = run_list.list_runs(folder)
    if as_json:
        result_json(value)
    else:
        run_list.show_list(value)


def report(
    folder: options.RunArgument,
    as_json: options.JsonOption = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write it as an HTML page.")] = None,
    task: Annotated[
        str | None, typer.Option("--task", metavar="TASK", help="With --html: show the curves of this task first.")
    ] = None,
) -> None:
    """Show the report of the last merge, or write it as a page.

    For a sweep, show a line for each run. Exits with 3 while the run is incomplete.
    """
    from slurmgpu.cli.console import result_json, say
    from slurmgpu.cli.views.report import show_report
    from slurmgpu.report.report_file import last_report
    from slurmgpu.report.states import made_since
    from slurmgpu.util.shared_files import exists

    if html is None and task is None and (runs := options.runs_of_sweep(folder)):
        from slurmgpu.cli.commands import sweep

        raise typer.Exit(sweep.report(runs, as_json=as_json))
    run = options.open_run(folder)
    value = last_report(run)
    if (since := made_since(run.submissions(), value["submissions"])) is not None:
        say(f"This is the report of the last merge; submission {since} is newer: slurmgpu status {run.typed}")
    elif value["merged"] is not None and not exists(run.merged):
        say(f"merged.h5 is gone since this report: slurmgpu status {run.typed}")
    if task is not None and html is None:
        raise SlurmGPUError("--task chooses curves of the HTML page: add --html FILE.")
    if html is not None:
        _write_html(run, value, html, task)
    if as_json:
        result_json(value)
    elif html is None:
        show_report(value, run.plan)
    raise typer.Exit(EXIT_COMPLETE if value["complete"] else EXIT_INCOMPLETE)


def _write_html(run: Run, report: Report, path: Path, task: str | None) -> None:
    from slurmgpu import page
    from slurmgpu.cli.console import say
    from slurmgpu.util.amounts import size_of

    if missing := page.missing_packages():
        raise SlurmGPUError(f"The page needs {' and '.join(missing)}: pip install 'slurmgpu[html]'.")
    tasks = sorted({task_of_attempt(attempt["attempt"]) for attempt in report["attempts"]})
    if task is not None and task not in tasks:
        raise SlurmGPUError(f"{run.folder} has no task {task!r}.{did_you_mean(task, tasks)}")
    if path.exists() and not path.is_file():
        raise SlurmGPUError(f"{path} is not a regular file; name the file to write with --html.")
    if not path.parent.is_dir():
        raise SlurmGPUError(f"The folder {path.parent} does not exist. Create it, or name another file.")
    say(f"{path}: {size_of(page.write_page(run, report, path, task))}")


def logs(
    folder: options.RunArgument,
    task: Annotated[
        str | None,
        typer.Argument(
            metavar="TASK", help="An attempt or task, such as 1234_7.", autocompletion=completion.complete_task
        ),
    ] = None,
    item: Annotated[
        str | None,
        typer.Option(
            "--item", "--items", metavar="ITEM", help="What happened to an item, given by its number or its key."
        ),
    ] = None,
    failure: Annotated[
        str | None,
        typer.Option(
            "--class",
            metavar="NAME",
            help="All failures of a class, such as crash.",
            autocompletion=completion.complete_class,
        ),
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="The failed items, each with its place in the logs.")
    ] = False,
    merge: Annotated[bool, typer.Option("--merge", help="The log of the merge job.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines.")] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", "--tail", "-n", min=1, max=10**9, help="Only the last N lines.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Print logs by task, item or failure class.

    \b
      slurmgpu logs runs/judge                  the log files that exist
      slurmgpu logs runs/judge 7                what task 7 and its workers wrote
      slurmgpu logs runs/judge --item 4711      what happened to item 4711
      slurmgpu logs runs/judge --failed         every failed item
      slurmgpu logs runs/judge --class crash    every crash
      slurmgpu logs runs/judge --follow         new lines of all tasks
    """
    from slurmgpu.cli.commands.logs import show_logs

    show_logs(
        options.open_run(folder),
        task,
        item,
        failure,
        failed=failed,
        merge=merge,
        follow=follow,
        n_lines=lines,
        as_json=as_json,
    )
