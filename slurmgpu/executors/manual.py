"""Jobs by hand: the scripts in sbatch/, and the lines that submit a run with them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurmgpu.containers.settings import ContainerRecord
from slurmgpu.executors.interface import Started
from slurmgpu.executors.slurm import Slurm, respect_limits
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import Submission
from slurmgpu.slurm import commands, queue

HERE = Path(__file__).resolve().parent.parent
SCRIPTS = next((folder for folder in (HERE.parent / "sbatch", HERE / "sbatch") if folder.is_dir()), HERE / "sbatch")
"""The scripts as they came: in a checkout beside the package, in an installation within it."""


class Manual(Slurm):
    """Jobs of Slurm's that the user submits: the first task of theirs writes the submission that they are."""

    name = "manual"

    def fit(self, submission: Submission, container: ContainerRecord | None) -> tuple[Submission, list[str]]:
        """What the lines ask for: tasks of Slurm's within this cluster's limits, where these are known."""
        asked, notes = replace(submission, executor=Slurm.name), []
        if commands_first := [*asked.slurm.get("setup", ()), *asked.merge.get("setup", ())]:
            typed = "; ".join(dict.fromkeys(commands_first))
            notes.append(f"The scripts do not run the setup of [slurm] or [merge]; write it into them: {typed}")
        try:
            asked, limited = respect_limits(asked)
        except commands.SlurmUnavailableError as error:
            limited = [f"The cluster's limits are not known here. {error}"]
        return asked, [*notes, *limited]

    def start(self, run: Run, submission: Submission) -> Started:
        """The lines to type."""
        return Started(to_type=lines_to_type(run, submission))


def lines_to_type(run: Run, submission: Submission) -> list[str]:
    """The two lines that submit a run by hand from the working directory: its tasks, and the merge behind them."""
    folder = _as_typed(run.folder)
    # By it the jobs are known while they wait: from Slurm 24.11 on squeue does not show a script's arguments.
    comment = {"comment": f"{queue.COMMENT}{run.folder}"}
    merge_options = {**comment, **submission.merge_options, "kill_on_invalid_dep": "yes"}
    tasks = [*_flags({**comment, **_task_options(submission)}), _script(_fitting(submission)), folder]
    merge = [*_flags(merge_options), _script("merge"), folder]
    return [
        f"J=$(sbatch --parsable {shlex.join(tasks)})",
        # afterany: a failed task must not keep the others from being merged.
        f"sbatch --dependency=afterany:$J {shlex.join(merge)}",
    ]


def _fitting(submission: Submission) -> str:
    if submission.nodes_per_task > 1:
        return "multi-node"
    return "model-parallel" if submission.gpus_per_task > 1 else "array"


def _task_options(submission: Submission) -> dict[str, Any]:
    options = submission.sbatch_options
    # The scripts ask for GPUs by --gpus-per-node, which goes over what they say; --gres would be added to it.
    others, asked = _without_gpus(str(options.pop("gres", "")))
    kind = f"{submission.gpu_type}:" if submission.gpu_type else ""
    options["gpus_per_node"] = asked or f"{kind}{submission.gpus_per_task // submission.nodes_per_task}"
    if others:
        options["gres"] = others
    if submission.nodes_per_task > 1:
        options["nodes"] = submission.nodes_per_task
    # Also for one task: without an array the %a in the scripts' --output is 4294967294.
    options["array"] = "0"
    if submission.n_tasks > 1:
        throttle = f"%{submission.n_concurrent}" if submission.n_concurrent < submission.n_tasks else ""
        options["array"] = f"0-{submission.n_tasks - 1}{throttle}"
    return options


def _without_gpus(gres: str) -> tuple[str, str]:
    """A --gres without its GPUs, and these as --gpus-per-node takes them: "gpu:a100:2,shard:1" has "a100:2"."""
    parts = [part for part in gres.split(",") if part]
    gpus = [part.partition(":")[2] or "1" for part in parts if part.partition(":")[0] == "gpu"]
    return ",".join(part for part in parts if part.partition(":")[0] != "gpu"), ",".join(gpus)


def _flags(options: Mapping[str, Any]) -> list[str]:
    given = {
        f"--{key.replace('_', '-')}": value
        for key, value in options.items()
        if value is not False and key != "setup"  # which is no option of sbatch
    }
    return [flag if value is True else f"{flag}={value}" for flag, value in given.items()]


def _script(name: str) -> str:
    """The user's own copy, in sbatch/ of the working directory; without one the script as it came."""
    own = Path("sbatch", f"{name}.sbatch")
    return str(own) if own.exists() else str(SCRIPTS / own.name)


def _as_typed(folder: Path) -> str:
    near = os.path.relpath(folder)
    return str(folder) if near.startswith("..") else near
