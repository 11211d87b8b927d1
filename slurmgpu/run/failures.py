"""The failure classes, and what is done about each: see docs/reference/failures.md."""

from __future__ import annotations

import contextlib
import errno
import logging
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from slurmgpu.util.atomic_files import FULL
from slurmgpu.util.shared_files import is_transient

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Policy:
    """What a failure class means for the run.

    `retriable`: another submission may compute what this failure left, so that `auto_resubmit` goes on.
    `node_at_fault`: the next submission excludes the node. `on_purpose`: a user ended it, and nothing is wrong:
    `resubmit` goes on when the user asks for it.
    """

    meaning: str
    retriable: bool
    node_at_fault: bool = False
    on_purpose: bool = False

    def outlook(self) -> str:
        """Whether another submission helps, in words."""
        if self.on_purpose:
            return "nothing is wrong: resubmit goes on when you say so"
        again = "another submission may compute it" if self.retriable else "computing it again does not help by itself"
        return again + ("; it leaves the node out" if self.node_at_fault else "")


POLICIES: dict[str, Policy] = {
    "cuda_oom": Policy("memory was not enough for one item alone, or to load: the GPU's, or on CPUs the host's", False),
    "item_error": Policy("the workload raised, or returned ItemError, for one item", False),
    "crash": Policy("the worker died by a signal or an exit code", True),
    "host_oom": Policy("the host memory of the job was not enough", True),
    "timeout": Policy("the walltime ended before the shards did", True),
    "preempted": Policy("ended from outside before its walltime, as where Slurm takes the allocation back", True),
    "node_fail": Policy("the node died or stopped answering", True, node_at_fault=True),
    "gpu_fault": Policy("a GPU was allocated but cannot be used", True, node_at_fault=True),
    "file_system": Policy("the node lost a file system that the run uses", True, node_at_fault=True),
    "container": Policy("the image is missing, unreadable or does not start", False),
    "workload_error": Policy("loading failed, or every item of a shard failed the same way", False),
    "input_error": Policy("the input cannot be read as it was planned", False),
    "disk_full": Policy("a file could not be written", False),
    "cancelled": Policy("scancel, slurmgpu cancel or Ctrl-C", False, on_purpose=True),
    "lost": Policy("no end was recorded, as where its process was killed, and nothing else tells why", True),
}

EXIT_FILE_SYSTEM = 74  # EX_IOERR of sysexits.h
"""The exit code of a task whose node lost the file system: its record may not tell."""

SELF_INFLICTED = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGTRAP,
        signal.SIGSYS,
    }
)
"""Signals that a process brings upon itself; SIGKILL and SIGTERM may as well have come from outside."""


def failure_of(error: OSError) -> str:
    """The failure class of an error of the file system that ends a task, which has tried again what may be."""
    if error.errno in (*FULL, errno.EFBIG):
        return "disk_full"
    return "file_system" if is_transient(error) else "crash"


@contextlib.contextmanager
def blaming(node: str) -> Iterator[None]:
    """Have a process end with EXIT_FILE_SYSTEM, and say that `node` is at fault, for a file system that is lost.

    For what a task does while it has no record in which to tell of it: accounting has the exit code.
    """
    try:
        yield
    except OSError as error:
        if failure_of(error) != "file_system":
            raise
        log.error("file_system: %s has lost a file system: %s", node, error)
        raise SystemExit(EXIT_FILE_SYSTEM) from error


def signal_of(returncode: int) -> int:
    """The signal that a process died of, 0 for none: `returncode` as in `subprocess`, negative for a signal."""
    # Apptainer and shells hand a signal on as 128 + its number.
    return -returncode if returncode < 0 else returncode - 128 if 128 < returncode < 192 else 0


def describe_exit(returncode: int) -> str:
    """How a process ended, in words."""
    if number := signal_of(returncode):
        try:
            return f"died by {signal.Signals(number).name}"
        except ValueError:
            return f"died by signal {number}"
    return f"exited with code {returncode} before its work was done"


def brought_upon_itself(returncode: int) -> bool:
    """Whether a process that ended so did it by itself (a segfault, an exit), rather than being killed from outside."""
    number = signal_of(returncode)
    return number == 0 or number in SELF_INFLICTED
