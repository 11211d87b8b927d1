"""The commands that show runs: how one stands, the runs there are, the report, the logs.

Each imports what it needs when it runs: `status` stays fast on a login node.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slurmgpu.cli import completion, options
from slurmgpu.errors import SlurmGPUError


def status(
    folder: options.RunArgument,
    watching: Annotated[
        bool, typer.Option("--watch", "-w", help="Follow it on the whole screen until it ends; q quits.")
    ] = False,
    as_json: options.JsonOption = False,
    metrics: Annotated[
        Path | None, typer.Option("--metrics", metavar="FILE", help="Write its progress for Prometheus, too.")
    ] = None,
) -> None:
    """Show how a run stands.

    From its files, and one call of squeue at most; with --watch, one every 30 seconds.
    """
    from slurmgpu.cli.console import result_json
    from slurmgpu.cli.views.tables import show_status
    from slurmgpu.report.metrics import keep_metrics, write_metrics
    from slurmgpu.report.status import read_status
    from slurmgpu.slurm.queue import queued_jobs

    run, metrics = options.open_run(folder), options.metrics_file(metrics)
    if watching:
        from slurmgpu.cli.views.watch import watch

        if metrics is None:
            raise typer.Exit(watch(run, as_json=as_json))
        write_metrics(read_status(run), metrics)  # a path that cannot be written is told before the screen is taken
        raise typer.Exit(watch(run, as_json=as_json, on_look=lambda status: keep_metrics(status, metrics)))
    value = read_status(run, queued_jobs(run))
    if metrics is not None:
        write_metrics(value, metrics)
    if as_json:
        result_json(value)
    else:
        show_status(value)


def list_runs(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Where to look; default: here.",
            show_default=False,
            autocompletion=completion.complete_folder,
        ),
    ] = Path(),
    as_json: options.JsonOption = False,
) -> None:
    """List the runs under a directory, the newest first.

    From their files, and one call of squeue for all of them at most.
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
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write it as a page.")] = None,
    task: Annotated[
        str | None, typer.Option("--task", metavar="TASK", help="With --html: draw the lines of this task first.")
    ] = None,
) -> None:
    """Show the report of the last merge, or write it as a page.

    Exits with 3 while the run is incomplete.
    """
    from slurmgpu.cli.console import result_json, say
    from slurmgpu.cli.views.tables import show_report
    from slurmgpu.report.build import last_report
    from slurmgpu.report.states import made_since

    run = options.open_run(folder)
    value = last_report(run)
    if (since := made_since(run.submissions(), value["submissions"])) is not None:
        say(f"This is the report of the last merge; submission {since} was made since: slurmgpu status {run.typed}")
    if task is not None and html is None:
        raise SlurmGPUError("--task is for the page: give --html FILE as well.")
    if html is not None:
        from slurmgpu.cli.views.page_file import write_html

        write_html(run, value, html, task)
    if as_json:
        result_json(value)
    elif html is None:
        show_report(value)
    raise typer.Exit(0 if value["complete"] else 3)


def logs(
    folder: options.RunArgument,
    task: Annotated[
        str | None,
        typer.Argument(
            metavar="TASK",
            help="An attempt or task, such as 1234_7.",
            autocompletion=completion.complete_task,
        ),
    ] = None,
    item: Annotated[int | None, typer.Option("--item", metavar="N", help="What became of item N, and where.")] = None,
    failure: Annotated[
        str | None,
        typer.Option(
            "--class",
            metavar="NAME",
            help="Every failure of a class, such as crash.",
            autocompletion=completion.complete_class,
        ),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="The log of the merge job.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing what is added.")] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", "--tail", "-n", min=1, help="So many lines alone, the last ones.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Find the place in the logs that tells of a task, an item or a failure.

    \b
      slurmgpu logs runs/judge                  which log files there are
      slurmgpu logs runs/judge 7                what task 7 and its workers wrote
      slurmgpu logs runs/judge --item 4711      what became of item 4711
      slurmgpu logs runs/judge --class crash    every crash
      slurmgpu logs runs/judge --follow         what all tasks write from now on
    """  # noqa: D301
    from slurmgpu.cli.commands.logs import show_logs

    show_logs(options.open_run(folder), task, item, failure, merge=merge, follow=follow, n_lines=lines, as_json=as_json)
