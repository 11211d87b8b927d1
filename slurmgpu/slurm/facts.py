"""Partitions, QOSes, associations and configuration as Slurm prints them, if it answers."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from slurmgpu.slurm import commands
from slurmgpu.slurm.commands import ARRAY_JOB, SlurmUnavailableError, sacctmgr
from slurmgpu.slurm.survey import GPUS
from slurmgpu.util.users import own_name

QOS_KEYS = (
    *("Name", "Flags", "MaxWall", "MaxTRESPerJob", "MaxTRESPerUser", "MaxTRESPerAccount", "GrpTRES"),
    *("MaxTRESMins", "GrpTRESRunMins", "GrpTRESMins"),
    *("MaxJobsPerUser", "GrpJobs", "MaxSubmitJobsPerUser", "GrpSubmitJobs"),
)
ASSOCIATION_KEYS = (
    *("User", "Account", "ParentName", "Partition", "DefaultQOS", "MaxWall", "MaxTRESPerJob", "GrpTRES"),
    *("MaxTRESMins", "GrpTRESRunMins", "GrpTRESMins"),
    *("MaxJobs", "GrpJobs", "MaxSubmitJobs", "GrpSubmitJobs"),
)
MAX_ACCOUNTS = 16
"""How many accounts are asked about, from the user's upwards: each takes a command."""
START = re.compile(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
"""sbatch's times with SLURM_TIME_FORMAT=standard, which `commands` sets."""

T = TypeVar("T")
Row = Mapping[str, str]


@dataclass(frozen=True)
class Node:
    """What jobs may have of a node: GPUs by type, CPUs, memory in MB; without what Slurm keeps back for the system.

    `cpus_per_core` is more than 1 where a CPU is a hardware thread.
    """

    gpus: Mapping[str, int]
    cpus: int
    megabytes: int
    cpus_per_core: int = 1


@dataclass
class Facts:
    """A cluster's limits in Slurm's own terms; if a command did not answer, its part is empty, and a note says so.

    `partitions` are by name, and so are `nodes`, those of each partition. `associations` are this user's with the
    account, those of the account, and those of the accounts above it; they and `qos` are empty if they are not
    enforced.
    """

    user: str = field(default_factory=own_name)
    config: Mapping[str, str] = field(default_factory=dict)
    partitions: Mapping[str, Row] = field(default_factory=dict)
    nodes: Mapping[str, Sequence[Node]] = field(default_factory=dict)
    default_account: str = ""
    associations: Sequence[Row] = ()
    qos: Mapping[str, Row] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_facts(config: Mapping[str, str], account: str | None = None, *, with_nodes: bool = True) -> Facts:
    """Ask scontrol and sacctmgr; `account` is the submission's, None for the default.

    `config` is what `commands.configuration` answered. Without `with_nodes`, these are asked for only where a partition
    gives whole ones, whose GPUs may idle.
    """
    facts = read_nodes(config, always=with_nodes)
    notes = facts.notes
    enforced = facts.config.get("AccountingStorageEnforce", "limits")
    if not re.search("limits|safe", enforced):
        notes.append(f"Limits of QOSes and associations are not enforced here: AccountingStorageEnforce = {enforced}.")
        return facts
    cluster = facts.config.get("ClusterName", "")
    what = "Limits of QOSes and associations are"
    known = _asked(what, lambda: _accounting(facts.user, account, cluster), None, notes)
    if known is not None:
        facts.default_account, facts.associations, facts.qos = known
    return facts


def read_nodes(config: Mapping[str, str] | None = None, *, always: bool = True) -> Facts:
    """Ask scontrol for partitions and their nodes; for nodes `always`, or only where a partition gives whole ones."""
    facts = Facts(config=config or {})
    facts.partitions = _asked("Limits of partitions are", _partitions, {}, facts.notes)
    if always or any(whole_nodes(row) for row in facts.partitions.values()):
        facts.nodes = _asked("GPUs of partitions are", lambda: _nodes(facts.partitions), {}, facts.notes)
    return facts


def whole_nodes(partition: Row) -> bool:
    """Whether a partition gives every job its nodes alone, whatever the job asks for."""
    return partition.get("OverSubscribe") == "EXCLUSIVE"


@dataclass(frozen=True)
class Trial:
    """Slurm's answer about a script; `start` is when the job, or an array's first task, would start now.

    None if it is not known: for a job that Slurm refuses, and for one that waits for another. It has this machine's
    time zone, as sbatch prints it by this machine's clock.
    """

    start: datetime | None
    said: str
    taken: bool = True

    def to_json(self) -> dict[str, str | bool | None]:
        """The keys of an estimate in the JSON of a dry run."""
        start = None if self.start is None else self.start.isoformat()
        return {"start": start, "said": self.said, "taken": self.taken}


def try_scripts(scripts: Mapping[str, str]) -> dict[str, Trial]:
    """Ask sbatch about these scripts without queueing them; may raise SlurmUnavailableError."""
    found = {}
    for job, text in scripts.items():
        # The array, for which the merge would wait, has no id yet.
        plain = re.sub(rf"^#SBATCH --dependency=.*:{ARRAY_JOB}\n", "", text, flags=re.MULTILINE)
        with tempfile.NamedTemporaryFile("w", suffix=".sbatch", encoding="utf-8", errors="surrogateescape") as file:
            file.write(plain)
            file.flush()
            taken, said = commands.try_script(file.name)
        start = START.search(said) if plain == text else None
        found[job] = Trial(start and datetime.fromisoformat(start[1]).astimezone(), said, taken)
    return found


def _asked(what: str, ask: Callable[[], T], default: T, notes: list[str]) -> T:
    try:
        return ask()
    except SlurmUnavailableError as error:
        notes.append(f"{what} not known. {error}")
        return default


def _partitions() -> dict[str, Row]:
    lines = commands.run("scontrol", "--all", "--oneliner", "show", "partition").splitlines()
    rows = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]
    found: dict[str, Row] = {row["PartitionName"]: row for row in rows if "PartitionName" in row}
    if not found:  # scontrol succeeds, and says on stderr that it may not
        raise SlurmUnavailableError("scontrol shows no partition: slurm.conf may hide them (PrivateData).")
    return found


def _nodes(partitions: Mapping[str, Row]) -> dict[str, list[Node]]:
    found: dict[str, list[Node]] = {name: [] for name in partitions}
    for line in commands.run("scontrol", "--all", "--oneliner", "show", "node").splitlines():
        told: dict[str, str] = {}
        for key, value in re.findall(r"(?<!\S)(\w+)=(\S*)", line):
            told.setdefault(key, value)  # an administrator's words come last
        if "NodeName" in told:
            for name in filter(None, told.get("Partitions", "").split(",")):
                found.setdefault(name, []).append(_node(told))
    if not any(found.values()):
        raise SlurmUnavailableError("scontrol shows no node: slurm.conf may hide them (PrivateData).")
    return found


def _node(told: Row) -> Node:
    """A node as scontrol shows it; before Slurm 22.05 without CPUEfctv."""
    gpus: dict[str, int] = {}
    for kind, count in GPUS.findall(told.get("Gres", "")):
        gpus[kind] = gpus.get(kind, 0) + int(count)
    n_all, n_cores = int(told["CPUTot"]), int(told["Sockets"]) * int(told["CoresPerSocket"])
    megabytes = int(told["RealMemory"]) - int(told.get("MemSpecLimit", "0"))
    # A site may count cores as CPUs, by CPUs= in slurm.conf, also where a core has two threads.
    return Node(gpus, int(told.get("CPUEfctv", n_all)), megabytes, max(1, n_all // n_cores))


def _accounting(user: str, account: str | None, cluster: str) -> tuple[str, list[Row], dict[str, Row]]:
    """The account, the associations of the user, the account and those above it, and all QOSes."""
    if account is None:
        account = next((row["DefaultAccount"] for row in sacctmgr("user", ("User", "DefaultAccount"), user)), "")
    found: dict[str, list[Row]] = {}
    above = account
    while above and above not in found and len(found) < MAX_ACCOUNTS:
        # A database may serve several clusters.
        rows = sacctmgr("assoc", ASSOCIATION_KEYS, f"account={above}", *([f"cluster={cluster}"] if cluster else []))
        found[above] = [row for row in rows if row["User"] in ("", user if above == account else "")]
        above = next((row["ParentName"] for row in rows if not row["User"]), "")
    own = [row for rows in found.values() for row in rows]
    return account, own, {row["Name"]: row for row in sacctmgr("qos", QOS_KEYS)}
