"""The claims of an attempt: renew their leases, and give back what its workers did not publish."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import replace

from slurmgpu.run.claims import RENEWALS_PER_LEASE, UNREADABLE, Claim, Claims
from slurmgpu.run.directory import Run
from slurmgpu.run.records import Attempt, Record, Unread
from slurmgpu.worker.shard_claimer import open_shards

log = logging.getLogger(__name__)

MOST_DROPPED = 32
"""How many claims a task reads to find those that it held before a requeue, or that its worker did not report."""


class Leases:
    """The claims of an attempt, each made like its `claim`; `held` are those whose leases are renewed, by shard."""

    def __init__(self, run: Run, attempt: Attempt, node: str) -> None:
        self.claim = Claim(attempt.task_name, attempt.name, node, os.getpid(), cluster=attempt.cluster)
        self.held: dict[int, Claim] = {}
        self._run, self._attempt = run, attempt
        self._claimed: set[int] = set()  # shards to give back, unless they are published
        self._unrenewed: set[int] = set()
        self._renewed = time.monotonic()

    def add(self, shard: int) -> None:
        """A worker has claimed the shard, or holds it again."""
        self.held.setdefault(shard, self.claim)
        self._claimed.add(shard)

    def hold_all(self) -> list[int]:
        """Hold all claimed shards for a new worker, also one that the last worker left; return the shards."""
        for shard in self._claimed:
            self.held.setdefault(shard, self.claim)
        return sorted(self.held)

    def let_go(self, shard: int) -> None:
        """Stop renewing a shard that is published, or belongs to another attempt; its claim is left as it is."""
        self.held.pop(shard, None)
        self._claimed.discard(shard)

    def leave(self, shard: int) -> bool:
        """The worker left the shard for later; False if another attempt has taken it over."""
        self.held.pop(shard, None)
        claim = self._run.claims.observe(shard)
        return claim is UNREADABLE or (claim is not None and claim.is_of(self.claim))

    def renew_if_due(self) -> None:
        """Renew the leases; failures are retried at the next call."""
        now = time.monotonic()
        if now - self._renewed >= self._run.plan.lease_s / RENEWALS_PER_LEASE:
            failed = [shard for shard, claim in self.held.items() if not self._renew(shard, claim)]
            if not failed:
                self._renewed = now

    def _renew(self, shard: int, claim: Claim) -> bool:
        try:
            # None: taken over. The worker still finishes the shard; the first of two equal copies is kept.
            self.held[shard] = self._run.claims.renew(shard, claim) or claim
        except OSError as error:
            if shard not in self._unrenewed:
                self._unrenewed.add(shard)
                log.warning("the lease of shard %d was not renewed; trying again: %s", shard, error)
            return False
        self._unrenewed.discard(shard)
        return True

    def drop_earlier(self) -> None:
        """Give back the claims of earlier attempts of this task after a requeue; one that is missed goes stale.

        A task takes shards in order: its claims are near the shard that its last record names.
        """
        if not self._attempt.restart:
            return
        read = self._run.attempt(replace(self._attempt, restart=self._attempt.restart - 1).name)
        near = self._claimed_near(None if isinstance(read, Unread) else read, self._run.claims)
        dropped = self._run.claims.drop_earlier(self.claim, near)
        if dropped:
            log.info("dropped the claims of this task's earlier attempts: shards %s", dropped)

    def give_back(self, unreported: Iterable[int] = ()) -> None:
        """Release the claims of shards that are not published, and of those that no worker reported."""
        for shard in sorted({*self._claimed, *unreported}):
            self._run.claims.release(shard, self.claim)

    def find_unreported(self, record: Record) -> list[int]:
        """Shards that a worker claimed but could not report before it was killed; a missed one goes stale."""
        try:  # without retries: a task whose file system is lost must not wait for it
            near = self._claimed_near(record, replace(self._run.claims, patience_s=0.0))
        except OSError as error:
            log.debug("the claims cannot be listed: %s", error)
            return []
        found = ((shard, self._run.claims.observe(shard)) for shard in near)
        return [shard for shard, claim in found if claim is not None and claim.is_of(self.claim)]

    def _claimed_near(self, record: Record | None, claims: Claims) -> list[int]:
        """The open shards with a claim that are nearest to the last one of a record."""
        last = 0
        if record is not None:
            last = record["published"][-1][0] if record["published"] else 0
            last = last if record["shard"] is None else record["shard"]
        taken = claims.numbers() & open_shards(self._run)
        return sorted(taken, key=lambda shard: abs(shard - last))[:MOST_DROPPED]
