"""Make submissions: the first one, and those that compute the missing items after failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors.registry import executor_named
from slurmgpu.plan.allocation import allocate
from slurmgpu.plan.merged_tables import merge_tables
from slurmgpu.plan.run_file import parse_resources
from slurmgpu.run.directory import Run
from slurmgpu.run.frozen_plan import Plan
from slurmgpu.run.submissions import Submission
from slurmgpu.util.amounts import count_of, time_words


def first_submission(resources: Mapping[str, Any], most_tasks: int, number: int = 1) -> Submission:
    """A submission by [resources] of at most `most_tasks` tasks; `number` is its number in the run."""
    wanted = parse_resources(resources)
    allocation = allocate(wanted, most_tasks)
    return Submission(
        submission=number,
        executor=wanted.executor,
        device=wanted.device,
        n_tasks=allocation.n_tasks,
        n_concurrent=allocation.n_concurrent,
        gpus_per_task=allocation.gpus_per_task,
        gpu_type=wanted.gpu_type,
        nodes_per_task=wanted.nodes_per_task,
        resources=wanted.model_dump(),
    )


def fewer_tasks(submission: Submission, plan: Plan, n_shards: int) -> list[str]:
    """A sentence if a first submission has fewer tasks than were asked for, because there are too few shards."""
    asked = allocate(parse_resources(submission.resources), None)
    if asked.n_tasks <= submission.n_tasks:
        return []
    gpus = f" ({asked.n_concurrent * asked.gpus_per_task} GPUs)" if asked.gpus_per_task else ""
    if plan.parts > 1:
        there = f"{count_of(n_shards, 'shard')} of {plan.parts} parts, so there are {submission.n_tasks} tasks"
    else:
        there = "1 shard, so there is 1 task" if n_shards == 1 else f"{n_shards:,} shards, so there are as many tasks"
    found = f"{asked.n_tasks} tasks{gpus} were asked for; the run has {there}, one for each."
    size = -(-plan.n_items // asked.n_tasks)
    n_made = -(-plan.n_items // size)
    if plan.extends or n_made <= n_shards:  # an extended run has the shards of the former one
        return [found]
    makes = f"shard_items = {size} makes {count_of(n_made, 'shard')}"
    smaller = f", with batches of {count_of(size, 'item')} instead of {min(plan.batch_size, plan.n_items)}"
    return [f"{found} {makes}{smaller if size < plan.batch_size else ''}."]


def check_walltime(submission: Submission, plan: Plan) -> None:
    """Refuse a walltime, or a minimum one, of at most `margin_s`: no task would take a shard."""
    for name in ("time", "time_min") if executor_named(submission.executor).queues else ():
        walltime_s = submission.seconds_asked(name)
        if walltime_s is not None and walltime_s <= plan.margin_s:
            raise SlurmGPUError(
                f"[slurm] {name} = {submission.slurm[name]} is {time_words(walltime_s)}, but tasks take no shard in "
                f"the last {plan.margin_s:g} s of their walltime (margin_s), so they would compute nothing. Ask for "
                f"more with --slurm {name}=…, in minutes or as hours:minutes:seconds."
            )


def next_submission(
    run: Run,
    resources: Mapping[str, Any] | None = None,
    slurm: Mapping[str, Any] | None = None,
    merging: Mapping[str, Any] | None = None,
    n_again: int = 0,
    round: int = 0,  # noqa: A002  the word of the run file's docs
) -> tuple[Submission, list[str]]:
    """The submission that computes what is missing: the last one, adjusted to its failures; and notes on changes."""
    if not run.submissions():  # the run was planned but not submitted
        most_tasks = run.plan.most_tasks(run.plan.n_shards)
        first = first_submission(merge_tables(run.plan.resources, resources or {}), most_tasks)
        slurm, merging = {**run.plan.slurm, **(slurm or {})}, {**run.plan.merge, **(merging or {})}
        submission = replace(first, slurm=slurm, merge=merging)
        check_walltime(submission, run.plan)
        return submission, []
    last, given = run.as_submitted(run.last_submission()), slurm or {}
    n_missing = run.plan.n_shards - len(run.published()) + n_again
    wanted = merge_tables(last["resources"], resources or {})
    asked = first_submission(wanted, max(1, run.plan.most_tasks(n_missing)), last["submission"] + 1)
    executor, so_far = executor_named(asked.executor), {**last["slurm"], **given}
    options, exclude, notes = executor.learn(run, last, so_far, given, asked)
    submission = replace(
        asked,
        slurm=options,
        merge={**last["merge"], **(merging or {})},
        exclude=tuple(exclude),
        round=round,
        container=last["container"],
        code=last["code"],
        # Failed items that are recomputed must not fail for the same reason.
        inject=() if n_again or asked.executor != last["executor"] else tuple(last["inject"]),
    )
    check_walltime(submission, run.plan)
    return submission, notes
