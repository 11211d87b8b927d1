"""Who computes which shard: one file for each claim, created exclusively, renewed in place, taken over by renaming.

Nothing here compares two machines' clocks: a lease is stale when an observer has not seen its counter change for
`lease_s` by the observer's own clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from slurmgpu.files import write_json


@dataclass(frozen=True)
class Claim:
    """The content of a claim file.

    `task` names the array task ("1234_7"), `attempt` one life of it ("1234_7.0"); `renewals` is the lease.
    A `parked` shard is left for the next submission: nobody takes it in this one.
    """

    task: str
    attempt: str
    host: str
    pid: int
    renewals: int = 0
    parked: bool = False


@dataclass(frozen=True)
class Claims:
    """The claims of a run, in one directory."""

    folder: Path

    def path(self, shard: int) -> Path:
        """Where the claim of `shard` lies."""
        return self.folder / f"{shard:05d}"

    def take(self, shard: int, claim: Claim) -> bool:
        """Create the claim; False when somebody holds it."""
        try:
            fd = os.open(self.path(shard), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(fd, "wb") as file:
            file.write(_encode(claim))
        return True

    def read(self, shard: int) -> Claim | None:
        """Who holds the shard; None when nobody does."""
        return _read(self.path(shard))

    def renew(self, shard: int, claim: Claim) -> Claim | None:
        """Count the lease up; None, and nothing is written, when the claim is no longer this attempt's."""
        if not self._is_held_by(shard, claim.attempt):
            return None
        renewed = replace(claim, renewals=claim.renewals + 1)
        try:
            # In place: renaming a new file over it could undo a take-over of this moment. Hence no O_CREAT either.
            fd = os.open(self.path(shard), os.O_WRONLY)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "wb") as file:
            file.write(_encode(renewed))
        return renewed

    def park(self, shard: int, claim: Claim) -> None:
        """Leave the shard for the next submission."""
        if self._is_held_by(shard, claim.attempt):
            write_json(self.path(shard), asdict(replace(claim, parked=True)), durable=False)

    def release(self, shard: int, attempt: str) -> None:
        """Give the shard back, if this attempt still holds it."""
        if self._is_held_by(shard, attempt):
            self.path(shard).unlink(missing_ok=True)

    def take_over(self, shard: int, stale: Claim, claim: Claim) -> bool:
        """Take a stale claim; of several observers one wins.

        The stale file is renamed to a name of the taker's own. What was renamed may be another taker's new claim, made
        since `stale` was read: then it is put back, unless a third has claimed by now and the shard is computed twice.
        """
        mine = self.folder / f".{shard:05d}.{claim.attempt}.{claim.pid}.taken"
        try:
            self.path(shard).rename(mine)
        except FileNotFoundError:
            return False
        try:
            if _read(mine) != stale:
                with contextlib.suppress(FileExistsError):  # claimed a third time: two copies of a shard are harmless
                    os.link(mine, self.path(shard))
                return False
            return self.take(shard, claim)
        finally:
            mine.unlink()

    def drop_earlier(self, task: str, attempt: str) -> list[int]:
        """Remove the claims that earlier attempts of a requeued task left; they are known to be dead."""
        dropped = []
        for shard, claim in self.held():
            if claim.task == task and claim.attempt != attempt and not claim.parked:
                self.path(shard).unlink(missing_ok=True)
                dropped.append(shard)
        return dropped

    def clear(self) -> list[int]:
        """Remove every claim: for `resubmit` and `merge`, which know that no task is alive."""
        shards = [shard for shard, _ in self.held()]
        for path in self.folder.iterdir():
            if path.suffix != ".history":
                path.unlink(missing_ok=True)
        return shards

    def numbers(self) -> set[int]:
        """The shards that are claimed, from one listing."""
        return {int(name) for name in os.listdir(self.folder) if name.isdecimal()}

    def held(self) -> Iterator[tuple[int, Claim]]:
        """Every claim with its shard, in order."""
        for shard in sorted(self.numbers()):
            if (claim := self.read(shard)) is not None:
                yield shard, claim

    def _is_held_by(self, shard: int, attempt: str) -> bool:
        claim = self.read(shard)
        return claim is not None and claim.attempt == attempt


class Watch:
    """Others' leases as one observer has seen them, by its own monotonic clock."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self._seen: dict[int, tuple[Claim, float, bool]] = {}

    def doubt(self) -> None:
        """Forget who was seen alive, not since when each lease is unchanged: alive is who renews from now on."""
        self._seen = {shard: (claim, since, False) for shard, (claim, since, _) in self._seen.items()}

    def look(self, shard: int, claim: Claim) -> str:
        """What is known of a claim: "alive" (it was seen renewed, and not stale since), "stale", or "unknown" yet."""
        now = self._clock()
        before = self._seen.get(shard)
        if before is None or before[0] != claim:
            # A claim that changed hands has an owner who lives: he has just written it.
            self._seen[shard] = (claim, now, before is not None)
            return "alive" if before is not None else "unknown"
        _, since, renewed = before
        if now - since > self.lease_s:
            return "stale"
        return "alive" if renewed else "unknown"


def _encode(claim: Claim) -> bytes:
    # One length whatever the counter says: a shorter text written in place would leave the end of the longer one.
    return json.dumps(asdict(claim)).encode().ljust(512) + b"\n"


def _read(path: Path) -> Claim | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return Claim(**json.loads(content))
    except (ValueError, TypeError):
        # Created and not written yet, or its writer died in between: nobody's, and stale if it stays so.
        return Claim(task="", attempt="", host="", pid=0)
