"""Track the deaths of an attempt's workers: the items in flight, the item to blame, and whether to go on."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence

from slurmgpu.run.claims import Claim
from slurmgpu.run.crash_history import History, read_history, write_history
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import POLICIES, describe_exit
from slurmgpu.run.records import Death
from slurmgpu.util.signals import is_self_inflicted

log = logging.getLogger(__name__)

MAX_DEATHS = 8
"""How many workers may die in a row, without a shard published or an item quarantined, before the task gives up."""
MAX_DEATHS_LOADING = 3
MAX_PARKED = 8
"""How many shards may be left for more memory in a row, without one published, before the task gives up."""


class Deaths:
    """The deaths of an attempt's workers; the items in flight are recorded in the shard's history.

    `parked` has a sentence for each shard that was left for a submission with more memory.
    """

    def __init__(self, run: Run, submission: int) -> None:
        self.parked: list[str] = []
        self._run = run
        self._submission = submission
        self._in_flight: tuple[int, Sequence[int], bool] | None = None
        self._ahead: tuple[int, int] | None = None
        self._broken: str | None = None
        self._is_sure = False
        self._n_in_a_row = self._n_parked_in_a_row = 0

    def begin_call(
        self, shard: int, items: Sequence[int], is_isolated: bool, ahead: tuple[int, int] | None = None
    ) -> None:
        """Set the items in flight; `ahead` are shard and first item of the batch that is being prepared."""
        self._in_flight, self._ahead = (shard, items, is_isolated), ahead

    def end_call(self, shard: int | None = None) -> None:
        """Clear the items in flight if they are of this shard; when it is published, the next's may be in flight."""
        if self._in_flight is not None and shard in (None, self._in_flight[0]):
            self._in_flight = self._ahead = None

    def note_broken(self, message: str, *, is_sure: bool = False) -> None:
        """Record why the worker will die; the first message counts. `is_sure`: only the items in flight can be why."""
        if self._broken is None:
            self._broken, self._is_sure = message, is_sure

    def forget(self) -> None:
        """Forget deaths and parked shards in a row: a shard was published, or an item has progressed."""
        self._n_in_a_row = self._n_parked_in_a_row = 0

    def forget_in_flight(self) -> None:
        """Forget deaths with the items in flight: their progress is kept, so what comes next did not cause them."""
        self.forget()
        if self._in_flight is not None:
            shard, items, _ = self._in_flight
            history = read_history(self._run.claims.folder, shard)
            if history.forget(items):
                write_history(self._run.claims.folder, shard, history)

    def add_death(self, returncode: int, was_oom: bool, held: MutableMapping[int, Claim]) -> tuple[Death, str | None]:
        """Record a death; return it, and why no other worker is started (None if one is).

        A parked shard is removed from `held`.
        """
        kind = "host_oom" if was_oom else "crash"
        how = describe_exit(returncode)
        killed = ", and meanwhile the kernel killed a process of this job for lack of host memory" * was_oom
        message = self._broken or f"the worker {how}{killed}"
        death: Death = {"class": kind, "message": message}
        limit = MAX_DEATHS_LOADING
        if self._in_flight is not None:
            limit = MAX_DEATHS
            shard, items, _ = self._in_flight
            death["shard"], death["items"] = shard, [items[0], items[-1]][: len(items)]
            weight = 0.5 if was_oom or not (self._broken or is_self_inflicted(returncode)) else 1.0
            self._remember(weight, kind, message, held)
        log.error("%s: %s%s", kind, message, _what_was_in_flight(death))
        self._n_in_a_row += 1
        self._in_flight = self._ahead = self._broken = None
        self._is_sure = False
        if self._n_parked_in_a_row >= MAX_PARKED:
            return death, f"{message}; {self._n_parked_in_a_row} shards in a row were left for more memory"
        if self._n_in_a_row < limit:
            return death, None
        return death, f"{message}; {self._n_in_a_row} workers died one after another"

    def _remember(self, weight: float, kind: str, message: str, held: MutableMapping[int, Claim]) -> None:
        assert self._in_flight is not None
        shard, items, is_isolated = self._in_flight
        history = read_history(self._run.claims.folder, shard)
        error, is_sole = f"{kind}: {message}", self._ahead is None
        is_sure = self._is_sure and POLICIES[kind].more_memory
        blamed = history.record(
            items, isolated=is_isolated, weight=weight, error=error, is_sole=is_sole, is_sure=is_sure
        )
        self._suspect_ahead(weight, shard, history)
        if blamed is not None:
            self._n_in_a_row = 0
            if POLICIES[kind].more_memory and history.parked_by is None:
                # More memory may help: the shard is left for a submission that has it.
                del history.quarantined[blamed]
                history.parked_by = self._submission
                try:
                    self._run.claims.park(shard, held.pop(shard))
                except OSError as error:  # then its lease runs out, and the next worker finds its history
                    log.warning("shard %d cannot be parked: %s", shard, error)
                log.error("shard %d is left for a submission with more memory: item %d", shard, blamed)
                self.parked.append(f"item {blamed} needs more host memory; its shard {shard} was left")
                self._n_parked_in_a_row += 1
            else:
                log.error("item %d is quarantined: %s: %s", blamed, kind, message)
        write_history(self._run.claims.folder, shard, history)

    def _suspect_ahead(self, weight: float, shard: int, history: History) -> None:
        """Count the death for the batch that was being prepared, in this shard's `history` or in another's."""
        if self._ahead is None:
            return
        other, first = self._ahead
        if other == shard:
            history.suspect(first, weight)
        else:
            its_own = read_history(self._run.claims.folder, other)
            its_own.suspect(first, weight)
            write_history(self._run.claims.folder, other, its_own)


def _what_was_in_flight(death: Death) -> str:
    items = death.get("items")
    if not items:
        return ""
    were = f"items {items[0]} to {items[-1]}" if len(items) > 1 else f"item {items[0]}"
    return f"; {were} of shard {death['shard']} {'were' if len(items) > 1 else 'was'} in flight"
