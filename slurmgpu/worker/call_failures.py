"""Failures of a call of the workload: the failures of its items, from an exception or the returned value."""

from __future__ import annotations

import bdb
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slurmgpu.errors import GPUFaultError, Interrupted, ItemError, NodeError, Retry, WorkerBrokenError, WorkloadError
from slurmgpu.run.failures import FILES, ITEM, POLICIES, class_of
from slurmgpu.shards.shard_file import FailedRow
from slurmgpu.util.broken_process import is_broken, says_used_up
from slurmgpu.util.early_signals import INTERRUPTS
from slurmgpu.util.exceptions import described, is_of_network, message_of, trace_of
from slurmgpu.util.forks import ending_forks
from slurmgpu.worker import groups
from slurmgpu.worker.groups import Group, PeersMissingError

log = logging.getLogger("slurmgpu.worker")

ERROR_LENGTH = 4000
"""Longest `error` of an item, in characters."""
LINE_LENGTH = 500
"""Longest first line of an underlying error, in characters."""


@dataclass(frozen=True)
class Failure:
    """Why an item has no row. `way` is equal for items that failed in the same way; None if that is unknown.

    `retry_after` is the wait in seconds before the item is computed again; None if that would not help. With
    `is_of_process`, the process could open no more files or threads.
    """

    kind: str
    message: str
    way: tuple[str, ...] | None = None
    trace: str = ""
    retry_after: float | None = None
    is_of_process: bool = False

    @property
    def first_line(self) -> str:
        """The first line of the message, for the log."""
        return self.message.partition("\n")[0][:ERROR_LENGTH]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Failure:
        """A failure from its `asdict` after JSON, which turns tuples into lists."""
        return cls(**{**value, "way": None if value["way"] is None else tuple(value["way"])})

    def to_row(self, values: Mapping[str, Any] = {}) -> FailedRow:
        """The item's row: the failure class and the message as its `error`, and these values."""
        return FailedRow(f"{self.kind}: {self.message}"[:ERROR_LENGTH], values)


INTERRUPTED = Failure("interrupted", "left for later")
"""The end of a call that saved its progress and raised Interrupted: neither a failure nor a row."""
NOT_ASKED = Failure(
    "item_error",
    "the workload raised Interrupted although it was not asked to stop; raise it only if task.stopping() is true",
    ("interrupted",),
)


def settle(ways: Sequence[Failure | None], *, is_asked: bool) -> Failure | None:
    """How a call ended for the whole group, given how it ended on each rank: the failure of the lowest failed rank.

    If the group was asked to stop, Interrupted has priority: other errors may come from a rank whose peers had left,
    and rows from a rank that noticed the stop too late. The item resumes from its progress; real errors occur again.
    """
    if INTERRUPTED in ways and is_asked:
        return INTERRUPTED
    failures = [way for way in ways if way is not None]
    return next((way for way in failures if way != INTERRUPTED), NOT_ASKED if failures else None)


def settle_together(failure: Failure | None, group: Group, *, is_asked: bool) -> Failure | None:
    """As `settle`, given how a call ended on this rank; WorkerBrokenError if another rank does not answer."""
    if group.world_size == 1:
        return settle([failure], is_asked=is_asked)
    patience_s = groups.PARTING_PATIENCE_S if failure == INTERRUPTED else groups.PEER_PATIENCE_S
    try:
        said = group.gather([failure and asdict(failure), is_asked], patience_s if failure else None)
    except PeersMissingError as error:
        alone = Failure.from_json(error.value[0])
        if error.rank == group.rank and alone.trace:
            log.error("%s", alone.trace)
        raise WorkerBrokenError(f"{alone.message}; {error}") from error
    return settle([way and Failure.from_json(way) for way, _ in said], is_asked=said[0][1])


def attempt(function: Callable[[], Any], n_items: int, *, folder: str, resumes: bool) -> tuple[Any, Failure | None]:
    """Call a function of the workload for `n_items` items; return its value, or its failure.

    Errors name the line in the user's code, which is in `folder`. A full disk is no item's fault if the workload
    `resumes`. The exception must not leave this function: its traceback would keep the failed call's tensors in memory.
    """
    try:
        with ending_forks():
            return function(), None
    except Interrupted:
        return [], INTERRUPTED
    except ItemError as error:
        return [], of_item(error)
    except Retry as error:
        return [], may_pass(error)
    except (WorkerBrokenError, *INTERRUPTS):
        raise
    except BaseException as error:  # also a panic of a library in Rust, and asyncio's CancelledError
        check_debugger_left(error)
        return [], _of_exception(error, n_items, folder, resumes=resumes)


def check_debugger_left(error: BaseException) -> None:
    """Raise KeyboardInterrupt if `error` comes from typing `q` in pdb.

    That is BdbQuit, and from Python 3.14 on a SystemExit raised in pdb's own code.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = trace.tb_frame.f_globals.get("__name__") if trace is not None else None
    if isinstance(error, bdb.BdbQuit) or (isinstance(error, SystemExit) and raised_in in ("pdb", "bdb")):
        raise KeyboardInterrupt("the debugger was left") from error


def of_item(error: ItemError) -> Failure:
    """The failure for an ItemError, whose attributes are checked: in a user's subclass they may mean something else."""
    kind = error.failure if isinstance(error.failure, str) and error.failure in POLICIES else "item_error"
    is_way = isinstance(error.way, tuple) and all(isinstance(each, str) for each in error.way)
    return Failure(kind, message_of(error), error.way if is_way else None)


def may_pass(error: BaseException) -> Failure:
    """The failure of an item that is computed again; its message is its `way`."""
    after = error.after if isinstance(error, Retry) and isinstance(error.after, int | float) else 0.0
    message = message_of(error) or type(error).__name__
    return Failure("item_error", message, ("retry", message), retry_after=max(0.0, after))


def _of_exception(error: BaseException, n_items: int, folder: str, *, resumes: bool) -> Failure:
    """The failure by the class of an exception; WorkerBrokenError if the process cannot continue after it."""
    kind = class_of(error, ITEM)
    if isinstance(error, NodeError | GPUFaultError | WorkloadError):
        return Failure(kind, message_of(error))
    if POLICIES[kind].node_at_fault:
        return _failure(error, kind, folder)
    if logged := POLICIES[kind].logged:
        return _too_large(error, kind, f"{logged} of {n_items}", is_alone=n_items == 1)
    if is_broken(error):
        raise WorkerBrokenError(described(error)) from error
    of_files = class_of(error, FILES)
    if resumes and POLICIES[of_files].ends_task:
        kind = of_files
    failure = replace(_failure(error, kind, folder), is_of_process=says_used_up(error))
    return replace(failure, retry_after=0.0) if is_of_network(error) else failure


def _too_large(error: BaseException, kind: str, message: str, *, is_alone: bool) -> Failure:
    said = message_of(error).strip().partition("\n")[0]
    if is_alone and said:  # a larger batch is halved and tried again, but an item's error needs the details
        message += f": {said[:LINE_LENGTH]}"
    return Failure(kind, message, (kind,))


def _failure(error: BaseException, kind: str, folder: str) -> Failure:
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    first, end, more = described(error).partition("\n")
    own = [frame for frame in frames if folder and _lies_below(frame.filename, folder)]
    place = own[-1] if own else last
    message = f"{first} ({Path(place.filename).name}, line {place.lineno}){end}{more}"
    trace = trace_of(error)
    return Failure(kind, message, (type(error).__name__, last.filename, str(last.lineno)), trace)


def _lies_below(filename: str, folder: str) -> bool:
    """Whether code is the user's: in the run's folder, but not in a virtual environment there."""
    path = Path(filename)
    return path.is_relative_to(folder) and "site-packages" not in path.parts
