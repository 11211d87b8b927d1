"""The options that several commands have, and what run files call them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from slurmgpu.runs import Run

RunFileArgument = Annotated[Path, typer.Argument(metavar="RUNFILE", help="The run file.", show_default=False)]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
GpusOption = Annotated[int | None, typer.Option("--gpus", help="GPUs the run may hold at once; 0 runs on CPUs.")]
ArrayOption = Annotated[bool | None, typer.Option("--array/--no-array", help="Spread them over array tasks.")]
PerTaskOption = Annotated[int | None, typer.Option("--gpus-per-task", help="GPUs of each array task (1).")]
NodesOption = Annotated[int | None, typer.Option("--nodes-per-task", help="Nodes that each task spreads over (1).")]
TypeOption = Annotated[str | None, typer.Option("--gpu-type", help="The type of GPU, as Slurm calls it: a100.")]
ProcessesOption = Annotated[
    str | None, typer.Option("--processes", help="one process for all GPUs of a task, or one per-gpu.")
]
TasksOption = Annotated[int | None, typer.Option("--tasks", help="Tasks to queue, if not as many as run at once.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="auto (the allocated GPUs) or cpu.")]
SlurmOption = Annotated[list[str] | None, typer.Option("--slurm", metavar="KEY=VALUE", help="An sbatch option.")]
ExecutorOption = Annotated[str | None, typer.Option("--executor", help="slurm, local or debug.")]
ImageOption = Annotated[Path | None, typer.Option("--image", help="The container image.", show_default=False)]
RunDirOption = Annotated[Path | None, typer.Option("--run-dir", help="The run directory to make.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the workload.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Follow the run to its end; exit with 3 if it is incomplete.")]
DEFAULT_RUN_FILE = Path("slurmgpu.toml")


def resources(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of [resources] among a command's options; None stands for those that were not given."""
    from slurmgpu.config import Resources

    return {key: given.get(key) for key in Resources.model_fields}


def container(image: Path | None) -> dict[str, Any]:
    """[container] of an image that was named on the command line, relative to the working directory."""
    return {} if image is None else {"image": str(image.expanduser().absolute())}


def settings(texts: list[str] | None) -> dict[str, Any]:
    """The settings in KEY=VALUE of --set."""
    if not texts:
        return {}
    from slurmgpu.config import parse_setting

    return dict(parse_setting(text) for text in texts)


def slurm_options(texts: list[str] | None) -> dict[str, Any]:
    """The options of sbatch in KEY=VALUE of --slurm."""
    if not texts:
        return {}
    from slurmgpu.config import parse_slurm_options

    return dict(parse_slurm_options(texts))


def overrides(
    given: Mapping[str, Any], setting_texts: list[str] | None, slurm_texts: list[str] | None, image: Path | None
) -> dict[str, Any]:
    """What a command's options put over the run file, table by table."""
    return {
        "settings": settings(setting_texts),
        "slurm": slurm_options(slurm_texts),
        "resources": resources(given),
        "container": container(image),
    }


def open_run(folder: Path) -> Run:
    """The run in a run directory."""
    from slurmgpu.runs import Run

    return Run.open(folder)
