"""The options that several commands have, and what run files call them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slurmgpu.cli import completion
from slurmgpu.errors import SlurmGPUError

if TYPE_CHECKING:
    from slurmgpu.run.directory import Run

RunFileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUNFILE", help="The run file.", show_default=False, autocompletion=completion.complete_run_file
    ),
]
RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="The run directory.", show_default=False, autocompletion=completion.complete_run
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
GpusOption = Annotated[int | None, typer.Option("--gpus", help="GPUs the run may hold at once; 0 runs on CPUs.")]
ArrayOption = Annotated[bool | None, typer.Option("--array/--no-array", help="Spread them over array tasks.")]
PerTaskOption = Annotated[int | None, typer.Option("--gpus-per-task", help="GPUs of each array task (1).")]
NodesOption = Annotated[int | None, typer.Option("--nodes-per-task", help="Nodes that each task spreads over (1).")]
TypeOption = Annotated[str | None, typer.Option("--gpu-type", help="The type of GPU, as Slurm calls it: a100.")]
ProcessesOption = Annotated[
    str | None,
    typer.Option(
        "--processes",
        help="one process for all GPUs of a task, or one per-gpu.",
        autocompletion=completion.words("one", "per-gpu"),
    ),
]
TasksOption = Annotated[int | None, typer.Option("--tasks", help="Tasks to queue, if not as many as run at once.")]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="auto (the allocated GPUs) or cpu.", autocompletion=completion.words("auto", "cpu")),
]
SlurmOption = Annotated[list[str] | None, typer.Option("--slurm", metavar="KEY=VALUE", help="An sbatch option.")]
MailOption = Annotated[
    str | None, typer.Option("--mail-user", metavar="ADDRESS", help="Let Slurm send a mail when the run has ended.")
]
InjectOption = Annotated[
    list[str] | None,
    typer.Option(
        "--inject",
        metavar="FAULTS",
        help="Make it fail on purpose: crash@17,oom@40,kill@60,timeout.",
        autocompletion=completion.complete_fault,
    ),
]
ExecutorOption = Annotated[
    str | None,
    typer.Option("--executor", help="slurm, local or debug.", autocompletion=completion.complete_executor),
]
ImageOption = Annotated[Path | None, typer.Option("--image", help="The container image.", show_default=False)]
RunDirOption = Annotated[Path | None, typer.Option("--run-dir", help="The run directory to make.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the workload.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Even while something of the run may be alive.")]
TrustOption = Annotated[
    bool, typer.Option("--trust", help="Run, as you, what whoever can write in the run directory has put there.")
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Follow the run to its end; exit with 3 if it is incomplete.")]
DEFAULT_RUN_FILE = Path("slurmgpu.toml")


def resources(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of [resources] among a command's options; None stands for those that were not given."""
    from slurmgpu.plan.run_file import Resources

    return {key: given.get(key) for key in Resources.model_fields}


def container(image: Path | None) -> dict[str, Any]:
    """[container] of an image that was named on the command line, relative to the working directory."""
    return {} if image is None else {"image": str(image.expanduser().absolute())}


def settings(texts: list[str] | None) -> dict[str, Any]:
    """The settings in KEY=VALUE of --set."""
    if not texts:
        return {}
    from slurmgpu.plan.run_file import parse_setting

    return dict(parse_setting(text) for text in texts)


def slurm_options(texts: list[str] | None) -> dict[str, Any]:
    """The options of sbatch in KEY=VALUE of --slurm."""
    if not texts:
        return {}
    from slurmgpu.plan.run_file import parse_slurm_options

    return dict(parse_slurm_options(texts))


def merge_options(mail_user: str | None) -> dict[str, Any]:
    """The options of the merge job's that --mail-user stands for: its end is the run's."""
    return {} if mail_user is None else {"mail_user": mail_user, "mail_type": "END,FAIL"}


def overrides(
    given: Mapping[str, Any], setting_texts: list[str] | None, slurm_texts: list[str] | None, image: Path | None
) -> dict[str, Any]:
    """What a command's options put over the run file, table by table."""
    return {
        "settings": settings(setting_texts),
        "slurm": slurm_options(slurm_texts),
        "merge": merge_options(given.get("mail_user")),
        "resources": resources(given),
        "container": container(image),
    }


def metrics_file(path: Path | None) -> Path | None:
    """The file of --metrics; a folder that is not there is refused, and a name that nobody collects is remarked."""
    if path is None:
        return None
    from slurmgpu.cli.console import say

    path = path.expanduser()
    if not path.absolute().parent.is_dir():
        raise SlurmGPUError(
            f"--metrics {path}: there is no folder {path.absolute().parent}. Make it, or name a file elsewhere."
        )
    if path.suffix != ".prom":
        say(f"{path} does not end in .prom; node_exporter's textfile collector reads only files that do.")
    return path


def open_run(folder: Path, *, trust: bool = False) -> Run:
    """The run in a run directory; with `trust` what it says is run, whoever may have written it."""
    from slurmgpu.run import owners
    from slurmgpu.run.directory import Run

    if trust:
        owners.trust(folder)
    return Run.open(folder)
