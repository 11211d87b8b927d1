"""The commands for runs that are submitted by hand: plan, task and merge."""

from __future__ import annotations

from typing import Annotated

import typer

from slurmgpu.cli import options
from slurmgpu.errors import SlurmGPUError


def plan(
    context: typer.Context,
    run_file: options.RunFileArgument = options.DEFAULT_RUN_FILE,
    gpus: options.GpusOption = None,
    array: options.ArrayOption = None,
    gpus_per_task: options.PerTaskOption = None,
    nodes_per_task: options.NodesOption = None,
    gpu_type: options.TypeOption = None,
    processes: options.ProcessesOption = None,
    tasks: options.TasksOption = None,
    device: options.DeviceOption = None,
    image: options.ImageOption = None,
    run_dir: options.RunDirOption = None,
    settings: options.SetOption = None,
    slurm: options.SlurmOption = None,
    mail_user: options.MailOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Plan a run, and print how to submit it by hand.

    Makes the run directory as submit does, queues nothing, and prints the two sbatch commands:
    for the array and for its merge.
    """
    from slurmgpu.cli.commands import submit as submitting

    overrides = options.overrides(context.params, settings, slurm, image)
    submitting.plan(run_file, overrides, run_dir, as_json=as_json)


def task(
    folder: options.RunArgument,
    device: options.DeviceOption = None,
    trust: options.TrustOption = False,
    own_array: Annotated[
        bool, typer.Option("--own-array", help="The script has #SBATCH --array: do not ask squeue.")
    ] = False,
) -> None:
    """Run one task inside a Slurm job.

    Scripts in sbatch/ call it; submit does not need it. Exits with 75 if it was stopped
    and released its shards.
    """
    from slurmgpu.executors.job_entry import run_task_by_hand

    if device not in (None, "auto", "cpu"):
        raise SlurmGPUError(f"--device {device!r} is unknown; expected auto or cpu.")
    raise typer.Exit(run_task_by_hand(folder, device, trust=trust, own_array=own_array))


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
    from slurmgpu.cli.console import complain, result, result_json
    from slurmgpu.cli.views.tables import show_report
    from slurmgpu.executors import submission as submitting
    from slurmgpu.merge.merge import verify as verify_merged
    from slurmgpu.util.logging import log_to_stderr

    run = options.open_run(folder, trust=trust)
    if verify and wait:
        raise SlurmGPUError("--verify only reads merged.h5 and does not wait. Leave out --wait.")
    if force and (verify or wait):
        raise SlurmGPUError("--force merges at once; leave out --verify and --wait.")
    if verify:
        problems = verify_merged(run)
        for problem in problems:
            complain(problem)
        if not problems:
            result(f"{run.merged} is whole.")
        raise typer.Exit(1 if problems else 0)
    if wait:
        log_to_stderr(force=True)
    value = submitting.merge_when_over(run) if wait else submitting.merge_by_hand(run, force=force)
    if as_json:
        result_json(value)
    else:
        show_report(value)
    raise typer.Exit(0 if value["complete"] else 3)
