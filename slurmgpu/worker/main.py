"""The worker: loads the workload once, then claim → read items → batches → rows → publish, until no shard is left.

`python -m slurmgpu.worker.main RUN` is started by the task, possibly in an image. It needs only the standard library,
NumPy and h5py before it imports the workload. It reports to the task in lines of JSON on its original standard output
(prints of the workload go to standard error) and ends when its standard input closes, so it dies with its task. With
several processes, rank 0 does all of this; the others read the same items and take part in each call of the workload.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import functools
import gc
import json
import logging
import math
import os
import platform
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from slurmgpu.code import importer
from slurmgpu.containers import image_name
from slurmgpu.errors import GPUFaultError, Interrupted, ItemError, SlurmGPUError, WorkerBrokenError
from slurmgpu.inputs import InputSpec, Reader
from slurmgpu.run.claims import Claim
from slurmgpu.run.crash_history import History, read_history
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import FILES, INPUT, LOADING, class_of
from slurmgpu.run.recompute import Spans
from slurmgpu.run.revisions import Former, Row, former_rows, made_again, put_over
from slurmgpu.shards.columns import columns_from_json
from slurmgpu.shards.names import partial_name
from slurmgpu.shards.shard_file import DamagedShardError, publish, sync_names, write_shard
from slurmgpu.util import gpus
from slurmgpu.util.atomic_files import FULL, working_folder
from slurmgpu.util.early_signals import INTERRUPTS
from slurmgpu.util.env_info import describe, used
from slurmgpu.util.exceptions import described, message_of, trace_of
from slurmgpu.util.logging import log_to_stderr
from slurmgpu.util.pipes import Report, close_stdin, listen_on_stdin, outlive_signals, report_on_stdout, watch_stdin
from slurmgpu.util.plurals import count_of
from slurmgpu.util.shared_files import cause_raised, retried
from slurmgpu.util.side_thread import SideThread
from slurmgpu.worker import groups
from slurmgpu.worker.assignment import Assignment, WorkerFailedError
from slurmgpu.worker.computer import (
    INTERRUPTED,
    LONGEST_PAUSE_S,
    Computed,
    Computer,
    Failure,
    check_debugger_left,
    common_failure,
    settle,
)
from slurmgpu.worker.groups import Group, PeersMissingError
from slurmgpu.worker.logged_values import LoggedValues
from slurmgpu.worker.lookahead import Lookahead, Taken
from slurmgpu.worker.parts import Parts
from slurmgpu.worker.preparing import only_for_calls
from slurmgpu.worker.shard_claimer import Claimer, Deadline, Held, is_open
from slurmgpu.workload import Adapted, Item, TaskContext, build

log = logging.getLogger("slurmgpu.worker")  # __name__ is "__main__" in its own process

FAILED_ALIKE = 8
"""The workload is at fault if so many items failed alike before any was computed: of two shards, if there are more."""

AHEAD_S = 2.0
"""A task claims and reads further shards while it computes one, if none took longer: others may be idle meanwhile."""
READ_AT_ONCE = 1024
"""How many items of them are read between two calls, about, of inputs with an index."""

SYNC_S = 1.0
"""How often the names of published shards are synced, at most: a power failure costs the last ones, which are computed
again."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Waiting:
    """A computed shard: `started` in seconds since the epoch, `began` by the monotonic clock."""

    shard: int
    computed: Computed
    started: float
    began: float


def _n_items(waiting: Sequence[Waiting]) -> int:
    return sum(len(one.computed.rows) for one in waiting)


@dataclass
class Worker:
    """One worker process and the shards it computes; it takes no more of them once `stopping` is set.

    With a workload that `resumes`, it then also leaves the present shard, whose progress the workload saves;
    `on_resumable` is called once such a workload is loaded. `end_times` gets an end of the walltime that is known late.
    With `reports_in_threads`, `report` may be called in any thread, several times at once.
    """

    run: Run
    assignment: Assignment
    report: Report
    stopping: threading.Event = field(default_factory=threading.Event)
    group: Group = field(default_factory=Group)
    on_resumable: Callable[[], None] = lambda: None
    end_times: Sequence[float] = ()
    reports_in_threads: bool = False
    slowest_s: float = 0.0
    _noted: dict[str, int] = field(default_factory=dict)
    _resume: list[int] = field(default_factory=list)
    _shard: int | None = None
    _parts: Parts | None = None
    _former: dict[int, Former] = field(default_factory=dict)
    _lookahead: Lookahead | None = None
    _none_free: bool = False
    _writing: tuple[Waiting, float, Future[bool]] | None = None
    _writer: SideThread = field(default_factory=lambda: SideThread("publish"))
    _resumes: bool = False
    _takes_one: bool = False
    _used: dict[str, str] = field(default_factory=dict)
    _synced: float = -math.inf
    _is_synced: bool = True

    def __post_init__(self) -> None:
        self._resume = list(self.assignment.resume)
        self._deadline = Deadline(self.assignment.end_time, self.run.plan.margin_s, self.stopping, self.end_times)
        given = self.assignment
        claim = Claim(given.task, given.attempt, platform.node(), os.getpid(), cluster=given.cluster)
        self._logged = LoggedValues(self.report)
        self.report = self._logged.before(self.report)
        self._claimer = Claimer(self.run, claim, self._report_takeover, held=set(self._resume))
        if self.run.plan.parts > 1:
            self._parts = Parts(self.run, claim, given.submission, self._shall_leave_parts)
            self._claimer.joins = self._parts.shard_to_join

    def work(self) -> None:
        """Take shards until none is left; raises WorkerFailedError if going on is pointless.

        Works in the run file's folder, as planning did, so that relative paths in the settings mean the same.
        """
        plan = self.run.plan
        around = describe(image_name())
        self._used = around["used"]
        self.report({"event": "surroundings", **around})
        self.report({"event": "loading"})
        with working_folder(Path(plan.search_path)), self._open_input() as reader:
            started = time.monotonic()
            self.group.guard()
            workload = self._load()
            if self.assignment.inject:
                workload = self._inject(workload)
            outside = self._log_outside()
            self._resumes, self._takes_one = workload.resumes, workload.takes_one
            self._columns = columns_from_json(plan.columns)  # after loading, which may register kinds
            if self._resumes:
                self.on_resumable()
            self.group.gather()
            self._report_used()
            self.report({"event": "ready", "load_s": time.monotonic() - started, "resumes": self._resumes})
            computer = Computer(
                workload,
                plan.workload.rpartition(":")[2],
                self._columns,
                plan.batch_size,
                on_batch=self._report_batch,
                agree=self._agree,
                keeps_rows=self.group.leads,
                noted=self._noted,
                folder=plan.search_path,
                retries=plan.retries,
                pause=self._pause,
                share=self.group.broadcast,
                # Plans of an older slurmgpu have no `keep`, but settings of the workload that say so.
                kept=plan.keep or {field: field for field in workload.kept_fields},
                key=plan.key,
            )
            is_one = self._parts is None and self.group.world_size == 1
            if workload.prepare is not None and is_one and not self._resumes:
                self._look_ahead_with(computer, reader)
                # 100,000 items make Python look for garbage among the million objects of PyTorch, for 0.2 s in which no
                # thread starts the GPU's next work. What is loaded stays.
                gc.collect()
                gc.freeze()
            try:
                self._take_and_compute(computer, reader)
                self._end_writing()
            except (WorkerFailedError, WorkerBrokenError):
                self._end_writing()  # what was computed before is not lost
                raise
            finally:
                computer.close()
                self._writer.close()
                if self._lookahead is not None:
                    gc.unfreeze()
                self._sync_names()
            self._log_outside(outside)

    def _log_outside(self, logged: Sequence[str] = ()) -> list[str]:
        """Log imported files of the user that the snapshot lacks, such as dynamically named modules."""
        if self.assignment.code is None:
            return []
        files = importer.outside(Path(self.run.plan.search_path))
        if new := [file for file in files if file not in logged]:
            log.warning("not in the snapshot of the code, and imported as it is now: %s", ", ".join(new))
        bypassed = importer.bypassed()
        if new := [file for file in bypassed if file not in logged]:
            log.warning("imported from disk by another loader, not from the snapshot of the code: %s", ", ".join(new))
        return [*files, *bypassed]

    def _take_and_compute(self, computer: Computer, reader: Reader) -> None:
        waiting: list[Waiting] = []
        for taken in self._shards():
            shard = taken.shard
            started, began = time.time(), time.monotonic()
            if self._parts is not None:
                self._parts.begin(shard, is_joined=self._shard != shard)
            try:
                taken_in = taken.taken_in or computer.take_in(self._read(reader, taken.spans))
                computed = computer.compute(taken_in, taken.history)
            except Interrupted:
                if self._is_joined(shard):
                    continue
                self.report({"event": "left", "shard": shard})
                log.info("shard %d: left%s", shard, ", with what is kept of it" if self._resumes else "")
                continue  # usually to the end; after a takeover to the next shard
            if self._is_joined(shard):
                continue
            if self.group.leads:
                waiting.append(Waiting(shard, computed, started, began))
            # If all items raised at the same place, others, drawn at random, show whether it is the workload's fault.
            self._claimer.draws = not self._is_enough(waiting) and self._failed_alike(waiting) is not None
            if not self._claimer.draws:
                self._publish_all(waiting)
        self._publish_all(waiting, weighed=self._deadline.over() is None)

    def _is_enough(self, waiting: Sequence[Waiting]) -> bool:
        """Whether it is enough that so many items failed alike, or one took too long to be computed."""
        n_items = _n_items(waiting)
        return (len(waiting) > 1 and n_items >= FAILED_ALIKE) or (self._resumes and n_items == 1)

    def _failed_alike(self, waiting: Sequence[Waiting]) -> Failure | None:
        return common_failure([one.computed for one in waiting])

    def _look_ahead_with(self, computer: Computer, reader: Reader) -> None:
        """Claim and read further shards while this computer computes, and write the files of the last in a thread."""
        size = self.run.plan.batch_size  # an index has the place of each batch
        ahead = self._lookahead = Lookahead(
            self._claim_ahead,
            lambda spans: self._read(reader, spans),
            computer.take_in,
            enough_items=2 * size,
            slice_items=max(2, -(-READ_AT_ONCE // size)) * size if reader.is_indexed else 0,
        )

        def meanwhile() -> None:
            # Only once a shard shows that the workload works, and how long one takes.
            if 0 < self.slowest_s < AHEAD_S and not (self.stopping.is_set() or self._resume):
                ahead.go_on()

        computer.meanwhile = meanwhile
        computer.following = lambda: found[1] if (found := ahead.first()) is not None else ()

    def _claim_ahead(self) -> Taken | None:
        if self._none_free:  # listed again when this task has nothing else to do
            return None
        try:
            shard = self._claimer.next_free()
        except OSError as error:
            log.info("no shard is claimed ahead: %s", error)
            shard = None
        if shard is None:
            self._none_free = True
            return None
        self.report({"event": "ahead", "shard": shard})
        return Taken(shard, read_history(self.run.claims.folder, shard), self._spans(shard))

    def _shards(self) -> Iterator[Taken]:
        """The shards to compute, with crash history and items; rank 0 finds them and tells the others."""
        while True:
            if (ahead := self._next_ahead()) is not None:
                self._begin(ahead.shard)
                yield ahead
                continue
            found = None
            if self.group.leads and (taken := self.next_shard()) is not None:
                shard = taken.shard if isinstance(taken, Held) else taken
                if isinstance(taken, Held):
                    index = self.run.plan.indices(*self.run.plan.bounds(shard))[0]
                    self._shard = None
                    self.report({"event": "tell", "text": f"computes parts of item {index}"})
                    log.info("shard %d: parts of item %d, whose shard another task holds", shard, index)
                else:
                    self._begin(shard)
                # Read by rank 0 only: a network file system may show ranks different files.
                found = shard, vars(read_history(self.run.claims.folder, shard)), self._spans(shard)
            found = self.group.broadcast(found)
            if found is None:
                return
            yield Taken(found[0], History.from_json(found[1]), found[2])

    def _begin(self, shard: int) -> None:
        indices = self.run.plan.indices(*self.run.plan.bounds(shard))
        self._shard = shard
        self.report({"event": "claim", "shard": shard, "idle_s": self._idle_s()})
        log.info("shard %d: items %d..%d", shard, indices[0], indices[-1])

    def _next_ahead(self) -> Taken | None:
        """The next shard of those claimed ahead; if the task has to end, all of them are given back."""
        if self._lookahead is None or (taken := self._lookahead.pop()) is None:
            return None
        if not self._deadline.over(1.1 * self.slowest_s):
            return taken
        found: Taken | None = taken
        while found is not None:
            self._claimer.give_back(found.shard)
            self.report({"event": "skipped", "shard": found.shard})
            found = self._lookahead.pop()
        return None

    def _spans(self, shard: int) -> Spans:
        """The items of a shard to compute: all if the rows of the former revision cannot be read."""
        if revision := self.run.revision_to_make(shard):
            try:
                read = functools.partial(former_rows, self.run, shard, revision, self._columns)
                self._former[shard] = retried(read, self.run.plan.lease_s)
            except DamagedShardError as error:
                log.warning("all items of shard %d are computed again: %s", shard, error)
                return [self.run.plan.bounds(shard)]
        return self.run.items_of(shard)

    def _agree(self, failure: Failure | None) -> Failure | None:
        """How a call of the workload ended for the group, see `settle`."""
        if failure is None and self.group.world_size == 1:
            return None
        has_left = self._parts is not None and self._parts.has_left
        is_asked = has_left or (self.group.leads and self._shall_leave())
        if self.group.world_size == 1:
            return settle([failure], is_asked=is_asked)
        patience_s = groups.PARTING_PATIENCE_S if failure == INTERRUPTED else groups.PEER_PATIENCE_S
        try:
            said = self.group.gather([failure and asdict(failure), is_asked], patience_s if failure else None)
        except PeersMissingError as error:
            alone = Failure.from_json(error.value[0])
            if error.rank == self.group.rank and alone.trace:
                log.error("%s", alone.trace)
            raise WorkerBrokenError(f"{alone.message}; {error}") from error
        return settle([way and Failure.from_json(way) for way, _ in said], is_asked=said[0][1])

    def _publish_all(self, waiting: list[Waiting], *, weighed: bool = True) -> None:
        """Publish `waiting`, unless it is much that failed alike, and no shard yet shows that the workload works.

        What a task that has to end leaves is not `weighed`: it might be lost.
        """
        alike = self._failed_alike(waiting) if weighed else None
        if (
            alike is not None
            and _n_items(waiting) >= FAILED_ALIKE
            and not retried(self.run.shard_files, self.run.plan.lease_s)
        ):
            raise WorkerFailedError("workload_error", alike.message, alike.trace)
        for one in waiting:
            self._publish(one)
        waiting.clear()

    def _is_joined(self, shard: int) -> bool:
        """Whether another task holds the shard, and publishes it; the event says what this one computed of it."""
        if self._parts is None or self._shard == shard:
            return False
        self._claimer.idle_s += self._parts.waited_s
        self.report({"event": "joined", "seconds": self._parts.computed_s, "idle_s": self._idle_s()})
        log.info("shard %d: computed parts for %.1f s", shard, self._parts.computed_s)
        return True

    def next_shard(self) -> int | Held | None:
        """The next shard, claimed or to join; None, after an event with the reason, when the work is done."""
        self._end_writing()  # a shard is complete only when it is published
        self._none_free = False
        # A resumable item need not be finished here.
        over = self._deadline.over(0.0 if self._resumes else 1.1 * self.slowest_s)
        while self._resume and not (over and self._resumes):
            shard = self._resume.pop(0)
            if self._claimer.is_still_own(shard):
                return shard
            log.info("shard %d: published, parked or taken over since it was claimed", shard)
            self.report({"event": "skipped", "shard": shard})
        found = over or _once_more_if_full(self._claimer.next)
        if isinstance(found, int | Held):
            return found
        self.report({"event": "done", "reason": found, "idle_s": self._idle_s()})
        return None

    def _pause(self, seconds: float, n_items: int) -> bool:
        """Wait until `n_items` can be tried again; False if the task has to end before that."""
        # A thousand tasks that a server refused must not all return at once.
        seconds = min(seconds * random.uniform(1.0, 1.25), LONGEST_PAUSE_S)
        log.info("waiting %.0f s, then %s again", seconds, count_of(n_items, "item"))
        self.report({"event": "waiting", "seconds": seconds, "items": n_items})
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._deadline.over(left):
            self.stopping.wait(min(left, 1.0))
        return not self._deadline.over()

    def _idle_s(self) -> float:
        """Seconds that it waited for what other tasks hold since the last call."""
        waited, self._claimer.idle_s = self._claimer.idle_s, 0.0
        return waited

    def _shall_leave(self) -> bool:
        """Whether a resumable workload shall leave the present item, since others do or will compute it."""
        return self._deadline.over() is not None or (self._shard is not None and self._claimer.has_lost(self._shard))

    def _shall_leave_parts(self) -> bool:
        """Whether to leave an item in parts: a holder finishes it, also if others compute the last ones."""
        if self._shard is not None:
            return self._claimer.has_lost(self._shard)
        is_published = self._parts is not None and not is_open(self.run, self._parts.shard)
        return is_published or self._deadline.over() is not None

    def _report_takeover(self, shard: int, former: Claim) -> None:
        self.report({"event": "takeover", "shard": shard, "from": former.attempt, "host": former.host})

    def _report_used(self) -> None:
        if (now := used()) != self._used:
            self._used = now
            self.report({"event": "used", "packages": now})

    def _report_batch(self, indices: Sequence[int], isolated: bool, ahead: Sequence[int]) -> None:
        if self._takes_one:
            self._logged.item = indices[0]
        if self._parts is None or self._shard is not None:  # of a joined shard, its holder tells
            self._end_writing(waits=False)
            event = {"event": "batch", "items": list(indices), "isolated": isolated}
            self.report({**event, "ahead": [self._shard_of(ahead[0]), ahead[0]]} if ahead else event)
        self.group.gather()  # no rank begins, and may die of an item, before rank 0 has reported the batch

    def _shard_of(self, index: int) -> int | None:
        """The shard of an item that is prepared ahead."""
        found = self._lookahead.first() if self._lookahead is not None else None
        return found[0] if found is not None and found[1][0].index == index else self._shard

    def _open_input(self) -> Reader:
        spec = InputSpec.from_json(self.run.input)
        try:
            return retried(lambda: cause_raised(lambda: Reader(spec, self.run.index)), self.run.plan.lease_s)
        except (OSError, SlurmGPUError) as error:
            raise WorkerFailedError(class_of(error, INPUT), str(error)) from error

    def _read(self, reader: Reader, spans: Spans) -> list[Item | tuple[int, ItemError]]:
        items: list[Item | tuple[int, ItemError]] = []
        seed = self.run.plan.seed
        for start, stop in spans:
            try:
                records = self._read_span(reader, start, stop)
            except (OSError, SlurmGPUError) as error:
                message = f"items {start}..{stop - 1} cannot be read: {error}"
                raise WorkerFailedError(class_of(error, INPUT), message) from error
            items += [
                (index, record) if isinstance(record, ItemError) else Item(index, record, seed)
                for index, record in zip(self.run.plan.indices(start, stop), records, strict=True)
            ]
        return items

    def _read_span(self, reader: Reader, start: int, stop: int) -> list[Mapping[str, Any] | ItemError]:
        def read() -> list[Mapping[str, Any] | ItemError]:
            try:
                return cause_raised(lambda: reader.read(start, stop))
            except OSError:
                reader.reopen()
                raise

        return retried(read, self.run.plan.lease_s)

    def _load(self) -> Adapted:
        plan, given, group = self.run.plan, self.assignment, self.group
        device = "cpu"
        if given.n_gpus and given.device != "cpu":
            try:
                found = gpus.probe(given.n_gpus, mine=group.local_rank if group.world_size > 1 else None)
            except GPUFaultError as error:
                raise WorkerFailedError("gpu_fault", str(error)) from error
            self.report({"event": "gpus", "names": [gpu.name for gpu in found], "uuids": [gpu.uuid for gpu in found]})
            device = f"cuda:{group.local_rank}"
        context = TaskContext(
            device,
            gpus=given.n_gpus if device != "cpu" else 0,
            run_dir=self.run.folder,
            attempt=given.attempt,
            rank=group.rank,
            world_size=group.world_size,
            local_rank=group.local_rank,
            note=only_for_calls("task.note", self._note),
            stopping=self._shall_leave if group.leads else lambda: False,
            progress=only_for_calls("task.progress", self._report_progress),
            tell=lambda text: self.report({"event": "tell", "text": str(text)}),
            log=self._logged.log if group.leads else lambda step, **values: None,
            code=given.code,
            is_again=lambda: self._shard is not None and self.run.revision_to_make(self._shard) > 0,
            parts=plan.parts,
            **({} if self._parts is None else {"divide": only_for_calls("task.divide", self._parts.divide)}),
        )
        try:
            workload = build(plan.workload, plan.settings, Path(plan.search_path))
            workload.load(context)
        except SlurmGPUError as error:
            if error.__cause__ is not None:
                log.info("what led to it:", exc_info=error.__cause__)
            raise WorkerFailedError(class_of(error, LOADING), message_of(error)) from error
        except INTERRUPTS:
            raise
        except BaseException as error:  # also a panic of a library in Rust
            check_debugger_left(error)
            raise WorkerFailedError(class_of(error, LOADING), described(error), trace_of(error)) from error
        return workload if self._parts is None else replace(workload, call=self._parts.calling(workload.call))

    def _note(self, name: str, value: int) -> None:
        self._noted[name] = value

    def _report_progress(self, text: str) -> None:
        self.report({"event": "progress", "text": str(text)})

    def _inject(self, workload: Adapted) -> Adapted:
        from slurmgpu.faults import parse_faults
        from slurmgpu.faults.striking import Injected, Marks

        injected = Injected(
            workload,
            parse_faults(self.assignment.inject),
            Marks.of(self.run, self.assignment.attempt),
            self.group.leads,
            self.report,
            self.stopping,
            self._deadline.end_now,
        )
        self.report = injected.overhear
        return replace(workload, call=injected)

    def _write(self, one: Waiting, seconds: float) -> bool:
        """Write a shard's file and publish it; False if another task published it first."""
        rows, notes, made_by = self._contents(one, seconds)
        partial = self.run.shards / partial_name(one.shard, self.assignment.attempt)
        write_shard(
            partial,
            self._columns,
            start=self.run.plan.bounds(one.shard)[0],
            indices=self.run.plan.indices(*self.run.plan.bounds(one.shard)),
            rows=rows,
            fingerprint=self.run.plan.fingerprint,
            notes=notes,
            made_by=made_by,
        )
        try:
            return publish(partial, self.run.shard_path(one.shard), sync=False)
        except FileNotFoundError as error:  # removed by a merge that took this task for dead
            raise OSError(errno.ESTALE, "removed before it was published", str(partial)) from error

    def _contents(self, one: Waiting, seconds: float) -> tuple[list[Row], dict[str, Any], dict[str, Any]]:
        places = (place for span in self.run.items_of(one.shard) for place in range(*span))
        computed = (
            row.to_row(one.computed.kept.get(index, {})) if isinstance(row, Failure) else row
            for index, row in one.computed.rows.items()
        )
        made_by: dict[str, Any] = {"attempt": self.assignment.attempt, "started": one.started, "seconds": seconds}
        made_by["code"] = self.assignment.code
        if (former := self._former.get(one.shard)) is None:
            return list(computed), one.computed.notes(), made_by
        start, _ = self.run.plan.bounds(one.shard)
        rows = dict(zip(places, computed, strict=True))
        combined = put_over(former.rows, rows, start)
        replaced = [index for index, row in rows.items() if combined[index - start] is row]
        notes = {**former.notes, **one.computed.notes()}
        return combined, notes, made_again(former.made_by, made_by, replaced)

    def _publish(self, one: Waiting) -> None:
        """Publish a shard; while others are claimed ahead, in a thread, whose end `_end_writing` notes."""
        seconds = time.monotonic() - one.began
        if self._lookahead is None:
            won = self._write_patiently(one, seconds)
            self._note_published(one, seconds)
            self._report_published(one, seconds, won)
        else:
            self._end_writing()
            self._writing = one, seconds, self._writer.begin(lambda: self._write_beside(one, seconds))

    def _write_beside(self, one: Waiting, seconds: float) -> bool:
        won = self._write_patiently(one, seconds)
        if self.reports_in_threads:  # now: this process may die in the call that it is in
            self._report_published(one, seconds, won)
        return won

    def _end_writing(self, *, waits: bool = True) -> None:
        """Note that the last shard is published; without `waits`, if it is."""
        if self._writing is not None and (waits or self._writing[2].done()):
            (one, seconds, future), self._writing = self._writing, None
            won = future.result()
            self._note_published(one, seconds)
            if not self.reports_in_threads:
                self._report_published(one, seconds, won)

    def _write_patiently(self, one: Waiting, seconds: float) -> bool:
        try:
            # After a failure write all again: it is unknown which bytes arrived.
            return _once_more_if_full(lambda: retried(lambda: self._write(one, seconds), self.run.plan.lease_s))
        except OSError as error:
            where = "" if error.filename else f" in {self.run.shards}"
            raise WorkerFailedError(
                class_of(error, FILES), f"shard {one.shard} cannot be written{where}: {error}"
            ) from error

    def _note_published(self, one: Waiting, seconds: float) -> None:
        self._former.pop(one.shard, None)
        self._is_synced = False
        if time.monotonic() - self._synced >= SYNC_S:
            self._sync_names()
        self._report_used()
        self.slowest_s = max(self.slowest_s, seconds)

    def _report_published(self, one: Waiting, seconds: float, won: bool) -> None:
        shard, computed = one.shard, one.computed
        errors = Counter(row.kind for row in computed.rows.values() if isinstance(row, Failure))
        how = "published" if won else "computed, and published by another task before"
        n_rows = len(computed.rows)
        log.info("shard %d: %s after %.1f s; %d of %d items failed", shard, how, seconds, errors.total(), n_rows)
        self.report(
            {
                "event": "published",
                "shard": shard,
                "items": n_rows,
                "errors": dict(errors),
                "started": one.started,
                "won": won,
                "revision": self.run.revision_to_make(shard),
                "seconds": seconds,
                "oom": bool(computed.oom_batch),
            }
        )

    def _sync_names(self) -> None:
        """Sync the names of the shards that were published since the last time."""
        if not self._is_synced:
            sync_names(self.run.shards)
            self._is_synced, self._synced = True, time.monotonic()


def _once_more_if_full(operation: Callable[[], _T]) -> _T:
    """The result of `operation`, retried once after a second if the disk was full: space may be freed."""
    try:
        return operation()
    except OSError as error:
        if error.errno not in FULL:
            raise
        log.warning("tried again in a second: %s", error)
    time.sleep(1.0)
    return operation()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker; 0 when its work is done, 1 after a `failed` event, 70 if a new process is needed."""
    parser = argparse.ArgumentParser(prog="python -m slurmgpu.worker.main")
    parser.add_argument("run", type=Path)
    parser.add_argument("assignment", type=json.loads)
    arguments = parser.parse_args(argv)
    log_to_stderr()
    # Log the Python stack of a segmentation fault.
    faulthandler.enable()
    # Slurm may signal every process of a job; only the task handles the notice.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, groups.BLOCKED_SIGNALS)
    os.environ.pop("PYTHONSAFEPATH", None)  # only for this process, not for the workload's children
    group = Group.of_environment()
    report = report_on_stdout(group.rank, group.local_rank)
    stopping, end_times = threading.Event(), list[float]()
    if group.leads:
        listen_on_stdin(stopping, end_times.append)
    else:
        watch_stdin()
        close_stdin()
    try:
        assignment = Assignment(**arguments.assignment)
        run = Run.open(arguments.run).computing(assignment.submission)
        if assignment.code is not None:
            try:
                importer.use(run.folder, assignment.code)
            except SlurmGPUError as error:
                raise WorkerFailedError("workload_error", str(error)) from error
        if group.leads:
            log.info("this worker is process %d of attempt %s", os.getpid(), assignment.attempt)
        worker = Worker(run, assignment, report, stopping, group, outlive_signals, end_times, reports_in_threads=True)
        worker.work()
        group.leave()
    except WorkerFailedError as error:
        log.error("%s: %s%s", error.kind, error, f"\n{error.trace}" if error.trace else "")
        report({"event": "failed", "class": error.kind, "message": str(error), "traceback": error.trace})
        return 1
    except WorkerBrokenError as error:
        log.error("this process cannot go on: %s", error)
        report({"event": "broken", "message": str(error)})
        return 70
    except Exception as error:
        # The workload's errors were caught at its calls, so this is a bug of slurmgpu.
        trace = trace_of(error)
        kind = class_of(error, FILES)
        report({"event": "failed", "class": kind, "message": described(error), "traceback": trace})
        raise
    return 0


def run_process() -> None:
    """Run the worker as the whole of a process, whose arguments are in sys.argv."""
    exit_code = main()
    if exit_code:
        # A lost CUDA context, or a collective that waits for a failed rank, may block Python's exit.
        sys.stderr.flush()
        os._exit(exit_code)


if __name__ == "__mp_main__":
    # A process that the workload spawns by multiprocessing starts with this main module.
    importer.use_as_parent()

if __name__ == "__main__":
    run_process()
