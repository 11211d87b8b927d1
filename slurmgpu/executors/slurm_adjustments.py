"""Adjust the next Slurm jobs to failures of the last ones: exclude nodes, ask for more memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slurmgpu.report.attempts import AttemptRow, attempts_of, of_last_submission, ran_out_of_memory
from slurmgpu.report.report_file import bad_nodes
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import POLICIES
from slurmgpu.run.submissions import Submission, SubmissionLine, megabytes_of
from slurmgpu.slurm import facts, nodes
from slurmgpu.slurm.accounting import accounting_of
from slurmgpu.slurm.limits import MEMORY_OPTIONS

MEMORY_FACTOR = 1.5


def learn(
    run: Run, last: SubmissionLine, options: Mapping[str, Any], given: Mapping[str, Any], asked: Submission
) -> tuple[Mapping[str, Any], Sequence[str], list[str]]:
    """The options, the nodes to exclude, and a sentence for each change: see `Executor.learn`."""
    exclude: list[str] = []
    notes: list[str] = []
    all_attempts = attempts_of(run, accounting_of(run))
    attempts = of_last_submission(all_attempts, run.submissions())
    if "exclude" not in given:  # a user who names nodes has the last word
        exclude, notes = _excluded(last["exclude"], attempts, all_attempts)
    records = (record for record in run.attempts() if record["submission"] == last["submission"])
    of_items = {kind for record in records for _, errors in record["failed"] for kind in errors}
    if ran_out_of_memory(attempts, of_items) and not MEMORY_OPTIONS & set(given):
        if last.get("by_hand") and _had(attempts):  # the script may ask for another amount than the run file
            options = {name: value for name, value in options.items() if name not in MEMORY_OPTIONS}
        factor = _factor(last, asked.n_concurrent)
        options, note = _with_more_memory(options, attempts, factor, lambda more: _room(replace(asked, slurm=more)))
        notes.append(note)
    return options, exclude, notes


def _excluded(
    before: Sequence[str], attempts: list[AttemptRow], all_attempts: list[AttemptRow]
) -> tuple[list[str], list[str]]:
    """The nodes to exclude (those in `before` and those on which these attempts failed), and sentences on them."""
    notes = []
    innocent = _blamed_alike(all_attempts)
    exclude = sorted({*before, *bad_nodes(attempts)} - innocent)
    if innocent:
        notes.append(f"No node is excluded: {', '.join(sorted(innocent))} failed alike, and no other node worked.")
    if new := sorted(set(exclude) - set(before)):
        notes.append(f"Excluded nodes: {', '.join(new)}, because the node or a GPU failed.")
    return exclude, notes


def _blamed_alike(attempts: list[AttemptRow]) -> set[str]:
    """The nodes that are blamed, if there are several and no other node works: then the cause is, say, a wrong path."""
    doubtful = {name for name, policy in POLICIES.items() if not policy.node_at_fault}
    blamed = {a["bad_node"] for a in attempts if a["failure"] in doubtful and a["bad_node"]}
    well = any(a["node"] not in blamed and (a["n_shards"] or not a["failure"]) for a in attempts)
    return blamed if len(blamed) > 1 and not well else set()


def _factor(last: SubmissionLine, n_tasks: int) -> float:
    """How many times as much memory a task gets: a job with fewer tasks than before has no less than before.

    A task can take the memory that others of its job leave.
    """
    before = last.get("tasks_per_node", 1)
    return max(MEMORY_FACTOR, before / min(before, n_tasks))


def _had(attempts: Sequence[AttemptRow]) -> int:
    """The most memory that one of these attempts had, in MB; 0 if it is not known."""
    return max((a["memory_mb"] or 0 for a in attempts), default=0)


def _with_more_memory(
    options: Mapping[str, Any],
    attempts: Sequence[AttemptRow],
    factor: float,
    room: Callable[[Mapping[str, Any]], float],
) -> tuple[dict[str, Any], str]:
    """The options with `factor` times the memory, and a sentence; `room` as in `_room`."""
    for name in sorted(MEMORY_OPTIONS):
        if options.get(name, False) is not False:
            megabytes = megabytes_of(str(options[name]))
            if megabytes is None:
                note = (
                    f"Memory ran out, but {name} = {options[name]!r} cannot be parsed; raise it with --slurm {name}=…"
                )
                return dict(options), note
            if not megabytes:
                note = f"Memory ran out, and {name} = {options[name]} is all memory of a node: ask for larger nodes."
                return dict(options), note
            return _raised(options, name, megabytes, str(options[name]), factor, room)
    if had := _had(attempts):
        return _raised(options, "mem", had, f"{had}M", factor, room)
    note = "Memory ran out, but the amount is unknown: set mem in [slurm], or --slurm mem=…"
    return dict(options), note


def _raised(
    options: Mapping[str, Any],
    name: str,
    before_mb: float,
    before: str,
    factor: float,
    room: Callable[[Mapping[str, Any]], float],
) -> tuple[dict[str, Any], str]:
    """The options with `factor` times as much of one kind of memory, or as much as a node gives; and a sentence."""
    more = int(before_mb * factor)  # in whole megabytes: 1.5 times 1G is no whole number of G
    most = int(more * min(1.0, room({**options, name: f"{more}M"})))
    if most <= before_mb:
        larger = "ask for larger nodes, as by --slurm partition=…"
        return dict(options), f"Memory ran out, and {name} = {before} is all that the largest node gives: {larger}"
    at_most = "" if most == more else ", as much as the largest node gives"
    return {**options, name: f"{most}M"}, f"Memory ran out: {name} is {most}M instead of {before}{at_most}."


def _room(asked: Submission) -> float:
    """How many times the memory that a job asks for the largest node of its partitions has; infinite if unknown."""
    job = asked.sharing_nodes(asked.resources.get("tasks_per_node") or 1)
    megabytes, known = nodes.memory_per_node(job), facts.read_nodes()
    rows = nodes.partitions_of(job, known)
    sizes = [size for row in rows for _, size in nodes.sizes_of_nodes(job, known, row["PartitionName"])]
    return max(sizes) / megabytes if sizes and megabytes else math.inf
