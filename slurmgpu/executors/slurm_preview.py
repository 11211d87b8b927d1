"""The cluster's answer to a submission: fewer tasks within its limits, the scripts, and what Slurm says about them."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

from slurmgpu.containers.runtime import runtime_named
from slurmgpu.containers.settings import ContainerRecord
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import slurm_jobs
from slurmgpu.executors.interface import Preview
from slurmgpu.plan.allocation import allocate
from slurmgpu.plan.run_file import parse_resources
from slurmgpu.run.submissions import Submission
from slurmgpu.slurm import commands, facts, limits, nodes

log = logging.getLogger(__name__)


def ask_slurm(seen: Preview, run_dir: Path, container: ContainerRecord | None) -> None:
    """Add the scripts, what sbatch says about them, and the limits that hold; lower the number of tasks to these."""
    known = facts.read_facts(commands.configuration(), seen.submission.sbatch_options.get("account"))
    seen.submission, fitted = respect_limits(seen.submission, known)
    seen.notes += [*fitted, *hazards(container)]
    seen.scripts = slurm_jobs.scripts(run_dir, run_dir.name, seen.submission)
    seen.notes += known.notes
    for name in nodes.empty_partitions(seen.submission, known):
        seen.notes.append(f"The partition {name} has no nodes, so no task will start there.")
    seen.limits, seen.walltime_s = limits.limits_of(seen.submission, known)
    seen.bound_gpu_hours = seen.submission.bound_gpu_hours(seen.walltime_s)
    try:
        seen.trials = facts.try_scripts(seen.scripts)
    except commands.SlurmUnavailableError as error:
        seen.notes.append(f"The start cannot be estimated. {error}")


def respect_limits(
    asked: Submission, known: facts.Facts | None = None, *, is_array: bool = False
) -> tuple[Submission, list[str]]:
    """The submission with the tasks of each job, reduced to MaxArraySize and MaxSubmitJobs; a sentence on each change.

    Fewer tasks still finish the run: they take shards until none is left. A single job is no array, unless `is_array`.
    `known` are Slurm's limits, if it was asked already.
    """
    if known is None:
        account = asked.sbatch_options.get("account")
        is_alone = "exclusive" in asked.sbatch_options
        known = facts.read_facts(commands.configuration(), account, with_nodes=is_alone)
        for note in known.notes:
            log.info("%s", note)
    has_more = not asked.resources or allocate(parse_resources(asked.resources), None).n_tasks <= asked.n_tasks
    asked, shared = share_nodes(asked, known)
    sizes = commands.array_limits(known.config)
    most = {name: size if is_array else max(1, size) for name, size in sizes.items()}
    # A merge job that resubmits counts as well, and so does an interactive job.
    others, n_others = ("the merge job, one is this job", 2) if "SLURM_JOB_ID" in os.environ else ("the merge job", 1)
    for name, n_jobs in limits.most_jobs(asked, known).items():
        # An interactive job may be of another account or QOS: it lowers the number, and refuses nothing by itself.
        most[f"{name} (one is for {others})"] = max(n_jobs - n_others, min(n_jobs - 1, 1), 0)
    name, limit = min(most.items(), key=lambda item: item[1])
    if limit < 1:
        raise SlurmGPUError(
            f"{name} is {limit}, which allows no task. Name another account, partition or qos in [slurm], or ask the "
            f"cluster's administrators."
        )
    idle = nodes.idle_gpus(asked, known, has_more=has_more)
    if asked.n_jobs <= limit:
        return asked, shared + idle
    n_tasks = limit * asked.tasks_per_node
    less = replace(asked, n_tasks=n_tasks, n_concurrent=min(asked.n_concurrent, n_tasks))
    in_jobs = "" if asked.tasks_per_node == 1 else f" and a job has {asked.tasks_per_node}"
    fewer = f"{asked.n_tasks} tasks were asked for, but {name} is {limit}{in_jobs}; {n_tasks} will compute all shards."
    return less, [*shared, fewer, *idle]


def share_nodes(asked: Submission, known: facts.Facts) -> tuple[Submission, list[str]]:
    """The submission with as many tasks in a job as it asks for, or as a whole node has room for; and a sentence."""
    if asked.shares_gpus or asked.nodes_per_task > 1 or asked.tasks_per_node > 1:
        return asked, []
    wanted = parse_resources(asked.resources).tasks_per_node
    if "gpu_bind" in asked.sbatch_options:  # each task would see GPUs of others
        if wanted in (None, 1):
            return asked, []
        raise SlurmGPUError(
            f"tasks_per_node = {wanted} and gpu_bind = {asked.slurm['gpu_bind']!r} under [slurm]: each task takes its "
            f"own GPUs of those that its job has, and could not tell which are its own. Remove gpu_bind."
        )
    if wanted is not None:
        return asked.sharing_nodes(wanted), []
    shared = asked.filling_nodes(nodes.tasks_of_whole_nodes(asked, known))
    if shared.tasks_per_node == 1:
        return asked, []
    more = f" ({shared.n_tasks} tasks instead of {asked.n_tasks})" if shared.n_tasks > asked.n_tasks else ""
    notes = [
        f"Slurm gives each job a whole node here, so {shared.tasks_per_node} tasks share one{more}. "
        f"--tasks-per-node 1 gives each task a node of its own."
    ]
    if (default := limits.memory_of_lone_job(asked, known)) is not None:  # DefMemPerNode is for a job, of any size
        rows = nodes.partitions_of(shared, known)
        sizes = [size for row in rows for _, size in nodes.sizes_of_nodes(shared, known, row["PartitionName"])]
        mem = f"{min(default, min(sizes, default=default * shared.tasks_per_node) // shared.tasks_per_node)}M"
        shared = replace(shared, slurm={**shared.slurm, "mem": mem})
        notes.append(f"Each asks for mem = {mem}: DefMemPerNode gives a job {default}M, however many tasks it has.")
    return shared, notes


def hazards(container: ContainerRecord | None) -> list[str]:
    """A sentence if Slurm's signals would kill the process that serves the image, and thus the worker."""
    if container is None:
        return []
    advice = runtime_named(container["runtime"]).if_served(container["identity"], container["stage"])
    if not advice:
        return []
    config = commands.configuration()
    tracking = config.get("ProctrackType", "")
    if tracking != "proctrack/cgroup":
        cause = f"ProctrackType = {tracking}"
    elif commands.signals_children(config):
        cause = "SignalChildrenProcesses = yes"
    else:
        return []
    return [
        f"This cluster signals every process of a job ({cause}), also the one that serves the image: the notice of a "
        f"preemption would kill the worker with a bus error. {advice}"
    ]
