"""A shard's rows: batches cut from the shard alone, failures narrowed to the item that causes them.

Nothing in here knows of claims, files or processes.
"""

from __future__ import annotations

import bdb
import gc
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmgpu.errors import Interrupted, ItemError
from slurmgpu.run.crash_history import History
from slurmgpu.run.failures import FILES, ITEM, class_of
from slurmgpu.shards.columns import Column, convert_row
from slurmgpu.util.out_of_memory import is_out_of_memory
from slurmgpu.util.plurals import count_of
from slurmgpu.workload import Adapted, Item

log = logging.getLogger(__name__)

ERROR_LENGTH = 4000
"""An item's `error` is cut at this many characters."""
LINE_LENGTH = 500
"""And so is what else an error says in its first line."""


class WorkerBrokenError(Exception):
    """The process cannot go on, since its CUDA context or its group is lost; a new worker can."""


class DiskFullError(Exception):
    """A workload that keeps the progress of its items could not write it: the fault of no item. Says why."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


@dataclass(frozen=True)
class Failure:
    """Why one item has no row. `way` is equal for items that failed in the same way; None if that is not known."""

    kind: str
    message: str
    way: tuple[str, ...] | None = None
    trace: str = ""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Failure:
        """A failure from its `asdict`, whose tuples JSON has made lists."""
        return cls(**{**value, "way": None if value["way"] is None else tuple(value["way"])})

    def to_error(self) -> ItemError:
        """What the shard keeps in the item's `error`: the failure class, then the message."""
        return ItemError(f"{self.kind}: {self.message}"[:ERROR_LENGTH])


_PENDING = Failure("item_error", "not computed")
INTERRUPTED = Failure("interrupted", "left for later")
"""How a call ends whose workload has kept its progress and raised Interrupted. It is nobody's fault, and no row."""
NOT_ASKED = Failure(
    "item_error",
    "the workload raised Interrupted though nobody had asked it to stop: task.stopping() says when to",
    ("interrupted",),
)


def settle(ways: Sequence[Failure | None], *, is_asked: bool) -> Failure | None:
    """How a call ended for the whole group, from how it ended on each rank: as on the lowest that failed.

    Where the group was asked to stop, being interrupted goes over all else: an error may be of a rank that missed the
    others, and a row of one that did not hear in time; the item goes on from what is kept, and both show again.
    """
    if INTERRUPTED in ways and is_asked:
        return INTERRUPTED
    failures = [way for way in ways if way is not None]
    return next((way for way in failures if way != INTERRUPTED), NOT_ASKED if failures else None)


@dataclass
class Computed:
    """A shard's rows in the order of its items: converted values or Failures; and what changed its batches.

    `oom_batch` is the batch size that memory sufficed for, 0 when it was never short; `noted` the workload's notes.
    """

    rows: dict[int, Mapping[str, Any] | Failure] = field(default_factory=dict)
    oom_batch: int = 0
    narrowed: int = 0
    isolated: int = 0
    noted: Mapping[str, int] = field(default_factory=dict)

    def common_way(self) -> Failure | None:
        """The failure that every one of the items shares, if at least two raised, all at the same place."""
        failures = [row for row in self.rows.values() if isinstance(row, Failure)]
        if len(failures) < max(2, len(self.rows)) or failures[0].way is None:
            return None
        return failures[0] if all(failure.way == failures[0].way for failure in failures) else None

    def notes(self) -> dict[str, int]:
        """What the shard records of changed batches."""
        notes = {
            "oom_batch": self.oom_batch,
            "narrowed_batches": self.narrowed,
            "isolated_batches": self.isolated,
        }
        return {**self.noted, **{name: value for name, value in notes.items() if value}}


class Computer:
    """Computes shards with one loaded workload.

    `on_batch(indices, isolated)` is called before each call of the workload, so that who sees the worker die knows what
    was in flight. Processes of a group `agree(failure)` on how each call ended, so that all go on in the same way;
    those that do not keep rows only take part in the calls. `noted` is where the workload's notes on a shard arrive;
    `folder` is where the user's own code lies, of which an error names the line.
    """

    def __init__(
        self,
        workload: Adapted,
        name: str,
        columns: Mapping[str, Column],
        batch_size: int,
        on_batch: Callable[[Sequence[int], bool], None] = lambda indices, isolated: None,
        agree: Callable[[Failure | None], Failure | None] = lambda failure: failure,
        keeps_rows: bool = True,
        noted: dict[str, int] | None = None,
        folder: str = "",
    ) -> None:
        self._workload = workload
        self._name = name
        self._columns = columns
        self._batch_size = batch_size
        self._on_batch = on_batch
        self._agree = agree
        self._keeps_rows = keeps_rows
        self._noted = {} if noted is None else noted
        self._folder = folder
        self._ways_logged: dict[tuple[str, ...], int] = {}

    def compute(self, items: Sequence[Item | tuple[int, ItemError]], history: History) -> Computed:
        """Rows for `items`, which are the whole shard; one that could not be read comes as (index, ItemError).

        Raises Interrupted where the workload left an item for later, and DiskFullError where it could not keep what
        there is of one: then the shard has no rows yet.
        """
        done = Computed()
        self._noted.clear()
        good = []
        for item in items:
            if isinstance(item, Item):
                good.append(item)
                done.rows[item.index] = _PENDING  # keeps the order of the shard
            else:
                unread = done.rows[item[0]] = Failure("input_error", str(item[1]))
                self._log(item[0], unread)
        self._sort(good, done)
        for cut in range(0, len(good), self._batch_size):
            batch = good[cut : cut + self._batch_size]
            if history.isolates([item.index for item in batch]):
                done.isolated += 1
                self._compute_alone(batch, history, done)
            else:
                self._compute_batch(batch, done)
        done.noted = dict(self._noted)
        return done

    def _sort(self, items: list[Item], done: Computed) -> None:
        key = self._workload.sort_key
        if key is not None:
            items.sort(key=lambda item: (key(item), item.index))

    def _compute_alone(self, batch: Sequence[Item], history: History, done: Computed) -> None:
        for item in batch:
            if item.index in history.quarantined:
                kind, _, message = history.quarantined[item.index].partition(": ")
                deadly = done.rows[item.index] = Failure(kind, message)
                self._log(item.index, deadly)
            else:
                self._call_narrowing([item], done, isolated=True)

    def _compute_batch(self, batch: Sequence[Item], done: Computed) -> None:
        """One batch; in pieces of `oom_batch` once memory was short in this shard."""
        start = 0
        while start < len(batch):
            size = done.oom_batch or len(batch)
            self._call_narrowing(batch[start : start + size], done)
            start += size

    def _call_narrowing(self, items: Sequence[Item], done: Computed, *, isolated: bool = False) -> None:
        """Rows for the items of one call; halved, and halved again, when the call fails."""
        self._on_batch([item.index for item in items], isolated)
        failure = self._call(items, done)
        if failure is None:
            return
        if len(items) == 1:
            self._log(items[0].index, failure)
            done.rows[items[0].index] = failure
            return
        half = (len(items) + 1) // 2
        if failure.kind == "cuda_oom":
            _free_memory()
            done.oom_batch = min(done.oom_batch or half, half)
            first, last = min(item.index for item in items), max(item.index for item in items)
            said = "out of memory with a batch of %d, items %d..%d; going on with %d"
            log.warning(said, len(items), first, last, half)
        else:
            done.narrowed += 1
        self._call_narrowing(items[:half], done, isolated=isolated)
        self._call_narrowing(items[half:], done, isolated=isolated)

    def _call(self, items: Sequence[Item], done: Computed) -> Failure | None:
        """Call the workload and keep its rows; what went wrong, if the call as a whole did."""
        returned, own_failure = self._try(items)
        failure = self._agree(own_failure)
        if failure == INTERRUPTED:
            raise Interrupted
        if failure is not None and failure.kind == "disk_full":
            raise DiskFullError(f"item {items[0].index}: {failure.message}", failure.trace)
        if failure is None and self._keeps_rows:
            self._keep(items, returned, done)
        return failure

    def _try(self, items: Sequence[Item]) -> tuple[Any, Failure | None]:
        """What the workload returns, or how it failed.

        The exception does not leave this function: its traceback would keep the tensors of the failed call alive.
        """
        try:
            returned = self._workload.call(items)
            # A generator computes only while it is read.
            are_rows = self._keeps_rows and _may_be_rows(returned)
            return list(returned) if are_rows or isinstance(returned, Iterator) else returned, None
        except Interrupted:
            return [], INTERRUPTED
        except ItemError as error:
            return [], Failure("item_error", str(error), error.way)
        except (Exception, SystemExit) as error:
            check_debugger_left(error)
            if is_out_of_memory(error):
                return [], _out_of_memory(error, len(items))
            if is_broken_cuda(error):
                raise WorkerBrokenError(f"{type(error).__name__}: {error}") from error
            is_full = class_of(error, FILES) == "disk_full"
            kind = "disk_full" if is_full and self._workload.resumes else class_of(error, ITEM)
            return [], _failure(error, kind, self._folder)

    def _keep(self, items: Sequence[Item], returned: Any, done: Computed) -> None:
        is_list = isinstance(returned, list)
        if not is_list or len(returned) != len(items):
            found = count_of(len(returned), "row") if is_list else _described(returned)
            message = f"workload {self._name} returned {found} for {count_of(len(items), 'item')}"
            message += "" if is_list else "; expected a list with a row, or an ItemError, for each of them"
            # Not narrowed: alone, an item would get the one row that was meant for all.
            failure = Failure("item_error", message, ("rows",))
            self._log(items[0].index, failure)
            done.rows.update({item.index: failure for item in items})
            return
        for item, row in zip(items, returned, strict=True):
            done.rows[item.index] = self._check(item, row)

    def _check(self, item: Item, row: Any) -> Mapping[str, Any] | Failure:
        if isinstance(row, ItemError):
            failure = Failure("item_error", str(row), row.way)
            self._log(item.index, failure)
            return failure
        try:
            if not isinstance(row, Mapping):
                raise ValueError(f"a row is a mapping of column to value, not {type(row).__name__}")
            return convert_row(self._columns, row)
        except ValueError as error:
            failure = Failure("item_error", f"workload {self._name}, item {item.index}: {error}", ("row", str(error)))
            self._log(item.index, failure)
            return failure

    def _log(self, index: int, failure: Failure) -> None:
        """A line for each failed item; the traceback only once for each place that raised, the others name its item."""
        if not self._keeps_rows:
            return
        first = self._ways_logged.setdefault(failure.way, index) if failure.trace and failure.way else None
        told = "" if first in (None, index) else f" [traceback: item {first}]"
        log.warning("item %d: %s: %s%s", index, failure.kind, failure.message.partition("\n")[0], told)
        if first == index:
            log.warning("%s", failure.trace)


def _may_be_rows(returned: Any) -> bool:
    """Whether iterating over it may give rows; over what has keys, such as a dict or a data frame, it gives these."""
    return isinstance(returned, Iterable) and not (isinstance(returned, str | bytes) or hasattr(returned, "keys"))


def _described(returned: Any) -> str:
    return "None" if returned is None else f"a {type(returned).__name__}"


def check_debugger_left(error: BaseException) -> None:
    """Raise KeyboardInterrupt in place of what pdb ends a program by when its user types `q`.

    That is BdbQuit, and from Python 3.14 on a SystemExit, which comes out of pdb's own code.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = trace.tb_frame.f_globals.get("__name__") if trace is not None else None
    if isinstance(error, bdb.BdbQuit) or (isinstance(error, SystemExit) and raised_in in ("pdb", "bdb")):
        raise KeyboardInterrupt("the debugger was left") from error


def is_broken_cuda(error: BaseException) -> bool:
    """Whether the CUDA context is lost: after a device-side assert every later call in this process fails, too."""
    return type(error).__name__ == "AcceleratorError" or (
        isinstance(error, RuntimeError) and str(error).startswith("CUDA error:")
    )


def _out_of_memory(error: BaseException, n_items: int) -> Failure:
    message, said = f"out of memory with a batch of {n_items}", str(error).strip().partition("\n")[0]
    if n_items == 1 and said:  # a larger batch is tried again in halves; of an item's error one wants to know more
        message += f": {said[:LINE_LENGTH]}"
    return Failure("cuda_oom", message, ("cuda_oom",))


def _failure(error: BaseException, kind: str, folder: str) -> Failure:
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    first, end, more = f"{type(error).__name__}: {error}".removesuffix(": ").partition("\n")
    own = [frame for frame in frames if folder and _lies_below(frame.filename, folder)]
    place = own[-1] if own else last
    message = f"{first} ({Path(place.filename).name}, line {place.lineno}){end}{more}"
    trace = "".join(traceback.format_exception(error))
    return Failure(kind, message, (type(error).__name__, last.filename, str(last.lineno)), trace)


def _lies_below(filename: str, folder: str) -> bool:
    """Whether code is the user's: in the run's folder, but not in a virtual environment there."""
    path = Path(filename)
    return path.is_relative_to(folder) and "site-packages" not in path.parts


def _free_memory() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
