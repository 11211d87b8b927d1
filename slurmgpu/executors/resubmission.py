"""What a submission asks for: the first one, and those that compute what failures have left."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slurmgpu.plan.planner import allocate
from slurmgpu.plan.run_file import Resources, merge_tables, parse_resources
from slurmgpu.report.attempts import AttemptRow, attempts_of
from slurmgpu.report.build import bad_nodes
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import Submission
from slurmgpu.slurm.accounting import lives_of

MEMORY_FACTOR = 1.5
MEMORY_OPTIONS = {"mem", "mem_per_cpu", "mem_per_gpu"}


def first_submission(plan_resources: Mapping[str, Any], n_shards: int, **given: Any) -> Submission:
    """A run's first submission, from its [resources]."""
    return replace(_asked_for(1, parse_resources(plan_resources), n_shards), **given)


def _asked_for(number: int, wanted: Resources, n_shards: int) -> Submission:
    """A submission for so many shards, as [resources] have it."""
    allocation = allocate(wanted, n_shards)
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


def fewer_tasks(submission: Submission, n_shards: int) -> list[str]:
    """A sentence if a first submission has fewer tasks than were asked for, as the run has no more shards."""
    asked = allocate(parse_resources(submission.resources), None)
    if asked.n_tasks <= submission.n_tasks:
        return []
    gpus = f" ({asked.n_concurrent * asked.gpus_per_task} GPUs)" if asked.gpus_per_task else ""
    there = "1 shard, so there is 1 task" if n_shards == 1 else f"{n_shards:,} shards, so there are as many tasks"
    found = f"{asked.n_tasks} tasks{gpus} were asked for; the run has {there}, one for each"
    return [f"{found}. A smaller shard_items makes more."]


def next_submission(
    run: Run,
    resources: Mapping[str, Any] | None = None,
    slurm: Mapping[str, Any] | None = None,
    merging: Mapping[str, Any] | None = None,
    n_again: int = 0,
    round: int = 0,  # noqa: A002  the word of the run file's docs
) -> tuple[Submission, list[str]]:
    """The submission that computes what is missing: the last one, adjusted to what failed; and what changed."""
    if not run.submissions():  # whoever planned the run died before it was submitted
        first = first_submission(merge_tables(run.plan.resources, resources or {}), run.plan.n_shards)
        return replace(
            first, slurm={**run.plan.slurm, **(slurm or {})}, merge={**run.plan.merge, **(merging or {})}
        ), []
    last, given = run.as_submitted(run.last_submission()), slurm or {}
    wanted = parse_resources(merge_tables(last["resources"], resources or {}))
    n_missing = run.plan.n_shards - len(run.published()) + n_again
    options: Mapping[str, Any] = {**last["slurm"], **given}
    exclude: list[str] = []
    notes: list[str] = []
    if wanted.executor == "slurm":
        all_attempts = attempts_of(run, lives_of(run))
        attempts = [a for a in all_attempts if a["submission"] in (last["submission"], None)]
        if "exclude" not in given:  # a user who names nodes has the last word
            exclude, notes = _excluded(last["exclude"], attempts, all_attempts)
        if _ran_out_of_memory(attempts) and not MEMORY_OPTIONS & set(given):
            options, note = _with_more_memory(options, attempts, by_hand=bool(last.get("by_hand")))
            notes.append(note)
    submission = replace(
        _asked_for(last["submission"] + 1, wanted, max(1, n_missing)),
        slurm=options,
        merge={**last["merge"], **(merging or {})},
        exclude=tuple(exclude),
        round=round,
        container=last.get("container"),
        code=last.get("code"),
        # What is computed anew because it failed shall not fail again.
        inject=() if n_again or wanted.executor != last["executor"] else tuple(last.get("inject") or ()),
    )
    return submission, notes


def _excluded(
    before: Sequence[str], attempts: list[AttemptRow], all_attempts: list[AttemptRow]
) -> tuple[list[str], list[str]]:
    """The nodes to leave out: those of before, and where these attempts failed; and what to say of it."""
    notes = []
    innocent = _blamed_alike(all_attempts)
    exclude = sorted({*before, *bad_nodes(attempts)} - innocent)
    if innocent:
        notes.append(f"{', '.join(sorted(innocent))} failed alike, and no other node did better: none is excluded.")
    if new := sorted(set(exclude) - set(before)):
        notes.append(f"Excluded: {', '.join(new)}, where nodes or GPUs failed.")
    return exclude, notes


def _blamed_alike(attempts: list[AttemptRow]) -> set[str]:
    """Nodes that lacked something for the container when no node at all had it: a path that is wrong is nobody's."""
    blamed = {a["bad_node"] for a in attempts if a["failure"] == "container" and a["bad_node"]}
    well = any(a["node"] not in blamed and (a["n_shards"] or not a["failure"]) for a in attempts)
    return blamed if len(blamed) > 1 and not well else set()


def _ran_out_of_memory(attempts: list[AttemptRow]) -> bool:
    return any(a["failure"] == "host_oom" or any(d["class"] == "host_oom" for d in a["deaths"]) for a in attempts)


def _with_more_memory(
    options: Mapping[str, Any], attempts: list[AttemptRow], *, by_hand: bool
) -> tuple[dict[str, Any], str]:
    had = max((a["memory_mb"] or 0 for a in attempts), default=0)
    if by_hand and had:  # the script may have asked for another amount than the run file
        options = {name: value for name, value in options.items() if name not in MEMORY_OPTIONS}
    for name in sorted(MEMORY_OPTIONS):
        if name in options:
            match = re.fullmatch(r"(\d+)([KMGTkmgt]?)[Bb]?", str(options[name]))
            if match is None:
                note = f"Memory ran out, but {name} = {options[name]!r} is not understood: raise it by hand."
                return dict(options), note
            # Whole megabytes: 1.5 of 1G is no whole number of G.
            megabytes = int(match[1]) * {"K": 1 / 1024, "G": 1024, "T": 1024**2}.get(match[2].upper(), 1)
            more = f"{-(-int(megabytes * MEMORY_FACTOR) // 1)}M"
            return {**options, name: more}, f"Memory ran out: {name} is {more} instead of {options[name]}."
    if not had:
        note = "Memory ran out, and how much there was is not known: set mem under [slurm], or --slurm mem=…"
        return dict(options), note
    more = f"{int(had * MEMORY_FACTOR)}M"
    return {**options, "mem": more}, f"Memory ran out: mem is {more} instead of {had}M."
