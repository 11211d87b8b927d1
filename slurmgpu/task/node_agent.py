"""A follower: a further node of a task, which starts and ends its part of the group as the leader says.

It has no record and no claims, and decides nothing. It ends when its leader is gone.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmgpu.containers.settings import ContainerError
from slurmgpu.errors import GPUFaultError, SlurmGPUError
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import FILES, POLICIES, class_of
from slurmgpu.run.records import Attempt
from slurmgpu.run.rendezvous import Line, join_rendezvous
from slurmgpu.task.launcher import Launcher
from slurmgpu.task.nodes import MEETING_S, group_command, rendezvous_path
from slurmgpu.task.telemetry import sampler_of
from slurmgpu.task.worker_process import (
    EXIT_STOPPED,
    GRACE_S,
    PARTING_S,
    TICK,
    StoppedError,
    StopSignals,
    TaskEvent,
    WorkerProcess,
    next_event,
    start_program,
)
from slurmgpu.util import cgroups, gpus

log = logging.getLogger(__name__)

LOOK_S = 0.2


def follow(run: Run, attempt: Attempt, rank: int, node: str) -> int:
    """Follow the leader on the node of this rank until the task has ended; return the exit code."""
    with StopSignals() as signals:
        try:
            line = _find_leader(run, attempt, rank, node, signals)
        except StoppedError:
            return EXIT_STOPPED
        if line is None:
            log.error("the task's first node was not found within %.0f s", MEETING_S)
            return EXIT_STOPPED
        with contextlib.closing(line):
            return _Follower(run, attempt, rank, node, line, signals).obey()


def _find_leader(run: Run, attempt: Attempt, rank: int, node: str, signals: StopSignals) -> Line | None:
    deadline = time.monotonic() + MEETING_S
    while time.monotonic() < deadline:
        if line := join_rendezvous(rendezvous_path(run, attempt), {"rank": rank, "node": node}):
            return line
        signals.pause(LOOK_S)
    return None


class _Follower:
    def __init__(self, run: Run, attempt: Attempt, rank: int, node: str, line: Line, signals: StopSignals) -> None:
        self._attempt, self._rank, self._node = attempt, rank, node
        self._line, self._events = line, signals.events
        self._launcher = Launcher(run, attempt)
        self._log_path: Path = run.logs / f"{attempt.name}.node{rank}.log"
        self._worker: WorkerProcess | None = None
        self._sampler = sampler_of(run, attempt, lambda: self._worker.pid if self._worker else None, rank)
        self._group = ""
        self._heard = False
        self._kills = cgroups.KillWatch()
        self._end_by: float | None = None

    def obey(self) -> int:
        """Prepare, then do what the leader says; return the exit code."""
        threading.Thread(target=self._listen, daemon=True, name="the leader's words").start()
        self._line.tell({"problem": self._problem()})
        with contextlib.closing(self._launcher), self._sampler, contextlib.ExitStack() as stack:
            while True:
                event = next_event(self._events, 1.0 if self._end_by is None else LOOK_S) or TICK
                if self._end_by is not None and time.monotonic() > self._end_by:
                    log.warning("the leader has not answered a signal; this node ends")
                    return EXIT_STOPPED
                code = self._handle(event, stack)
                if code is not None:
                    return code

    def _handle(self, event: TaskEvent, stack: contextlib.ExitStack) -> int | None:
        """Handle one event; an exit code to end with."""
        self._kills.look()
        match event["event"]:
            case "tick":
                if self._worker is not None:
                    self._worker.reap()
            case "signal":
                if event["signum"] != signal.SIGUSR2:
                    # The leader gets the signal as well, and decides. Without an answer this node ends.
                    self._end_by = self._end_by or time.monotonic() + PARTING_S + 2 * GRACE_S
            case "leader":
                return self._follow_order(event["message"], stack)
            case "eof":
                if self._worker is not None and event["pid"] == self._worker.pid:
                    self._tell_end(self._worker.wait())
            case "failed" | "broken":
                self._heard = True
                self._line.tell({**event, "group": self._group})
            case _:
                self._heard = True
        return None

    def _follow_order(self, order: Mapping[str, Any] | None, stack: contextlib.ExitStack) -> int | None:
        if order is None:
            log.error("the leader is gone")
            return EXIT_STOPPED
        if order["do"] == "end":
            return 0
        if order["do"] == "start":
            try:
                self._start(order, stack)
            except (SlurmGPUError, OSError) as error:
                log.error("%s", error)
                self._line.tell({"problem": self._as_problem(error)})
        else:
            self._worker = None
            stack.close()
        return None

    def _start(self, order: Mapping[str, Any], stack: contextlib.ExitStack) -> None:
        command, env = group_command(self._launcher, order["assignment"], self._rank, order["group"], self._line.host)
        self._group, self._heard, self._kills = order["group"]["name"], False, cgroups.KillWatch()
        self._worker = stack.enter_context(WorkerProcess(start_program(command, env, self._log_path), self._events))

    def _tell_end(self, code: int) -> None:
        assert self._worker is not None
        if code and not self._heard and (complaint := self._launcher.explain(self._worker.said(), code)):
            self._line.tell({"problem": self._as_problem(complaint)})
        self._line.tell({"exited": code, "since_kill_s": self._kills.age_s, "group": self._group})

    def _problem(self) -> dict[str, Any] | None:
        """The faults that prevent this node from computing, before anything is started."""
        try:
            if self._attempt.uses_gpus:
                gpus.check_visible(self._attempt.n_gpus)
            self._launcher.prepare()
        except (GPUFaultError, ContainerError, OSError) as error:
            log.error("%s", error)
            return self._as_problem(error)
        return None

    def _as_problem(self, error: Exception) -> dict[str, Any]:
        kind = "gpu_fault" if isinstance(error, GPUFaultError) else class_of(error, FILES)
        if isinstance(error, ContainerError):
            kind, at_fault = error.kind, error.node_at_fault
        else:
            at_fault = POLICIES[kind].node_at_fault
        message = str(error) if POLICIES[kind].names_node else f"{self._node}: {error}"
        return {"kind": kind, "message": message, "node": self._node if at_fault else None}

    def _listen(self) -> None:
        while (message := self._line.hear()) is not None:
            self._events.put({"event": "leader", "message": message})
        self._events.put({"event": "leader", "message": None})
