"""The commands. Each imports what it needs when it runs: `--help` and `status` stay fast on a login node."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from slurmgpu import __version__
from slurmgpu.cli import completion, options
from slurmgpu.cli.commands import manual, run, show
from slurmgpu.cli.commands.image import image_app
from slurmgpu.cli.lazy_commands import App, Commands
from slurmgpu.cli.options import (
    DEFAULT_RUN_FILE,
    ArrayOption,
    DeviceOption,
    ExecutorOption,
    ForceOption,
    GpusOption,
    ImageOption,
    InjectOption,
    JsonOption,
    MailOption,
    NodesOption,
    PerTaskOption,
    ProcessesOption,
    RunArgument,
    RunDirOption,
    RunFileArgument,
    SetOption,
    SlurmOption,
    TasksOption,
    TrustOption,
    TypeOption,
    WaitOption,
)
from slurmgpu.errors import SlurmGPUError

app = App(
    cls=Commands,
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
        "  slurmgpu status --watch runs/judge        how it stands, live\n"
        "  slurmgpu logs runs/judge --item 4711      what became of an item\n"
        "  slurmgpu resubmit runs/judge              compute what is missing\n"
    ),
)


app.add_typer(image_app, name="image")


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    from slurmgpu.cli.console import result

    if version:
        result(__version__)
        raise typer.Exit


@app.command()
def init(
    workload: Annotated[
        str | None,
        typer.Argument(help="A built-in workload, such as embed.", autocompletion=completion.complete_workload),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write it.")] = None,
    site: Annotated[bool, typer.Option("--site", help="Write the site file, from what Slurm says.")] = False,
    from_args: Annotated[
        str | None, typer.Option("--from-args", metavar="ARGS", help="tracin: the arguments of run_tracin.py.")
    ] = None,
) -> None:
    """Write a commented run file.

    For a built-in workload, or without WORKLOAD for a class of your own. With --site, write the site file: what holds
    for all of your runs on this cluster. With --from-args, write the run file of tracin that the arguments of a script
    for TracIn mean, and say of each what became of it.

    The built-in workloads:

    \b
      embed      a vector for each text
      generate   a language model's answers to each prompt
      classify   one of your labels for each text
      judge      a language model's verdict on each answer
      collect    a language model's solutions of each question, and a value for each step
      tracin     the training examples that a prediction rests on
      train      a training for each configuration
      command    the rows that any program writes
    """  # noqa: D301  \b is the character that keeps the lines as they are
    from slurmgpu.cli import templates
    from slurmgpu.cli.console import result

    if from_args is not None:
        templates.say_translated(workload, from_args, output or DEFAULT_RUN_FILE)
        return
    if site and workload is not None:
        raise SlurmGPUError("A site file is for all workloads: `slurmgpu init --site` alone.")
    path = templates.write_site_file(output) if site else templates.write_run_file(workload, output or DEFAULT_RUN_FILE)
    then = "Look at it, and change what is not so." if site else f"Edit it, then: slurmgpu submit {path} --dry-run"
    result(f"{path} is written. {then}")


@app.command()
def submit(
    context: typer.Context,
    run_file: RunFileArgument = DEFAULT_RUN_FILE,
    gpus: GpusOption = None,
    array: ArrayOption = None,
    gpus_per_task: PerTaskOption = None,
    nodes_per_task: NodesOption = None,
    gpu_type: TypeOption = None,
    processes: ProcessesOption = None,
    tasks: TasksOption = None,
    executor: ExecutorOption = None,
    device: DeviceOption = None,
    image: ImageOption = None,
    run_dir: RunDirOption = None,
    settings: SetOption = None,
    slurm: SlurmOption = None,
    mail_user: MailOption = None,
    after: Annotated[
        Path | None,
        typer.Option(
            "--after",
            metavar="RUN",
            help="Start when that run is complete.",
            autocompletion=completion.complete_run,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, the limits and the sbatch scripts; queue nothing.")
    ] = False,
    probe: Annotated[
        int | None, typer.Option("--probe", metavar="N", help="First compute N items, and say what the run will take.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Queue the run after its probe without asking.")] = False,
    inject: InjectOption = None,
    wait: WaitOption = False,
    as_json: JsonOption = False,
) -> None:
    """Plan a run and submit it.

    \b
      slurmgpu submit --gpus 4 --array                         four tasks of one GPU
      slurmgpu submit --gpus 4                                 one task of four GPUs
      slurmgpu submit --gpus 8 --gpus-per-task 4 --array       two tasks of four GPUs
      slurmgpu submit --executor local --gpus 0 --tasks 2      on this machine's CPUs
      slurmgpu submit --gpus 64 --array --probe 256            what it will take, then ask
      slurmgpu submit --executor local --inject crash@17       a rehearsal: item 17 kills workers
    """  # noqa: D301 - \b keeps the lines of a paragraph apart
    from slurmgpu.cli.commands import submit as submitting

    overrides = options.overrides(context.params, settings, slurm, image)
    raise typer.Exit(
        submitting.submit(
            *(run_file, overrides, run_dir, after),
            dry_run=dry_run,
            wait=wait,
            as_json=as_json,
            probe=probe,
            yes=yes,
            inject=inject or (),
        )
    )


app.command(cls=run.WithProgram, options_metavar=run.USAGE)(run.run)
app.command()(manual.plan)


@app.command()
def resubmit(
    context: typer.Context,
    folder: RunArgument,
    gpus: GpusOption = None,
    array: ArrayOption = None,
    gpus_per_task: PerTaskOption = None,
    nodes_per_task: NodesOption = None,
    gpu_type: TypeOption = None,
    tasks: TasksOption = None,
    executor: ExecutorOption = None,
    device: DeviceOption = None,
    slurm: SlurmOption = None,
    mail_user: MailOption = None,
    failed: Annotated[bool, typer.Option("--failed", help="Compute failed items again as well.")] = False,
    force: ForceOption = False,
    trust: TrustOption = False,
    code: Annotated[
        str | None,
        typer.Option(metavar="WHICH", help="Not the code as it is now: 'former', or the digest of a snapshot."),
    ] = None,
    other_code: Annotated[
        bool, typer.Option("--other-code", help="Compute the rows that other code has computed again as well.")
    ] = False,
    wait: WaitOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compute what a run lacks, on any number of GPUs.

    What is published stays as it is. After memory ran out it asks for 1.5 times as much;
    nodes that failed are excluded. What has changed in the code is said.
    """
    from slurmgpu.cli.commands import submit as submitting

    run = options.open_run(folder, trust=trust)
    resources, sbatch_options = options.resources(context.params), options.slurm_options(slurm)
    merging = options.merge_options(mail_user)
    ways = {"failed": failed, "force": force, "other_code": other_code, "wait": wait, "as_json": as_json}
    raise typer.Exit(submitting.resubmit(run, resources, sbatch_options, merging, code=code, **ways))


app.command()(manual.task)


app.command()(show.status)
app.command("list")(show.list_runs)
app.command()(show.report)
app.command()(show.logs)


@app.command()
def cancel(folder: RunArgument) -> None:
    """Stop a run's tasks and its merge.

    What is published stays; resubmit goes on from there.
    """
    from slurmgpu.cli.console import result
    from slurmgpu.executors import liveness

    run = options.open_run(folder)
    done = liveness.cancel(run)
    result(f"cancelled: {done}. To go on: slurmgpu resubmit {run.typed}" if done else "nothing of this run is alive.")


app.command()(manual.merge)


@app.command()
def export(
    folder: RunArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write, - for standard output.")],
    file_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="jsonl, csv, parquet, pt, or one of the workload's own; default from the file's suffix.",
            autocompletion=completion.words(*completion.FORMATS),
        ),
    ] = None,
    trust: TrustOption = False,
) -> None:
    """Write the merged rows as JSONL, CSV, Parquet, or tensors of PyTorch."""
    from slurmgpu.cli.console import result, say
    from slurmgpu.merge.export import FORMATS, export_to
    from slurmgpu.merge.export import export as write
    from slurmgpu.util.plurals import count_of
    from slurmgpu.util.shared_files import exists, is_file, status_of

    run = options.open_run(folder, trust=trust)
    if not exists(run.merged):
        raise SlurmGPUError(
            f"There is no {run.merged} yet. `slurmgpu merge {run.typed}` makes it once no task is alive."
        )
    chosen = file_format or output.suffix.removeprefix(".")
    if chosen not in (known := {**FORMATS, **dict.fromkeys(run.plan.exports)}):
        raise SlurmGPUError(f"Format {chosen!r} is none of {', '.join(known)}; name one with --format.")
    if status_of(output) is not None and not is_file(output):
        raise SlurmGPUError(f"{output} is no regular file; name the file to write with -o.")
    if str(output) == "-":
        n_rows = export_to(run.merged, chosen, sys.stdout.buffer)
    else:
        exported = write(run.merged, chosen, output)
        n_rows = exported.n_rows
        result(f"{output}: {exported.said or count_of(n_rows, 'row')}")
    if n_missing := run.plan.n_items - n_rows:
        say(f"The run is incomplete: {count_of(n_missing, 'item')} without a row. slurmgpu report {run.typed}")


@app.command()
def check(
    run_file: RunFileArgument = DEFAULT_RUN_FILE,
    node: Annotated[bool, typer.Option("--node", help="Check a node of the cluster, too, by a short job.")] = False,
    here: Annotated[bool, typer.Option("--here", help="Check this machine as a task would, and nothing else.")] = False,
    fetch: Annotated[bool, typer.Option("--fetch", help="Download the workload's model first.")] = False,
) -> None:
    """Check what a run needs, one line each.

    Versions, run file, image, plan, resources, Slurm. With --node or --here the image is started,
    and tells its Python and the GPUs that CUDA can use. Exits with 2 if one fails.
    """
    from slurmgpu.cli.commands.check import run_checks, run_checks_here

    raise typer.Exit(run_checks_here(run_file) if here else run_checks(run_file, node=node, fetch=fetch))
