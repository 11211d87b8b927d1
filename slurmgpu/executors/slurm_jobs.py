"""Slurm jobs, submitted with Submitit: the array, the merge that depends on it, and the srun of `check --node`."""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from slurmgpu.errors import MayBeQueuedError, SlurmGPUError
from slurmgpu.executors import job_entry
from slurmgpu.executors.resubmission import first_submission
from slurmgpu.executors.submitit_patches import patch_submitit
from slurmgpu.plan.run_file import RunFile
from slurmgpu.plan.run_path import refuse_odd_path
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import Submission, gres_names
from slurmgpu.slurm import commands, queue
from slurmgpu.slurm.commands import ARRAY_JOB
from slurmgpu.slurm.limits import CORRECT, CORRECT_MERGE
from slurmgpu.util.array_ids import array_of
from slurmgpu.util.process_wide import safe_path

SIGNAL_BEFORE_END_S = 30
"""Tasks stop taking shards by themselves; the signal is for a shard that takes longer than all before it."""
PYTHON = f"""sh -c 'trap "" USR2; exec "$0" "$@"' {shlex.quote(sys.executable)} {job_entry.BEGIN}"""
"""Slurm may send SIGUSR2 a minute early; without the trap it would kill a Python that has no handler yet."""

ONCE_REACHED = "while said=$(scontrol ping 2>&1); [[ $said == *DOWN* && $said != *UP* ]]; do sleep 5; done"
"""A line of the scripts before srun: while slurmctld is restarted, srun fails at once, and the job with it."""

NOT_READ = "Could not make sense of sbatch output"
"""Submitit's message for an answer without "job 1234"."""


def scripts(folder: Path, name: str, submission: Submission) -> dict[str, str]:
    """The sbatch scripts that `submit` would hand to Slurm, by job."""
    array = _array_executor(folder / "logs", name, submission)
    if submission.n_jobs > 1:  # else Submitit makes it a plain job
        array.parameters["map_count"] = submission.n_jobs
    merge = _merge_executor(folder / "logs", name, submission, f"afterany:{ARRAY_JOB}")
    return {
        "array": array._make_submission_file_text(array._submitit_command_str, "dry-run"),
        "merge": merge._make_submission_file_text(merge._submitit_command_str, "dry-run"),
    }


def submit(run: Run, submission: Submission, not_in_paths: str) -> dict[str, Any]:
    """Queue the array and its merge; return their job ids. The array is cancelled if the merge job is refused."""
    refuse_odd_path(run.folder, not_in_paths)  # the run may have been planned for another executor, or moved
    array = _array_executor(run.logs, run.plan.name, submission)
    with commands.outside_job(), safe_path():
        folders = [run.folder] * submission.n_jobs
        numbers = [submission.submission] * len(folders)
        jobs = _queue(run, "array", lambda: array.map_array(job_entry.run_task, folders, numbers), submission)
        array_job = array_of(jobs[0].job_id)
        merge = _merge_executor(run.logs, run.plan.name, submission, f"afterany:{array_job}")
        try:
            number = submission.submission
            [merge_job] = _queue(
                run,
                "merge",
                lambda: [merge.submit(job_entry.run_merge, run.folder, number)],
                undone=f"The array job {array_job} was cancelled. ",
            )
        except BaseException as error:
            _take_back(run, number, array_job, error)
            raise
    return {"array_job": array_job, "merge_job": merge_job.job_id}


CHECK_TIME = "00:05:00"
FOR_SRUN = {
    *("account", "constraint", "cpus_per_task", "exclude", "gpus_per_node", "gres", "mem", "mem_per_cpu"),
    *("mem_per_gpu", "nodelist", "nodes", "partition", "qos", "reservation"),
}


def check_command(config: RunFile, command: list[str]) -> list[str]:
    """The srun command line that runs a command where a task of the run file would run, at most five minutes."""
    submission = first_submission(config.resources.model_dump(), most_tasks=1)
    options = _array_options(replace(submission, slurm=config.slurm))
    asked = {key: value for key, value in options.items() if key in FOR_SRUN}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in asked.items()]
    if "setup" in options:
        script = "\n".join(["set -e", *options["setup"], f"exec {shlex.join(command)}"])
        command = ["bash", "-c", script]
    own = ["--quiet", f"--time={CHECK_TIME}", "--ntasks-per-node=1", "--job-name=slurmgpu-check"]
    return ["srun", *own, *flags, *command]


def _take_back(run: Run, number: int, array_job: str, why: BaseException) -> None:
    """Cancel an array that has no merge job; MayBeQueuedError if that is not possible."""
    try:
        commands.cancel(array_job)
    except commands.SlurmUnavailableError as error:
        run.record_submission({"submission": number, "array_job": array_job})
        raise MayBeQueuedError(
            f"The array job {array_job} is queued, but its merge job is not: {_first_sentence(why)}. The array cannot "
            f"be cancelled now: {str(error).rstrip('.')}. Either let it run, and then type `slurmgpu merge "
            f"{run.typed}`. Or, once Slurm answers, `slurmgpu cancel {run.typed}` and `slurmgpu resubmit {run.typed}`."
        ) from error


def _first_sentence(error: BaseException) -> str:
    """What failed, without the advice after it."""
    return str(error).partition(". ")[0].rstrip(".")


def _queue(run: Run, job: str, submit_jobs: Any, array: Submission | None = None, undone: str = "") -> Any:
    try:
        # Submitit also prints to stderr what it raises.
        with contextlib.redirect_stderr(io.StringIO()):
            return submit_jobs()
    except (FailedSubmissionError, FailedJobError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        told = [line.removeprefix("sbatch: ") for line in lines if line.startswith("sbatch: ")]
        said = ("; ".join(told) or " ".join(lines).strip()).rstrip(".")
        if commands.was_not_taken(said):
            raise commands.SlurmUnavailableError(
                f"Slurm takes no jobs at present: {said}. The job is not queued. Once Slurm does, type `slurmgpu "
                f"resubmit {run.typed}`, or repeat the command if the run directory was removed.",
                is_silent=True,
            ) from error
        if (is_silent := commands.is_silence(said)) or NOT_READ in said:
            what = "Slurm did not answer sbatch" if is_silent else "sbatch printed no job id"
            raise MayBeQueuedError(
                f"{what}: {said}. The job may be queued, but it would find none of its files. Once Slurm answers, "
                f"`slurmgpu cancel {run.typed}` removes such a job, and `slurmgpu resubmit {run.typed}` submits the "
                "run."
            ) from error
        remedy = _let_back_in(array.exclude) if array else ""
        if array and array.tasks_per_node > 1 and "node configuration" in said:
            remedy += f"{array.tasks_per_node} tasks share a job: --tasks-per-node says how many. "
        if array and "node configuration" in said:
            remedy += "The same command with --dry-run says what nodes have. "
        if "SubmitJob" in said:  # QOSMaxSubmitJobPerUserLimit, AssocGrpSubmitJobsLimit …
            remedy += "Your other jobs in the queue count as well: wait until they end, or submit fewer tasks. "
        if "Invalid generic resource" in said:
            remedy += 'Where GPUs come with a partition or constraint alone, set gres = "none" under [slurm]. '
        to_do = CORRECT_MERGE if job == "merge" and not remedy else CORRECT
        if "invalid partition" in said:
            remedy += "`sinfo -s` lists the partitions. "
        raise SlurmGPUError(f"Slurm refuses the {job} job: {said}. {undone}{remedy}{to_do}") from error


def _let_back_in(excluded: Sequence[str]) -> str:
    if not excluded:
        return ""
    who, them = ("are", "them") if len(excluded) > 1 else ("is", "it")
    names = ", ".join(excluded)
    return f"{names} {who} excluded, because tasks failed there; `--slurm exclude=` allows {them} again. "


def _array_executor(logs: Path, name: str, submission: Submission) -> submitit.SlurmExecutor:
    options, at_once = _array_options(submission), submission.n_concurrent_jobs
    return _executor(logs, f"{queue.JOB_NAME}:{name}", options, at_once, submission.tasks_per_node)


def _array_options(submission: Submission) -> dict[str, Any]:
    options = submission.sbatch_options
    if submission.whole_gpus_per_task and "gpu" not in gres_names(options):
        # Per node, not per task: for one process it is the same, and it hides no GPU from processes that share a node.
        count = submission.gpus_per_node
        options["gpus_per_node"] = f"{submission.gpu_type}:{count}" if submission.gpu_type else count
    if submission.nodes_per_task > 1:
        options["nodes"] = submission.nodes_per_task
    if submission.after:
        options["dependency"] = ",".join(f"afterok:{job}" for job in submission.after)
        options["kill_on_invalid_dep"] = "yes"
    return options


def _merge_executor(logs: Path, name: str, submission: Submission, dependency: str) -> submitit.SlurmExecutor:
    # afterany: a failed task must not keep the others from being merged.
    options = {**submission.merge_options, "dependency": dependency, "kill_on_invalid_dep": "yes"}
    return _executor(logs, f"{queue.MERGE_NAME}:{name}", options, 1)


def _executor(
    logs: Path, name: str, options: Mapping[str, Any], parallelism: int, tasks_per_node: int = 1
) -> submitit.SlurmExecutor:
    try:
        patch_submitit()
        executor = submitit.SlurmExecutor(logs, python=PYTHON)
    except RuntimeError as error:  # it looks for srun
        raise commands.SlurmUnavailableError(commands.NOT_HERE.format("srun")) from error
    # sbatch's options go to Submitit's catch-all, without its defaults (5 minutes, a wckey).
    plain = {key.replace("_", "-"): value for key, value in options.items()}
    if not plain.keys() & {"requeue", "no-requeue"}:
        plain["requeue"] = True  # after a preemption or a node's death, also where JobRequeue of slurm.conf is 0
    setup, nodes = plain.pop("setup", None), plain.pop("nodes", 1)
    # One process on each node: srun(1) starts as many as fit if it gets --cpus-per-task and no --ntasks.
    # Without its own --export, a step has only the variables that sbatch's --export names; setup and Submitit set more.
    step = ["--export=ALL", f"--ntasks={nodes * tasks_per_node}", f"--ntasks-per-node={tasks_per_node}"]
    if tasks_per_node > 1:
        # slurm.conf may let a task's end, or failure, end the others (KillOnBadExit, WaitTime).
        step += ["--kill-on-bad-exit=0", "--wait=0"]
        plain["ntasks-per-node"] = tasks_per_node
    # srun does not inherit --cpus-per-task from Slurm 22.05 to 23.11: without the argument a step has one core.
    if "cpus-per-task" in plain:
        step.append(f"--cpus-per-task={plain['cpus-per-task']}")
    if broken := [key for key, value in plain.items() if len(str(value).splitlines()) > 1]:
        raise SlurmGPUError(
            f"{broken[0]} has a line break, which would end its line in sbatch's script. Write it in one line."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        executor.update_parameters(
            job_name=str(plain.pop("job-name", name)),
            time=None,
            wckey=None,
            nodes=nodes,
            array_parallelism=parallelism,
            signal_delay_s=SIGNAL_BEFORE_END_S,
            setup=[*(setup or []), ONCE_REACHED],
            additional_parameters=plain,
            srun_args=step,
        )
    return executor
