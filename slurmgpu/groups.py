"""Several processes for one task: torchrun's launcher, and how its processes keep in step.

`python -m slurmgpu.groups RUN ASSIGNMENT` starts one worker for each GPU with PyTorch's elastic launcher, which is what
`torchrun` calls. The task sees one process: its pipes are rank 0's, and its exit code is that of the rank that failed
first. Nothing of it outlives it, or the task.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import MutableMapping, Sequence
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from slurmgpu.failures import describe_exit
from slurmgpu.logs import log_to_stderr
from slurmgpu.pipes import EXIT_ABANDONED, report_briefly, watch_stdin

log = logging.getLogger(__name__)

LAUNCHER = "SLURMGPU_LAUNCHER"
"""Names, in the environment of a rank, the process that started it."""
PEER_PATIENCE_S = 60.0
"""How long a rank whose call failed waits for the others, which may wait for it in a collective, for good."""
PARTING_PATIENCE_S = 600.0
"""The same of a rank that has left its item for later: others may be busy with keeping their progress."""
ALL_CAME = "all"
FOREVER = timedelta(days=365)
MEETING_S = 120
"""How long the launchers of a task's nodes wait for each other."""
DEATH_S = 5.0
"""How long to wait for killed processes: one that waits for a disk or a GPU may not die at all."""
DEAF_TO = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that a launcher blocks: it ends when its task says so, or its ranks have ended. Ranks unblock them."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


class PeersMissingError(Exception):
    """Some ranks did not come in time; `rank` waited for them, and `value` is what it brought."""

    def __init__(self, rank: int, value: Any, patience_s: float) -> None:
        super().__init__(f"other ranks did not come within {patience_s:g} s")
        self.rank = rank
        self.value = value


@dataclasses.dataclass
class Group:
    """A process among those that compute together; alone, as by default, it waits for nobody.

    `address` is that of the TCPStore by which they speak, the same that `torch.distributed` finds in the environment.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: tuple[str, int] = ("", 0)
    _turn: int = 0

    @classmethod
    def of_environment(cls, environ: MutableMapping[str, str] = os.environ) -> Group:
        """The group that `main` has put this process into, with which the process then ends; else a group of one."""
        launcher = environ.pop(LAUNCHER, None)
        if launcher is None:
            return cls()  # RANK and its like may be somebody else's
        _die_with(int(launcher))
        address = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        return cls(int(environ["RANK"]), int(environ["WORLD_SIZE"]), int(environ["LOCAL_RANK"]), address)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone claims, reports and publishes."""
        return self.rank == 0

    def gather(self, value: Any = None, patience_s: float | None = None) -> list[Any]:
        """The values of all ranks, each at its place, when all have come here; values are JSON's.

        After `patience_s` without some of them PeersMissingError is raised, here and on those that come later.
        """
        if self.world_size == 1:
            return [value]
        from torch.distributed import DistNetworkError

        turn, self._turn = self._turn, self._turn + 1
        try:
            values = self._exchange(turn, value, patience_s)
            if turn:
                # Who has come to this turn has read the last one.
                self._store.delete_key(f"{turn - 1}/{self.rank}")
        except DistNetworkError as error:
            # The launcher is dead, and with it the group. That is no news for the task, which sees it, too.
            log.error("the group's store is gone: %s", error)
            os._exit(EXIT_ABANDONED)
        return values

    def _exchange(self, turn: int, value: Any, patience_s: float | None) -> list[Any]:
        from torch.distributed import DistStoreError

        keys = [f"{turn}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], json.dumps([value, patience_s]))
        word = ALL_CAME
        try:
            self._store.wait(keys, FOREVER if patience_s is None else timedelta(seconds=patience_s))
        except DistStoreError:
            word = self._first_word(turn, str(self.rank))
        if word == ALL_CAME:
            said = [json.loads(text) for text in self._store.multi_get(keys)]
            # Where nobody was impatient, nobody can have left.
            if all(patience is None for _, patience in said) or (word := self._first_word(turn, word)) == ALL_CAME:
                return [value for value, _ in said]
        [value, patience_s] = json.loads(self._store.get(keys[int(word)]))
        raise PeersMissingError(int(word), value, patience_s)

    def _first_word(self, turn: int, word: str) -> str:
        """What was said first of how this turn ended: that all came, or the rank that left."""
        said: bytes = self._store.compare_set(f"{turn}/end", "", word)
        return said.decode()

    def broadcast(self, value: Any = None) -> Any:
        """The value of rank 0."""
        return self.gather(value)[0]

    def leave(self) -> None:
        """End what the workload began with `torch.distributed`: NCCL complains of a process that ends without."""
        distributed = sys.modules.get("torch.distributed")
        if self.world_size > 1 and distributed is not None and distributed.is_initialized():
            distributed.destroy_process_group()

    @cached_property
    def _store(self) -> Any:
        from torch.distributed import PrefixStore, TCPStore

        host, port = self.address
        # Not counted among the workers that init_process_group() waits for, and with keys of its own.
        return PrefixStore("slurmgpu", TCPStore(host, port, is_master=False, wait_for_workers=False))


def main(argv: Sequence[str] | None = None) -> int:
    """The launcher's process: exits as the rank that failed first, with 128 and the signal's number for a signal."""
    parser = argparse.ArgumentParser(prog="python -m slurmgpu.groups")
    parser.add_argument("run")
    parser.add_argument("assignment")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int)
    parser.add_argument("--group", default=uuid.uuid4().hex, help="the group's name, the same on all nodes")
    parser.add_argument("--endpoint", help="where rank 0 listens, seen from this node")
    arguments = parser.parse_args(argv)
    log_to_stderr()
    n_ranks = max(1, json.loads(arguments.assignment)["n_gpus"])
    _prepare_environment(n_ranks)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    watch_stdin(_abandon)
    try:
        return _launch(n_ranks, arguments)
    except ImportError as error:
        message = f'processes = "per-gpu" needs PyTorch in the Python of the worker, {sys.executable}: {error}'
        report_briefly({"event": "failed", "class": "workload_error", "message": message, "traceback": ""})
        return 1
    finally:
        _end_children()


def _launch(n_ranks: int, arguments: argparse.Namespace) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # When a rank has failed, the others may wait for it, and not die of SIGTERM: PyTorch would wait for them for 30 s.
    api._get_default_signal = lambda: signal.SIGKILL

    class Logs(DefaultLogsSpecs):  # type: ignore[misc]
        """No files and nobody who reads them: the ranks have the launcher's streams."""

        def reify(self, envs: Any) -> Any:
            return dataclasses.replace(super().reify(envs), tee_stdouts={}, tee_stderrs={})

    place: dict[str, Any]
    if arguments.nodes > 1:
        # Only this way ranks are in the order of the nodes.
        rank = {"rank": arguments.node_rank, "timeout": MEETING_S}
        place = {"rdzv_backend": "static", "rdzv_endpoint": arguments.endpoint, "rdzv_configs": rank}
    else:
        # A port that the system chooses, as `torchrun --standalone` does: tasks that share a node never collide.
        place = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
    config = LaunchConfig(
        min_nodes=arguments.nodes,
        max_nodes=arguments.nodes,
        nproc_per_node=n_ranks,
        run_id=arguments.group,
        role="worker",
        max_restarts=0,
        logs_specs=Logs(log_dir=os.devnull),
        **place,
    )
    words = ["-m", "slurmgpu.worker", arguments.run, arguments.assignment]
    try:
        # PyTorch fills in ${local_rank} in arguments; a path with a dollar shall stay as it is.
        elastic_launch(config, sys.executable)(*[word.replace("$", "$$") for word in words])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        log.error("rank %d %s", rank, describe_exit(failure.exitcode))
        code = int(failure.exitcode)
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _prepare_environment(n_ranks: int) -> None:
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // n_ranks)))
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "0"  # the ranks speak by the launcher's store
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")  # less than the task's own grace
    # Slurm's signals are the task's affair. What is ignored here, ranks ignore, too.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    # Blocked, for PyTorch sets handlers of its own, which end the ranks before they have kept their progress.
    signal.pthread_sigmask(signal.SIG_BLOCK, DEAF_TO)


def _abandon() -> None:
    _end_children()
    os._exit(EXIT_ABANDONED)


def _end_children() -> None:
    """Kill the ranks, and what they left: their children became this process's when they died."""
    deadline = time.monotonic() + DEATH_S
    while (children := _children(os.getpid())) and time.monotonic() < deadline:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # reaped by another thread
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)


def _children(parent: int) -> list[int]:
    """Child processes, also those that have ended and wait to be reaped: proc(5)."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):  # it has just ended
                fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[1]) == parent:
                    found.append(int(name))
    return found


def _die_with(launcher: int) -> None:
    """Have the kernel kill this process when the launcher dies, also by SIGKILL; torchrun gives each rank a session."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(EXIT_ABANDONED)  # it died before the kernel was told


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


if __name__ == "__main__":
    sys.exit(main())
