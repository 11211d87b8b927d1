"""The nodes that jobs of a submission get: those of its partitions, how many tasks fit on one, and what would idle."""

from __future__ import annotations

import math
from collections.abc import Mapping

from slurmgpu.run.submissions import Submission, megabytes_of
from slurmgpu.slurm.facts import Facts, Node, Row, whole_nodes


def empty_partitions(submission: Submission, facts: Facts) -> list[str]:
    """The partitions of a submission that have no nodes, so that no task starts there."""
    return [name for row in partitions_of(submission, facts) if facts.nodes.get(name := row["PartitionName"]) == []]


def tasks_of_whole_nodes(submission: Submission, facts: Facts) -> int:
    """How many tasks a node has GPUs, CPUs and memory for, if all partitions give jobs whole nodes; otherwise 1."""
    per_task, rows = submission.whole_gpus_per_task, partitions_of(submission, facts)
    if not per_task or submission.nodes_per_task > 1 or not all(are_given_whole(submission, row) for row in rows):
        return 1
    return min((n for row in rows for n in _tasks_of_nodes(submission, facts, row["PartitionName"])), default=1)


def _tasks_of_nodes(submission: Submission, facts: Facts, partition: str) -> list[int]:
    """How many tasks fit on each node of a partition that has GPUs for one."""
    nodes, least = facts.nodes.get(partition, ()), submission.whole_gpus_per_task
    return [_tasks_of_node(submission, node) for node in nodes if _gpus_of(node, submission) >= least]


def _tasks_of_node(submission: Submission, node: Node) -> int:
    """How many tasks fit on a node."""
    options, per_task, n_gpus = submission.slurm, submission.whole_gpus_per_task, _gpus_of(node, submission)
    cpus = cpus_of(submission) or 1
    asked = (("mem", 1), ("mem_per_cpu", cpus), ("mem_per_gpu", per_task))
    memory = next((math.ceil(megabytes_of(str(options[name])) or 0) * n for name, n in asked if options.get(name)), 0)
    in_memory = node.megabytes // memory if memory else n_gpus
    return max(1, min(n_gpus // per_task, _usable_cpus(options, node) // cpus, in_memory))


def cpus_of(submission: Submission) -> int:
    """The CPUs that each task asks for on a node; 0 if it names none."""
    options = submission.slurm
    per_gpu = _number(options.get("cpus_per_gpu"))
    return _number(options.get("cpus_per_task")) or per_gpu * submission.gpus_per_task // submission.nodes_per_task


def threads_of_a_core(submission: Submission, facts: Facts, partition: str) -> int:
    """How many CPUs of a core tasks count; the least of a partition's nodes."""
    return min((_threads(submission.slurm, node) for node in facts.nodes.get(partition, ())), default=1)


def cpus_per_node(submission: Submission) -> int:
    """The CPUs that a job asks for on each of its nodes; 0 if it names none."""
    return cpus_of(submission) * submission.tasks_per_node


def memory_per_node(submission: Submission) -> float:
    """The MB that a job asks for on each of its nodes; 0 if it names none, or all memory of the node."""
    options = submission.sbatch_options
    per_cpu, per_gpu = cpus_per_node(submission) or submission.tasks_per_node, submission.gpus_per_node
    asked = (("mem", 1), ("mem_per_cpu", per_cpu), ("mem_per_gpu", per_gpu))
    return next(((megabytes_of(str(options[name])) or 0) * n for name, n in asked if options.get(name)), 0.0)


def sizes_of_nodes(submission: Submission, facts: Facts, partition: str) -> list[tuple[int, int]]:
    """The CPUs that tasks count, and the MB, of each node of a partition that has the GPUs that are asked for."""
    nodes, least = facts.nodes.get(partition, ()), submission.gpus_per_node
    fitting = [node for node in nodes if _gpus_of(node, submission) >= least]
    return [(_usable_cpus(submission.slurm, node), node.megabytes) for node in fitting]


def _usable_cpus(options: Mapping[str, object], node: Node) -> int:
    """The CPUs of a node that tasks count."""
    return node.cpus * _threads(options, node) // node.cpus_per_core


def _threads(options: Mapping[str, object], node: Node) -> int:
    """The CPUs of a core that tasks count: one, where they ask for no second thread."""
    is_alone = options.get("hint") in ("nomultithread", "compute_bound")
    n_threads = 1 if is_alone else _number(options.get("threads_per_core")) or node.cpus_per_core
    return min(n_threads, node.cpus_per_core)


def _number(option: object) -> int:
    return int(text) if (text := str(option)).isdecimal() else 0


def gpus_of_nodes(submission: Submission, facts: Facts, partition: str) -> list[int]:
    """The GPUs of each node of a partition, of the type that is asked for."""
    return [_gpus_of(node, submission) for node in facts.nodes.get(partition, ())]


def _gpus_of(node: Node, submission: Submission) -> int:
    kind = submission.type_of_gpus
    return node.gpus.get(kind, 0) if kind else sum(node.gpus.values())


def idle_gpus(submission: Submission, facts: Facts, *, has_more: bool = True) -> list[str]:
    """A sentence if jobs are given whole nodes, and thus GPUs on which they do not compute.

    `has_more`: there are shards for more tasks.
    """
    per_node = submission.gpus_per_node
    for row in partitions_of(submission, facts) if per_node else ():
        name = row["PartitionName"]
        fitting = [there for there in gpus_of_nodes(submission, facts, name) if there >= per_node]
        if are_given_whole(submission, row) and fitting and per_node < (least := min(fitting)):
            what = f"The partition {name}" if whole_nodes(row) else "exclusive = true under [slurm]"
            room = min(_tasks_of_nodes(submission, facts, name), default=1)
            return [
                f"{what} gives each job a whole node: its {least} GPUs are held, and charged for, and the job computes "
                f"on {per_node}. {_more_gpus(submission, least, room, has_more=has_more)}"
            ]
    return []


def _more_gpus(submission: Submission, least: int, room: int, *, has_more: bool) -> str:
    """What lets a job compute on more GPUs of a node with `least` of them, which has `room` for so many tasks."""
    if submission.nodes_per_task == 1 and submission.n_tasks == submission.tasks_per_node:
        more = f"To use all, ask for them: --gpus {least} --array, or a task with gpus_per_task = {least}."
        return more if has_more else "There are no shards for more tasks."
    if room > submission.tasks_per_node:
        n_used = room * submission.gpus_per_task
        return f"To use {'all' if n_used == least else n_used}, set tasks_per_node = {room}."
    return "More tasks do not fit there: ask for fewer CPUs or less memory for each, or for more GPUs."


def are_given_whole(submission: Submission, partition: Row) -> bool:
    """Whether nodes of the partition are given to a job alone, with all that they have."""
    return whole_nodes(partition) or submission.sbatch_options.get("exclusive") in (True, "")


def partitions_of(submission: Submission, facts: Facts) -> list[Row]:
    """The partitions in which its jobs may start, as far as they are known."""
    if named := str(submission.sbatch_options.get("partition", "")):
        return [facts.partitions[name] for name in named.split(",") if name in facts.partitions]
    return [row for row in facts.partitions.values() if row.get("Default") == "YES"]
