"""Claims of shards: one file for each, created exclusively, renewed in place, taken over by renaming.

Clocks of two machines are never compared: a lease is stale when an observer has not seen its counter change for
`lease_s` by the observer's own clock.

A file system may fail for a moment, or report that an operation failed which has happened. An attempt reads its own
claim again for `patience_s`; another's claim that cannot be read is neither alive nor stale.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from slurmgpu.run.counters import encode
from slurmgpu.run.lock import checked
from slurmgpu.util.atomic_files import partial_path
from slurmgpu.util.regular_files import UnusableFileError, open_new
from slurmgpu.util.shared_files import PATIENCE_S, exists, list_names, make_folder, read_bytes, remove, retried

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 16
"""More than any claim has."""
PARTING_PATIENCE_S = 5.0
"""How long a task tries to give a claim back; otherwise the claim goes stale."""
_IN_PLACE = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""The flags to open an existing claim; if there is a FIFO instead, opening does not block."""


@dataclass(frozen=True)
class Claim:
    """The content of a claim file.

    `task` names the array task ("1234_7"), `attempt` one life of it ("1234_7.0"); `renewals` is the lease's counter.
    `cluster` distinguishes tasks of two clusters that share the disk and gave the same job id; "" without a cluster.
    A `parked` shard is left for the next submission: no task takes it in this one.
    """

    task: str
    attempt: str
    host: str
    pid: int
    renewals: int = 0
    parked: bool = False
    cluster: str = ""

    def is_of(self, attempt: Claim) -> bool:
        """Whether it is a claim of the attempt that made `attempt`."""
        return (self.cluster, self.attempt) == (attempt.cluster, attempt.attempt)


RENEWALS_PER_LEASE = 6
"""How often within `lease_s` an owner renews a claim, and checks whether it was taken over."""

UNOWNED = Claim(task="", attempt="", host="", pid=0)
"""A claim that is not written yet, or is damaged: it is stale if it stays so."""
UNREADABLE = Claim(task="", attempt="", host="", pid=-1)
"""A claim that cannot be read at the moment."""


@dataclass(frozen=True)
class Claims:
    """The claims of a run, in one directory; `patience_s` is how long operations are tried again."""

    folder: Path
    patience_s: float = PATIENCE_S

    def path(self, shard: int) -> Path:
        """The path of a shard's claim."""
        return self.folder / f"{shard:05d}"

    def take(self, shard: int, claim: Claim) -> bool:
        """Create the claim; False if another attempt holds it.

        After a lost reply an empty claim of this attempt may be left, which goes stale.
        """
        path, created = self.path(shard), False

        def write() -> None:
            nonlocal created
            fd = os.open(path, _IN_PLACE) if created else open_new(path)
            created = True
            with os.fdopen(fd, "wb") as file:
                file.write(encode(vars(claim)))

        try:
            try:
                retried(write, self.patience_s)
            except FileNotFoundError:
                if created:  # another task took it over before the write
                    return False
                # A purge removes folders that have long been empty: every task would wait for others to end for ever.
                make_folder(self.folder)
                retried(write, self.patience_s)
        except FileExistsError:
            return False
        except OSError as error:
            if created:
                error.filename = os.fspath(path)  # errors of an open file do not name it
                self._remove(path)
            raise
        return True

    def read(self, shard: int, patience_s: float | None = None) -> Claim | None:
        """The claim of the shard; None if there is none. Raises an OSError that outlasts the patience."""
        return _read(self.path(shard), self.patience_s if patience_s is None else patience_s)

    def observe(self, shard: int) -> Claim | None:
        """The same without a second try; UNREADABLE after an error."""
        try:
            return self.read(shard, 0.0)
        except OSError as error:
            log.debug("%s cannot be read: %s", self.path(shard), error)
            return UNREADABLE

    def holds(self, shard: int, claim: Claim, patience_s: float | None = None) -> bool:
        """Whether the shard is claimed by the attempt that made `claim`, which has not parked it."""
        found = self.read(shard, patience_s)
        return found is not None and found.is_of(claim) and not found.parked

    def renew(self, shard: int, claim: Claim) -> Claim | None:
        """Renew the lease; None, and nothing is written, if the claim is no longer this attempt's.

        An OSError is raised at once: the lease is renewed again soon.
        """
        found = self.read(shard, 0.0)
        if found is None or not found.is_of(claim) or found.parked:
            return None
        # Read it from the file: a renewal that seemed to fail may have been written.
        renewed = replace(claim, renewals=max(claim.renewals, found.renewals) + 1)
        try:
            self._rewrite(shard, renewed)
        except FileNotFoundError:
            return None
        return renewed

    def park(self, shard: int, claim: Claim) -> None:
        """Leave the shard for the next submission."""
        if self.holds(shard, claim):
            with contextlib.suppress(FileNotFoundError):
                retried(lambda: self._rewrite(shard, replace(claim, parked=True)), self.patience_s)

    def release(self, shard: int, claim: Claim) -> None:
        """Give the shard back, if the attempt that made `claim` still holds it. After an error, its lease runs out."""
        try:
            if self.holds(shard, claim, min(self.patience_s, PARTING_PATIENCE_S)):
                self._remove(self.path(shard))
        except OSError as error:
            log.warning("shard %d was not given back; other tasks wait until its lease ends: %s", shard, error)

    def take_over(self, shard: int, stale: Claim, claim: Claim) -> bool:
        """Take a stale claim; one of several observers wins.

        The stale file is renamed to the taker's own name. If it turns out to be another taker's new claim, made since
        `stale` was read, it is put back, unless a third has claimed by now and the shard is computed twice.
        """
        path = self.path(shard)
        if self._stands(path) != stale:
            return False
        mine = partial_path(path).with_suffix(".taken")
        if not self._rename(path, mine):
            return False
        try:
            found = self._stands(mine)
            if found != stale:
                self._put_back(mine, shard, found)
                return False
            return self.take(shard, claim)
        finally:
            self._remove(mine)

    def drop_earlier(self, claim: Claim, among: Iterable[int]) -> list[int]:
        """Remove claims that earlier, dead attempts of a requeued task left on these shards; return the shards.

        `claim` is what a new attempt claims with, before it has claimed any. A claim that cannot be read goes stale.
        """
        dropped = []
        for shard in among:
            found = self.observe(shard)
            if found is not None and (found.cluster, found.task) == (claim.cluster, claim.task) and not found.parked:
                self._remove(self.path(shard))
                dropped.append(shard)
        return dropped

    def clear(self, check: Callable[[], None] = lambda: None) -> list[int]:
        """Remove every claim, for `resubmit` and `merge`, which know that no task is alive; return the shards.

        `check` raises if the caller has lost the run's lock.
        """
        names = list_names(self.folder, self.patience_s)
        for name in checked(names, check):
            if not name.endswith(".history"):
                self._remove(self.folder / name)
        return sorted(_numbers(names))

    def numbers(self) -> set[int]:
        """The shards that are claimed, from one listing."""
        return _numbers(list_names(self.folder, self.patience_s))

    def held(self) -> Iterator[tuple[int, Claim]]:
        """Every claim with its shard, in order, as it is observed."""
        for shard in sorted(self.numbers()):
            if (claim := self.observe(shard)) is not None:
                yield shard, claim

    def _rewrite(self, shard: int, claim: Claim) -> None:
        # In place and without O_CREAT: a new file that is renamed over it could undo a take-over.
        with os.fdopen(os.open(self.path(shard), _IN_PLACE), "wb") as file:
            file.write(encode(vars(claim)))

    def _stands(self, path: Path) -> Claim | None:
        """The current content of a claim that was stale; UNOWNED if it still cannot be read."""
        try:
            return _read(path, 0.0)
        except OSError:
            return UNOWNED

    def _rename(self, path: Path, mine: Path) -> bool:
        def rename() -> bool:
            try:
                path.rename(mine)
            except FileNotFoundError:
                return exists(mine, 0.0)  # if so, an earlier try worked and its reply was lost: only this task uses it
            return True

        return retried(rename, self.patience_s)

    def _put_back(self, mine: Path, shard: int, found: Claim | None) -> None:
        try:
            os.link(mine, self.path(shard))
        except OSError as error:
            # Without hard links, for example. Its owner renews it by its name, so a copy is as good. If there is
            # another claim by now, that stays: two copies of a shard are harmless.
            log.debug("%s is put back as a copy: %s", mine, error)
            if found is not None:
                self.take(shard, found)

    def _remove(self, path: Path) -> None:
        try:
            remove(path, min(self.patience_s, PARTING_PATIENCE_S))
        except OSError as error:
            log.warning("%s cannot be removed: %s", path, error)


class Watch:
    """Leases as one observer has seen them, by its own monotonic clock."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self._seen: dict[int, tuple[Claim, float, bool]] = {}
        self._unreadable: dict[int, float] = {}
        self._doubted: set[int] = set()

    def doubt(self) -> None:
        """Reset leases to unknown; keep the times of last change.

        A change that the next look finds may have happened before this call, so it does not count.
        """
        self._seen = {shard: (claim, since, False) for shard, (claim, since, _) in self._seen.items()}
        self._doubted = set(self._seen)

    def look(self, shard: int, claim: Claim) -> str:
        """The state of a claim: "alive" (seen renewed, and not stale since), "stale", or still "unknown".

        One that cannot be read is unknown for the time of a lease, then stale.
        """
        now = self._clock()
        if claim is UNREADABLE:
            return "stale" if now - self._unreadable.setdefault(shard, now) > self.lease_s else "unknown"
        self._unreadable.pop(shard, None)
        before, is_first = self._seen.get(shard), shard not in self._seen or shard in self._doubted
        self._doubted.discard(shard)
        if before is None or before[0] != claim:
            # A claim of another attempt than before was just written, so its owner is alive.
            self._seen[shard] = (claim, now, not is_first)
            return "unknown" if is_first else "alive"
        _, since, renewed = before
        if now - since > self.lease_s:
            return "stale"
        return "alive" if renewed else "unknown"


def _read(path: Path, patience_s: float) -> Claim | None:
    try:
        content = read_bytes(path, max_bytes=MAX_BYTES, patience_s=patience_s)
    except FileNotFoundError:
        return None
    except UnusableFileError as error:
        log.debug("%s is not a claim: %s", path, error.strerror)
        return UNOWNED
    try:
        return _checked(Claim(**json.loads(content)))
    except (ValueError, TypeError, RecursionError):
        # Created and not written yet, or its writer died.
        return UNOWNED


def _checked(claim: Claim) -> Claim:
    texts, counts = (claim.task, claim.attempt, claim.host, claim.cluster), (claim.pid, claim.renewals)
    if not all(isinstance(text, str) for text in texts) or not all(type(count) is int for count in counts):
        raise ValueError("its values are impossible")
    return replace(claim, parked=claim.parked is True)


def _numbers(names: Iterable[str]) -> set[int]:
    """The claimed shards in a listing: `000005` is no claim of shard 5."""
    return {int(name) for name in names if name.isdecimal() and f"{int(name):05d}" == name}
