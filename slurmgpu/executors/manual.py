"""Jobs that users submit themselves: the scripts in sbatch/, and the commands that submit a run with them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurmgpu.containers.settings import ContainerRecord
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors.interface import Started
from slurmgpu.executors.slurm import Slurm
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import NO_GRES, Submission
from slurmgpu.slurm import commands, queue

HERE = Path(__file__).resolve().parent.parent
SCRIPTS = next((folder for folder in (HERE.parent / "sbatch", HERE / "sbatch") if folder.is_dir()), HERE / "sbatch")
"""The scripts of this installation: next to the package in a checkout, otherwise within it."""


class Manual(Slurm):
    """Slurm jobs that the user submits: the first of their tasks to start records the submission."""

    name = "manual"

    def fit(self, submission: Submission, container: ContainerRecord | None) -> tuple[Submission, list[str]]:
        """The submission within this cluster's limits, if these are known."""
        from slurmgpu.executors.slurm_preview import respect_limits

        if submission.slurm.get("gres") == NO_GRES:
            raise SlurmGPUError(
                'gres = "none" under [slurm] is for `slurmgpu submit`: a task by hand takes the GPUs that Slurm gives '
                "its job, and would find none."
            )
        asked, notes = replace(submission, executor=Slurm.name), []
        if commands_first := [*asked.sbatch_options.get("setup", ()), *asked.merge_options.get("setup", ())]:
            typed = "; ".join(dict.fromkeys(commands_first))
            notes.append(f"The scripts do not run setup of [slurm] and [merge]; add these lines to them: {typed}")
        try:
            if why := commands.other_cluster():
                notes.append(f"{why} Its queue cannot be seen from here; type these lines on that cluster.")
            asked, limited = respect_limits(asked, is_array=True)
        except commands.SlurmUnavailableError as error:
            limited = [f"The cluster's limits are unknown. {error}"]
        return asked, [*notes, *limited]

    def start(self, run: Run, submission: Submission) -> Started:
        """The commands to type."""
        return Started(to_type=lines_to_type(run, submission))


def lines_to_type(run: Run, submission: Submission) -> list[str]:
    """The two commands that submit a run from the working directory: its tasks, and the merge after them."""
    near = os.path.relpath(run.folder)
    folder = str(run.folder) if near.startswith("..") else near
    # Identifies the jobs while they wait: from Slurm 24.11 on squeue does not show a script's arguments.
    comment = {"comment": f"{queue.COMMENT}{run.folder}"}
    merge_options = {**comment, **submission.merge_options, "kill_on_invalid_dep": "yes"}
    kind = "model-parallel" if submission.gpus_per_task > 1 else "array"
    script = _script("multi-node" if submission.nodes_per_task > 1 else kind)
    tasks = [*_flags({**comment, **_task_options(submission)}), script, folder]
    merge = [*_flags(merge_options), _script("merge"), folder]
    return [
        f"J=$(sbatch --parsable {shlex.join(tasks)})",
        # afterany: a failed task must not keep the others from being merged.
        # %%: with --clusters, which SLURM_CLUSTERS may set, --parsable prints "1234;CLUSTER".
        f"sbatch --dependency=afterany:${{J%%;*}} {shlex.join(merge)}",
    ]


def _task_options(submission: Submission) -> dict[str, Any]:
    options = submission.sbatch_options
    # The scripts ask for GPUs by --gpus-per-node, which this overrides; --gres would be added to it.
    parts = [part for part in str(options.pop("gres", "")).split(",") if part]
    asked = ",".join(part.partition(":")[2] or "1" for part in parts if part.partition(":")[0] == "gpu")
    others = ",".join(part for part in parts if part.partition(":")[0] != "gpu")
    kind = f"{submission.gpu_type}:" if submission.gpu_type else ""
    options["gpus_per_node"] = asked or f"{kind}{submission.gpus_per_node}"
    if others:
        options["gres"] = others
    if submission.nodes_per_task > 1:
        options["nodes"] = submission.nodes_per_task
    if submission.tasks_per_node > 1:
        options["ntasks_per_node"] = submission.tasks_per_node
    n_jobs, at_once = submission.n_jobs, submission.n_concurrent_jobs
    # Also for one job: without an array the %a in the scripts' --output is 4294967294.
    options["array"] = f"0-{n_jobs - 1}{f'%{at_once}' if at_once < n_jobs else ''}" if n_jobs > 1 else "0"
    return options


def _flags(options: Mapping[str, Any]) -> list[str]:
    given = {
        f"--{key.replace('_', '-')}": value
        for key, value in options.items()
        if key != "setup"  # it is no option of sbatch
    }
    return [flag if value is True else f"{flag}={value}" for flag, value in given.items()]


def _script(name: str) -> str:
    """The user's own copy in sbatch/ of the working directory, else the script of this installation."""
    own = Path("sbatch", f"{name}.sbatch")
    return str(own) if own.exists() else str(SCRIPTS / own.name)
