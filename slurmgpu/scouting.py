"""Finding the next shard: a free one, one whose owner died, or the knowledge that there is nothing left to do."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from slurmgpu.claims import Claim, Watch
from slurmgpu.runs import Run

log = logging.getLogger(__name__)


@dataclass
class Tenure:
    """How long a worker may go on: until it is `told` to stop, or too little of the walltime is left.

    `end_time` is when the walltime ends, in seconds since the epoch, None for never; `margin_s` of it are left over.
    """

    end_time: float | None
    margin_s: float
    told: threading.Event
    _over: str | None = None

    def over(self, needed_s: float = 0.0) -> str | None:
        """Why it may not go on, if `needed_s` are needed: "told to stop" or "deadline"; once said, it stays so."""
        if self._over is None and self.told.is_set():
            self._over = "told to stop"
        if self._over is None and self.end_time is not None:
            self._over = "deadline" if time.time() + needed_s + self.margin_s > self.end_time else None
        return self._over

    def end_now(self) -> float:
        """End the walltime so soon that no time is left for another shard; when."""
        self.end_time = time.time() + self.margin_s
        return self.end_time


@dataclass
class Scout:
    """Takes shards of `run` for the attempt that `claim` names.

    `on_takeover(shard, former)` is told of each claim that was taken from a dead owner; `pause` waits between looks.
    """

    run: Run
    claim: Claim
    on_takeover: Callable[[int, Claim], None] = lambda shard, former: None
    pause: Callable[[float], None] = time.sleep
    _cursor: int = 0
    _observed: float = 0.0
    _checked: float = 0.0
    _lost: set[int] = field(default_factory=set)
    _watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self._watch = Watch(self.run.plan.lease_s)

    def next(self) -> int | str:
        """A shard, claimed; else why there is none: "complete" (all published) or "others" (the rest has owners)."""
        self._observe()
        doubted = False
        while True:
            shard = self._take_free()
            if shard is None:
                if not doubted:
                    self._watch.doubt()
                    doubted = True
                shard = self._take_stale()
            if shard is not None:
                self._lost.discard(shard)
                return shard
            if (verdict := self._verdict()) is not None:
                return verdict
            self._wait()

    def has_lost(self, shard: int) -> bool:
        """Whether another attempt has taken over a shard that this one holds; looked up six times in `lease_s`.

        Who keeps an item's progress in files would write them beside the new owner.
        """
        now = time.monotonic()
        if shard not in self._lost and now - self._checked >= self.run.plan.lease_s / 6:
            self._checked = now
            claim = self.run.claims.read(shard)
            # Nobody's: it is being taken over, perhaps in vain, or written just now.
            if claim is not None and claim.attempt not in ("", self.claim.attempt):
                self._lost.add(shard)
        return shard in self._lost

    def _observe(self) -> None:
        """Look at others' leases while there is free work, too: when there is none, the dead are known at once."""
        if time.monotonic() - self._observed >= self.run.plan.lease_s / 4:
            self._observed = time.monotonic()
            for shard in sorted(self.run.claims.numbers() - self.run.published()):
                claim = self.run.claims.read(shard)
                if claim is not None and not claim.parked and claim.attempt != self.claim.attempt:
                    self._watch.look(shard, claim)

    def look(self) -> str:
        """The same without claiming anything: "work", "complete" or "others". For a task, before it loads a model."""
        while True:
            if self._free() or self._stale():
                return "work"
            if (verdict := self._verdict()) is not None:
                return verdict
            self._wait()

    def _take_free(self) -> int | None:
        while self._cursor < self.run.plan.n_shards:
            shard = self._cursor
            self._cursor += 1
            if self._take(shard):
                return shard
        return next((shard for shard in self._free() if self._take(shard)), None)  # given back, behind the cursor

    def _take(self, shard: int) -> bool:
        # A published shard keeps its claim until the merge, so that it costs others one failed open, not two.
        if not self.run.claims.take(shard, self.claim):
            return False
        if self.run.shard_path(shard).exists():
            self.run.claims.release(shard, self.claim.attempt)
            return False
        return True

    def _take_stale(self) -> int | None:
        for shard, former in self._stale():
            if self.run.claims.take_over(shard, former, self.claim):
                log.warning(
                    "shard %d taken over from %s on %s: its lease is stale",
                    shard,
                    former.attempt,
                    former.host,
                )
                self.on_takeover(shard, former)
                return shard
        return None

    def _open(self) -> list[int]:
        return sorted(set(range(self.run.plan.n_shards)) - self.run.published())

    def _free(self) -> list[int]:
        return sorted(set(self._open()) - self.run.claims.numbers())

    def _states(self) -> list[tuple[int, Claim | None, str]]:
        """What is known of the claim of each open shard that is neither parked nor this attempt's own."""
        states: list[tuple[int, Claim | None, str]] = []
        for shard in self._open():
            claim = self.run.claims.read(shard)
            if claim is None:
                states.append((shard, None, "unknown"))  # published or given back this moment
            elif not claim.parked and claim.attempt != self.claim.attempt:
                states.append((shard, claim, self._watch.look(shard, claim)))
        return states

    def _stale(self) -> list[tuple[int, Claim]]:
        return [(shard, claim) for shard, claim, state in self._states() if claim is not None and state == "stale"]

    def _verdict(self) -> str | None:
        if not self._open():
            return "complete"
        return "others" if all(state == "alive" for _, _, state in self._states()) else None

    def _wait(self) -> None:
        # Often enough to see each renewal, of which there are six in a lease.
        self.pause(min(1.0, self.run.plan.lease_s / 20))
