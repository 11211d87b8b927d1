"""The options that several commands share, and the keys of run files that they set."""

from __future__ import annotations

import sys
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


def _executors() -> str:
    """The executors that are installed; they are looked up only where help is printed."""
    return f"{', '.join(completion.complete_executor(''))}." if {"-h", "--help"} & set(sys.argv) else ""


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


def _number_of_gpus(text: str) -> int | str:
    if text == "all":
        return text
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is neither a whole number nor all.")
    return int(text)


GpusOption = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        metavar="N",
        parser=_number_of_gpus,
        help="GPUs that the run may use at once; 0 runs on CPUs; all: this machine's.",
    ),
]
ArrayOption = Annotated[bool | None, typer.Option("--array/--no-array", help="Spread the GPUs over array tasks.")]
PerTaskOption = Annotated[int | None, typer.Option("--gpus-per-task", help="GPUs of each array task (1).")]
NodesOption = Annotated[int | None, typer.Option("--nodes-per-task", help="Nodes of each task (1).")]
TypeOption = Annotated[str | None, typer.Option("--gpu-type", help="The GPU type by Slurm's name, such as a100.")]
ProcessesOption = Annotated[
    str | None,
    typer.Option(
        "--processes",
        help="one: a process for all GPUs of a task; per-gpu: one for each.",
        autocompletion=completion.words("one", "per-gpu"),
    ),
]
TasksOption = Annotated[int | None, typer.Option("--tasks", help="Tasks to queue, if more than run at once.")]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="auto (the allocated GPUs) or cpu.", autocompletion=completion.words("auto", "cpu")),
]
SlurmOption = Annotated[list[str] | None, typer.Option("--slurm", metavar="KEY=VALUE", help="An sbatch option.")]
MailOption = Annotated[
    str | None, typer.Option("--mail-user", metavar="ADDRESS", help="Let Slurm send a mail when the run ends.")
]
InjectOption = Annotated[
    list[str] | None,
    typer.Option(
        "--inject",
        metavar="FAULTS",
        help="Inject faults: crash@17,oom@40,kill@60,timeout.",
        autocompletion=completion.complete_fault,
    ),
]
ExecutorOption = Annotated[
    str | None, typer.Option("--executor", help=_executors(), autocompletion=completion.complete_executor)
]
ImageOption = Annotated[Path | None, typer.Option("--image", help="The container image.", show_default=False)]
RunDirOption = Annotated[Path | None, typer.Option("--run-dir", help="The run directory to make.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the workload.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Even while tasks of the run may be alive.")]
TrustOption = Annotated[
    bool, typer.Option("--trust", help="Run code that others can write in the run directory, as you.")
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Follow the run to its end; exit with 3 if it is incomplete.")]
AfterOption = Annotated[
    Path | None,
    typer.Option(
        "--after", metavar="RUN", help="Start when that run is complete.", autocompletion=completion.complete_run
    ),
]
ProbeOption = Annotated[
    int | None, typer.Option("--probe", metavar="N", help="First compute N items, and estimate time and cost.")
]
YesOption = Annotated[bool, typer.Option("--yes", help="Queue the run after its probe without asking.")]
DEFAULT_RUN_FILE = Path("slurmgpu.toml")


def resources(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of [resources] among a command's options; None for those that were not given."""
    from slurmgpu.plan.run_file import Resources

    return {key: given.get(key) for key in Resources.model_fields}


def slurm_options(texts: list[str] | None) -> dict[str, Any]:
    """The sbatch options in the KEY=VALUE texts of --slurm."""
    from slurmgpu.plan.run_file import parse_slurm_options

    return dict(parse_slurm_options(texts or ()))


def merge_options(mail_user: str | None) -> dict[str, Any]:
    """The merge job's options for --mail-user: the run ends with the merge job."""
    return {} if mail_user is None else {"mail_user": mail_user, "mail_type": "END,FAIL"}


def overrides(
    given: Mapping[str, Any], setting_texts: list[str] | None, slurm_texts: list[str] | None, image: Path | None
) -> dict[str, Any]:
    """The values that a command's options override in the run file, by table."""
    from slurmgpu.plan.run_file import parse_setting

    return {
        "settings": dict(map(parse_setting, setting_texts or ())),
        "slurm": slurm_options(slurm_texts),
        "merge": merge_options(given.get("mail_user")),
        "resources": resources(given),
        "container": {} if image is None else {"image": str(image.expanduser().absolute())},
    }


def metrics_file(path: Path | None) -> Path | None:
    """The file of --metrics. A missing folder is an error, and a name that the collector ignores gives a warning."""
    if path is None:
        return None
    from slurmgpu.cli.console import say

    path = path.expanduser()
    if not path.absolute().parent.is_dir():
        raise SlurmGPUError(
            f"--metrics {path}: there is no folder {path.absolute().parent}. Make it, or name a file elsewhere."
        )
    if path.suffix != ".prom":
        say(f"{path} does not end in .prom; node_exporter's textfile collector ignores it.")
    return path


def open_run(folder: Path, *, trust: bool = False) -> Run:
    """The run in a run directory; with `trust` its code is run whoever may have written it."""
    from slurmgpu.run import owners
    from slurmgpu.run.directory import Run

    if trust:
        owners.trust(folder)
    return Run.open(folder)
