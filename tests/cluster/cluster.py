"""The cluster: start it, run Slurm's commands on it, break it, stop it."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import cgroups, config, processes
from .config import NODES, Settings
from .processes import ClusterError, wait_for

DAEMONS = ("munged", "mariadbd", "mariadb-install-db", "slurmdbd", "slurmctld", "slurmd")
CLIENTS = ("munge", "sbatch", "sinfo", "scontrol", "sacctmgr")
# Debian keeps daemons where a user's PATH does not look, and root's may be a user's (su without -).
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
# Of an enclosing job, or of a user's shell: they would change what Slurm's commands do.
INHERITED = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SACCT_")


def missing() -> str | None:
    """None when a cluster can be started here, else a sentence that says what is missing and what to do."""
    if sys.platform != "linux":
        return f"the test cluster needs Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "the test cluster needs root: slurmd runs jobs as other users and makes cgroups"
    absent = [name for name in DAEMONS + CLIENTS if shutil.which(name, path=PATH) is None]
    if absent:
        return (
            f"the test cluster needs {', '.join(absent)}: "
            "run tests/cluster/install.sh as root on Debian or Ubuntu (it installs packages)"
        )
    try:
        pwd.getpwnam("munge")
    except KeyError:
        return "the test cluster needs the user munge, which Debian's package munge makes"
    try:
        with tempfile.TemporaryDirectory() as folder:
            config.make_gpu(Path(folder, "nvidia0"))
    except PermissionError:
        return "the test cluster needs to make device files: in a container, give it CAP_MKNOD"
    return None


class Cluster:
    """A running cluster of two nodes, gpu1 and gpu2, with four stand-in GPUs each.

    Made by `start`, or by `open` for one that another process has started. `env` is what Slurm's commands need in
    their environment; `has_cgroups` says whether memory limits are enforced, and `cgroup_note` why they are not.
    """

    def __init__(self, settings: Settings) -> None:
        self.folder = Path(settings.folder)
        self.env = {"SLURM_CONF": str(settings.slurm_conf)}
        self.has_cgroups = settings.cgroup_version > 0
        self.cgroup_note = settings.cgroup_note
        self._settings = settings
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    @classmethod
    def start(
        cls, folder: Path, *, accounting: bool = True, max_array_size: int = 1001, with_cgroups: bool = True
    ) -> Cluster:
        """A cluster whose nodes are idle, with everything that lasts under `folder` (configuration, logs).

        Without `accounting` there is no sacct, no QOS and no preemption; without cgroups there are no memory limits,
        and Slurm tracks processes by their parents (proctrack/linuxproc). When something does not come up, what
        was started is stopped again and the ClusterError ends with the logs' last lines.
        """
        reason = missing()
        if reason is not None:
            raise ClusterError(reason)
        settings, cgroup_conf = _settle(folder.resolve(), accounting, max_array_size, with_cgroups)
        cluster = cls(settings)
        try:
            config.write(settings, cgroup_conf)
            cluster._bring_up()
        except BaseException:
            cluster.stop()
            raise
        return cluster

    @classmethod
    def open(cls, folder: Path) -> Cluster:
        """The cluster that was started in `folder` and not stopped since, whoever started it.

        When the folder is lost, the cluster's other directory, /tmp/slurm-test-*, will do.
        """
        folder = folder.resolve()
        if not config.state_file(folder).exists():
            raise ClusterError(f"no cluster was started in {folder}, or it was stopped")
        return cls(Settings.load(folder))

    def stop(self) -> None:
        """End all processes, jobs included, and remove all but configuration and logs. Twice does no harm."""
        processes.kill(self._settings.name)
        for child in self._children.values():
            child.wait()
        cgroups.remove(self._settings.name, NODES, self._settings.cgroup_version)
        for directory in (Path(self._settings.private), self.folder / "database", self.folder / "state"):
            if directory.exists():
                shutil.rmtree(directory)
        config.state_file(self.folder).unlink(missing_ok=True)

    def run(self, *argv: str, check: bool = True, **env: str) -> str:
        """What a Slurm command prints, run on this cluster; with `check`, a ClusterError when it fails."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith(INHERITED)}
        result = subprocess.run(
            argv, env={**clean, "PATH": PATH, **self.env, **env}, capture_output=True, text=True, timeout=240
        )
        if check and result.returncode != 0:
            raise ClusterError(f"{' '.join(argv)}: exit code {result.returncode}: {result.stderr.strip()}")
        return result.stdout

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
        """Return once `condition()` is true; else a ClusterError naming `what`, with the logs' last lines."""
        try:
            wait_for(condition, what, timeout_s, poll_s=0.1)  # each look is a command that keeps slurmctld busy
        except ClusterError as error:
            raise ClusterError(f"{error}\n{self._log_tails()}") from None

    def kill_node(self, name: str) -> None:
        """End a node as a power failure would: slurmd, the slurmstepds and the jobs' processes, all at once.

        Slurm notices 15 to 20 s later. The node's jobs are NODE_FAIL then, or requeued, to start after two minutes.
        """
        self._end(_known(name))

    def start_node(self, name: str) -> None:
        """Start a killed node's slurmd and wait until jobs can start on it.

        Before that it waits until Slurm has noticed the node's death: the jobs of a node that is back sooner stay
        RUNNING for Slurm, as ghosts.
        """
        if processes.find(f"{self._settings.name}/{_known(name)}"):
            raise ClusterError(f"{name} is running")
        self.wait_until(lambda: self._node(name)["State"].startswith("DOWN"), f"Slurm noticed that {name} was dead")
        self._start_node(name)
        self._wait_for(name, partial(self._is_usable, name))

    def break_accounting(self) -> None:
        """End slurmdbd, so that sacct fails and slurmctld keeps its records to itself."""
        self._end("slurmdbd")

    def mend_accounting(self) -> None:
        """Start slurmdbd again and wait until it has got what slurmctld had kept."""
        self._start_slurmdbd()
        self.wait_until(
            lambda: re.search(r"DBD Agent queue size:\s+0$", self.run("sdiag"), re.MULTILINE) is not None,
            "slurmctld had delivered its records to slurmdbd",
        )

    def _bring_up(self) -> None:
        self._start_munged()
        if self._settings.accounting:
            self._start_mariadb()
            self._start_slurmdbd()
            self._fill_accounts()
        self._start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self._start_node(node)
        for node in NODES:
            self._wait_for(node, partial(self._is_usable, node))

    def _start_node(self, name: str) -> None:
        self._start(name, "slurmd", "-D", "-N", name, reaper=True)

    def _start_munged(self) -> None:
        """munged, as its own user, with a key and a socket that belong to this cluster alone."""
        directory = self._settings.munge_socket.parent
        directory.mkdir(mode=0o711)
        key = directory / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for path in (directory, key):
            shutil.chown(path, "munge", "munge")
        files = {
            "socket": self._settings.munge_socket,
            "key-file": key,
            "pid-file": directory / "pid",
            "seed-file": directory / "seed",
            "log-file": directory / "log",  # in foreground it logs to stderr and still wants a name
        }
        options = [f"--{option}={path}" for option, path in files.items()]
        self._start("munged", "munged", "--foreground", *options, user="munge")
        self._wait_for(
            "munged", lambda: self._succeeds("munge", "--no-input", f"--socket={self._settings.munge_socket}")
        )

    def _start_mariadb(self) -> None:
        """MariaDB on a socket only, where root needs no password; it may lose everything in a crash."""
        data = f"--datadir={self.folder}/database"
        # A server that starts removes what others keep in its folder for temporary tables, so it is not /tmp.
        temporary = Path(self._settings.private, "mariadb")
        temporary.mkdir()
        # Native AIO: what the kernel has of it is used up by two servers, and tests start a third beside them.
        own = (
            f"--tmpdir={temporary}",
            "--innodb-flush-method=nosync", "--innodb-log-file-size=8M", "--innodb-use-native-aio=0",
        )  # fmt: skip
        with open(self._settings.output("mariadb-install-db"), "wb") as output:
            installed = subprocess.run(
                ["mariadb-install-db", "--no-defaults", data, "--user=root", "--skip-test-db",
                 "--auth-root-authentication-method=socket", *own],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={"PATH": PATH},
            )  # fmt: skip
        if installed.returncode != 0:
            raise ClusterError(f"mariadb-install-db: exit code {installed.returncode}\n{self._log_tails(40)}")
        socket_option = f"--socket={self._settings.database_socket}"
        self._start(
            "mariadbd", "mariadbd", "--no-defaults", data, "--user=root", socket_option, "--skip-networking",
            *own, "--innodb-flush-log-at-trx-commit=0",
            "--loose-innodb-snapshot-isolation=OFF",  # slurmdbd refuses ON, MariaDB's default from 11.6 on
            "--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900",  # slurmdbd complains about less
        )  # fmt: skip
        self._wait_for(
            "mariadbd",
            lambda: self._succeeds("mariadb-admin", "--no-defaults", socket_option, "--silent", "ping"),
        )
        # slurmdbd would make its database itself, once it has found none; but MariaDB 11.8.9's client library refuses
        # all answers on a connection that was tried with a database that is not there.
        self.run("mariadb-admin", "--no-defaults", socket_option, "create", "slurm_acct_db")

    def _start_slurmdbd(self) -> None:
        # StorageHost=localhost means a socket, and slurmdbd.conf cannot say which.
        self._start("slurmdbd", "slurmdbd", "-D", MARIADB_UNIX_PORT=str(self._settings.database_socket))
        self._wait_for("slurmdbd", lambda: self._succeeds("sacctmgr", "-n", "show", "cluster"))

    def _fill_accounts(self) -> None:
        for command in (
            "add cluster test",
            "add qos high preempt=normal priority=100",
            "add account test",
            "add user root account=test defaultaccount=test qos=normal,high defaultqos=normal",
        ):
            self.run("sacctmgr", "-i", *command.split())

    def _start(self, name: str, *argv: str, user: str | None = None, reaper: bool = False, **env: str) -> None:
        program = shutil.which(argv[0], path=PATH)
        assert program is not None  # missing() has looked
        self._children[name] = processes.start(
            [program, *argv[1:]],
            mark=f"{self._settings.name}/{name}",
            output=self._settings.output(name),
            env={"PATH": PATH, "LC_ALL": "C.UTF-8", **self.env, **env},
            user=user,
            reaper=reaper,
        )

    def _end(self, name: str) -> None:
        processes.kill(f"{self._settings.name}/{name}")
        if name in self._children:  # else another process has started it
            self._children.pop(name).wait()

    def _wait_for(self, daemon: str, ready: Callable[[], bool]) -> None:
        """Wait until a daemon is ready, or has ended before it was."""
        child = self._children[daemon]
        self.wait_until(lambda: child.poll() is not None or ready(), f"{daemon} was ready")
        if child.returncode is not None:
            raise ClusterError(f"{daemon} ended with exit code {child.returncode}\n{self._log_tails()}")

    def _succeeds(self, *argv: str) -> bool:
        """Whether a command that asks a daemon gets its answer; its last refusal is kept among the logs."""
        with open(self._settings.output(f"asking-{argv[0]}"), "wb") as output:
            environment = {"PATH": PATH, **self.env}
            asked = subprocess.run(argv, env=environment, stdout=subprocess.DEVNULL, stderr=output, timeout=120)
        return asked.returncode == 0

    def _is_usable(self, node: str) -> bool:
        return self._node(node)["State"] in ("IDLE", "MIXED", "ALLOCATED")  # IDLE* and IDLE+... are not

    def _node(self, name: str) -> dict[str, str]:
        """What slurmctld knows about a node; only a State, UNKNOWN, while slurmctld does not answer."""
        shown = self.run("scontrol", "--oneliner", "show", "node", name, check=False)
        return {"State": "UNKNOWN", **dict(re.findall(r"(\w+)=(\S+)", shown))}

    def _log_tails(self, lines: int = 15) -> str:
        """The last lines of each log that says something."""
        tails = []
        for path in sorted((self.folder / "log").iterdir()):
            text = path.read_text(errors="replace").splitlines()[-lines:]
            repeated = path.suffix == ".out" and path.with_suffix(".log").exists()
            if text and not repeated:
                tails.append("\n".join([f"--- {path}", *text]))
        return "\n".join(tails)


def _settle(folder: Path, accounting: bool, max_array_size: int, with_cgroups: bool) -> tuple[Settings, str]:
    """Take `folder` for a new cluster: its names, ports and cgroups, and the text of cgroup.conf."""
    if config.state_file(folder).exists():
        raise ClusterError(f"{folder} holds a cluster already: stop it with `python -m tests.cluster stop {folder}`")
    if re.search(r"[^\w./-]", str(folder)):
        raise ClusterError(f"{folder}: Slurm's files cannot hold such a path; use letters, digits, '_', '-', '.'")
    folder.mkdir(parents=True, exist_ok=True)
    daemons = ("slurmctld", "slurmdbd", *NODES)
    ports = dict(zip(daemons, config.free_ports(len(daemons)), strict=True))
    version = _slurm_version()
    # /tmp, not TMPDIR: short, and a place that others may enter and where scripts can be executed (/run: noexec).
    private = Path(tempfile.mkdtemp(prefix="slurm-test-", dir="/tmp"))
    private.chmod(0o711)
    found = cgroups.Cgroups(0, why_not="no memory limits: this cluster is without cgroups, as it was asked to be")
    if with_cgroups:
        found = cgroups.prepare(private.name, private / "cgroup", NODES, version)
    settings = Settings(
        folder=str(folder),
        private=str(private),
        accounting=accounting,
        max_array_size=max_array_size,
        cgroup_version=found.version,
        cgroup_note=found.why_not,
        ports=ports,
    )
    settings.save()
    return settings, found.conf


def _slurm_version() -> tuple[int, int]:
    output = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True, env={"PATH": PATH}).stdout
    major, minor = output.split()[1].split(".")[:2]  # "slurm-wlm 22.05.8"
    return int(major), int(minor)


def _known(name: str) -> str:
    if name not in NODES:
        raise ValueError(f"{name!r} is no node of the test cluster; there are {', '.join(NODES)}")
    return name
