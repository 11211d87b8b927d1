"""The options of sbatch in [slurm], in [merge] and of --slurm: those that slurmgpu sets itself are refused."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

SlurmValue = str | int | float | bool | list[str]

_NTASKS = (
    *("ntasks", "ntasks_per_node", "tasks_per_node", "ntasks_per_core", "ntasks_per_gpu", "ntasks_per_socket"),
    "ntasks_per_tres",
)
_RESERVED = {
    "array": "--gpus, --tasks and --array of slurmgpu set it",
    "dependency": "--after of slurmgpu sets it",
    "gpus": "[resources] gpus sets it",
    "gpus_per_node": "[resources] gpus and gpus_per_task set it",
    "gpus_per_task": "[resources] gpus_per_task sets it",
    "nodes": "[resources] nodes_per_task sets it",
    **dict.fromkeys(
        _NTASKS,
        "a task is one process on each of its nodes, which starts one for each GPU if needed, and [resources] "
        "tasks_per_node says how many tasks a job has",
    ),
    **dict.fromkeys(
        ("clusters", "cluster", "M"), "slurmgpu finds its jobs on this cluster only; submit on the other cluster"
    ),
    "output": "logs are in the run directory",
    "error": "logs are in the run directory",
    "open_mode": "logs are in the run directory",
    "wrap": "slurmgpu writes the script",
    **dict.fromkeys(("parsable", "quiet", "test_only"), "slurmgpu reads sbatch's answer"),
    "wait": "sbatch would not answer before all tasks have ended; --wait of slurmgpu waits for the run",
}
"""sbatch options that slurmgpu sets itself, and why."""
_NOTICE = re.compile(r"(?:R:)?(?:SIG)?USR2(?:@\d+)?|False")
"""Values of sbatch's `signal` for which tasks listen."""
_OPTION = re.compile("[A-Za-z0-9][A-Za-z0-9_]*")


def refuse_nul(value: Any, name: str = "") -> None:
    """ValueError for a text that can be no path, and no line of a script: it would end at this character."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and "\0" in text:
            raise ValueError(f"{name} holds a NUL character".lstrip())


def _slurm_names(value: Any) -> Any:
    """Options of sbatch by their long names, with '-' or '_'; those that slurmgpu sets itself are refused."""
    if not isinstance(value, Mapping):
        return value
    # An unquoted 04:00:00 is a time of day to TOML.
    options = {
        name: str(option) if isinstance(option, datetime.time) else option
        for name, option in plain_names(value).items()
    }
    for name, option in options.items():
        if not _OPTION.fullmatch(name):  # a line break in it would begin another line of the script
            raise ValueError(f"{name!r} is not an option of sbatch: its name has letters, digits, '_' and '-'")
        refuse_nul(option, name)
        if name in _RESERVED:
            raise ValueError(f"{name!r} cannot be set here: {_RESERVED[name]}")
        if name == "signal" and not _NOTICE.fullmatch(str(option)):
            raise ValueError(
                "'signal' must be USR2, such as \"USR2@300\": another one would kill tasks before their end"
            )
        if isinstance(option, list) and name != "setup":
            raise ValueError(f"{name!r} is a list; only setup (the commands that the script runs first) takes a list")
    if isinstance(options.get("setup"), str):
        options["setup"] = [options["setup"]]
    return options


def plain_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of sbatch with '_' in their names, with or without leading dashes."""
    return {str(name).lstrip("-").replace("-", "_"): value for name, value in options.items()}


SlurmOptions = Annotated[dict[str, SlurmValue], BeforeValidator(_slurm_names)]
