"""The other nodes of a task with several nodes, and the group of processes on all of them.

Slurm starts one process on each node. The one on the first node is the task, with its record, its claims and rank 0,
and leads; the others follow: see `node_agent`. If a process dies on any node, the group ends on all nodes, and the task
starts a new one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from slurmgpu.run.directory import Run
from slurmgpu.run.records import Attempt
from slurmgpu.run.rendezvous import Line, Rendezvous, own_hosts
from slurmgpu.run.worker_events import WorkerEvent
from slurmgpu.task.launcher import Launcher
from slurmgpu.task.worker_process import Events, StoppedError, StopSignals, WorkerProcess, start_program
from slurmgpu.util.sockets import free_port
from slurmgpu.worker.assignment import Assignment
from slurmgpu.worker.groups import GROUP_SECRET

log = logging.getLogger(__name__)

MEETING_S = 120.0
"""How long a node may take to start its process and find the leader."""
FAREWELL_S = 10.0
"""How long a task that ends early waits for followers to connect, so that they do not wait for it."""


class NodeFaultError(Exception):
    """Another node of the task cannot go on; `kind` is the failure class, `node` the node at fault, if any."""

    def __init__(self, kind: str, message: str, node: str | None) -> None:
        super().__init__(message)
        self.kind = kind
        self.node = node


def node_rank() -> int:
    """The rank of this node among those of its task, set by srun."""
    return int(os.environ.get("SLURM_PROCID", "0"))


def rendezvous_path(run: Run, attempt: Attempt) -> Path:
    """The file in which the followers of an attempt read how to find their leader."""
    return run.tasks / f".{attempt.name}.group"


def group_command(
    launcher: Launcher, assignment: Mapping[str, Any], rank: int, group: Mapping[str, Any], host: str
) -> tuple[list[str], dict[str, str]]:
    """The launcher of a group's processes on the node of this rank, and its environment."""
    address = f"[{host}]" if ":" in host else host
    place = ["--nodes", str(launcher.attempt.n_nodes), "--node-rank", str(rank), "--group", group["name"]]
    words = [str(launcher.run.folder), json.dumps(assignment), *place, "--endpoint", f"{address}:{group['port']}"]
    # The secret is not an argument, because every user of the node can see arguments.
    return launcher.command("slurmgpu.worker.group_launcher", *words, environ={GROUP_SECRET: group["secret"]})


@dataclass
class _Follower:
    node: str
    line: Line
    is_prepared: bool = False


@dataclass
class OtherNodes:
    """The other nodes of a task, for its leader; there may be none."""

    run: Run
    attempt: Attempt
    signals: StopSignals
    fault: NodeFaultError | None = None
    _followers: dict[int, _Follower] = field(default_factory=dict)
    _meeting: Rendezvous | None = None
    _worker: GroupProcess | None = None
    _n_groups: int = 0
    _is_stopped: bool = False

    def __enter__(self) -> OtherNodes:
        if self.attempt.n_nodes > 1:
            self._meeting = Rendezvous(rendezvous_path(self.run, self.attempt), own_hosts(), self._serve)
        return self

    def meet(self) -> None:
        """Wait until all have connected; NodeFaultError names one that has not."""
        deadline = time.monotonic() + MEETING_S
        while missing := self._missing():
            self.check()
            if time.monotonic() > deadline:
                node = self.attempt.nodes[missing[0]] if self.attempt.nodes else None
                which = node or f"the task's node number {missing[0]}"
                message = f"{which} did not start its process, or could not reach {' or '.join(own_hosts())}"
                self.fault = NodeFaultError("node_fail", f"{message} within {MEETING_S:.0f} s", node)
                raise self.fault
            self._pause()

    def start(self, launcher: Launcher, assignment: Assignment, log_path: Path) -> WorkerProcess:
        """Start the worker; on several nodes its part here, while the others start theirs."""
        if self._meeting is None:
            return WorkerProcess(start_program(*launcher.worker(assignment), log_path), self.signals.events)
        while not all(follower.is_prepared for follower in self._followers.values()):
            self.check()
            self._pause()
        self.check()
        self._n_groups += 1
        name = f"{self.attempt.name}-{self._n_groups}"
        group = {"name": name, "port": free_port(), "secret": secrets.token_hex(32)}
        command, env = group_command(launcher, asdict(assignment), 0, group, "localhost")
        # Start this part first: from now on the end of another node or of its part ends this part.
        self._worker = GroupProcess(self, name, command, env, log_path, self.signals.events)
        self.tell({"do": "start", "assignment": asdict(assignment), "group": group})
        if self.fault is not None:  # it came after the check above, but before there was a part to end
            self._worker.end()
        return self._worker

    def check(self) -> None:
        """Raise the fault of another node, if there is one."""
        if self.fault is not None:
            raise self.fault

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message to all."""
        for follower in list(self._followers.values()):
            follower.line.tell(message)

    def __exit__(self, *exc_info: object) -> None:
        if self._meeting is None:
            return
        deadline = time.monotonic() + FAREWELL_S
        with contextlib.suppress(StoppedError):
            while self._missing() and self.fault is None and not self._is_stopped and time.monotonic() < deadline:
                self._pause()
        meeting, self._meeting = self._meeting, None
        meeting.close()
        self.tell({"do": "end"})
        for follower in list(self._followers.values()):
            follower.line.close()

    def _pause(self) -> None:
        try:
            self.signals.pause(0.05)
        except StoppedError:
            self._is_stopped = True  # and so are nodes that have not connected yet
            raise

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self.attempt.n_nodes) if rank not in self._followers]

    def _serve(self, line: Line, hello: Mapping[str, Any]) -> None:
        """Handle a follower's messages until it is gone, in a thread of its own."""
        follower = _Follower(hello["node"], line)
        self._followers[hello["rank"]] = follower
        while (message := line.hear()) is not None:
            if "group" in message:
                self._handle(follower, message)
            elif message["problem"] is None:
                follower.is_prepared = True
            else:
                self._give_up(NodeFaultError(**message["problem"]))
        if self._meeting is not None:
            text = f"{follower.node}: its process died or stopped answering"
            self._give_up(NodeFaultError("node_fail", text, follower.node))

    def _handle(self, follower: _Follower, message: Mapping[str, Any]) -> None:
        worker = self._worker
        if worker is None or worker.group != message["group"]:
            return
        if "event" in message:
            told = {**message, "node": follower.node, "message": f"{follower.node}: {message['message']}"}
            self.signals.events.put(cast(WorkerEvent, told))
        elif message["exited"] != 0:
            log.error("on %s the group's processes ended with code %d", follower.node, message["exited"])
            worker.end_as(message["exited"], message["since_kill_s"])

    def _give_up(self, fault: NodeFaultError) -> None:
        self.fault = self.fault or fault
        if self._worker is not None:
            self._worker.end()


class GroupProcess(WorkerProcess):
    """The part of a group on this node; it ends with the parts on other nodes."""

    def __init__(
        self, others: OtherNodes, group: str, command: list[str], env: dict[str, str], log_path: Path, events: Events
    ) -> None:
        self.group = group
        self._others = others
        self._first_exit: int | None = None
        super().__init__(start_program(command, env, log_path), events)

    def end_as(self, code: int, since_kill_s: float) -> None:
        """End it because the part on another node has ended, unless it has already ended."""
        if self._process.poll() is None:
            self._first_exit, self.since_kill_s = code, since_kill_s
            self.end()

    def wait(self) -> int:
        """The exit code of the part that ended first; NodeFaultError if a node is lost."""
        code = super().wait()
        if code:
            self._others.check()
        return code if self._first_exit is None else self._first_exit

    def __exit__(self, *exc_info: object) -> None:
        self._others.tell({"do": "stop", "group": self.group})
        super().__exit__(*exc_info)
