"""A worker: loads the workload once, then claim → read items → batches → rows → publish, until no shard is left.

With several processes, rank 0 does all of this; the others read the same items and take part in each call of the
workload.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurmgpu.code import importer
from slurmgpu.containers import image_name
from slurmgpu.errors import Interrupted, WorkerBrokenError
from slurmgpu.loader.adapted import Adapted
from slurmgpu.run.claims import Claim
from slurmgpu.run.directory import Run
from slurmgpu.run.worker_events import Report
from slurmgpu.shards.columns import Column, columns_from_json
from slurmgpu.util.amounts import count_of
from slurmgpu.util.broken_process import says_used_up
from slurmgpu.util.chance import CHANCE
from slurmgpu.util.env_info import describe, used
from slurmgpu.util.exceptions import described
from slurmgpu.util.logging import enable_own_loggers
from slurmgpu.util.process_wide import without_full_collections, working_folder
from slurmgpu.util.shared_files import retried
from slurmgpu.worker.assignment import Assignment, WorkerFailedError
from slurmgpu.worker.call_failures import Failure, settle_together
from slurmgpu.worker.computed_shard import ComputedShard
from slurmgpu.worker.computer import LONGEST_PAUSE_S, Computer
from slurmgpu.worker.deadline import Deadline
from slurmgpu.worker.groups import Group
from slurmgpu.worker.item_reader import ItemReader
from slurmgpu.worker.loading import device_of, load_together, load_workload, log_outside
from slurmgpu.worker.logged_values import LoggedValues, noted_number
from slurmgpu.worker.parts import Parts
from slurmgpu.worker.preparer import only_for_calls
from slurmgpu.worker.publisher import Publisher
from slurmgpu.worker.shard_claimer import Claimer, is_open
from slurmgpu.worker.shard_source import ShardSource
from slurmgpu.worker.unpublished import FEW, Unpublished
from slurmgpu.workload import TaskContext

log = logging.getLogger("slurmgpu.worker")


@dataclass
class Worker:
    """One worker process and the shards that it computes; it takes no more of them once `stopping` is set.

    With a workload that `resumes`, it then also leaves the current shard, whose progress the workload saves;
    `on_resumable` is called once such a workload is loaded. `end_times` gets the end of the walltime if that becomes
    known later. With `reports_in_threads`, `report` may be called in several threads at once.
    """

    run: Run
    assignment: Assignment
    report: Report
    stopping: threading.Event = field(default_factory=threading.Event)
    group: Group = field(default_factory=Group)
    on_resumable: Callable[[], None] = lambda: None
    end_times: Sequence[float] = ()
    reports_in_threads: bool = False
    _noted: dict[str, float] = field(default_factory=dict)
    _shard: int | None = None
    _parts: Parts | None = None
    _has_looked: bool = False
    _resumes: bool = False
    _takes_one: bool = False
    _used: dict[str, str] = field(default_factory=dict)
    _publisher: Publisher = field(init=False)
    _source: ShardSource = field(init=False)

    def __post_init__(self) -> None:
        self._deadline = Deadline(self.assignment.end_time, self.run.plan.margin_s, self.stopping, self.end_times)
        given = self.assignment
        claim = Claim(given.task, given.attempt, platform.node(), os.getpid(), cluster=given.cluster)
        self._logged = LoggedValues(self.report)
        self.report = self._logged.before(self.report)
        self._claimer = Claimer(self.run, claim, self._report_takeover, held=set(given.resume))
        if self.run.plan.parts > 1:
            self._parts = Parts(self.run, claim, given.submission, self._shall_leave_parts)
            self._claimer.joins = self._parts.shard_to_join
        self._unpublished = Unpublished(lambda: bool(retried(self.run.shard_files, self.run.plan.lease_s)))

    def work(self) -> None:
        """Take shards until none is left; raises WorkerFailedError if going on is pointless.

        Works in the run file's folder, as planning did, so that relative paths in the settings mean the same.
        """
        plan = self.run.plan
        around = describe(image_name())
        self._used = around["used"]
        self.report({"event": "surroundings", **around})
        self.report({"event": "loading"})
        with working_folder(Path(plan.search_path)), ItemReader(self.run) as reader:
            started = time.monotonic()
            self.group.guard()
            with without_full_collections():
                workload = load_together(self._load, self.group)
                if workload.prepare is not None:
                    gc.collect()  # before it is frozen; after the block Python would do it once more
            enable_own_loggers()
            if self.assignment.inject:
                workload = self._inject(workload)
            outside = log_outside(plan, self.assignment.code)
            importer.present_files().look_at_read_files()
            self._resumes, self._takes_one = workload.resumes, workload.takes_one
            self._unpublished.is_trusted = self._resumes  # an item takes too long for others to wait
            columns = columns_from_json(plan.columns)  # after loading, which may register kinds
            self._publisher = Publisher(
                self.run, self.assignment, columns, self.report, self._report_used, self.reports_in_threads
            )
            self._source = ShardSource(
                self.run,
                self._claimer,
                self.group,
                self._deadline,
                self._publisher,
                self.report,
                self._publish_held,
                list(self.assignment.resume),
                self._resumes,
            )
            if self._resumes:
                self.on_resumable()
            self._report_used()
            self.report({"event": "ready", "load_s": time.monotonic() - started, "resumes": self._resumes})
            computer = self._computer(workload, columns, items_are_rows=reader.items_are_rows)
            looks_ahead = workload.prepare is not None and self._is_plain
            if looks_ahead:
                self._source.look_ahead(computer, reader)
                # 100,000 items make Python look for garbage among the million objects of PyTorch, for 0.2 s in which no
                # thread starts the GPU's next work. What is loaded stays.
                gc.freeze()
            try:
                self._take_compute_and_publish(computer, reader)
            except (WorkerFailedError, OSError, RuntimeError) as error:
                if says_used_up(cause := error.__cause__ or error):
                    raise WorkerBrokenError(described(cause), blames_items=False) from error
                raise
            finally:
                computer.close()
                if looks_ahead:
                    gc.unfreeze()
                self._publisher.close()
            log_outside(plan, self.assignment.code, outside)

    def _computer(self, workload: Adapted, columns: Mapping[str, Column], *, items_are_rows: bool) -> Computer:
        plan = self.run.plan
        return Computer(
            workload,
            plan.workload.rpartition(":")[2],
            columns,
            plan.batch_size,
            on_batch=self._report_batch,
            agree=self._agree,
            keeps_rows=self.group.leads,
            noted=self._noted,
            folder=plan.search_path,
            retries=plan.retries,
            pause=self._pause,
            share=self.group.broadcast,
            kept=plan.keep,
            key=plan.key,
            items_are_rows=items_are_rows,
            doubts=lambda: self._is_plain and self._unpublished.doubts(),
            is_enough=lambda n_failed: n_failed >= FEW and self._unpublished.is_enough(n_failed),
            tell=self._tell,
        )

    def _take_compute_and_publish(self, computer: Computer, reader: ItemReader) -> None:
        try:
            self._take_and_compute(computer, reader)
            self._publisher.end()
        except (WorkerFailedError, WorkerBrokenError, OSError):
            self._publisher.end()  # what was computed before is not lost
            raise

    def _take_and_compute(self, computer: Computer, reader: ItemReader) -> None:
        for taken in self._source:
            shard = taken.shard
            self._shard = shard if self.group.leads and not taken.is_joined else None
            began = time.monotonic()
            self._unpublished.begin()
            if self._parts is not None:
                self._parts.begin(shard, is_joined=self._shard != shard)
            try:
                taken_in = taken.taken_in or computer.take_in(reader.read(taken.spans))
                computed = computer.compute(taken_in, taken.history)
            except Interrupted:
                if self._left_to_its_holder(shard):
                    continue
                self.report({"event": "left", "shard": shard})
                log.info("shard %d: left%s", shard, ", with its progress kept" if self._resumes else "")
                continue  # usually to the end; after a takeover to the next shard
            if self._left_to_its_holder(shard):
                continue
            if self.group.leads:
                seconds = time.monotonic() - began
                # By the clock as it is set now: its task does not know whether it was set since.
                self._unpublished.add(ComputedShard(shard, computed, time.time() - seconds, seconds, self._code()))
            if computed.is_sample:
                log.warning("shard %d: its other items wait until another shard shows whether all items fail", shard)
            self._claimer.draws = self._unpublished.wants_another()
            if not self._claimer.draws:
                self._publish_held(weighed=True)
            del computed, taken_in  # frees the rows before the next shard's

    @property
    def _is_plain(self) -> bool:
        """Whether one process computes whole items, and saves no progress of an item."""
        return self._parts is None and self.group.world_size == 1 and not self._resumes

    def _code(self) -> str | None:
        """The digest of the code that has computed the last shard, None if that is unknown."""
        # Also the first call may read files.
        is_known = importer.present_files().is_code_known(looks=not self._has_looked)
        self._has_looked = True
        return self.assignment.code if is_known else None

    def _agree(self, failure: Failure | None) -> Failure | None:
        """How a call of the workload ended for the whole group."""
        if failure is None and self.group.world_size == 1:
            return None
        has_left = self._parts is not None and self._parts.has_left
        is_asked = has_left or (self.group.leads and self._shall_leave())
        return settle_together(failure, self.group, is_asked=is_asked)

    def _publish_held(self, weighed: bool) -> bool:
        """Publish the shards that are held back, see `Unpublished.take`.

        Shards of which only a sample was computed are given back; True if there were any. Without `weighed`, as when
        the task has to end, shards are published even if the workload may be at fault.
        """
        shards = self._unpublished.take(weighed=weighed)
        self._logged.flush()  # this process may be killed once their files are there
        for one in shards:
            if one.computed.is_sample:
                self._source.give_back(one.shard)
            else:
                self._publisher.begin(one)
        return any(one.computed.is_sample for one in shards)

    def _left_to_its_holder(self, shard: int) -> bool:
        """Leave a shard to the task that holds it, and tell what was computed of it; False if this task holds it."""
        if self._parts is None or self._shard == shard:
            return False
        self._claimer.idle_s += self._parts.waited_s
        self.report({"event": "joined", "seconds": self._parts.computed_s, "idle_s": self._claimer.take_idle_s()})
        log.info("shard %d: computed parts for %.1f s", shard, self._parts.computed_s)
        return True

    def _tell(self, text: str) -> None:
        self.report({"event": "tell", "text": str(text)})

    def _pause(self, seconds: float, n_items: int) -> bool:
        """Wait until `n_items` can be tried again; False if the task has to end before that."""
        # A thousand tasks that a server refused must not all return at once.
        seconds = min(seconds * CHANCE.uniform(1.0, 1.25), LONGEST_PAUSE_S)
        log.info("waiting %.0f s before retrying %s", seconds, count_of(n_items, "item"))
        self.report({"event": "waiting", "seconds": seconds, "items": n_items})
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._deadline.over(left):
            self.stopping.wait(min(left, 1.0))
        return not self._deadline.over()

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

    def _report_batch(self, indices: list[int], isolated: bool, ahead: int | None) -> None:
        if self._takes_one:
            self._logged.item = indices[0]
        if self._shard is not None:  # of a joined shard, its holder tells
            self._publisher.end(waits=False)
            prepared = None if ahead is None else (self._source.shard_of(ahead, self._shard), ahead)
            self.report({"event": "batch", "items": indices, "isolated": isolated, "ahead": prepared})
        self.group.gather()  # no rank begins, and may die of an item, before rank 0 has reported the batch

    def _load(self) -> Adapted:
        given, group = self.assignment, self.group
        device = device_of(given, group, self.report)
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
            tell=self._tell,
            log=self._logged.log if group.leads else lambda step, **values: None,
            code=given.code,
            is_again=lambda: self._shard is not None and self.run.revision_to_make(self._shard) > 0,
            parts=self.run.plan.parts,
            **({} if self._parts is None else {"divide": only_for_calls("task.divide", self._parts.divide)}),
        )
        workload = load_workload(self.run.plan, context)
        return workload if self._parts is None else replace(workload, call=self._parts.calling(workload.call))

    def _note(self, name: str, value: float) -> None:
        self._noted[name] = noted_number(name, value)

    def _report_progress(self, text: str) -> None:
        self.report({"event": "progress", "text": str(text)})

    def _inject(self, workload: Adapted) -> Adapted:
        from slurmgpu.faults import parse_faults
        from slurmgpu.faults.injection import Injected, Marks

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
