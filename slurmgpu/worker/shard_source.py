"""The shards of a worker, one after another: those that its attempt holds, those claimed ahead, then others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slurmgpu.run.crash_history import History, read_history
from slurmgpu.run.directory import Run
from slurmgpu.run.frozen_plan import SPARE_SHARE
from slurmgpu.run.recompute import Spans
from slurmgpu.run.worker_events import Report
from slurmgpu.shards.userblock import DamagedShardError
from slurmgpu.util.atomic_files import once_more_if_full
from slurmgpu.util.logging import enable_own_loggers
from slurmgpu.worker.computer import Computer
from slurmgpu.worker.deadline import Deadline
from slurmgpu.worker.groups import Group
from slurmgpu.worker.item_reader import ItemReader
from slurmgpu.worker.lookahead import Lookahead
from slurmgpu.worker.publisher import Publisher
from slurmgpu.worker.shard_claimer import Claimer, Held, open_shards
from slurmgpu.worker.taken_shard import Taken

log = logging.getLogger("slurmgpu.worker")

AHEAD_S = 2.0
"""A task claims further shards while it computes one, if none took longer: otherwise other tasks might be idle."""
READ_AT_ONCE = 1024
"""The number of items of these shards that are read between two calls, approximately, if the input has an index."""


@dataclass
class ShardSource:
    """Claims the shards that a worker computes, until none is left or its task has to end: an event says why.

    Rank 0 of the `group` claims them, and sends them to the others. `resume` are the shards that the attempt held when
    this process began. With a workload that `resumes`, an item need not be finished before the `deadline`.

    `publish_held(weighed)` publishes computed shards that are held back, weighed or not by whether the workload may be
    at fault; True if some were given back instead, so that not all shards are complete.
    """

    run: Run
    claimer: Claimer
    group: Group
    deadline: Deadline
    publisher: Publisher
    report: Report
    publish_held: Callable[[bool], bool]
    resume: list[int]
    resumes: bool
    _lookahead: Lookahead | None = None
    _none_free: bool = False

    def __iter__(self) -> Iterator[Taken]:
        """The shards to compute, with crash history and items; all ranks get the same."""
        while True:
            if (ahead := self._next_ahead()) is not None:
                self._begin(ahead.shard)
                yield ahead
                continue
            found = None
            if self.group.leads and (taken := self._next()) is not None:
                # Read by rank 0 only: a network file system may show ranks different files.
                found = taken.shard, vars(taken.history), taken.spans, taken.is_joined
            found = self.group.broadcast(found)
            if found is None:
                return
            shard, history, spans, is_joined = found
            yield Taken(shard, History.from_json(history), spans, is_joined=is_joined)

    def look_ahead(self, computer: Computer, reader: ItemReader) -> None:
        """Claim and read further shards while this computer computes, and write the files of the last in a thread."""
        self.publisher.is_beside = True
        size = self.run.plan.batch_size  # an index has the place of each batch
        ahead = self._lookahead = Lookahead(
            self._claim_ahead,
            reader.read,
            computer.take_in,
            enough_items=2 * size,
            slice_items=max(2, -(-READ_AT_ONCE // size)) * size if reader.is_indexed else 0,
        )

        def meanwhile() -> None:
            # Only once a shard shows that the workload works, and how long one takes.
            if 0 < self.publisher.slowest_s < AHEAD_S and not (self.deadline.stop.is_set() or self.resume):
                ahead.go_on()

        computer.meanwhile = meanwhile
        computer.following = lambda: found[1] if (found := ahead.first()) is not None else ()

    def shard_of(self, index: int, present: int) -> int:
        """The shard of an item that is prepared ahead: the present one, or the next."""
        found = self._lookahead.first() if self._lookahead is not None else None
        return found[0] if found is not None and found[1][0].index == index else present

    def give_back(self, shard: int) -> None:
        """Release a claimed shard, for any task."""
        self.claimer.give_back(shard)
        self.report({"event": "skipped", "shard": shard})

    @property
    def _time_of_a_shard(self) -> float:
        """The seconds that have to be left for another shard."""
        return (1 + SPARE_SHARE) * self.publisher.slowest_s

    def _begin(self, shard: int) -> None:
        enable_own_loggers()
        indices = self.run.plan.indices(*self.run.plan.bounds(shard))
        self.report({"event": "claim", "shard": shard, "idle_s": self.claimer.take_idle_s()})
        log.info("shard %d: items %d..%d", shard, indices[0], indices[-1])

    def _next_ahead(self) -> Taken | None:
        """The next shard of those claimed ahead; if the task has to end, all of them are given back."""
        if self._lookahead is None or (taken := self._lookahead.pop()) is None:
            return None
        if not self.deadline.over(self._time_of_a_shard):
            return taken
        found: Taken | None = taken
        while found is not None:
            self.give_back(found.shard)
            found = self._lookahead.pop()
        return None

    def _claim_ahead(self) -> Taken | None:
        if self._none_free:  # listed again when this task has nothing else to do
            return None
        try:
            shard = self.claimer.next_free()
        except OSError as error:
            log.info("no shard is claimed ahead: %s", error)
            shard = None
        if shard is None:
            self._none_free = True
            return None
        self.report({"event": "ahead", "shard": shard})
        return self._taken(shard)

    def _next(self) -> Taken | None:
        """The next shard, claimed or to join; None, after an event with the reason, when the work is done."""
        found = self._find()
        if isinstance(found, str):
            self.report({"event": "done", "reason": found, "idle_s": self.claimer.take_idle_s()})
            return None
        if isinstance(found, Held):
            index = self.run.plan.indices(*self.run.plan.bounds(found.shard))[0]
            self.report({"event": "tell", "text": f"computing parts of item {index}"})
            log.info("shard %d: parts of item %d, whose shard another task holds", found.shard, index)
            return self._taken(found.shard, is_joined=True)
        self._begin(found)
        return self._taken(found)

    def _find(self) -> int | Held | str:
        """The next shard, claimed or to join; the reason when the work is done."""
        self.publisher.end()  # a shard is complete only when it is published
        self._none_free = False
        # A resumable item need not be finished here.
        over = self.deadline.over(0.0 if self.resumes else self._time_of_a_shard)
        while self.resume and not (over and self.resumes):
            shard = self.resume.pop(0)
            if self.claimer.is_still_own(shard):
                return shard
            log.info("shard %d: published, parked or taken over since it was claimed", shard)
            self.report({"event": "skipped", "shard": shard})
        found = over or once_more_if_full(self.claimer.next)
        if isinstance(found, int | Held):
            return found
        if self.publish_held(self.deadline.over() is None):
            return self._find()
        if over is not None and not open_shards(self.run):
            return "complete"  # no shard is left that would need more time
        return found

    def _taken(self, shard: int, *, is_joined: bool = False) -> Taken:
        history = read_history(self.run.claims.folder, shard)
        return Taken(shard, history, self._spans(shard), is_joined=is_joined)

    def _spans(self, shard: int) -> Spans:
        """The items of a shard to compute; all of them if the rows of the former revision cannot be read."""
        if revision := self.run.revision_to_make(shard):
            try:
                self.publisher.read_former(shard, revision)
            except DamagedShardError as error:
                log.warning("all items of shard %d are recomputed: %s", shard, error)
                return [self.run.plan.bounds(shard)]
        return self.run.items_of(shard)
