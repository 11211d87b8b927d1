"""The failure classes and the policy for each: see docs/reference/failures.md."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from slurmgpu.errors import GPUFaultError, NodeError, WorkloadError
from slurmgpu.util.exceptions import message_of
from slurmgpu.util.forks import TOO_MANY, is_of_limit
from slurmgpu.util.out_of_memory import is_out_of_gpu_memory, is_out_of_host_memory
from slurmgpu.util.shared_files import FULL, is_transient
from slurmgpu.util.signals import name_of_signal, signal_of

log = logging.getLogger(__name__)


EXIT_DISK_FULL, EXIT_FILE_SYSTEM = 73, 74  # EX_CANTCREAT and EX_IOERR of sysexits.h
"""The exit codes of a task that finds the disk full, or lost the file system: it may be unable to write its record."""

Sees = Callable[[BaseException], bool]

FILES, INPUT, LOADING, ITEM = "files", "input", "loading", "item"
"""The scope of an error: a task, by an error of its own files; reading the input; loading the workload; one item."""


@dataclass(frozen=True)
class Policy:
    """A failure class: how it is recognised, whose fault it is, what is done about it, and what messages say.

    `retriable`: another submission may compute what this failure left, so that `auto_resubmit` goes on.
    `node_at_fault`: the next submission excludes the node, and an error of an item ends the task, not the item.
    `on_purpose`: a user ended it, and nothing is wrong.
    `more_memory`: the next submission asks for more memory, and takes the shards that were parked for it.
    `may_restart`: Slurm may start the task again. `ends_task`: it ends the task, not the item, if the workload keeps
    its progress: the next task continues the item.

    `seen` are the errors of the class, by what they end; all other errors that end the same thing belong to the class
    that names it as `rest`. `states` are Slurm's job states; `exit_code` is that of a task that could not write its
    record. `is_stop`: a signal ended it. `is_guess`: Slurm's accounting may know a cause that the attempt does not.

    `says` follows the node's name at the beginning of a message: in the record of a task, if the node is at fault, and
    where a task could not write one. A class with `logged` is for batches that are too
    large: the batch is halved, and the worker's line about it in the log begins with this text.
    """

    meaning: str
    retriable: bool
    node_at_fault: bool = False
    on_purpose: bool = False
    more_memory: bool = False
    seen: Mapping[str, Sees] = field(default_factory=dict)
    rest: str | None = None
    states: tuple[str, ...] = ()
    exit_code: int | None = None
    is_stop: bool = False
    is_guess: bool = False
    may_restart: bool = False
    ends_task: bool = False
    says: str = ""
    logged: str = ""

    @property
    def names_node(self) -> bool:
        """Whether the message of a task's record begins with its node's name and `says`."""
        return self.node_at_fault and bool(self.says)

    def outlook(self) -> str:
        """Whether another submission helps, in words."""
        if self.on_purpose:
            return "nothing is wrong: resubmit continues the run when you want"
        again = "another submission may compute it" if self.retriable else "recomputing alone does not help"
        return again + ("; it excludes the node" if self.node_at_fault else "")


def _is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (*FULL, errno.EFBIG)


def _is_of_file_system(error: BaseException) -> bool:
    return is_transient(error) and not is_of_limit(error)


def _is_gpu_fault(error: BaseException) -> bool:
    return any(text in message_of(error) for text in GPU_FAULT_TEXTS + HARDWARE_TEXTS)


def _is_fault_of_hardware(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(text in message_of(error) for text in HARDWARE_TEXTS)


GPU_FAULT_TEXTS = (
    "CUDA driver version is insufficient",
    "NVIDIA driver on your system is too old",
    "no CUDA-capable device",
    "No CUDA GPUs are available",
    "Unexpected error from cudaGetDeviceCount()",
    "CUDA unknown error",
    "Found no NVIDIA driver",
    "CUDA-capable device(s) is/are busy or unavailable",
)
"""PyTorch's messages if the GPU or its driver is at fault."""
HARDWARE_TEXTS = (
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error",
    "hardware stack error",
    "nvlink or a hardware error",
)
"""CUDA's messages if the GPU's hardware is at fault, which may come in any call (cudaGetErrorString)."""

POLICIES: dict[str, Policy] = {
    "cuda_oom": Policy(
        "the GPU's memory was too small for a single item, or for loading",
        False,
        seen={LOADING: is_out_of_gpu_memory, ITEM: is_out_of_gpu_memory},
        logged="out of memory with a batch",
    ),
    "item_error": Policy("the workload raised, or returned ItemError, for one item", False, rest=ITEM),
    "crash": Policy("the worker died by a signal or an exit code", True, rest=FILES, states=("FAILED",)),
    "host_oom": Policy(
        "the job's host memory was too small",
        True,
        more_memory=True,
        seen={LOADING: is_out_of_host_memory, ITEM: is_out_of_host_memory},
        states=("OUT_OF_MEMORY",),
        logged="out of host memory with a batch",
    ),
    "timeout": Policy("the walltime ended before the shards did", True, is_stop=True, states=("TIMEOUT", "DEADLINE")),
    "preempted": Policy(
        "ended from outside before its walltime, for example because Slurm took the allocation back",
        True,
        is_stop=True,
        is_guess=True,
        may_restart=True,
        states=("PREEMPTED", "REQUEUED"),
    ),
    "node_fail": Policy(
        "the node died or stopped answering, or can compute no item",
        True,
        node_at_fault=True,
        seen=dict.fromkeys((LOADING, ITEM), lambda error: isinstance(error, NodeError)),
        states=("NODE_FAIL", "BOOT_FAIL"),
    ),
    "gpu_fault": Policy(
        "a GPU was allocated but cannot be used",
        True,
        node_at_fault=True,
        seen={
            LOADING: _is_gpu_fault,
            ITEM: lambda error: isinstance(error, GPUFaultError) or _is_fault_of_hardware(error),
        },
    ),
    "file_system": Policy(
        "the node lost a file system that the run uses",
        True,
        node_at_fault=True,
        seen=dict.fromkeys((FILES, INPUT), _is_of_file_system),
        exit_code=EXIT_FILE_SYSTEM,
        says="has lost a file system",
    ),
    "container": Policy("the image is missing, unreadable or does not start", False),
    "workload_error": Policy(
        "loading failed, or the first items all failed the same way",
        False,
        seen={ITEM: lambda error: isinstance(error, WorkloadError)},
        rest=LOADING,
    ),
    "input_error": Policy("the input cannot be read as it was planned", False, rest=INPUT),
    "disk_full": Policy(
        "a file could not be written",
        False,
        ends_task=True,
        seen={FILES: _is_full},
        exit_code=EXIT_DISK_FULL,
        says="has no room for a file",
    ),
    "cancelled": Policy(
        "scancel, slurmgpu cancel or Ctrl-C", False, on_purpose=True, is_stop=True, states=("CANCELLED", "REVOKED")
    ),
    "lost": Policy(
        "no end was recorded (its process may have been killed), and nothing else tells why", True, is_guess=True
    ),
}


def policy_of(name: str | None) -> Policy | None:
    """The policy of a failure class; None without a failure, and for a class of a later slurmgpu."""
    return POLICIES.get(name or "")


def class_of(error: BaseException, ended: str) -> str:
    """The failure class of an error, given what it ended: FILES, INPUT, LOADING or ITEM."""
    for name, policy in POLICIES.items():
        if ended in policy.seen and policy.seen[ended](error):
            return name
    return next(name for name, policy in POLICIES.items() if policy.rest == ended)


def class_and_message(error: str) -> tuple[str, str]:
    """The failure class and the message of an item's error."""
    kind, colon, rest = error.partition(": ")
    return (kind, rest) if colon and kind in POLICIES else ("item_error", error)


def without_numbers(message: str) -> str:
    """A message with its numbers replaced: equal for failures that differ in numbers only."""
    return re.sub(r"\d+(\.\d+)?", "#", message)


def is_of_disk(kind: str) -> bool:
    """Whether failures of a class are those of a disk: where it happened in slurmgpu tells nothing."""
    return POLICIES[kind].exit_code is not None


def class_of_exit(code: int) -> str | None:
    """The failure class that a task's exit code stands for; None for most codes."""
    codes = {policy.exit_code: name for name, policy in POLICIES.items() if policy.exit_code is not None}
    return codes.get(code)


def class_of_job(state: str, exit_code: str = "") -> str | None:
    """The failure class of a job with this state and exit code in Slurm (`FAILED`, `74:0`); None for a good end."""
    code, _, signum = exit_code.partition(":")
    if state == "FAILED" and signum == "0" and (found := class_of_exit(int(code))):
        return found
    return next((name for name, policy in POLICIES.items() if state in policy.states), None)


@contextlib.contextmanager
def blaming(node: str) -> Iterator[None]:
    """On an error, exit with the exit code of its failure class, if it has one, and name `node` in the log.

    For a task that has no record yet: Slurm's accounting keeps the exit code.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if is_of_limit(error):
            log.error("crash: %s: %s", node, TOO_MANY)
            raise SystemExit(1) from error
        if not isinstance(error, OSError):
            raise
        policy = POLICIES[name := class_of(error, FILES)]
        if policy.exit_code is None:
            raise
        log.error("%s: %s %s: %s", name, node, policy.says, error)
        raise SystemExit(policy.exit_code) from error


def describe_exit(returncode: int, *, was_done: bool = False) -> str:
    """The end of a process in words; `was_done` says that its work was done."""
    if number := signal_of(returncode):
        return f"died by {name_of_signal(number)}"
    return f"exited with code {returncode}" + ("" if was_done else " before its work was done")
