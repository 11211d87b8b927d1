"""Parts of an item: if there are fewer items than tasks, several tasks compute one item together.

Each of these tasks calls the workload with that item. `TaskContext.divide` cuts the work into parts; a task computes
the parts that no other task has, and reads the values of the others from files. The first published values of a part
stay, and every task uses them, even one that computed different ones. The task that holds the shard publishes it as
usual. Nothing else depends on these files: a lost part is recomputed. If the files cannot be used, the holder computes
all parts alone, and other tasks leave the item.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from slurmgpu.errors import Interrupted
from slurmgpu.run.claims import PARTING_PATIENCE_S, RENEWALS_PER_LEASE, UNOWNED, UNREADABLE, Claim, Claims, Watch
from slurmgpu.run.counters import counting
from slurmgpu.run.directory import Run
from slurmgpu.util.atomic_files import beside, write_bytes
from slurmgpu.util.chance import CHANCE
from slurmgpu.util.shared_files import link_first, list_fresh, make_folder, read_bytes, remove_folder, retried
from slurmgpu.worker.shard_claimer import LATER
from slurmgpu.workload import part_as_json

log = logging.getLogger(__name__)

T = TypeVar("T")

FOLDER = "parts"
"""The folder of a run's parts."""
MOST_BYTES = 1 << 30
"""More than the values of any part."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""The first and the longest pause, in seconds, of a task that waits for others' values; each is twice the previous."""
COMPARED = 8
"""A task compares this many shards with unclaimed parts, of maybe hundreds, and joins the one with the most."""


@dataclass
class Parts:
    """The parts of a run's items that the attempt of `claim` computes.

    `shall_leave()` says whether the attempt has to leave the item; it is called before each part and while it waits.
    `has_left` says whether it did, also because the files cannot be used. `computed_s` and `waited_s` are the seconds
    in which it computed parts and waited for others since `begin`.
    """

    run: Run
    claim: Claim
    submission: int
    shall_leave: Callable[[], bool] = lambda: False
    computed_s: float = 0.0
    waited_s: float = 0.0
    has_left: bool = False
    is_joined: bool = False
    shard: int = 0
    _call: int = 0
    _stage: int = 0
    _is_called: bool = False
    _failed_in_part: bool = False
    _is_alone: bool = False
    _begun: set[int] = field(default_factory=set)
    _last_calls: dict[int, int] = field(default_factory=dict)
    _seen: dict[int, float] = field(default_factory=dict)
    _shards: Collection[int] = ()
    _looked: float = -math.inf

    @property
    def folder(self) -> Path:
        """The parts of a submission: another one may compute with other code."""
        return self.run.folder / FOLDER / str(self.submission)

    def shard_to_join(self, shards: Collection[int]) -> int | str | None:
        """A shard that another task holds, with many unclaimed parts; LATER if one may have some soon; or None.

        A shard that this attempt has begun is not joined again. If its holder has not reached its first `divide`, the
        shard is waited for during one lease. Outdated listings only cause a late or a needless join.
        """
        self._shards = shards
        left = [shard for shard in shards if shard not in self._begun]
        CHANCE.shuffle(left)  # so that tasks that choose at the same time choose differently
        n_free: dict[int, int] = {}
        try:
            stages = self._stages() if left else {}
            for shard in left:
                if shard in stages and (n_left := self._n_free(stages[shard][1])):
                    n_free[shard] = n_left
                if len(n_free) == COMPARED:
                    break
        except OSError as error:
            log.warning("the parts left in shards of other tasks are unknown: %s", error)
            return None
        if n_free:
            best = max(n_free, key=n_free.__getitem__)
            self._last_calls[best] = stages[best][0]
            return best
        now = time.monotonic()
        since = [self._seen.setdefault(shard, now) for shard in left if shard not in stages]
        return LATER if any(now - seen < self.run.plan.lease_s for seen in since) else None

    def is_needed_elsewhere(self) -> bool:
        """Whether this task got no part of the item it joined, while another item has unclaimed parts.

        Tasks that choose at the same moment may join the same item. This reads folders, so only six times in a lease.
        """
        now = time.monotonic()
        if not self.is_joined or self.computed_s or now - self._looked < self.run.plan.lease_s / RENEWALS_PER_LEASE:
            return False
        self._looked = now
        return isinstance(self.shard_to_join(self._shards), int)

    def _stages(self) -> dict[int, tuple[int, str]]:
        """The last call of each shard that has stages, and the folder of the last stage in it."""
        found: dict[int, tuple[int, int, str]] = {}
        for name in _names(self.folder) or ():
            numbers = name.split(".")
            if len(numbers) == 3 and all(number.isdecimal() for number in numbers):
                shard, call, stage = map(int, numbers)
                found[shard] = max((call, stage, name), found.get(shard, (-1, -1, "")))
        return {shard: (call, name) for shard, (call, _, name) in found.items()}

    def _n_free(self, stage: str) -> int:
        names = _names(self.folder / stage)
        if names is None:  # the run was merged
            return 0
        return self.run.plan.parts - len({name.partition(".")[0] for name in names if not name.startswith(".")})

    def give_back(self) -> None:
        """Give back the parts that a worker of this attempt held when it died, for others to compute at once."""
        try:
            for _, stage in self._stages().values() if self.run.plan.parts > 1 else ():
                claims = Claims(self.folder / stage, PARTING_PATIENCE_S)
                for number in claims.numbers():
                    claims.release(number, self.claim)
        except OSError as error:
            log.warning("parts were not given back; other tasks wait until their leases end: %s", error)

    def begin(self, shard: int, *, is_joined: bool = False) -> None:
        """The next calls of the workload are of this shard, which another task holds if it `is_joined`."""
        self.shard, self.is_joined, self.computed_s, self.waited_s = shard, is_joined, 0.0, 0.0
        self._call = self._last_calls.get(shard, 0) if is_joined else 0
        self.has_left = self._is_called = False
        self._begun.add(shard)
        self._looked = -math.inf

    def calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A workload's call, in which the first `divide` is the first of its item.

        If a part failed in the previous call, the other parts keep their values. If the call failed otherwise, the
        values led to the failure, and all parts are computed again.
        """

        def calls(*given: Any) -> Any:
            self._call += self._is_called and not self._failed_in_part
            self._stage, self._is_called, self._failed_in_part, self._is_alone = 0, True, False, False
            return call(*given)

        return calls

    def divide(self, things: Sequence[T], compute: Callable[[Sequence[T]], Sequence[Any]]) -> list[Any]:
        """A JSON value for each of the things; `compute` returns the values of some of them, which are a part."""
        size = -(-len(things) // self.run.plan.parts)
        parts = [things[start : start + size] for start in range(0, len(things), size or 1)]
        stage = _Stage(self, self.folder / f"{self.shard:05d}.{self._call}.{self._stage}")
        self._stage += 1
        found: dict[int, list[Any]] = {}

        def content_of(number: int) -> bytes:
            try:
                return part_as_json(parts[number], compute)
            except BaseException:
                self._failed_in_part = True
                raise

        if not self._is_alone:
            self._share(stage, [len(part) for part in parts], content_of, found)
        for number in range(len(parts)):
            if number not in found:
                found[number] = json.loads(content_of(number))
        return [value for number in range(len(parts)) for value in found[number]]

    def _share(
        self, stage: _Stage, sizes: Sequence[int], content_of: Callable[[int], bytes], found: dict[int, list[Any]]
    ) -> None:
        """Find the values of all parts together with other tasks; those that a holder has to compute alone are missing.

        Interrupted if this task has to leave.
        """
        try:
            if not stage.share(sizes, content_of, found):
                self.has_left = True
                raise Interrupted
        except _NotSharedError as error:
            if self.is_joined:
                log.info("the item is left to the task that holds it: %s", error)
                self.has_left = True
                raise Interrupted from error
            # Other tasks may compute other values for these parts, and continue with those.
            log.warning("this task computes the remaining parts alone: %s", error)
            self._is_alone = True


def remove_parts(run: Run) -> None:
    """Remove the parts of all submissions, whose items have rows now or are computed by another submission."""
    try:
        remove_folder(run.folder / FOLDER)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s could not be removed, which does no harm: %s", run.folder / FOLDER, error)


class _NotSharedError(Exception):
    """The folder of a stage cannot be used."""


class _Stage:
    """One call of `divide`: its claims and its values, in a folder."""

    def __init__(self, parts: Parts, folder: Path) -> None:
        self._parts, self._folder = parts, folder
        self._lease_s = parts.run.plan.lease_s
        self._claims, self._watch = Claims(folder, self._lease_s), Watch(self._lease_s)

    def share(self, sizes: Sequence[int], content_of: Callable[[int], bytes], found: dict[int, list[Any]]) -> bool:
        """Add the values of all parts to `found`; False if this task has to leave before that.

        `sizes` are the numbers of values of each part; `content_of(number)` computes a part.
        """
        _of_files(lambda: self._make_folder(len(sizes)))
        pause_s = FIRST_PAUSE_S
        while True:
            there = set(_of_files(lambda: list_fresh(self._folder)))
            left = []
            for number, size in enumerate(sizes):
                path = self._path(number)
                if number not in found and path.name in there and (values := _read(path, size)) is not None:
                    found[number] = values
                if number not in found:
                    left.append(number)
            if not left:
                return True
            if _of_files(self._parts.shall_leave):
                return False
            taken = next((number for number in left if _of_files(functools.partial(self._take, number))), None)
            if taken is not None:
                self._find(taken, sizes[taken], content_of, found)
                pause_s = FIRST_PAUSE_S
            elif self._parts.is_needed_elsewhere():
                return False
            else:
                time.sleep(pause_s)
                self._parts.waited_s += pause_s
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S, self._lease_s / RENEWALS_PER_LEASE)

    def _make_folder(self, n_parts: int) -> None:
        above = (self._folder.parent.parent, self._folder.parent)
        # The holder of a joined shard has made those above; once they are gone, the run is merged.
        for folder in (self._folder,) if self._parts.is_joined else (*above, self._folder):
            make_folder(folder)
        for number in range(n_parts, self._parts.run.plan.parts):
            # Fewer things than parts: others need not come for these.
            self._path(number).with_suffix(".none").touch()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:05d}.json"

    def _take(self, number: int) -> bool:
        """Claim a part that no task computes, or that was published since the listing."""
        mine, former = self._parts.claim, self._claims.observe(number)
        if former is None:
            return self._claims.take(number, mine)
        if former.is_of(mine):
            return True  # left by a worker of this attempt that died
        is_stale = self._watch.look(number, former) == "stale"
        return is_stale and self._claims.take_over(number, UNOWNED if former is UNREADABLE else former, mine)

    def _find(self, number: int, size: int, content_of: Callable[[int], bytes], found: dict[int, list[Any]]) -> None:
        """Compute and publish a claimed part, unless it is published; `found` gets the values in its file."""
        began = time.monotonic()
        try:
            if (values := _read(self._path(number), size)) is None:
                # So that others see that this process is alive; a renewal that fails is soon tried again.
                renew = functools.partial(self._claims.renew, number, self._parts.claim)
                with counting(renew, self._lease_s / RENEWALS_PER_LEASE, "claim of a part"):
                    content = content_of(number)
                    found[number] = json.loads(content)
                    _of_files(lambda: self._publish(number, size, content))
                values = _read(self._path(number), size)
            if values is None:
                raise _NotSharedError(f"{self._path(number)} cannot be read after it was written")
            found[number] = values
        finally:
            self._claims.release(number, self._parts.claim)
            self._parts.computed_s += time.monotonic() - began

    def _publish(self, number: int, size: int, content: bytes) -> None:
        """Publish the values of a part for other tasks; the first ones stay, unless they are damaged.

        Nothing is fsynced: a file that a power failure leaves damaged is computed again.
        """
        path, signed = self._path(number), hashlib.sha256(content).hexdigest().encode() + b"\n" + content

        def put() -> bool:
            with beside(path) as partial:
                partial.write_bytes(signed)
                is_first = link_first(partial, path, self._lease_s)
                partial.unlink(missing_ok=True)  # without hard links it was renamed
                return is_first

        if not retried(put, self._lease_s) and _read(path, size) is None:
            write_bytes(path, signed, durable=False, patience_s=self._lease_s)


def _of_files(operation: Callable[[], T]) -> T:
    """The result of an operation on files; _NotSharedError instead of an OSError."""
    try:
        return operation()
    except OSError as error:
        raise _NotSharedError(str(error)) from error


def _names(folder: Path) -> list[str] | None:
    """The names in a folder, as this machine sees it; None without the folder."""
    try:
        return retried(lambda: os.listdir(folder), PARTING_PATIENCE_S)
    except FileNotFoundError:
        return None


def _read(path: Path, n_values: int) -> list[Any] | None:
    """The values of a part; None without a file, and for one that cannot be read, or is damaged."""
    try:
        digest, _, content = read_bytes(path, max_bytes=MOST_BYTES).partition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s cannot be read, so its part is recomputed: %s", path, error)
        return None
    if hashlib.sha256(content).hexdigest().encode() != digest:
        log.warning("%s is damaged, so its part is recomputed", path)
        return None
    values: list[Any] = json.loads(content)
    return values if len(values) == n_values else None
