"""The commands. Each imports what it needs when it runs: `--help` and `status` stay fast on a login node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slurmgpu import __version__
from slurmgpu.errors import SlurmGPUError

if TYPE_CHECKING:
    from slurmgpu.runs import Run

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Map a GPU workload over a data set on Slurm and lose nothing.\n\n"
        "\b\n"
        "  slurmgpu init                             write a commented slurmgpu.toml\n"
        "  slurmgpu submit --gpus 4 --array          four tasks of one GPU, and the merge\n"
        "  slurmgpu submit --executor local          the same on this machine\n"
        "  slurmgpu status runs/judge                how it stands\n"
        "  slurmgpu resubmit runs/judge              compute what is missing\n"
    ),
)

RunFileArgument = Annotated[Path, typer.Argument(metavar="RUNFILE", help="The run file.", show_default=False)]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
GpusOption = Annotated[int | None, typer.Option("--gpus", help="GPUs the run may hold at once; 0 runs on CPUs.")]
ArrayOption = Annotated[bool | None, typer.Option("--array/--no-array", help="Spread them over array tasks.")]
PerTaskOption = Annotated[int | None, typer.Option("--gpus-per-task", help="GPUs of each array task (1).")]
TasksOption = Annotated[int | None, typer.Option("--tasks", help="Tasks to queue, if not as many as run at once.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="auto (the allocated GPUs) or cpu.")]
SlurmOption = Annotated[list[str] | None, typer.Option("--slurm", metavar="KEY=VALUE", help="An sbatch option.")]
ExecutorOption = Annotated[str | None, typer.Option("--executor", help="slurm, local or debug.")]
DEFAULT_RUN_FILE = Path("slurmgpu.toml")


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    from slurmgpu.cli.output import result

    if version:
        result(__version__)
        raise typer.Exit


@app.command()
def init(
    workload: Annotated[str | None, typer.Argument(help="A built-in workload, such as embed.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write it.")] = DEFAULT_RUN_FILE,
) -> None:
    """Write a commented run file.

    For a built-in workload, or without WORKLOAD for a class of your own.
    """
    from slurmgpu.cli.output import result
    from slurmgpu.cli.templates import run_file_template

    text = run_file_template(workload)
    if output.exists():
        raise SlurmGPUError(f"{output} exists; name another file with -o, or remove it.")
    output.write_text(text)
    result(f"{output} is written. Edit it, then: slurmgpu submit {output} --dry-run")


@app.command()
def submit(
    run_file: RunFileArgument = DEFAULT_RUN_FILE,
    gpus: GpusOption = None,
    array: ArrayOption = None,
    gpus_per_task: PerTaskOption = None,
    tasks: TasksOption = None,
    executor: ExecutorOption = None,
    device: DeviceOption = None,
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="The run directory to make.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the workload.")
    ] = None,
    slurm: SlurmOption = None,
    after: Annotated[
        Path | None, typer.Option("--after", metavar="RUN", help="Start when that run is complete.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and the sbatch scripts; queue nothing.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow the run to its end; exit with 3 if it is incomplete.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Plan a run and submit it.

    \b
      slurmgpu submit --gpus 4 --array                         four tasks of one GPU
      slurmgpu submit --gpus 4                                 one task of four GPUs
      slurmgpu submit --gpus 8 --gpus-per-task 4 --array       two tasks of four GPUs
      slurmgpu submit --executor local --gpus 0 --tasks 2      on this machine's CPUs
    """  # noqa: D301 - \b keeps the lines of a paragraph apart
    from slurmgpu.cli import submitting

    overrides = {
        "settings": _pairs(settings),
        "slurm": _slurm_options(slurm),
        "resources": _resources(gpus, array, gpus_per_task, tasks, executor, device),
    }
    raise typer.Exit(
        submitting.submit(run_file, overrides, run_dir, after, dry_run=dry_run, wait=wait, as_json=as_json)
    )


@app.command()
def resubmit(
    folder: RunArgument,
    gpus: GpusOption = None,
    array: ArrayOption = None,
    gpus_per_task: PerTaskOption = None,
    tasks: TasksOption = None,
    executor: ExecutorOption = None,
    device: DeviceOption = None,
    slurm: SlurmOption = None,
    failed: Annotated[bool, typer.Option("--failed", help="Compute the shards of failed items anew as well.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow the run to its end; exit with 3 if it is incomplete.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compute what a run lacks, on any number of GPUs.

    What is published stays as it is. After memory ran out it asks for 1.5 times as much;
    nodes that failed are excluded.
    """
    from slurmgpu.cli import submitting

    resources = _resources(gpus, array, gpus_per_task, tasks, executor, device)
    raise typer.Exit(
        submitting.resubmit(_open(folder), resources, _slurm_options(slurm), failed=failed, wait=wait, as_json=as_json)
    )


@app.command()
def status(folder: RunArgument, as_json: JsonOption = False) -> None:
    """Show how a run stands.

    From its files, and one call of squeue at most.
    """
    from slurmgpu.cli.output import result_json, show_status
    from slurmgpu.executors.commands import queued_jobs
    from slurmgpu.status import read_status

    run = _open(folder)
    value = read_status(run, queued_jobs(run))
    if as_json:
        result_json(value)
    else:
        show_status(value)


@app.command()
def report(folder: RunArgument, as_json: JsonOption = False) -> None:
    """Show the report of the last merge.

    Exits with 3 while the run is incomplete.
    """
    from slurmgpu.cli.output import result_json, show_report
    from slurmgpu.report import last_report

    value = last_report(_open(folder))
    if as_json:
        result_json(value)
    else:
        show_report(value)
    raise typer.Exit(0 if value["complete"] else 3)


@app.command()
def logs(
    folder: RunArgument,
    task: Annotated[str | None, typer.Argument(metavar="TASK", help="An attempt or task, such as 1234_7.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing what is added.")] = False,
) -> None:
    """Print the logs of a task; without TASK, list them."""
    from slurmgpu.cli.logs import list_logs, print_logs

    run = _open(folder)
    if task is None:
        list_logs(run)
    else:
        print_logs(run, task, follow=follow)


@app.command()
def cancel(folder: RunArgument) -> None:
    """Stop a run's tasks and its merge.

    What is published stays; resubmit goes on from there.
    """
    from slurmgpu.cli.output import result
    from slurmgpu.executors import living

    run = _open(folder)
    done = living.cancel(run)
    result(f"cancelled: {done}. To go on: slurmgpu resubmit {run.typed}" if done else "nothing of this run is alive.")


@app.command()
def merge(
    folder: RunArgument,
    verify: Annotated[bool, typer.Option("--verify", help="Only check every byte of merged.h5 again.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Join what is published into merged.h5, and report.

    The merge job does this by itself. Exits with 3 while the run is incomplete; --verify with 1 if bytes changed.
    """
    from slurmgpu.cli.output import complain, result, result_json, show_report
    from slurmgpu.executors import submitting
    from slurmgpu.merge import verify as verify_merged

    run = _open(folder)
    if verify:
        problems = verify_merged(run)
        for problem in problems:
            complain(problem)
        if not problems:
            result(f"{run.merged} is whole.")
        raise typer.Exit(1 if problems else 0)
    value = submitting.merge_by_hand(run)
    if as_json:
        result_json(value)
    else:
        show_report(value)
    raise typer.Exit(0 if value["complete"] else 3)


@app.command()
def export(
    folder: RunArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    file_format: Annotated[
        str | None, typer.Option("--format", help="jsonl, csv or parquet; default from the file's suffix.")
    ] = None,
) -> None:
    """Write the merged rows as JSONL, CSV or Parquet."""
    from slurmgpu.cli.output import result, say
    from slurmgpu.export import FORMATS
    from slurmgpu.export import export as write

    run = _open(folder)
    if not run.merged.exists():
        raise SlurmGPUError(
            f"There is no {run.merged} yet. `slurmgpu merge {run.typed}` makes it once no task is alive."
        )
    chosen = file_format or output.suffix.removeprefix(".")
    if chosen not in FORMATS:
        raise SlurmGPUError(f"Format {chosen!r} is none of {', '.join(FORMATS)}; name one with --format.")
    if output.exists() and not output.is_file():
        raise SlurmGPUError(f"{output} is no regular file; name the file to write with -o.")
    n_rows = write(run.merged, chosen, output)
    result(f"{output}: {n_rows:,} rows")
    if n_rows < run.plan.n_items:
        say(f"The run is incomplete: {run.plan.n_items - n_rows:,} items have no row. slurmgpu report {run.typed}")


@app.command()
def check(run_file: RunFileArgument = DEFAULT_RUN_FILE) -> None:
    """Check what a run needs, one line each.

    Versions, run file, plan, resources, Slurm. Exits with 2 if one fails.
    """
    from slurmgpu.cli.checks import run_checks

    raise typer.Exit(run_checks(run_file))


def _resources(
    gpus: int | None,
    array: bool | None,
    gpus_per_task: int | None,
    tasks: int | None,
    executor: str | None,
    device: str | None,
) -> dict[str, Any]:
    given = {"gpus": gpus, "array": array, "gpus_per_task": gpus_per_task}
    return {**given, "tasks": tasks, "executor": executor, "device": device}


def _pairs(texts: list[str] | None) -> dict[str, Any]:
    if not texts:
        return {}
    from slurmgpu.config import parse_setting

    return dict(parse_setting(text) for text in texts)


def _slurm_options(texts: list[str] | None) -> dict[str, Any]:
    if not texts:
        return {}
    from slurmgpu.config import parse_slurm_options

    return dict(parse_slurm_options(texts))


def _open(folder: Path) -> Run:
    from slurmgpu.runs import Run

    return Run.open(folder)
