"""Several processes for one task: the launcher that starts them, and their synchronisation.

`python -m slurmgpu.worker.groups RUN ASSIGNMENT` starts one worker per GPU with torchrun's environment. The task sees
one process: its pipes are those of rank 0, its exit code is that of the rank that failed first. No rank survives the
launcher or the task.

Ranks are forks of the launcher: a node imports PyTorch once for all of them, and they share the memory of what is
imported. The import opens no GPU and starts no thread of PyTorch's.

This is not PyTorch's elastic launcher, whose rendezvous listens on all addresses and unpickles what anybody sends.
The TCPStore of the ranks listens on the loopback address; `tunnels` carries connections from other nodes of the task.
The store and gloo do not authenticate, and other users of the node reach them. So everything that controls the ranks
is signed, including what `torch.distributed` pickles.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import hmac
import io
import json
import logging
import os
import pickle
import runpy
import secrets
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from slurmgpu.run.failures import describe_exit
from slurmgpu.util.logging import log_to_stderr
from slurmgpu.util.pipes import EXIT_ABANDONED, report_briefly, watch_stdin
from slurmgpu.worker.tunnels import Entrance, Exit

log = logging.getLogger(__name__)

LAUNCHER = "SLURMGPU_LAUNCHER"
"""Environment variable of a rank: the process ID of its launcher."""
GROUP_SECRET = "SLURMGPU_GROUP_SECRET"
"""Environment variable of a launcher and its ranks: the secret of their group."""
PEER_PATIENCE_S = 60.0
"""How long a failed rank waits for the others, which may wait for it in a collective forever."""
PARTING_PATIENCE_S = 600.0
"""The same for a rank that left its item for later: others may still be saving progress."""
ALL_CAME = "all"
FOREVER = timedelta(days=365)
SIGNATURE_BYTES = 32
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
DEATH_S = 5.0
"""How long to wait for killed processes: one blocked on a disk or a GPU may not die at all."""
BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that a launcher blocks: it ends with its ranks or when the task says so. Ranks unblock them."""
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h


class PeersMissingError(Exception):
    """Some ranks did not arrive in time; `rank` waited for them with `value`."""

    def __init__(self, rank: int, value: Any, patience_s: float) -> None:
        super().__init__(f"other ranks did not come within {patience_s:g} s")
        self.rank = rank
        self.value = value


@dataclass
class Group:
    """A rank's place in its group; the default is a group of one, which never waits.

    `address` is that of the TCPStore, which `torch.distributed` finds in the environment as well.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: tuple[str, int] = ("", 0)
    secret: str = field(default="", repr=False)
    _turn: int = 0

    @classmethod
    def of_environment(cls, environ: MutableMapping[str, str] = os.environ) -> Group:
        """The group that the launcher made, else a group of one. The process dies with its launcher."""
        launcher, secret = environ.pop(LAUNCHER, None), environ.pop(GROUP_SECRET, "")
        if launcher is None:
            return cls()  # RANK etc. may have another meaning here
        _die_with(int(launcher))
        address = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        return cls(int(environ["RANK"]), int(environ["WORLD_SIZE"]), int(environ["LOCAL_RANK"]), address, secret)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone claims, reports and publishes."""
        return self.rank == 0

    def gather(self, value: Any = None, patience_s: float | None = None) -> list[Any]:
        """The JSON values of all ranks, in rank order, when all have called this.

        If some ranks do not arrive within `patience_s`, all others raise PeersMissingError, also those that come later.
        """
        if self.world_size == 1:
            return [value]
        from torch.distributed import DistNetworkError

        turn, self._turn = self._turn, self._turn + 1
        try:
            values = self._exchange(turn, value, patience_s)
            if turn:
                # All ranks that reached this turn have read the previous one.
                self._store.delete_key(f"{turn - 1}/{self.rank}")
        except DistNetworkError as error:
            # The launcher is dead, and so is the group. The task notices that itself.
            log.error("the group's store is gone: %s", error)
            os._exit(EXIT_ABANDONED)
        return values

    def _exchange(self, turn: int, value: Any, patience_s: float | None) -> list[Any]:
        from torch.distributed import DistStoreError

        keys = [f"{turn}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], self._signed(keys[self.rank], [value, patience_s]))
        word = ALL_CAME
        try:
            self._store.wait(keys, FOREVER if patience_s is None else timedelta(seconds=patience_s))
        except DistStoreError:
            word = self._first_ending(turn, str(self.rank))
        if word == ALL_CAME:
            said = list(map(self._read, keys, self._store.multi_get(keys)))
            # Without a limit, no rank can have left.
            if all(patience is None for _, patience in said) or (word := self._first_ending(turn, word)) == ALL_CAME:
                return [value for value, _ in said]
        key = keys[int(word)]
        [value, patience_s] = self._read(key, self._store.get(key))
        raise PeersMissingError(int(word), value, patience_s)

    def _first_ending(self, turn: int, word: str) -> str:
        """How this turn ended, as written first: all came, or the rank that left."""
        key = f"{turn}/end"
        return str(self._read(key, self._store.compare_set(key, "", self._signed(key, word))))

    def _signed(self, key: str, value: Any) -> str:
        text = json.dumps(value)
        return f"{sign(self.secret, key, text.encode()).hex()} {text}"

    def _read(self, key: str, said: bytes) -> Any:
        """The value under a key; exits on a wrong signature: another user of the node wrote it."""
        signature, _, text = said.partition(b" ")
        if not hmac.compare_digest(signature, sign(self.secret, key, text).hex().encode()):
            log.error("the group's store has a value with a wrong signature; another user of this node wrote it")
            os._exit(EXIT_ABANDONED)
        return json.loads(text)

    def guard(self) -> None:
        """Make `torch.distributed` refuse to unpickle what no rank of this group has pickled."""
        if self.world_size == 1:
            return
        from torch.distributed import distributed_c10d

        # They are private, but every collective of objects uses them in torch 2.5 to 2.13.
        if not (hasattr(distributed_c10d, "_pickler") and hasattr(distributed_c10d, "_unpickler")):
            log.warning("objects sent by collectives of this torch version are not verified: it pickles differently")
        distributed_c10d._pickler = functools.partial(SigningPickler, self.secret)
        distributed_c10d._unpickler = functools.partial(SigningUnpickler, self.secret)

    def broadcast(self, value: Any = None) -> Any:
        """The value of rank 0."""
        return self.gather(value)[0]

    def leave(self) -> None:
        """Destroy the workload's process group: NCCL complains if a process ends without."""
        distributed = sys.modules.get("torch.distributed")
        if self.world_size > 1 and distributed is not None and distributed.is_initialized():
            distributed.destroy_process_group()

    @cached_property
    def _store(self) -> Any:
        from torch.distributed import PrefixStore, TCPStore

        host, port = self.address
        # Not counted by init_process_group(), and with a key prefix of its own.
        return PrefixStore("slurmgpu", TCPStore(host, port, is_master=False, wait_for_workers=False))


def sign(secret: str, place: str, content: bytes) -> bytes:
    """The signature of `content` for this place."""
    return hmac.digest(secret.encode(), place.encode() + b"\0" + content, "sha256")


class SigningPickler:
    """Writes a pickle after its signature."""

    def __init__(self, secret: str, file: Any) -> None:
        self._secret, self._file = secret, file

    def dump(self, value: Any) -> None:
        """Write the signature and the pickle of `value`."""
        content = pickle.dumps(value)
        self._file.write(sign(self._secret, "pickle", content) + content)


class SigningUnpickler:
    """Reads only what a SigningPickler wrote with the same secret."""

    def __init__(self, secret: str, file: io.BytesIO) -> None:
        self._secret, self._file = secret, file

    def load(self) -> Any:
        """The value; RuntimeError before unpickling if the signature is wrong."""
        content = self._file.read()
        signature, content = content[:SIGNATURE_BYTES], content[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, sign(self._secret, "pickle", content)):
            raise RuntimeError("a collective of torch.distributed got an object that no rank of this group has sent")
        return pickle.loads(content)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher; the exit code of the rank that failed first, 128 + N for signal N."""
    parser = argparse.ArgumentParser(prog="python -m slurmgpu.worker.groups")
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
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        import torch.distributed  # noqa: F401
    except ImportError as error:
        message = f'processes = "per-gpu" needs PyTorch in the Python of the worker, {sys.executable}: {error}'
        report_briefly({"event": "failed", "class": "workload_error", "message": message, "traceback": ""})
        return 1
    gc.freeze()  # no collection writes to pages that the ranks share
    ranks: list[_Rank] = []
    for local_rank in range(n_ranks):  # before there is any thread or socket that they would have as well
        if (rank := _fork(ranks)) is None:
            _work(local_rank, n_ranks, arguments)
            return 0
        ranks.append(rank)
    watch_stdin(_abandon)
    try:
        return _launch(ranks, arguments)
    finally:
        _end_children()


@dataclass
class _Rank:
    """A fork that waits for the port of the group's store: the end of its pipe that the launcher has."""

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
        os.write(each.told, str(place).encode())
        os.close(each.told)
    first = arguments.node_rank * len(ranks)
    for rank, code in _ends({each.pid: first + local_rank for local_rank, each in enumerate(ranks)}):
        if code:
            log.error("rank %d %s", rank, describe_exit(code))
            return code if code > 0 else 128 - code
    return 0


def _fork(others: Sequence[_Rank]) -> _Rank | None:
    """Start a rank in its own session; None in the rank itself, once the launcher has told it the port."""
    ours, told = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of OpenBLAS, which prepares for forks
        pid = os.fork()
    if pid:
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
    _prctl(PR_SET_NAME, f"rank {rank}".encode())
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # as in a process of its own; Python's random does so by itself, PyTorch's seed is fixed
    sys.argv = ["slurmgpu.worker.main", arguments.run, arguments.assignment]
    runpy.run_module("slurmgpu.worker.main", run_name="__main__", alter_sys=True)


def _ends(started: dict[int, int]) -> Iterator[tuple[int, int]]:
    """The ranks in the order of their ends, with exit codes, -N for signal N. Reaps orphans as well."""
    while started:
        pid, status = os.waitpid(-1, 0)
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
    while (children := _children(os.getpid())) and time.monotonic() < deadline:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # reaped by another thread
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)


def _children(parent: int) -> list[int]:
    """Child processes, including zombies: proc(5)."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):  # it has just ended
                fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[1]) == parent:
                    found.append(int(name))
    return found


def _die_with(launcher: int) -> None:
    """Have the kernel kill this process when the launcher dies, even by SIGKILL."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(EXIT_ABANDONED)  # it died before the prctl call


def _prctl(option: int, value: int | bytes) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value!r})")


if __name__ == "__main__":
    sys.exit(main())
