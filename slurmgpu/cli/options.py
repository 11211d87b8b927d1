"""The options that several commands share, and the keys of run files that they set."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from slurmgpu.cli import completion
from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.users import expanded

if TYPE_CHECKING:
    from slurmgpu.plan.overrides import Overrides
    from slurmgpu.run.directory import Run

Command = TypeVar("Command", bound=Callable[..., None])

RunFileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUNFILE",
        help="The run file (slurmgpu.toml).",
        show_default=False,
        autocompletion=completion.complete_run_file,
    ),
]
RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="The run directory.", show_default=False, autocompletion=completion.complete_run
    ),
]


def _compared(metavar: str) -> Any:
    return typer.Argument(
        metavar=metavar,
        help="A run directory or a merged file.",
        show_default=False,
        autocompletion=completion.complete_run,
    )


ComparedArgument = Annotated[Path, _compared("A")]
OtherArgument = Annotated[Path, _compared("B")]


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


DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="auto (the allocated GPUs) or cpu.", autocompletion=completion.words("auto", "cpu")),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="A setting, or any key of the run file: resources.gpus=4.",
        autocompletion=completion.complete_key,
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile", metavar="NAME", help="A profile of the site file.", autocompletion=completion.complete_profile
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Even while tasks of the run may be alive.")]
TrustOption = Annotated[bool, typer.Option("--trust", help="Run the run's code as you, although others can write it.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Follow the run to its end; exit with 3 if it is incomplete.")]
ColumnsOption = Annotated[
    str | None, typer.Option("--columns", metavar="A,B", help="Only these columns, in this order.")
]
WhereOption = Annotated[
    str | None, typer.Option("--where", metavar="CONDITION", help="Only these rows, such as 'score > 0.5'.")
]
WithItemsOption = Annotated[bool, typer.Option("--with-items", help="Also the items of the input.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show the plan, the limits and the sbatch scripts; queue nothing.")
]
DEFAULT_RUN_FILE = Path("slurmgpu.toml")
DEFAULTS = dict.fromkeys(("dry_run", "yes", "wait", "as_json"), False)


PLACES: dict[str, Any] = {
    "gpus": Annotated[
        int | None,
        typer.Option(
            "--gpus",
            metavar="N",
            parser=_number_of_gpus,
            help="GPUs that the run may use at once; 0 runs on CPUs; all: this machine's.",
        ),
    ],
    "array": Annotated[bool | None, typer.Option("--array/--no-array", help="Spread the GPUs over array tasks.")],
    "gpus_per_task": Annotated[int | None, typer.Option("--gpus-per-task", help="GPUs of each array task (1).")],
    "nodes_per_task": Annotated[int | None, typer.Option("--nodes-per-task", help="Nodes of each task (1).")],
    "tasks_per_node": Annotated[
        int | None, typer.Option("--tasks-per-node", help="Tasks of each job (1; as many as fit, of a whole node).")
    ],
    "gpu_type": Annotated[str | None, typer.Option("--gpu-type", help="The GPU type by Slurm's name, such as a100.")],
    "processes": Annotated[
        str | None,
        typer.Option(
            "--processes",
            help="one: a process for all GPUs of a task; per-gpu: one for each.",
            autocompletion=completion.words("one", "per-gpu"),
        ),
    ],
    "tasks": Annotated[int | None, typer.Option("--tasks", help="Tasks to queue, if not as many as run at once.")],
    "executor": Annotated[
        str | None, typer.Option("--executor", help=_executors(), autocompletion=completion.complete_executor)
    ],
    "device": DeviceOption,
}
"""Options that are keys of [resources]."""
KEYS: dict[str, Any] = {
    "settings": SetOption,
    "profile": ProfileOption,
    "image": Annotated[Path | None, typer.Option("--image", help="The container image.", show_default=False)],
    "slurm": Annotated[list[str] | None, typer.Option("--slurm", metavar="KEY=VALUE", help="An sbatch option.")],
    "mail_user": Annotated[
        str | None, typer.Option("--mail-user", metavar="ADDRESS", help="Let Slurm send a mail when the run ends.")
    ],
}
"""Options that set other keys of the run file."""
SUBMITTING: dict[str, Any] = {
    "limit": Annotated[int | None, typer.Option("--limit", metavar="N", help="Compute only the first N items.")],
    "items": Annotated[
        str | None, typer.Option("--items", metavar="RANGES", help="Compute only these items: 10:20,35.")
    ],
    "extend": Annotated[
        Path | None,
        typer.Option(
            "--extend",
            metavar="RUN",
            help="Compute only the items that the input has and that run lacks.",
            autocompletion=completion.complete_run,
        ),
    ],
    "run_dir": Annotated[Path | None, typer.Option("--run-dir", help="The run directory to create.")],
    "after": Annotated[
        list[Path] | None,
        typer.Option(
            "--after", metavar="RUN", help="Start when that run is complete.", autocompletion=completion.complete_run
        ),
    ],
    "dry_run": DryRunOption,
    "probe": Annotated[
        int | None, typer.Option("--probe", metavar="N", help="First compute N items, and estimate time and cost.")
    ],
    "yes": Annotated[bool, typer.Option("--yes", help="Queue the run after its probe without asking.")],
    "inject": Annotated[
        list[str] | None,
        typer.Option(
            "--inject",
            metavar="FAULTS",
            help="Inject faults: crash@17,oom@40,kill@60,timeout.",
            autocompletion=completion.complete_fault,
        ),
    ],
    "wait": WaitOption,
    "as_json": JsonOption,
}
"""Options of the commands that plan a run and submit it."""


def taking(options: Mapping[str, Any], but: Collection[str] = ()) -> Callable[[Command], Command]:
    """Give a command these options except those in `but`; it takes them as `**given`."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        given = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=option, default=DEFAULTS.get(name))
            for name, option in options.items()
            if name not in but
        ]
        command.__signature__ = signature.replace(parameters=[*own, *given])  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in (*own, *given)}
        return command

    return decorate


def overrides(given: Mapping[str, Any], below: Overrides | None = None) -> Overrides:
    """The values with which options override the run file, or `below`: of the profile, of flags, of -s."""
    from slurmgpu.plan.overrides import Overrides
    from slurmgpu.plan.run_file import parse_slurm_options
    from slurmgpu.plan.site_file import put_profile

    found = Overrides() if below is None else below
    if "profile" in given:
        put_profile(found, given["profile"])
    image, mail_user = given.get("image"), given.get("mail_user")
    if given.get("run_dir"):  # relative to the working directory; the key is relative to the run file
        found.sources["", "run_dir"] = "--run-dir"
    found.put({"resources": {key: given.get(key) for key in PLACES}})
    found.put({"container": {"image": image and str(expanded(image).absolute())}})
    found.put({"slurm": parse_slurm_options(given.get("slurm") or ())}, "--slurm")
    # The run ends with the merge job.
    found.put({"merge": {"mail_user": mail_user, "mail_type": mail_user and "END,FAIL"}}, "--mail-user")
    for text in given.get("settings") or ():
        found.assign_text(text)
    return found


def overrides_of_resubmission(given: Mapping[str, Any]) -> Overrides:
    """The values of `overrides` for a resubmission. Raises SlurmGPUError for a key that is frozen in the run."""
    from slurmgpu.run.private import OF_SBATCH

    found = overrides(given)
    for table, key in found.sources:
        if table not in OF_SBATCH and not (table == "resources" and key in {*PLACES} - {"processes"}):
            raise SlurmGPUError(
                f"-s {'.'.join(filter(None, (table, key)))}: this key is frozen in the run. `resubmit` can change "
                f"[slurm], [merge], and those keys of [resources] that have an option in `resubmit --help`; for "
                f"anything else plan another run with `slurmgpu submit --run-dir`."
            )
    return found


def as_typed(given: Mapping[str, Any]) -> list[str]:
    """The options -s and --profile as they were typed."""
    typed = [word for text in given["settings"] or () for word in ("-s", text)]
    return typed + (["--profile", given["profile"]] if given["profile"] else [])


def names(text: str | None) -> list[str]:
    """The names in the text of --columns; none if it was not given."""
    return [] if text is None else [name.strip() for name in text.split(",")]


def metrics_file(path: Path | None) -> Path | None:
    """The file of --metrics. Raises SlurmGPUError on a missing folder; warns if the collector ignores the name."""
    if path is None:
        return None
    from slurmgpu.cli.console import say

    path = expanded(path)
    if path.is_dir():
        raise SlurmGPUError(f"--metrics {path} is a folder. Name a file in it, such as {path / 'run.prom'}.")
    if not path.absolute().parent.is_dir():
        raise SlurmGPUError(
            f"--metrics {path}: there is no folder {path.absolute().parent}. Make it, or name a file elsewhere."
        )
    if path.suffix != ".prom":
        say(f"{path} does not end in .prom; node_exporter's textfile collector ignores it.")
    return path


def open_run(folder: Path, *, trust: bool = False) -> Run:
    """The run in a run directory; with `trust`, its code runs even if others can write it."""
    from slurmgpu.run import owners, sweep_file

    if trust:
        owners.trust(folder)
    return sweep_file.open_run(folder)


def merged_alone(path: Path) -> Path | None:
    """The path of a file that is in no run directory, such as a copy of merged.h5; None for anything else."""
    path = expanded(path)
    return path if path.is_file() and not (path.parent / "run.json").exists() else None


def runs_of_sweep(folder: Path) -> list[Path] | None:
    """The runs of the sweep in a folder; None if the folder holds no sweep, such as a run directory."""
    from slurmgpu.run import sweep_file

    return sweep_file.runs_of_sweep(folder)
