"""Finding the next shard: a free one, one whose owner died, or the knowledge that there is nothing left to do.

A listing may be old: before a task ends for it, what it shows as taken or done is asked for by name or listed again.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from slurmgpu.run.claims import UNOWNED, UNREADABLE, Claim, Watch
from slurmgpu.run.directory import Run
from slurmgpu.util.shared_files import exists, list_fresh, retried

log = logging.getLogger(__name__)

TRIES = 8
"""So many shards of a listing that others have taken since: then it is too old, and another one is made."""
MANY = 1000
"""With so many free shards each task begins at a place of its own; with fewer all go through them in order."""
GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, lie apart from each other, however many there are."""
OBSERVED = 32
"""So many of others' claims are watched while there is free work."""
LOOKED_UP = 1000
"""So many shards that a listing lacks are asked for by their names before a run is taken for complete."""
CLAIMS_A_SECOND, NAMES_A_SECOND = 100, 20_000
"""An idle task reads no more claims, and lists no more names, on average: there may be a thousand such tasks."""


@dataclass
class Tenure:
    """How long a worker may go on: until it is `told` to stop, or too little of the walltime is left.

    `end_time` is when the walltime ends, in seconds since the epoch, None for never; `margin_s` of it are left over.
    `told_late` gets it where it becomes known while the worker is at work.
    """

    end_time: float | None
    margin_s: float
    told: threading.Event
    told_late: Sequence[float] = ()
    _over: str | None = None
    _end: float | None = field(init=False)

    def __post_init__(self) -> None:
        # A clock that is set while the worker works changes nothing of how long that may be.
        self._end = None if self.end_time is None else time.monotonic() + self.end_time - time.time()

    def over(self, needed_s: float = 0.0) -> str | None:
        """Why it may not go on, if `needed_s` are needed: "told to stop" or "deadline"; once said, it stays so."""
        if self._over is None and self.told.is_set():
            self._over = "told to stop"
        if self.end_time is None and self.told_late:
            self.end_time = self.told_late[-1]
            self.__post_init__()
        if self._over is None and self._end is not None:
            self._over = "deadline" if time.monotonic() + needed_s + self.margin_s > self._end else None
        return self._over

    def end_now(self) -> float:
        """End the walltime so soon that no time is left for another shard; when."""
        self._end = time.monotonic() + self.margin_s
        self.end_time = time.time() + self.margin_s
        return self.end_time


def open_shards(run: Run) -> set[int]:
    """The shards that are to be computed, from one listing."""
    return set(range(run.plan.n_shards)) - retried(run.published, run.plan.lease_s)


def is_open(run: Run, shard: int) -> bool:
    """Whether a shard is to be computed, asked for by its name."""
    return not exists(run.shard_path(shard), run.plan.lease_s)


State = tuple[int, Claim, str]
"""A shard with its claim and what is known of it: "alive", "stale" or "unknown"; "gone", "parked", "own" or "left"."""


@dataclass
class Scout:
    """Takes shards of `run` for the attempt that `claim` names.

    `on_takeover(shard, former)` is told of each claim that was taken from a dead owner; `pause` waits between looks.
    `held` are the shards that the attempt knows to hold; another one with its claim was left by a worker that died.
    """

    run: Run
    claim: Claim
    on_takeover: Callable[[int, Claim], None] = lambda shard, former: None
    pause: Callable[[float], None] = time.sleep
    held: set[int] = field(default_factory=set)
    _ahead: deque[int] = field(default_factory=deque)
    _last: int = 0
    _n_surveys: int = 0
    _n_names: int = 0
    _observed: float = 0.0
    _checked: float = 0.0
    _lost: set[int] = field(default_factory=set)
    _published: set[int] = field(default_factory=set)
    _watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self._watch = Watch(self.run.plan.lease_s)

    def next(self) -> int | str:
        """A shard, claimed; else why there is none: "complete" (all published) or "others" (the rest has owners)."""
        self._observe()
        doubted = False
        while True:
            if (shard := self._take_ahead()) is not None:
                return self._begin(shard)
            free, taken = self._survey()
            self._ahead = deque(_from(self._place(len(free)), free))
            if (shard := self._take_ahead()) is not None:
                return self._begin(shard)
            states: list[State] = []
            if not free:
                if not doubted:
                    self._watch.doubt()
                    doubted = True
                states = self._states(taken)
                if (shard := self._take_left(states)) is not None:
                    return self._begin(shard)
                if (verdict := self._verdict(states)) is not None:
                    return verdict
            self._wait(len(states))

    def look(self) -> str:
        """The same without claiming anything: "work", "complete" or "others". For a task, before it loads a model."""
        while True:
            free, taken = self._survey()
            states = [] if free else self._states(taken)
            if free or any(state in ("gone", "left", "stale") and self._is_open(shard) for shard, _, state in states):
                return "work"
            if (verdict := self._verdict(states)) is not None:
                return verdict
            self._wait(len(states))

    def is_still_own(self, shard: int) -> bool:
        """Whether a shard that this attempt has held for a while is still to be computed, and by this attempt."""
        return is_open(self.run, shard) and self.run.claims.holds(shard, self.claim)

    def has_lost(self, shard: int) -> bool:
        """Whether another attempt has taken over a shard that this one holds; looked up six times in `lease_s`.

        Who keeps an item's progress in files would write them beside the new owner.
        """
        now = time.monotonic()
        if shard not in self._lost and now - self._checked >= self.run.plan.lease_s / 6:
            self._checked = now
            claim = self.run.claims.observe(shard)
            # Nobody's: it is being taken over, perhaps in vain, or written just now.
            if claim is not None and claim not in (UNOWNED, UNREADABLE) and not claim.is_of(self.claim):
                self._lost.add(shard)
        return shard in self._lost

    def _begin(self, shard: int) -> int:
        self._last = shard
        self._lost.discard(shard)
        self.held.add(shard)
        return shard

    def _observe(self) -> None:
        """Look at others' leases while there is free work, too: when there is none, the dead are known at once."""
        gap = max(self.run.plan.lease_s / 4, 10 * self._n_names / NAMES_A_SECOND)
        if time.monotonic() - self._observed >= gap:
            self._observed = time.monotonic()
            taken = self._survey()[1]
            # Those behind one's own are of tasks that are near; each task watches others.
            self._states(_from(bisect_left(taken, self._last), taken)[:OBSERVED])

    def _survey(self) -> tuple[list[int], list[int]]:
        """The shards that are to be computed, in order, from listings: those without a claim, and those with one."""
        is_open = open_shards(self.run) - self._published
        claimed = self.run.claims.numbers()
        self._n_names = self.run.plan.n_shards - len(is_open) + len(claimed)
        return sorted(is_open - claimed), sorted(is_open & claimed)

    def _place(self, n_free: int) -> int:
        """Where to begin among the free shards, in order where these are few."""
        self._n_surveys += 1
        if n_free < MANY:
            return 0
        number = self.claim.task.rpartition("_")[2]
        is_first = self._n_surveys == 1 and number.isdecimal()
        return int(n_free * (int(number) * GOLDEN % 1 if is_first else random.random()))

    def _take_ahead(self) -> int | None:
        """The first free shard of the last listing that is free still; None if that listing is of no more use."""
        n_tries = len(self._ahead) if len(self._ahead) < MANY else TRIES
        for _ in range(n_tries):
            shard = self._ahead.popleft()
            if self.run.claims.take(shard, self.claim) and self._keep(shard):
                return shard
        self._ahead.clear()
        return None

    def _keep(self, shard: int) -> bool:
        """Whether a shard that was claimed just now is to be computed; else the claim is given back."""
        if self._is_open(shard):
            return True
        self.run.claims.release(shard, self.claim)
        return False

    def _is_open(self, shard: int) -> bool:
        """Whether a shard that is open by a listing is so indeed."""
        if is_open(self.run, shard):
            return True
        self._published.add(shard)
        return False

    def _take_left(self, states: list[State]) -> int | None:
        """A shard that a dead worker or a dead task left, or whose claim an old listing still showed."""
        for shard, former, state in states:
            if state == "left" and self._keep(shard):
                return shard
            if state == "gone" and self.run.claims.take(shard, self.claim) and self._keep(shard):
                return shard
            if state == "stale" and self.run.claims.take_over(shard, former, self.claim) and self._keep(shard):
                log.warning("shard %d taken over from %s on %s: its lease is stale", shard, former.attempt, former.host)
                self.on_takeover(shard, former)
                return shard
        return None

    def _states(self, shards: Iterable[int]) -> list[State]:
        """What is known of the claims of shards."""
        return [self._state(shard) for shard in shards]

    def _state(self, shard: int) -> State:
        claim = self.run.claims.observe(shard)
        if claim is None:
            return shard, UNOWNED, "gone"  # published or given back this moment, or before an old listing
        if claim.parked:
            return shard, claim, "parked"
        if claim.is_of(self.claim):
            return shard, claim, "own" if shard in self.held else "left"
        return shard, UNOWNED if claim is UNREADABLE else claim, self._watch.look(shard, claim)

    def _verdict(self, states: list[State]) -> str | None:
        """Why there is nothing to do, if that is so; `states` are those of all shards that are open by a listing."""
        if any(state not in ("alive", "parked", "own") for _, _, state in states):
            return None
        retried(lambda: list_fresh(self.run.shards), self.run.plan.lease_s)
        asked = {*self._published}
        lacking = open_shards(self.run) - asked
        if not states and len(lacking) <= LOOKED_UP:
            asked |= lacking
        self._published = {shard for shard in asked if not is_open(self.run, shard)}
        lacking |= asked - self._published
        lacking -= self._published
        if not lacking:
            return "complete"
        return "others" if lacking <= {shard for shard, _, _ in states} else None

    def _wait(self, n_claims: int) -> None:
        """Pause so long that each renewal is seen, of which there are six in a lease; longer, if there is much to read.

        A look every quarter of a lease finds a stale one within one and a half.
        """
        lease_s = self.run.plan.lease_s
        work_s = n_claims / CLAIMS_A_SECOND + self._n_names / NAMES_A_SECOND
        self.pause(min(lease_s / 4, max(min(1.0, lease_s / 20), work_s)))


def _from(place: int, shards: list[int]) -> list[int]:
    """Shards in order from a place on, and then those before it."""
    return shards[place:] + shards[:place]
