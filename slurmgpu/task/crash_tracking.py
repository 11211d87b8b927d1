"""The deaths of an attempt's workers: what each had in hand, which item is to blame, and whether to start another."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence

from slurmgpu.run.claims import Claim
from slurmgpu.run.crash_history import read_history, write_history
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import POLICIES, brought_upon_itself, describe_exit
from slurmgpu.run.records import Death

log = logging.getLogger(__name__)

MAX_DEATHS = 8
"""Workers that may die in a row, without a shard published or an item quarantined, before the task gives up."""
MAX_DEATHS_LOADING = 3


class Deaths:
    """What is known of an attempt's workers that died; what was in flight goes into the shard's history.

    `parked` says of each shard that was left for a submission with more memory, and why.
    """

    def __init__(self, run: Run, submission: int) -> None:
        self.parked: list[str] = []
        self._run = run
        self._submission = submission
        self._in_flight: tuple[int, Sequence[int], bool] | None = None
        self._broken: str | None = None
        self._n_in_a_row = 0

    def take_up(self, shard: int, items: Sequence[int], is_isolated: bool) -> None:
        """Suspect these items, if the worker dies now."""
        self._in_flight = (shard, items, is_isolated)

    def put_down(self) -> None:
        """Suspect nobody."""
        self._in_flight = None

    def note_broken(self, message: str) -> None:
        """Know why the worker will die: the first of several messages says it."""
        self._broken = self._broken or message

    def forgive(self) -> None:
        """Forget deaths that led nowhere: a shard has been published, or an item has got further."""
        self._n_in_a_row = 0

    def forgive_in_flight(self) -> None:
        """Forget the deaths of what is in flight, whose progress is kept: it did not die of what comes now."""
        self.forgive()
        if self._in_flight is not None:
            shard, items, _ = self._in_flight
            history = read_history(self._run.claims.folder, shard)
            if history.forget(items):
                write_history(self._run.claims.folder, shard, history)

    def bury(self, returncode: int, was_oom: bool, held: MutableMapping[int, Claim]) -> tuple[Death, str | None]:
        """A death for the attempt's record, and why no worker is to be started after it; None if one is.

        A shard that is left for a submission with more memory is taken out of `held`.
        """
        kind = "host_oom" if was_oom else "crash"
        how = describe_exit(returncode)
        message = self._broken or (f"the worker ran out of host memory and {how}" if was_oom else f"the worker {how}")
        death: Death = {"class": kind, "message": message}
        limit = MAX_DEATHS_LOADING
        if self._in_flight is not None:
            limit = MAX_DEATHS
            shard, items, _ = self._in_flight
            death["shard"], death["items"] = shard, [items[0], items[-1]][: len(items)]
            weight = 1.0 if self._broken or (brought_upon_itself(returncode) and not was_oom) else 0.5
            self._remember(weight, kind, message, held)
        log.error("%s: %s%s", kind, message, _what_was_in_flight(death))
        self._n_in_a_row += 1
        self._in_flight = self._broken = None
        if self._n_in_a_row < limit:
            return death, None
        return death, f"{message}; {self._n_in_a_row} workers died one after another"

    def _remember(self, weight: float, kind: str, message: str, held: MutableMapping[int, Claim]) -> None:
        assert self._in_flight is not None
        shard, items, is_isolated = self._in_flight
        history = read_history(self._run.claims.folder, shard)
        guilty = history.record(items, isolated=is_isolated, weight=weight, error=f"{kind}: {message}")
        if guilty is not None:
            self.forgive()
            if POLICIES[kind].more_memory and history.parked_by is None:
                # More memory may be all it needs: the shard is left for a submission that has it.
                del history.quarantined[guilty]
                history.parked_by = self._submission
                self._park(shard, held.pop(shard))
                log.error("shard %d is left for a submission with more memory: item %d", shard, guilty)
                self.parked.append(f"item {guilty} needs more host memory; its shard {shard} was left")
            else:
                log.error("item %d is quarantined: %s: %s", guilty, kind, message)
        write_history(self._run.claims.folder, shard, history)

    def _park(self, shard: int, claim: Claim) -> None:
        try:
            self._run.claims.park(shard, claim)
        except OSError as error:  # then its lease ends, and who takes it over finds its history
            log.warning("shard %d cannot be parked: %s", shard, error)


def _what_was_in_flight(death: Death) -> str:
    """What a worker that died had in hand, in words; "" if nothing."""
    items = death.get("items")
    if not items:
        return ""
    were = f"items {items[0]} to {items[-1]}" if len(items) > 1 else f"item {items[0]}"
    return f"; {were} of shard {death['shard']} {'were' if len(items) > 1 else 'was'} in flight"
