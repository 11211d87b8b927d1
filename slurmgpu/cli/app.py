"""The commands. Each imports what it needs when it runs, so `--help` and `status` start fast on a login node."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from slurmgpu import __version__
from slurmgpu.cli import completion, options
from slurmgpu.cli.commands import inspection, run, track
from slurmgpu.cli.commands.image import image_app
from slurmgpu.cli.exit_codes import EXIT_COMPLETE, EXIT_FAILED, EXIT_INCOMPLETE
from slurmgpu.cli.lazy_commands import App, Commands
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
        "  slurmgpu submit --gpus 4 --array          four tasks of one GPU\n"
        "  slurmgpu submit --executor local          the same on this machine\n"
        "  slurmgpu run --each a.csv --col n:int64 -- ./count {text}\n"
        "                                            a program, for each item\n"
        "  slurmgpu status --watch runs/judge        its progress, live\n"
        "  slurmgpu logs runs/judge --item 4711      what happened to an item\n"
        "  slurmgpu resubmit runs/judge              compute what is missing\n"
        "  slurmgpu export runs/judge -o rows.csv    the results\n\n"
        "A function of Python needs no run file: slurmgpu.map(function, items)."
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
        typer.Argument(
            metavar="WORKLOAD",
            help="A built-in workload, such as embed, or a Python file.",
            autocompletion=completion.complete_workload,
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write it.")] = None,
    site: Annotated[bool, typer.Option("--site", help="Write the site file, from Slurm's answers.")] = False,
    from_args: Annotated[
        str | None, typer.Option("--from-args", metavar="ARGS", help="tracin: the arguments of run_tracin.py.")
    ] = None,
) -> None:
    """Write a run file with comments, and example items.

    Name a built-in workload, or a file such as my_workload.py for a class of your own: if the file does not exist,
    init writes it, too. Nothing is overwritten. --site writes the site file instead, with defaults for all of your
    runs on this cluster. --from-args translates the arguments of a TracIn script into a run file of tracin, and says
    what each argument became.

    The built-in workloads:

    \b
      embed      a vector for each text
      generate   a language model's answers to each prompt
      classify   one of your labels for each text
      score      what a classifier, a reward model or a reranker gives each text
      perplexity how likely each text is to a language model
      judge      a language model's verdict on each answer
      collect    a language model's solutions, and a value for each step
      tracin     the training examples that a prediction rests on
      train      a training for each configuration
      command    the rows that any program writes
    """
    from slurmgpu.cli import templates
    from slurmgpu.cli.console import result

    if from_args is not None:
        templates.write_translated(workload, from_args, output or options.DEFAULT_RUN_FILE)
        return
    if site and workload is not None:
        raise SlurmGPUError("The site file is for all workloads: use `slurmgpu init --site` alone.")
    if site:
        result(f"{templates.write_site_file(output)} is written. Check and edit it.")
        return
    for line in templates.write_run_file(workload, output or options.DEFAULT_RUN_FILE):
        result(line)


@app.command()
@options.taking({**options.PLACES, **options.KEYS, **options.SUBMITTING})
def submit(run_file: options.RunFileArgument = options.DEFAULT_RUN_FILE, **given: Any) -> None:
    """Plan a run and submit it.

    \b
      slurmgpu submit --gpus 4 --array                    four tasks of one GPU
      slurmgpu submit --gpus 4                            one task of four GPUs
      slurmgpu submit --gpus 8 --gpus-per-task 4 --array  two tasks of four GPUs
      slurmgpu submit --executor local --gpus 0 --tasks 2 on this machine's CPUs
      slurmgpu submit --gpus 64 --array --probe 256       estimate it, then ask
      slurmgpu submit --executor local --limit 20         the first items
      slurmgpu submit -s slurm.time=01:00:00 -s lr=1e-4   keys and settings
      slurmgpu submit --executor local --inject crash@17  item 17 kills workers
    """
    from slurmgpu.cli.commands import submit as submitting

    asked = {name: given[name] for name in options.SUBMITTING}
    raise typer.Exit(submitting.submit(run_file, options.overrides(given), **asked))


app.command(cls=run.WithProgram, options_metavar=run.USAGE)(run.run)


@app.command()
@options.taking(
    {**options.PLACES, **options.KEYS, **options.SUBMITTING},
    but=("executor", "after", "dry_run", "probe", "yes", "inject", "wait"),
)
def plan(run_file: options.RunFileArgument = options.DEFAULT_RUN_FILE, **given: Any) -> None:
    """Plan a run, and print how to submit it by hand.

    Makes the run directory as submit does, queues nothing, and prints the two sbatch commands:
    for the array and for its merge.
    """
    from slurmgpu.cli.commands import submit as submitting

    asked = {name: given[name] for name in ("run_dir", "limit", "items", "extend", "as_json")}
    submitting.plan(run_file, options.overrides(given), **asked)


@app.command()
@options.taking({**options.PLACES, **options.KEYS}, but=("processes", "profile", "image"))
def resubmit(
    folder: options.RunArgument,
    failed: Annotated[bool, typer.Option("--failed", help="Also recompute failed items.")] = False,
    force: options.ForceOption = False,
    trust: options.TrustOption = False,
    code: Annotated[
        str | None,
        typer.Option(metavar="WHICH", help="'former' or the digest of a snapshot; default: the code as it is now."),
    ] = None,
    other_code: Annotated[
        bool, typer.Option("--other-code", help="Also recompute rows that other code computed.")
    ] = False,
    dry_run: options.DryRunOption = False,
    wait: options.WaitOption = False,
    as_json: options.JsonOption = False,
    **given: Any,
) -> None:
    """Compute what a run lacks, on any number of GPUs.

    For a sweep, compute what each of its runs lacks. Published rows stay as they are. If memory ran out,
    the new tasks ask for 1.5 times as much; nodes that failed are excluded. Changes in the code are reported.
    """
    from slurmgpu.cli.commands import submit as submitting
    from slurmgpu.operations.resubmit import Request

    tables = options.overrides_of_resubmission(given)
    own = {name: tables.get(name, {}) for name in ("resources", "slurm", "merge")}
    asked = Request(**own, failed=failed, code=code, other_code=other_code)
    if runs := options.runs_of_sweep(folder):
        from slurmgpu.cli.commands import sweep
        from slurmgpu.run import owners
        from slurmgpu.run.sweep_file import was_submitted

        for each in filter(was_submitted, runs) if trust else ():
            owners.trust(each)
        if dry_run:
            raise SlurmGPUError(f"--dry-run shows one run, and {folder} holds the runs of a sweep. Name one of them.")
        raise typer.Exit(sweep.resubmit(runs, asked, force=force, wait=wait, as_json=as_json))
    run = options.open_run(folder, trust=trust)
    raise typer.Exit(submitting.resubmit(run, asked, force=force, dry_run=dry_run, wait=wait, as_json=as_json))


@app.command()
def task(
    folder: options.RunArgument,
    device: options.DeviceOption = None,
    trust: options.TrustOption = False,
    own_array: Annotated[
        bool, typer.Option("--own-array", help="The script has #SBATCH --array: do not ask squeue.")
    ] = False,
) -> None:
    """Run one task inside a Slurm job.

    The scripts in sbatch/ call it; you do not need it after `submit`. Exits with 75 if it was stopped
    and released its shards.
    """
    from slurmgpu.executors.job_entry import run_task_by_hand

    if device not in (None, "auto", "cpu"):
        raise SlurmGPUError(f"--device {device!r} is unknown; expected auto or cpu.")
    raise typer.Exit(run_task_by_hand(folder, device, trust=trust, own_array=own_array))


app.command()(inspection.status)
app.command("list")(inspection.list_runs)
app.command()(inspection.report)
app.command()(inspection.logs)
app.command()(track.track)


@app.command()
def cancel(folder: options.RunArgument) -> None:
    """Stop a run's tasks and its merge.

    For a sweep, stop all of its runs. Published rows stay; resubmit continues from there.
    """
    from slurmgpu.cli.console import result
    from slurmgpu.executors import live_tasks
    from slurmgpu.report.completeness import command_to_continue, is_complete

    if runs := options.runs_of_sweep(folder):
        from slurmgpu.cli.commands import sweep

        raise typer.Exit(sweep.cancel(runs))
    run = options.open_run(folder)
    if not (done := live_tasks.cancel(run)):
        result("no task of this run is alive.")
        return
    rest = "The run is complete." if is_complete(run) else f"To go on: {command_to_continue(run)}"
    result(f"cancelled: {done}. {rest}")


@app.command()
def merge(
    folder: options.RunArgument,
    verify: Annotated[bool, typer.Option("--verify", help="Only verify every byte of merged.h5.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until no task is queued or alive.")] = False,
    force: options.ForceOption = False,
    trust: options.TrustOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Merge the published shards into merged.h5, and report.

    The merge job does this, too; sbatch/merge.sbatch uses --wait. Exits with 3 if the run is
    incomplete; --verify exits with 1 if bytes changed.
    """
    from slurmgpu.cli.console import complain, result, result_json, stdout_for_json
    from slurmgpu.cli.views.report import show_report
    from slurmgpu.executors import run_merge
    from slurmgpu.merge.join import verify_joined
    from slurmgpu.slurm.commands import final_code
    from slurmgpu.util.logging import log_to_stderr

    run = options.open_run(folder, trust=trust)
    if verify and (wait or as_json):
        unfit, why = ("--wait", "does not wait") if wait else ("--json", "writes no report")
        raise SlurmGPUError(f"--verify only reads merged.h5 and {why}. Leave out {unfit}.")
    if force and (verify or wait):
        raise SlurmGPUError("--force merges at once; leave out --verify and --wait.")
    if verify:
        problems = verify_joined(run.merged)
        for problem in problems:
            complain(problem)
        if not problems:
            result(f"{run.merged} is whole.")
        raise typer.Exit(EXIT_FAILED if problems else EXIT_COMPLETE)
    if wait:
        log_to_stderr(force=True)
    with stdout_for_json(as_json):
        value = run_merge.merge_when_over(run) if wait else run_merge.merge_by_hand(run, force=force)
    if as_json:
        result_json(value)
    else:
        show_report(value)
    code = EXIT_COMPLETE if value["complete"] else EXIT_INCOMPLETE
    raise typer.Exit(final_code(code) if code and wait and "SLURM_JOB_ID" in os.environ else code)


@app.command("show")
def show_rows(
    folder: options.RunArgument,
    columns: options.ColumnsOption = None,
    where: options.WhereOption = None,
    items: Annotated[
        str | None, typer.Option("--items", "--item", metavar="10:20,35", help="Only these items, or one by its name.")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only failed items.")] = False,
    n_rows: Annotated[int, typer.Option("-n", "--rows", min=1, max=10**9, help="At most N rows.", metavar="N")] = 10,
    n_random: Annotated[
        int | None, typer.Option("--random", min=1, max=10**9, metavar="N", help="N rows, drawn at random.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Another number draws other rows.")] = 0,
    with_items: options.WithItemsOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Show rows of a run, also while it is running.

    \b
      slurmgpu show runs/judge                               the first ten rows
      slurmgpu show runs/judge --random 5 --with-items       with their items
      slurmgpu show runs/judge --where "score > 0.9" -n 50   by a condition
      slurmgpu show runs/judge --failed --columns error      why items failed
    """
    from slurmgpu.cli.commands import show

    wanted = show.Wanted(options.names(columns), where, items, failed, n_rows, n_random, seed, with_items)
    show.show(options.open_run(folder), wanted, as_json=as_json)


@app.command()
def compare(
    a: options.ComparedArgument,
    b: options.OtherArgument,
    key: Annotated[
        str | None, typer.Option("--key", metavar="NAME", help="Match rows by this column or field of the input.")
    ] = None,
    columns: options.ColumnsOption = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="Numbers x, y are the same within T * max(1, |x|, |y|).", metavar="T")
    ] = 0.0,
    n_rows: Annotated[
        int, typer.Option("-n", "--rows", min=0, help="Show at most N rows that differ.", metavar="N")
    ] = 10,
    as_json: options.JsonOption = False,
) -> None:
    """Compare the rows and the summaries of two runs.

    A and B are run directories, also of running runs, or merged files. Exits with 1 if anything differs.

    \b
      slurmgpu compare runs/before runs/after
      slurmgpu compare runs/8b runs/70b --key id --columns answer
      slurmgpu compare runs/a100 runs/h100 --tolerance 1e-5
    """
    from slurmgpu.cli.console import result_json
    from slurmgpu.cli.views.comparison import show_comparison
    from slurmgpu.merge.compare import compare as compare_runs

    chosen = options.names(columns)
    found = compare_runs(a, b, key=key, columns=chosen, tolerance=tolerance, n_examples=n_rows)
    if as_json:
        result_json(found.to_json())
    else:
        show_comparison(found)
    raise typer.Exit(EXIT_COMPLETE if found.equal else EXIT_FAILED)


@app.command()
def export(
    folder: options.RunArgument,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="The file to write, as with -o.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The file to write, - for standard output.")
    ] = None,
    file_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="jsonl, csv, tsv, parquet, hf, pt, or one of the workload's own; default from the file's suffix.",
            autocompletion=completion.words(*completion.FORMATS),
        ),
    ] = None,
    columns: options.ColumnsOption = None,
    where: options.WhereOption = None,
    with_items: options.WithItemsOption = False,
    trust: options.TrustOption = False,
) -> None:
    """Write the rows as JSONL, CSV, TSV, Parquet, or for Python.

    --format hf writes a Hugging Face data set, and pt writes tensors. A running run gives the rows that are published
    so far; the command says how many items have none. The folder of a sweep gives the rows of all runs with the
    values that vary, as JSONL, CSV or TSV. A merged file that was copied out of its run needs no run directory.

    \b
      slurmgpu export runs/judge -o scores.parquet
      slurmgpu export runs/judge -o good.csv --columns score --where "score > 0.5"
      slurmgpu export runs/judge -o both.csv --with-items  with their items
      slurmgpu export runs/judge -o scores --format hf     for load_dataset()
    """
    from slurmgpu.cli.commands.export import export_rows, export_sweep_rows

    if (output is None) == (file is None):
        typed = shlex.quote(str(folder))
        raise SlurmGPUError(f"Name one file to write: slurmgpu export {typed} -o rows.csv, or - for standard output.")
    target, names = output or file or Path(), options.names(columns)
    if (merged := options.merged_alone(folder)) is not None:
        export_rows(merged, target, file_format, names, where, with_items=with_items)
        return
    if options.runs_of_sweep(folder) is not None:
        export_sweep_rows(folder, target, file_format, names, where, with_items=with_items)
        return
    run = options.open_run(folder, trust=trust)
    export_rows(run, target, file_format, names, where, with_items=with_items)


@app.command()
@options.taking({"settings": options.SetOption, "profile": options.ProfileOption})
def check(
    run_file: options.RunFileArgument = options.DEFAULT_RUN_FILE,
    node: Annotated[bool, typer.Option("--node", help="Also check a node of the cluster, by a short job.")] = False,
    here: Annotated[bool, typer.Option("--here", help="Check only this machine, as a task would.")] = False,
    fetch: Annotated[
        bool, typer.Option("--fetch", help="Download the workload's model, and an input of the hub, first.")
    ] = False,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="With --node or --here: also try the GPUs, by a run of real faults.")
    ] = False,
    **given: Any,
) -> None:
    """Check what a run needs, one line each.

    Versions, run file, image, plan, resources, Slurm. --node and --here start the image
    and print its Python and the GPUs that CUDA can use; with --gpu they also run a short
    computation on them, with injected failures, for a minute or two. Exits with 2 if a check fails.
    """
    from slurmgpu.cli.commands.check import run_checks, run_checks_here

    overrides = options.overrides(given)
    if gpu and not (node or here):
        raise SlurmGPUError("--gpu says what to try, not where: add --node for a node of the cluster, or --here.")
    if here:
        raise typer.Exit(run_checks_here(run_file, overrides, gpu=gpu))
    raise typer.Exit(run_checks(run_file, overrides, options.as_typed(given), node=node, fetch=fetch, gpu=gpu))
