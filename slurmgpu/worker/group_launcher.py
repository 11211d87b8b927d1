"""The launcher of a task's group of processes: one worker for each GPU of a node, with torchrun's environment.

`python -m slurmgpu.worker.group_launcher RUN ASSIGNMENT`. The task sees one process, with the pipes of rank 0 and the
exit code of the rank that failed first. No rank survives the launcher or the task.

Ranks are forks of the launcher: a node imports PyTorch once for all of them, and they share the memory of what is
imported. The import opens no GPU and starts no thread of PyTorch's.

This is not PyTorch's elastic launcher, whose rendezvous listens on all addresses and unpickles what anybody sends.
The TCPStore of the ranks listens on the loopback address; `tunnels` carries connections from other nodes of the task.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import runpy
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slurmgpu.run.failures import describe_exit
from slurmgpu.util.forks import fork
from slurmgpu.util.logging import log_to_stderr
from slurmgpu.util.pipes import EXIT_ABANDONED, report_briefly, watch_stdin
from slurmgpu.util.prctl import PR_SET_CHILD_SUBREAPER, PR_SET_NAME, prctl
from slurmgpu.util.process_tree import children_of
from slurmgpu.util.process_wide import environment
from slurmgpu.worker.groups import BLOCKED_SIGNALS, GROUP_SECRET, LAUNCHER
from slurmgpu.worker.tunnels import Entrance, Exit

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""The environment variable that makes PyTorch import back ends of other packages, if it is unset or "1"."""
DEATH_S = 5.0
"""How long to wait for killed processes, in seconds: one that is blocked on a disk or a GPU may not end at all."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher; the exit code of the rank that failed first, 128 + N for signal N."""
    parser = argparse.ArgumentParser(prog="python -m slurmgpu.worker.group_launcher")
    parser.add_argument("run")
    parser.add_argument("assignment")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--group", default="alone", help="the group's name, the same on all nodes")
    parser.add_argument("--endpoint", help="where rank 0's launcher listens, seen from this node")
    arguments = parser.parse_args(argv)
    log_to_stderr()
    n_ranks = max(1, json.loads(arguments.assignment)["n_gpus"])
    _prepare_environment(n_ranks, arguments.nodes)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    watch_stdin(_abandon)
    try:
        _import_torch()
    except ImportError as error:
        message = f'processes = "per-gpu" needs PyTorch in the Python of the worker, {sys.executable}: {error}'
        report_briefly({"event": "failed", "class": "workload_error", "message": message, "traceback": ""})
        return 1
    ranks: list[_Rank] = []
    for local_rank in range(n_ranks):  # before sockets are opened, which the ranks would inherit
        if (rank := _fork(ranks)) is None:
            _work(local_rank, n_ranks, arguments)
            return 0
        ranks.append(rank)
    try:
        return _launch(ranks, arguments)
    finally:
        _end_children()


@dataclass
class _Rank:
    """A fork that waits for the port of the group's store: the launcher's end of its pipe."""

    pid: int
    told: int


def _launch(ranks: Sequence[_Rank], arguments: argparse.Namespace) -> int:
    from torch.distributed import TCPStore

    secret = os.environ[GROUP_SECRET]
    host, _, port = (arguments.endpoint or "").rpartition(":")
    if arguments.node_rank > 0:
        # On all nodes, ranks find the store at the same loopback address.
        place = Entrance(LOOPBACK, host.strip("[]"), int(port), secret).port
    else:
        # Given a socket, since it would listen on all addresses. Nodes are shared, so the system chooses the port.
        listener = socket.create_server((LOOPBACK, 0))
        place = listener.getsockname()[1]
        store = TCPStore(LOOPBACK, place, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        log.debug("the group meets at port %d", store.port)
        if arguments.nodes > 1:
            Exit(LOOPBACK, place, int(port), secret)
    for each in ranks:
        with contextlib.suppress(BrokenPipeError):  # it has died; its exit code is read below
            os.write(each.told, str(place).encode())
        os.close(each.told)
    first = arguments.node_rank * len(ranks)
    for rank, code in _ends({each.pid: first + local_rank for local_rank, each in enumerate(ranks)}):
        if code:
            log.error("rank %d %s", rank, describe_exit(code))
            return code if code > 0 else 128 - code
    return 0


def _fork(others: Sequence[_Rank]) -> _Rank | None:
    """Start a rank in its own session; return None in the rank itself, once the launcher has sent it the port."""
    ours, told = os.pipe()
    if pid := fork():
        os.close(ours)
        return _Rank(pid, told)
    os.setsid()
    for each in others:
        os.close(each.told)
    os.close(told)
    os.environ["MASTER_PORT"] = os.read(ours, 16).decode()
    os.close(ours)
    if not os.environ["MASTER_PORT"]:
        os._exit(EXIT_ABANDONED)  # the launcher died
    return None


def _work(local_rank: int, n_ranks: int, arguments: argparse.Namespace) -> None:
    """Be the worker of this rank, in a fork of the launcher, as if `python -m` had started it."""
    rank, world_size = arguments.node_rank * n_ranks + local_rank, arguments.nodes * n_ranks
    told = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": n_ranks,
        "GROUP_RANK": arguments.node_rank,
        "GROUP_WORLD_SIZE": arguments.nodes,
        "ROLE_NAME": "worker",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": LOOPBACK,
        "TORCHELASTIC_RUN_ID": arguments.group,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # otherwise rank 0 opens a store on all addresses
    }
    os.environ.update({name: str(value) for name, value in told.items()})
    prctl(PR_SET_NAME, f"rank {rank}".encode())
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # as in a process of its own; Python's random does so by itself, PyTorch's seed is fixed
    _load_back_ends()
    sys.argv = ["slurmgpu.worker.main", arguments.run, arguments.assignment]
    runpy.run_module("slurmgpu.worker.main", run_name="__main__", alter_sys=True)


def _import_torch() -> None:
    """Import PyTorch without the back ends of other packages, which may open their devices: each rank does that."""
    gc.disable()  # what is imported stays, and `fork` leaves it out of later collections
    try:
        with environment({AUTOLOAD: "0"}):
            import torch.distributed  # noqa: F401
    finally:
        gc.enable()


def _load_back_ends() -> None:
    load = getattr(sys.modules["torch"], "_import_device_backends", None)
    if load is not None and os.environ.get(AUTOLOAD, "1") == "1":
        load()


def _ends(started: dict[int, int]) -> Iterator[tuple[int, int]]:
    """The ranks in the order of their ends, with exit codes, -N for signal N. Reaps orphans as well."""
    while started:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:  # the task is gone, and the thread that noticed that has ended the ranks
            os._exit(EXIT_ABANDONED)
        if pid in started:
            yield started.pop(pid), os.waitstatus_to_exitcode(status)


def _prepare_environment(n_ranks: int, n_nodes: int) -> None:
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.setdefault(GROUP_SECRET, secrets.token_hex(32))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // n_ranks)))
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun does
    if n_nodes == 1:
        # By default they listen on the node's network addresses.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
    # The task handles Slurm's signals. Ranks inherit that this one is ignored.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    # Blocked: the launcher ends after its ranks, which may have progress to save.
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)


def _abandon() -> None:
    _end_children()
    os._exit(EXIT_ABANDONED)


def _end_children() -> None:
    """Kill the ranks and their children, which this process adopted when the ranks died."""
    deadline = time.monotonic() + DEATH_S
    while (children := children_of(os.getpid())) and time.monotonic() < deadline:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # reaped by another thread
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)


if __name__ == "__main__":
    sys.exit(main())
