"""A survey of this cluster and this user by Slurm's commands, for the site file of `init --site`."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field

from slurmgpu.slurm import commands
from slurmgpu.slurm.commands import SlurmUnavailableError
from slurmgpu.util.users import own_name

GPUS = re.compile(r"\bgpu:(?:([^:,()]+):)?(\d+)")
"""GPUs in a node's Gres: "gpu:a100:4(S:0-1)" has type and number, "gpu:4" only a number."""


@dataclass
class Partition:
    """A partition: its longest walltime as sinfo shows it, its nodes, and the types of GPU on them."""

    name: str
    is_default: bool
    time_limit: str
    n_nodes: int = 0
    gpus: dict[str, int] = field(default_factory=dict)

    @property
    def described(self) -> str:
        """Its nodes, GPUs and time limit, in words."""
        kinds = ", ".join(f"{kind or 'gpu'}:{count}" for kind, count in sorted(self.gpus.items()))
        nodes = f"{self.n_nodes} node{'s' if self.n_nodes > 1 else ''}"
        return f"{nodes}{f' with {kinds}' if kinds else ', no GPU'}, time limit {self.time_limit}"


@dataclass(frozen=True)
class Survey:
    """A cluster as this user sees it. The first account is the default one; none if accounting does not answer."""

    cluster: str
    partitions: list[Partition]
    accounts: list[str]
    qos: list[str]
    scratch: str

    @property
    def gpu_partitions(self) -> list[Partition]:
        """Those with GPUs, the cluster's default first."""
        return sorted((p for p in self.partitions if p.gpus), key=lambda p: not p.is_default)

    @property
    def gpu_types(self) -> list[str]:
        """The types of GPU that have a name."""
        return sorted({kind for partition in self.partitions for kind in partition.gpus if kind})


def survey() -> Survey:
    """Ask sinfo, scontrol and, if it answers, sacctmgr; SlurmUnavailableError if there is no Slurm."""
    if shutil.which("sinfo") is None:
        raise SlurmUnavailableError("This machine has no sinfo. Write the site file on a node of the cluster.")
    partitions = _partitions(commands.table("\x1f", 5, "sinfo", "--noheader", "--format", "%P\x1f%a\x1f%l\x1f%D\x1f%G"))
    config = commands.configuration()
    accounts, qos = _accounts(config.get("ClusterName"))
    return Survey(config.get("ClusterName", "?"), partitions, accounts, qos, config.get("TmpFS", "/tmp"))


def _partitions(rows: Sequence[Sequence[str]]) -> list[Partition]:
    """The partitions in the output of sinfo, which has a line for each kind of node in a partition."""
    found: dict[str, Partition] = {}
    for name, available, limit, nodes, gres in rows:
        if available.strip() != "up":
            continue
        plain = name.strip().rstrip("*")
        partition = found.setdefault(plain, Partition(plain, name.strip().endswith("*"), limit.strip()))
        partition.n_nodes += int(nodes)
        for kind, count in GPUS.findall(gres):
            partition.gpus[kind] = max(int(count), partition.gpus.get(kind, 0))
    return list(found.values())


def _accounts(cluster: str | None) -> tuple[list[str], list[str]]:
    """Accounts of this user, the one in SBATCH_ACCOUNT or else the default one first, and QOSes.

    Clusters may share an accounting database: only what the user has on this one counts.
    """
    user, of_cluster = own_name(), (f"cluster={cluster}",) if cluster else ()
    try:
        default = [row["DefaultAccount"] for row in commands.sacctmgr("user", ("User", "DefaultAccount"), user)]
        rows = commands.sacctmgr("assoc", ("Account", "QOS"), f"user={user}", *of_cluster)
    except SlurmUnavailableError:
        return [], []
    accounts, qos = [row["Account"] for row in rows], [name for row in rows for name in row["QOS"].split(",")]
    default = [account for account in (os.environ.get("SBATCH_ACCOUNT"), *default) if account in accounts]
    return list(dict.fromkeys([*default, *accounts])), sorted(filter(None, set(qos)))
