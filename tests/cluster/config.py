"""The daemons' configuration: where everything lies, which ports, and the text of each file."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

NODES = ("gpu1", "gpu2")
GPUS_PER_NODE = 4
CPUS_PER_NODE = 16
MEMORY_MB = 8000


@dataclass(frozen=True)
class Settings:
    """One cluster's facts.

    `folder` holds configuration, logs, database and state. `private` is a directory with a short path for sockets
    (whose paths are limited to 107 bytes), the job scripts, and munged, which runs as a user of its own and could
    not enter a folder such as pytest's.
    """

    folder: str
    private: str
    accounting: bool
    max_array_size: int
    cgroup_version: int
    cgroup_note: str
    ports: dict[str, int]

    @property
    def name(self) -> str:
        """What marks this cluster's processes and cgroups."""
        return Path(self.private).name

    @property
    def slurm_conf(self) -> Path:
        """The path for SLURM_CONF."""
        return Path(self.folder, "etc", "slurm.conf")

    @property
    def munge_socket(self) -> Path:
        """Where munged listens."""
        return Path(self.private, "munge", "socket")

    @property
    def database_socket(self) -> Path:
        """Where MariaDB listens; nowhere else."""
        return Path(self.private, "mariadb.socket")

    def log(self, daemon: str) -> Path:
        """A daemon's log."""
        return Path(self.folder, "log", f"{daemon}.log")

    def output(self, daemon: str) -> Path:
        """What a daemon writes to stdout and stderr; Slurm's write the same to their logs, later on."""
        return Path(self.folder, "log", f"{daemon}.out")

    def save(self) -> None:
        """Write what another process needs to stop this cluster, also into `private`: pytest clears folders away."""
        for folder in (self.folder, self.private):
            state_file(Path(folder)).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Settings:
        """The settings of the cluster whose `folder`, or `private`, this is."""
        return cls(**json.loads(state_file(folder).read_text()))


def state_file(folder: Path) -> Path:
    """It is there as long as something of the cluster may be."""
    return folder / "cluster.json"


def free_ports(n: int) -> list[int]:
    """Ports on which nothing listens, and which no other cluster that is starting has found.

    They lie below the range from which the kernel gives ports to outgoing connections (ip(7)), so that they stay free.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    for port in random.sample(range(10_000, max(lowest, 20_000)), k=1000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0 and _reserve(port):
                found.append(port)
        if len(found) == n:
            return found
    raise RuntimeError(f"no {n} free ports among 1000 tried")


_reserved: list[socket.socket] = []


def _reserve(port: int) -> bool:
    """Keep a port from clusters that start at the same time, as long as this process lives."""
    sign = socket.socket(socket.AF_UNIX)
    try:
        sign.bind(f"\0slurm-test-port-{port}")  # unix(7): an abstract name, which leaves no file
    except OSError:
        sign.close()
        return False
    _reserved.append(sign)
    return True


def write(settings: Settings, cgroup_conf: str) -> None:
    """Write every file that the daemons read, and the stand-in GPUs."""
    etc = settings.slurm_conf.parent
    for directory in (etc, Path(settings.folder, "log")):
        if directory.exists():  # of an earlier cluster in this folder
            shutil.rmtree(directory)
    for directory in (
        etc,
        Path(settings.folder, "log"),
        Path(settings.folder, "state"),
        Path(settings.private, "spool"),
    ):
        directory.mkdir()
    settings.slurm_conf.write_text(slurm_conf(settings))
    (etc / "gres.conf").write_text(_gres_conf(settings))
    (etc / "cgroup.conf").write_text(cgroup_conf)
    (etc / "slurmdbd.conf").write_text(_slurmdbd_conf(settings))
    (etc / "slurmdbd.conf").chmod(0o600)  # slurmdbd refuses anything wider
    mail = Path(settings.private, "mail")  # in place of a mail program, as slurmctld calls one: -s SUBJECT ADDRESS
    mail.write_text(f'#!/bin/sh\necho "$*" >> "{settings.log("mail")}"\n')
    mail.chmod(0o755)
    for gpu in range(GPUS_PER_NODE):
        make_gpu(Path(settings.private, f"nvidia{gpu}"))


def make_gpu(path: Path) -> None:
    """Put a stand-in GPU at `path`: the character device that Slurm wants to see.

    Its numbers are /dev/null's: NVIDIA's would open a real GPU where there is one.
    """
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))


def slurm_conf(settings: Settings) -> str:
    """slurm.conf: two nodes on one host, everything as quick as Slurm can be made."""
    ports = settings.ports
    host = socket.gethostname().partition(".")[0]
    nodes = "".join(f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[node]}\n" for node in NODES)
    return f"""\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports["slurmctld"]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={settings.munge_socket}
StateSaveLocation={settings.folder}/state
SlurmctldPidFile={settings.private}/slurmctld.pid
SlurmdSpoolDir={settings.private}/spool/%n
SlurmdPidFile={settings.private}/%n.pid
SlurmdLogFile={settings.log("%n")}
SlurmctldLogFile={settings.log("slurmctld")}
SlurmctldSyslogDebug=quiet
SlurmdSyslogDebug=quiet
MpiDefault=none
MailProg={settings.private}/mail

# Two nodes on this host, each claiming more CPUs than there are.
GresTypes=gpu,shard
SlurmdParameters=config_overrides
NodeName=DEFAULT CPUs={CPUS_PER_NODE} CoresPerSocket={CPUS_PER_NODE} \
RealMemory={MEMORY_MB} Gres=gpu:a100:{GPUS_PER_NODE},shard:{2 * GPUS_PER_NODE}
{nodes}PartitionName=gpu Nodes={",".join(NODES)} Default=YES
PartitionName=cpu Nodes={",".join(NODES)}

SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU={MEMORY_MB // CPUS_PER_NODE}
{_proctrack(settings)}
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=5

PriorityType=priority/basic
SchedulerParameters=sched_min_interval=0,sched_interval=1,bf_interval=1,batch_sched_delay=0,default_queue_depth=1000
MaxArraySize={settings.max_array_size}
JobRequeue=0

# A node is down 15 to 20 s after its slurmd has died, and back as soon as a slurmd reports. slurmctld tries to reach a
# dead slurmd for MessageTimeout before it looks at SlurmdTimeout: with the default of 10 s it took up to 26 s.
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=5
# What a task has to give back its shard, which on a busy machine it needs; it waits no longer than it must.
KillWait=60
TCPTimeout=2

{_accounting(settings)}"""


def _proctrack(settings: Settings) -> str:
    if settings.cgroup_version:
        return "ProctrackType=proctrack/cgroup\nTaskPlugin=task/cgroup"
    return "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none"


def _accounting(settings: Settings) -> str:
    if not settings.accounting:
        return "AccountingStorageType=accounting_storage/none\n"
    return f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={settings.ports["slurmdbd"]}
AccountingStoragePass=socket={settings.munge_socket}
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,limits,qos
PreemptType=preempt/qos
PreemptMode=REQUEUE
"""


def _gres_conf(settings: Settings) -> str:
    files = f"{settings.private}/nvidia[0-{GPUS_PER_NODE - 1}]"
    return "".join(
        f"NodeName={node} Name=gpu Type=a100 File={files}\nNodeName={node} Name=shard Count={2 * GPUS_PER_NODE}\n"
        for node in NODES
    )


def _slurmdbd_conf(settings: Settings) -> str:
    return f"""\
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={settings.ports["slurmdbd"]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={settings.munge_socket}
LogFile={settings.log("slurmdbd")}
DebugLevelSyslog=quiet
PidFile={settings.private}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
"""
