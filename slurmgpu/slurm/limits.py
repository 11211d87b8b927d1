"""Slurm's limits for this user, and what happens to a submission that asks for more.

Slurm accepts most jobs that are above a limit, and they pend for ever; `sbatch --test-only` does not say so. Which of
several limits holds: https://slurm.schedmd.com/resource_limits.html#hierarchy. The first QOS or association that sets a
limit decides, for each TRES separately; limits that an account's members share hold at every level above a user.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from slurmgpu.run.submissions import Submission, seconds_of
from slurmgpu.slurm.commands import array_limits
from slurmgpu.slurm.facts import Facts, Row
from slurmgpu.slurm.nodes import (
    are_given_whole,
    cpus_of,
    cpus_per_node,
    empty_partitions,
    gpus_of_nodes,
    memory_per_node,
    partitions_of,
    sizes_of_nodes,
    threads_of_a_core,
)
from slurmgpu.util.amounts import count_of

NEVER, REFUSED = "pends for ever", "sbatch refuses it"
ELSEWHERE = "no task starts there, but in another partition"
ENDS, PENDS = "Slurm ends its tasks once it is used up", "tasks pend once it is used up"
GPU = "gres/gpu"
MEMORY_OPTIONS = {"mem", "mem_per_cpu", "mem_per_gpu"}
QOS, ASSOCIATION = "QOS", "Assoc"
CORRECT = "Correct [slurm], [merge] or [resources]."
CORRECT_MERGE = "Correct [merge], which takes account, partition, qos and reservation from [slurm], and nothing else."
"""What to do about jobs that Slurm refuses, and about a merge job alone."""


@dataclass(frozen=True)
class Limit:
    """A limit, its value, what the submission asks for, and the consequence if that is more; "" if it fits."""

    limit: str
    value: str
    asked: str
    then: str

    @property
    def fits(self) -> bool:
        """Whether the submission stays within it."""
        return not self.then

    def to_json(self) -> dict[str, object]:
        """The keys of `limits` in the JSON of a dry run."""
        return {"limit": self.limit, "value": self.value, "asked": self.asked, "fits": self.fits, "then": self.then}


@dataclass(frozen=True)
class Source:
    """A QOS or an association that sets limits, a row of `Facts`; `reasons` is the prefix of Slurm's reasons."""

    name: str
    row: Mapping[str, str]
    reasons: str
    denies: bool


@dataclass(frozen=True)
class Rule:
    """A kind of limit, and its keys in QOSes and associations with Slurm's reasons, without the source's prefix."""

    kind: str
    keys: Mapping[str, str]


@dataclass(frozen=True)
class Held:
    """A limit that holds: its source, its key there, and its value, which is the GPUs of a list of TRES."""

    rule: Rule
    source: Source
    key: str
    value: str

    @property
    def in_words(self) -> str:
        """The limit's name, and the QOS or association that sets it."""
        return f"{self.key} of {self.source.name}"


RULES = (
    Rule("wall", {"MaxWall": "MaxWallDurationPerJobLimit"}),
    Rule("task", {"MaxTRESPerJob": "MaxGRESPerJob"}),
    Rule("at once", {"MaxTRESPerUser": "MaxGRESPerUser"}),
    Rule("at once", {"MaxTRESPerAccount": "MaxGRESPerAccount"}),
    Rule("at once", {"GrpTRES": "GrpGRES"}),
    Rule("minutes of a task", {"MaxTRESMins": "MaxGRESMinutesPerJob"}),
    Rule("minutes at once", {"GrpTRESRunMins": "GrpGRESRunMinutes"}),
    Rule("minutes in all", {"GrpTRESMins": "GrpGRESMinutes"}),
    Rule("jobs", {"MaxJobsPerUser": "MaxJobsPerUserLimit", "MaxJobs": "MaxJobsLimit"}),
    Rule("jobs", {"GrpJobs": "GrpJobsLimit"}),
    Rule("submit", {"MaxSubmitJobsPerUser": "", "MaxSubmitJobs": ""}),
    Rule("submit", {"GrpSubmitJobs": ""}),
)


def limits_of(submission: Submission, facts: Facts) -> tuple[list[Limit], float | None]:
    """The limits that hold for a submission, and the walltime of its tasks in seconds, None if that is not known."""
    partitions = partitions_of(submission, facts)
    names, sources = _limiting(submission, facts, partitions)
    held = [each for rule in RULES for each in _held(rule, sources, submission)]
    walltime_s = _walltime_s(submission, partitions, [each.value for each in held if each.rule.kind == "wall"])
    asked = replace(submission, slurm={**submission.slurm, "time": _time(walltime_s)})
    # The partition's MaxTime does not hold for jobs of such a QOS.
    is_free = any("PartitionTimeLimit" in _flags(facts, name) for name, is_job_s in names if is_job_s)
    empty = empty_partitions(submission, facts)
    usable = [row for row in partitions if row["PartitionName"] not in empty] or partitions
    found = _of_partitions([list(_of_partition(asked, row, facts, is_free)) for row in usable], facts.config)
    found += [_of_rule(asked, each, facts.config) for each in held]
    return [*found, *_of_cluster(asked, facts.config)], walltime_s


def most_jobs(submission: Submission, facts: Facts) -> dict[str, int]:
    """The limits on how many jobs a user, or an account's, may have submitted that hold for a submission, by name."""
    _, sources = _limiting(submission, facts, partitions_of(submission, facts))
    held = [each for rule in RULES if rule.kind == "submit" for each in _held(rule, sources, submission)]
    return {each.in_words: int(each.value) for each in held}


def _limiting(
    submission: Submission, facts: Facts, partitions: Sequence[Row]
) -> tuple[list[tuple[str, bool]], list[Source]]:
    """The QOSes that limit the jobs, as `_qos_names`, and all sources of limits, both by precedence."""
    associations = _associations(submission, facts, partitions)
    names = _qos_names(submission, facts, partitions, associations)
    return names, list(_sources(facts, names, associations))


def _associations(submission: Submission, facts: Facts, partitions: Sequence[Row]) -> list[Row]:
    """The user's associations with the account, by partition if there are such, and those of the accounts above."""
    account = str(submission.sbatch_options.get("account") or facts.default_account)
    names = [row["PartitionName"] for row in partitions]
    own = [row for row in facts.associations if row["User"] == facts.user and row["Account"] == account]
    found = [row for row in own if row["Partition"] in names] or [row for row in own if not row["Partition"]]
    accounts = {row["Account"]: row for row in facts.associations if not row["User"]}
    while account in accounts:
        row = accounts.pop(account)  # so that it ends even if parents form a circle
        found.append(row)
        account = row.get("ParentName", "")
    return found


def _qos_names(
    submission: Submission,
    facts: Facts,
    partitions: Sequence[Mapping[str, str]],
    associations: Sequence[Mapping[str, str]],
) -> list[tuple[str, bool]]:
    """The QOSes that limit the jobs, by precedence; True marks the jobs' own."""
    default = next((row["DefaultQOS"] for row in associations if row["User"]), "")
    own = str(submission.sbatch_options.get("qos") or default or "normal")
    names = [(row.get("QoS", ""), False) for row in partitions]
    names = [(own, True), *names] if "OverPartQOS" in _flags(facts, own) else [*names, (own, True)]
    return [(name, is_job_s) for name, is_job_s in names if name in facts.qos]


def _flags(facts: Facts, name: str) -> list[str]:
    return facts.qos.get(name, {}).get("Flags", "").split(",")


def _sources(
    facts: Facts, names: Sequence[tuple[str, bool]], associations: Sequence[Mapping[str, str]]
) -> Iterator[Source]:
    """The sources of limits for the jobs, by precedence."""
    denies = any("DenyOnLimit" in _flags(facts, name) for name, _ in names)  # holds for the limits of all
    for name in dict.fromkeys(name for name, _ in names):
        yield Source(f"QOS {name}", facts.qos[name], QOS, denies)
    for row in associations:
        who = f"{row['User']} in account" if row["User"] else "account"
        yield Source(f"{who} {row['Account']}", row, ASSOCIATION, denies)


def _held(rule: Rule, sources: Sequence[Source], submission: Submission) -> list[Held]:
    """The limits of a rule that hold; where a source limits GPUs and GPUs of the type, the lower one."""
    if rule.kind in ("wall", "jobs", "submit"):  # the others' values are lists of TRES: "cpu=64,gres/gpu=8"
        return _deciding(rule, sources)
    if not submission.whole_gpus_per_task:
        return []
    kinds = [GPU, f"{GPU}:{submission.type_of_gpus}"] if submission.type_of_gpus else [GPU]
    found: dict[tuple[str, str], Held] = {}
    for held in (held for tres in kinds for held in _deciding(rule, sources, tres)):
        known = found.setdefault((held.source.name, held.key), held)
        if int(held.value) < int(known.value):
            found[held.source.name, held.key] = held
    return list(found.values())


def _deciding(rule: Rule, sources: Sequence[Source], tres: str | None = None) -> list[Held]:
    """The first limit of a rule, or of a TRES in it; all limits of accounts, if their users share them."""
    found = [
        Held(rule, source, key, value)
        for source in sources
        for key in rule.keys
        if (value := source.row.get(key, "") if tres is None else _count(source.row.get(key, ""), tres))
    ]
    is_shared = all(key.startswith("Grp") for key in rule.keys)
    return found if is_shared and found and found[0].source.reasons == ASSOCIATION else found[:1]


def _walltime_s(submission: Submission, partitions: Sequence[Mapping[str, str]], most: Sequence[str]) -> float | None:
    """The walltime that was asked for, or else the partition's default, or else the longest one."""
    if "time" in submission.sbatch_options:
        return submission.walltime_s
    defaults = [seconds for row in partitions if (seconds := seconds_of(row.get("DefaultTime", ""))) is not None]
    longest = [row.get("MaxTime", "") for row in partitions]
    known = defaults or [seconds for text in [*longest, *most] if (seconds := seconds_of(text)) is not None]
    return min(known, default=None)


def _of_partition(asked: Submission, partition: Mapping[str, str], facts: Facts, is_free: bool) -> Iterator[Limit]:
    name = partition["PartitionName"]
    if not is_free:
        refuses = facts.config.get("EnforcePartLimits", "NO") != "NO"
        never = REFUSED if refuses else f"{NEVER} (PartitionTimeLimit)"
        yield _of_walltime(asked, f"MaxTime of partition {name}", partition.get("MaxTime", ""), never)
    if name not in facts.nodes:
        return
    counts = gpus_of_nodes(asked, facts, name)
    what = f"{asked.type_of_gpus} GPUs" if asked.type_of_gpus else "GPUs"
    most, per_node = max(counts, default=0), asked.gpus_per_node
    n_nodes = sum(count >= per_node for count in counts)
    if are_given_whole(asked, partition):
        yield _of_nodes(asked, name, n_nodes, "each is given whole nodes")
    elif "MEMORY" in facts.config.get("SelectTypeParameters", "") and not asked.sbatch_options.keys() & MEMORY_OPTIONS:
        default = _default_memory(asked, partition, facts)
        if default is None:
            yield _of_nodes(asked, name, n_nodes, "each gets all memory of its node, as no mem is asked for")
        else:
            setting, megabytes = default
            yield Limit(f"memory of a task in partition {name} ({setting})", f"{megabytes:,} MB", "no mem", "")
    yield from _of_size(asked, facts, name)
    if not asked.whole_gpus_per_task:
        return
    lacks = f"no node has {per_node}" if counts else "it has no nodes"
    then = f"{REFUSED}: {lacks}" if per_node > most else ""
    yield Limit(f"{what} of a node of partition {name}", str(most), str(per_node), then)
    yield _at_once(asked, f"{what} of partition {name}", sum(counts), "Resources")


def _of_size(asked: Submission, facts: Facts, partition: str) -> Iterator[Limit]:
    """The CPUs and the memory that a job asks for on each node; sbatch refuses too much, and does not say of what."""
    sizes = sizes_of_nodes(asked, facts, partition)
    cpus, megabytes = cpus_per_node(asked), math.ceil(memory_per_node(asked))
    if cpus and sizes:
        most = max(n for n, _ in sizes)
        then = f"{REFUSED}: no node has {cpus}" if cpus > most else ""
        yield Limit(f"CPUs of a node of partition {partition}", str(most), str(cpus), then)
    if megabytes and sizes:
        most = max(n for _, n in sizes)
        then = f"{REFUSED}: no node has so much" if megabytes > most else ""
        yield Limit(f"memory of a node of partition {partition}", f"{most:,} MB", f"{megabytes:,} MB", then)


def _of_partitions(of_each: Sequence[Sequence[Limit]], config: Mapping[str, str]) -> list[Limit]:
    """The limits of several partitions: a task starts in one that allows it, unless each of them has to."""
    is_closed = [any(limit.then.startswith((NEVER, REFUSED)) for limit in limits) for limits in of_each]
    if all(is_closed) or config.get("EnforcePartLimits") == "ALL":
        return [limit for limits in of_each for limit in limits]
    return [
        replace(limit, then=ELSEWHERE) if closed and limit.then else limit
        for limits, closed in zip(of_each, is_closed, strict=True)
        for limit in limits
    ]


def _of_nodes(asked: Submission, partition: str, n_nodes: int, why: str) -> Limit:
    """A limit on the jobs at once, none of which shares its nodes; `why` says for what reason."""
    wanted, n_jobs = asked.n_concurrent_jobs * asked.nodes_per_task, n_nodes // asked.nodes_per_task
    fewer = f"{_fewer(n_jobs * asked.tasks_per_node, 'Resources')}: {why}"
    then = fewer if 0 < n_jobs < asked.n_concurrent_jobs else ""
    return Limit(f"nodes of partition {partition}", str(n_nodes), f"{wanted} at once", then)


def memory_of_lone_job(asked: Submission, facts: Facts) -> int | None:
    """The MB that DefMemPerNode gives a job with one task; None if it asks for memory, or another setting holds."""
    if "MEMORY" not in facts.config.get("SelectTypeParameters", "") or asked.sbatch_options.keys() & MEMORY_OPTIONS:
        return None
    defaults = [_default_memory(asked, row, facts) for row in partitions_of(asked, facts)]
    found = [each[1] for each in defaults if each is not None and each[0] == "DefMemPerNode"]
    return min(found) if found and len(found) == len(defaults) else None


def _default_memory(asked: Submission, partition: Row, facts: Facts) -> tuple[str, int] | None:
    """Slurm's setting by which a task that asks for no memory gets some, and the MB on a node; None if it gets all."""
    config, n_gpus = facts.config, asked.whole_gpus_per_task // asked.nodes_per_task
    defaults = [dict(re.findall(r"(\w+)=(\d+)", row.get("JobDefaults", ""))) for row in (partition, config)]
    for given in defaults if n_gpus else ():
        if "DefMemPerGPU" in given:
            return "DefMemPerGPU", int(given["DefMemPerGPU"]) * n_gpus
    per_gpu = next((int(given["DefCpuPerGPU"]) for given in defaults if "DefCpuPerGPU" in given), 0)
    n_cpus = (cpus_of(asked) or per_gpu * n_gpus or 1) * asked.tasks_per_node
    if "CR_CORE" in config["SelectTypeParameters"]:  # jobs get whole cores, and memory for each thread
        n_threads = threads_of_a_core(asked, facts, partition["PartitionName"])
        n_cpus = math.ceil(n_cpus / n_threads) * n_threads
    for row in (partition, config):
        if (per_cpu := row.get("DefMemPerCPU", "")).isdecimal():
            return "DefMemPerCPU", int(per_cpu) * n_cpus // asked.tasks_per_node
        if (per_node := row.get("DefMemPerNode", "")).isdecimal():
            return "DefMemPerNode", int(per_node) // asked.tasks_per_node
    return None


def _of_rule(asked: Submission, held: Held, config: Mapping[str, str]) -> Limit:
    rule, source, value = held.rule, held.source, held.value
    name, reason = held.in_words, f"{source.reasons}{rule.keys[held.key]}"
    never = REFUSED if source.denies else f"{NEVER} ({reason})"
    if rule.kind == "wall":
        return _of_walltime(asked, name, value, never)
    most = int(value)
    if rule.kind == "jobs":
        then = _fewer(most * asked.tasks_per_node, reason) if asked.n_concurrent_jobs > most else ""
        return Limit(name, value, f"{asked.n_concurrent_jobs} at once", then)
    if rule.kind == "submit":
        n_jobs = asked.n_jobs + 1  # the merge job
        return Limit(name, value, str(n_jobs), REFUSED if n_jobs > most else "")
    if rule.kind.startswith("minutes"):
        return _of_minutes(asked, held, never, reason, "safe" in config.get("AccountingStorageEnforce", ""))
    if rule.kind == "task" or asked.gpus_per_job > most:
        then = never if asked.gpus_per_job > most else ""
        return Limit(name, count_of(most, "GPU"), f"{asked.gpus_per_job} for a {_one(asked)}", then)
    return replace(_at_once(asked, name, most, reason), value=count_of(most, "GPU"))


def _of_minutes(asked: Submission, held: Held, never: str, reason: str, is_safe: bool) -> Limit:
    """A limit on GPUs times minutes of walltime. `is_safe`: Slurm starts only what a budget lets run to its end."""
    most, name, unit = int(held.value), held.in_words, count_of(int(held.value), "GPU-minute")
    if asked.walltime_s is None:
        return Limit(name, unit, "no walltime", "")
    of_job, n_tasks = math.ceil(asked.walltime_s / 60) * asked.gpus_per_job, asked.tasks_per_node
    if held.rule.kind == "minutes of a task":
        return Limit(name, unit, f"{of_job:,} for a {_one(asked)}", never if of_job > most else "")
    if held.rule.kind == "minutes at once":
        at_once = asked.n_concurrent_jobs * of_job
        then = _fewer(most // of_job * n_tasks, reason) if at_once > most else ""
        return Limit(name, unit, f"{at_once:,} at once", then)
    if (is_safe and of_job > most) or most == 0:  # without any, no job starts
        return Limit(name, unit, f"{of_job:,} for a {_one(asked)}", never)
    # What others have used of it is not known here, nor how much of their walltimes the tasks will need.
    in_all = asked.n_jobs * of_job
    then = f"{PENDS if is_safe else ENDS} ({reason})" if in_all > most else ""
    return Limit(name, unit, f"{in_all:,} at most", then)


def _of_cluster(asked: Submission, config: Mapping[str, str]) -> Iterator[Limit]:
    in_array, n_jobs = asked.n_jobs, asked.n_jobs + 1  # the merge job
    for name, size in array_limits(config).items() if "MaxArraySize" in config else ():
        # One job is a plain job; of 0 there are no arrays.
        then = REFUSED if in_array > max(1, size) else ""
        yield Limit(name, str(size), count_of(in_array, _one(asked)), then)
    if (most := config.get("MaxJobCount", "")).isdecimal():
        yield Limit("MaxJobCount, of all users", most, str(n_jobs), REFUSED if n_jobs > int(most) else "")


def _of_walltime(asked: Submission, name: str, longest: str, never: str) -> Limit:
    walltime_s, limit = asked.walltime_s, seconds_of(longest)
    is_more = walltime_s is not None and limit is not None and walltime_s > limit
    return Limit(name, longest, _time(walltime_s), never if is_more else "")


def _at_once(asked: Submission, name: str, gpus: int, reason: str) -> Limit:
    """A limit on the GPUs that the tasks may have together."""
    wanted = asked.n_concurrent_jobs * asked.gpus_per_job
    then = _fewer(gpus // asked.gpus_per_job * asked.tasks_per_node, reason) if wanted > gpus else ""
    return Limit(name, str(gpus), f"{wanted} at once", then)


def _one(asked: Submission) -> str:
    """What each job of the array is."""
    return "task" if asked.tasks_per_node == 1 else "job"


def _fewer(n_tasks: int, reason: str) -> str:
    return f"{n_tasks} of its tasks run at once, the others pend ({reason})" if n_tasks else f"{NEVER} ({reason})"


def _count(text: str, tres: str) -> str:
    """The number of one TRES in a list such as "cpu=64,gres/gpu=8,gres/gpu:a100=4"; "" if it is not in it."""
    counts: dict[str, str] = dict(re.findall(r"([\w/:.-]+)=(\d+)", text))
    return counts.get(tres, "")


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "no limit"
    days, rest = divmod(round(seconds), 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock
