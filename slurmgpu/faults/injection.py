"""Make faults happen: in the workload, in the same way as real ones, and in published shards."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from slurmgpu.faults import KINDS, Fault
from slurmgpu.loader.adapted import Adapted
from slurmgpu.run.directory import Run
from slurmgpu.run.worker_events import Report, WorkerEvent
from slurmgpu.shards.shard_file import read_directory
from slurmgpu.util.out_of_memory import OutOfMemoryError
from slurmgpu.util.shared_files import read_bytes
from slurmgpu.workload import Item, Row

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""Seconds that the worker of a preempted task waits to be stopped."""
TOO_MUCH_BYTES = 1 << 50
"""More memory than any GPU or machine has."""


class Mark(TypedDict):
    """When and in which attempt a fault struck, and the items of the call."""

    time: float
    attempt: str
    items: list[int]


@dataclass(frozen=True)
class Marks:
    """The record of each fault that struck: a file of JSON lines in injected/, in the run directory."""

    folder: Path
    attempt: str = ""

    @classmethod
    def of(cls, run: Run, attempt: str = "") -> Marks:
        """The marks of a run, made by `attempt`."""
        return cls(run.folder / "injected", attempt)

    def set(self, fault: Fault, items: Sequence[int] = ()) -> bool:
        """Record that a fault strikes; False, without a record, if it strikes only once and has struck already."""
        self.folder.mkdir(exist_ok=True)
        mark: Mark = {"time": time.time(), "attempt": self.attempt, "items": list(items)}
        line = json.dumps(mark) + "\n"
        once = os.O_EXCL if KINDS[fault.kind].once else 0
        try:
            fd = os.open(self.folder / str(fault), os.O_WRONLY | os.O_CREAT | os.O_APPEND | once, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(fd, "wb") as file:
            file.write(line.encode())
        return True

    def read(self, fault: Fault) -> list[Mark]:
        """The marks of a fault, one for each time that it struck."""
        try:
            return [json.loads(line) for line in read_bytes(self.folder / str(fault)).splitlines()]
        except FileNotFoundError:
            return []


@dataclass
class Injected:
    """A workload that computes rows, and fails as `faults` demand.

    Faults that end a process, or strike once, strike on rank 0 only, which `leads`. `report` sends events to the task,
    which sets `stopping`; `end_now` ends the walltime with the current shard, and returns that time.
    """

    workload: Adapted
    faults: Sequence[Fault]
    marks: Marks
    leads: bool
    report: Report
    stopping: threading.Event
    end_now: Callable[[], float]
    _in_hand: list[int] = field(default_factory=list)

    def __call__(self, items: Sequence[Item], *prepared: Any) -> Sequence[Row | Any]:
        """The rows of the workload, unless a fault strikes."""
        self._in_hand = [item.index for item in items]
        # If the workload keeps its progress, faults that strike once wait until there is some.
        waits = self.workload.resumes
        for fault in self.faults:
            if not (waits and KINDS[fault.kind].once):
                self._meet(fault)
        return self.workload.call(items, *prepared)

    def overhear(self, event: WorkerEvent) -> None:
        """Report an event of the worker. Faults that wait for saved progress strike after the event that reports it."""
        self.report(event)
        if event["event"] == "progress":
            for fault in self.faults:
                if KINDS[fault.kind].once:
                    self._meet(fault)

    def _meet(self, fault: Fault) -> None:
        """Cause a fault if its item is in this call."""
        if fault.kind == "timeout" or (KINDS[fault.kind].takes == "item" and fault.at in self._in_hand):
            getattr(self, f"_{fault.kind}")(fault)

    def _strikes(self, fault: Fault) -> bool:
        if not self.leads or not self.marks.set(fault, self._in_hand):
            return False
        log.warning("injected: %s", fault)
        return True

    def _kill(self, fault: Fault) -> None:
        if self._strikes(fault):
            os.kill(os.getpid(), signal.SIGKILL)

    def _crash(self, fault: Fault) -> None:
        if self._strikes(fault):
            sys.stderr.flush()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump
            ctypes.string_at(0)

    def _preempt(self, fault: Fault) -> None:
        if self._strikes(fault):
            self.report({"event": "preempt"})
            self.stopping.wait(PATIENCE_S)  # a worker without saved progress is killed during this wait

    def _timeout(self, fault: Fault) -> None:
        if self._strikes(fault):
            self.report({"event": "timeout", "end_time": self.end_now()})

    def _oom(self, fault: Fault) -> None:
        if len(self._in_hand) > 1:
            self._cuda_oom(fault)

    def _cuda_oom(self, fault: Fault) -> None:
        self._strikes(fault)
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.empty(TOO_MUCH_BYTES, dtype=torch.uint8, device="cuda")
        raise OutOfMemoryError

    def _error(self, fault: Fault) -> None:
        self._strikes(fault)
        raise RuntimeError(f"{fault} was injected")


def damage_shards(run: Run, faults: Sequence[Fault]) -> None:
    """Flip a byte of each published shard that a fault names, in its largest column."""
    for fault in faults:
        if fault.kind != "damage" or fault.at is None or not (path := run.shard_path(fault.at)).exists():
            continue
        if Marks.of(run).set(fault):
            datasets = read_directory(path).datasets
            own = [region for region in datasets if region.path.partition("/")[0] not in ("index", "error")]
            largest = max(own, key=lambda region: region.n_bytes)
            with open(path, "r+b") as file:
                file.seek(largest.offset + largest.n_bytes // 2)
                [byte] = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 0xFF]))
            log.warning("injected: %s", fault)
