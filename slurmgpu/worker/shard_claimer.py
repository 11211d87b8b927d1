"""Find the next shard: a free one, or one whose owner died; or find that nothing is left to do.

Listings may be outdated: before a task ends because of one, shards are listed again, and those that it found by name
are looked up again.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from slurmgpu.run.claims import RENEWALS_PER_LEASE, UNOWNED, UNREADABLE, Claim, Watch
from slurmgpu.run.directory import Run
from slurmgpu.util.chance import CHANCE
from slurmgpu.util.shared_files import exists, list_fresh, retried

log = logging.getLogger(__name__)

TRIES = 8
"""After this many shards of a listing that others have taken, the shards are listed again."""
MANY = 1000
"""With this many free shards each task starts at its own place; with fewer, all go in order."""
GOLDEN = 0.6180339887498949
"""Golden ratio: its multiples modulo 1 are spread evenly, however many there are."""
OBSERVED = 32
"""How many claims of others to watch while there is free work."""
FIRST_PAUSE_S = 0.05
"""An idle task's first pause; each is twice the one before, up to what the lease allows."""
CLAIMS_A_SECOND, NAMES_A_SECOND = 100, 20_000
"""Average limits of an idle task for reading claims and listing names: there may be a thousand such tasks."""


def open_shards(run: Run) -> set[int]:
    """The shards to compute, from one listing."""
    return set(range(run.plan.n_shards)) - retried(run.published, run.plan.lease_s)


def is_open(run: Run, shard: int) -> bool:
    """Whether a shard must be computed, looked up by name."""
    return not exists(run.shard_path(shard), run.plan.lease_s)


@dataclass(frozen=True)
class Held:
    """A shard that another task holds; this task may compute parts of its item."""

    shard: int


LATER = "later"
"""No shard can be joined yet, but one of them may soon."""
State = tuple[int, Claim, str]
"""A shard, its claim, and its state: alive, stale, unknown, gone, parked, own or left."""


@dataclass
class Claimer:
    """Claims shards of `run` for the attempt of `claim`.

    `on_takeover(shard, former)` is called for each claim taken from a dead owner; `pause` waits between looks. `held`
    are the shards that the attempt knows it holds; others with its claim were left by a worker that died. `idle_s` is
    how long it has waited for what others hold. `joins` chooses one of the shards that others hold, to compute parts
    of its item, or LATER, or None. While it `draws`, free shards are taken at random and not in order.
    """

    run: Run
    claim: Claim
    on_takeover: Callable[[int, Claim], None] = lambda shard, former: None
    pause: Callable[[float], None] = time.sleep
    held: set[int] = field(default_factory=set)
    idle_s: float = 0.0
    joins: Callable[[Sequence[int]], int | str | None] = lambda shards: None
    draws: bool = False
    _ahead: deque[int] = field(default_factory=deque)
    _last: int = 0
    _n_pauses: int = 0
    _n_surveys: int = 0
    _n_names: int = 0
    _observed: float = 0.0
    _checked: float = 0.0
    _lost: set[int] = field(default_factory=set)
    _published: set[int] = field(default_factory=set)
    _watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self._watch = Watch(self.run.plan.lease_s)

    def next(self) -> int | Held | str:
        """A claimed shard, or one to join; else "complete" (all published or `held`) or "others" (owned by others)."""
        self._observe()
        self._n_pauses = 0
        doubted = False
        while True:
            if (shard := self._take_ahead()) is not None:
                return self._begin(shard)
            free, taken = self._survey()
            self._ahead = deque(_rotated(self._place(len(free)), free))
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
                joined = self._to_join(states)
                if isinstance(joined, int):
                    return Held(joined)
                if joined is None and (verdict := self._verdict(states)) is not None:
                    return verdict
            self._wait(len(states))

    def next_free(self) -> int | None:
        """A claimed shard that was free; None, without waiting, if no listing shows one."""
        self._observe()
        if (shard := self._take_ahead()) is None:
            free, _ = self._survey()
            self._ahead = deque(_rotated(self._place(len(free)), free))
            shard = self._take_ahead()
        return None if shard is None else self._begin(shard)

    def give_back(self, shard: int) -> None:
        """Release a claimed shard, for any task."""
        self.held.discard(shard)
        self.run.claims.release(shard, self.claim)

    def look(self) -> str:
        """Return, without claiming a shard, "work" if there is any; else "complete" or "others".

        A task asks before it loads a model.
        """
        while True:
            free, taken = self._survey()
            states = [] if free else self._states(taken)
            if free or any(state in ("gone", "left", "stale") and self._is_open(shard) for shard, _, state in states):
                return "work"
            joined = self._to_join(states)
            if isinstance(joined, int):
                return "work"
            if joined is None and (verdict := self._verdict(states)) is not None:
                return verdict
            self._wait(len(states))

    def is_still_own(self, shard: int) -> bool:
        """Whether a shard that this attempt claimed is still open and its own."""
        return is_open(self.run, shard) and self.run.claims.holds(shard, self.claim)

    def has_lost(self, shard: int) -> bool:
        """Whether another attempt took over a shard of this one; checked six times in `lease_s`.

        Without this check, both would write the progress of the same item.
        """
        now = time.monotonic()
        if shard not in self._lost and now - self._checked >= self.run.plan.lease_s / RENEWALS_PER_LEASE:
            self._checked = now
            claim = self.run.claims.observe(shard)
            # Unowned: it is being taken over, perhaps in vain, or was just written.
            if claim is not None and claim not in (UNOWNED, UNREADABLE) and not claim.is_of(self.claim):
                self._lost.add(shard)
        return shard in self._lost

    def take_idle_s(self) -> float:
        """Seconds that it waited for what other tasks hold since the last call."""
        waited, self.idle_s = self.idle_s, 0.0
        return waited

    def _begin(self, shard: int) -> int:
        self._last = shard
        self._lost.discard(shard)
        self.held.add(shard)
        return shard

    def _observe(self) -> None:
        """Watch others' leases while there is free work, so that stale ones are known once there is none."""
        gap = max(self.run.plan.lease_s / 4, 10 * self._n_names / NAMES_A_SECOND)
        if time.monotonic() - self._observed >= gap:
            self._observed = time.monotonic()
            taken = self._survey()[1]
            # The following ones belong to nearby tasks, so each task watches others.
            self._states(_rotated(bisect_left(taken, self._last), taken)[:OBSERVED])

    def _survey(self) -> tuple[list[int], list[int]]:
        """The shards to compute without and with a claim, in order, from listings."""
        is_open = open_shards(self.run) - self._published
        claimed = self.run.claims.numbers()
        self._n_names = self.run.plan.n_shards - len(is_open) + len(claimed)
        return sorted(is_open - claimed), sorted(is_open & claimed)

    def _place(self, n_free: int) -> int:
        """The place to start among the free shards; 0 if there are few."""
        self._n_surveys += 1
        if n_free < MANY:
            return 0
        number = int(self.claim.task.rpartition("_")[2])
        return int(n_free * (number * GOLDEN % 1 if self._n_surveys == 1 else CHANCE.random()))

    def _take_ahead(self) -> int | None:
        """The next shard of the last listing that is still free; None if the listing is used up."""
        n_tries = len(self._ahead) if len(self._ahead) < MANY else TRIES
        for _ in range(n_tries):
            if self.draws:
                self._ahead.rotate(-CHANCE.randrange(len(self._ahead)))
            shard = self._ahead.popleft()
            if self.run.claims.take(shard, self.claim) and self._keep(shard):
                return shard
        self._ahead.clear()
        return None

    def _keep(self, shard: int) -> bool:
        """Whether a newly claimed shard is still open; else its claim is released."""
        if self._is_open(shard):
            return True
        self.run.claims.release(shard, self.claim)
        return False

    def _is_open(self, shard: int) -> bool:
        if is_open(self.run, shard):
            return True
        self._published.add(shard)
        return False

    def _take_left(self, states: list[State]) -> int | None:
        """A shard that a dead worker or task left, or whose claim is gone."""
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

    def _to_join(self, states: list[State]) -> int | str | None:
        return self.joins([shard for shard, _, state in states if state in ("alive", "unknown")])

    def _states(self, shards: Iterable[int]) -> list[State]:
        return [self._state(shard) for shard in shards]

    def _state(self, shard: int) -> State:
        claim = self.run.claims.observe(shard)
        if claim is None:
            return shard, UNOWNED, "gone"  # just published or released, or before an outdated listing
        if claim.parked:
            return shard, claim, "parked"
        if claim.is_of(self.claim):
            return shard, claim, "own" if shard in self.held else "left"
        return shard, UNOWNED if claim is UNREADABLE else claim, self._watch.look(shard, claim)

    def _verdict(self, states: list[State]) -> str | None:
        """Why there is nothing to do, or None; `states` are those of all listed open shards."""
        if any(state not in ("alive", "parked", "own") for _, _, state in states):
            return None
        retried(lambda: list_fresh(self.run.shards), self.run.plan.lease_s)
        known, self._published = self._published, {shard for shard in self._published if not is_open(self.run, shard)}
        lacking = (known | open_shards(self.run)) - self._published
        # Its own are computed: they are published next, once they show whether the workload is at fault.
        if lacking <= {shard for shard, _, state in states if state == "own"}:
            return "complete"
        return "others" if lacking <= {shard for shard, _, _ in states} else None

    def _wait(self, n_claims: int) -> None:
        """Pause so that each of the six renewals in a lease is seen; longer if there is much to read.

        The first pauses are shorter: mostly others are about to publish the last shards, and the merge waits for all.
        Looking every quarter of a lease finds a stale one within one and a half leases.
        """
        lease_s = self.run.plan.lease_s
        n_claims *= 2 if self.run.plan.parts > 1 else 1  # a folder of parts is read with each
        work_s = n_claims / CLAIMS_A_SECOND + self._n_names / NAMES_A_SECOND
        pause_s = max(min(1.0, lease_s / 20, FIRST_PAUSE_S * 2 ** min(self._n_pauses, 8)), work_s)
        self._n_pauses += 1
        begun = time.monotonic()
        try:
            self.pause(min(lease_s / 4, pause_s))
        finally:
            self.idle_s += time.monotonic() - begun


def _rotated(place: int, shards: list[int]) -> list[int]:
    return shards[place:] + shards[:place]
