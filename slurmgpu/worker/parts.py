"""Parts of an item: where there are fewer items than tasks, several tasks compute one item together.

Each of them calls the workload with that item. What the workload computes by `TaskContext.divide` is cut into parts; a
task computes those that no other has, and reads the others' values from files. The shard is published as always, by the
task that holds it. Nothing else depends on these files: a part that is lost is computed again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from slurmgpu.errors import Interrupted
from slurmgpu.run.claims import PARTING_PATIENCE_S, RENEWALS_PER_LEASE, UNOWNED, UNREADABLE, Claim, Claims, Watch
from slurmgpu.run.directory import Run
from slurmgpu.util.atomic_files import write_bytes
from slurmgpu.util.shared_files import exists, list_fresh, make_folder, read_bytes

log = logging.getLogger(__name__)

T = TypeVar("T")

FOLDER = "parts"
"""Where the parts of a run lie."""
MOST_BYTES = 1 << 30
"""More than the values of any part."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""The pauses of a task that waits for the values of others; each is twice the one before."""


@dataclass
class Parts:
    """The parts of a run's items that the attempt of `claim` computes.

    `shall_leave` says whether it has to stop waiting for others. `computed_s` and `waited_s` are what it took since
    `begin`.
    """

    run: Run
    claim: Claim
    submission: int
    shall_leave: Callable[[], bool] = lambda: False
    computed_s: float = 0.0
    waited_s: float = 0.0
    _shard: int = 0
    _stage: int = 0
    _begun: set[int] = field(default_factory=set)

    @property
    def folder(self) -> Path:
        """The parts of a submission: another one may compute with other code."""
        return self.run.folder / FOLDER / str(self.submission)

    def shard_to_join(self, shards: Collection[int]) -> int | None:
        """Of shards that others hold, the one with the most parts that nobody has; None without any.

        A shard that this attempt has begun is not joined again.
        """
        left = [shard for shard in sorted(shards) if shard not in self._begun]
        try:
            stages = self._stages() if left else {}
            n_free = {shard: self._n_free(stages.get(shard)) for shard in left}
        except OSError as error:
            log.warning("whether others' shards have parts left is unknown: %s", error)
            return None
        best = max(left, key=n_free.__getitem__, default=None)
        return best if best is not None and n_free[best] else None

    def _stages(self) -> dict[int, str]:
        """The folder of the last stage of each shard that has one."""
        found: dict[int, tuple[int, str]] = {}
        for name in list_fresh(self.folder) if exists(self.folder) else ():
            shard, _, stage = name.partition(".")
            if shard.isdecimal() and stage.isdecimal():
                found[int(shard)] = max((int(stage), name), found.get(int(shard), (-1, "")))
        return {shard: name for shard, (_, name) in found.items()}

    def _n_free(self, stage: str | None) -> int:
        names = [] if stage is None else list_fresh(self.folder / stage)
        return self.run.plan.parts - len({name.partition(".")[0] for name in names if not name.startswith(".")})

    def give_back(self) -> None:
        """Give back the parts that a worker of this attempt held when it died, for others to compute at once."""
        try:
            for stage in self._stages().values() if self.run.plan.parts > 1 else ():
                claims = Claims(self.folder / stage, PARTING_PATIENCE_S)
                for number in claims.numbers():
                    claims.release(number, self.claim)
        except OSError as error:
            log.warning("parts are not given back, and their leases end instead: %s", error)

    def begin(self, shard: int) -> None:
        """The next calls of the workload are of this shard."""
        self._shard, self.computed_s, self.waited_s = shard, 0.0, 0.0
        self._begun.add(shard)

    def calling(self, call: Callable[[T], Any]) -> Callable[[T], Any]:
        """A workload's call, in which the first `divide` is the first of its item, also when it is called again."""

        def calls(items: T) -> Any:
            self._stage = 0
            return call(items)

        return calls

    def divide(self, things: Sequence[T], compute: Callable[[Sequence[T]], Sequence[Any]]) -> list[Any]:
        """A JSON value for each of the things; `compute` gives those of some of them, which are a part."""
        size = -(-len(things) // self.run.plan.parts)
        parts = [things[start : start + size] for start in range(0, len(things), size or 1)]
        stage = _Stage(self, self.folder / f"{self._shard:05d}.{self._stage}", compute)
        self._stage += 1
        return [value for values in stage.values_of(parts) for value in values]


def remove_parts(run: Run) -> None:
    """Remove the parts of all submissions, whose items have rows now or are computed by another submission."""
    try:
        shutil.rmtree(run.folder / FOLDER)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s stays, and does no harm: %s", run.folder / FOLDER, error)


class _NotSharedError(Exception):
    """The folder of a stage cannot be used."""


class _Stage:
    """One call of `divide`: its claims and its values, in a folder."""

    def __init__(self, parts: Parts, folder: Path, compute: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self._parts, self._folder, self._compute = parts, folder, compute
        self._lease_s = parts.run.plan.lease_s
        self._claims, self._watch = Claims(folder, self._lease_s), Watch(self._lease_s)

    def values_of(self, parts: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """The values of all parts, in order. Interrupted if this task has to leave while others compute the last."""
        found: dict[int, list[Any]] = {}
        try:
            self._share(parts, found)
        except _NotSharedError as error:
            log.warning("the parts that are left are computed by this task alone: %s", error)
            for number in range(len(parts)):
                if number not in found:
                    found[number] = json.loads(self._content(parts[number]))
        return [found[number] for number in range(len(parts))]

    def _share(self, parts: Sequence[Sequence[Any]], found: dict[int, list[Any]]) -> None:
        _of_files(lambda: self._make_folder(len(parts)))
        pause_s = FIRST_PAUSE_S
        while True:
            there = set(_of_files(lambda: list_fresh(self._folder)))
            left = []
            for number, part in enumerate(parts):
                path = self._path(number)
                if number not in found and path.name in there and (values := _read(path, len(part))) is not None:
                    found[number] = values
                if number not in found:
                    left.append(number)
            if not left:
                return
            taken = next((number for number in left if _of_files(functools.partial(self._take, number))), None)
            if taken is not None:
                found[taken] = self._computed(taken, parts[taken])
                pause_s = FIRST_PAUSE_S
            elif self._parts.shall_leave():
                raise Interrupted
            else:
                time.sleep(pause_s)
                self._parts.waited_s += pause_s
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S, self._lease_s / RENEWALS_PER_LEASE)

    def _make_folder(self, n_parts: int) -> None:
        for folder in (self._folder.parent.parent, self._folder.parent, self._folder):
            make_folder(folder)
        for number in range(n_parts, self._parts.run.plan.parts):
            # Fewer things than parts: others need not come for these.
            self._path(number).with_suffix(".none").touch()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:05d}.json"

    def _take(self, number: int) -> bool:
        """Claim a part that nobody computes."""
        mine, former = self._parts.claim, self._claims.observe(number)
        if former is None:
            return self._claims.take(number, mine)
        if former.is_of(mine):
            return True  # left by a worker of this attempt that died
        is_stale = self._watch.look(number, former) == "stale"
        return is_stale and self._claims.take_over(number, UNOWNED if former is UNREADABLE else former, mine)

    def _computed(self, number: int, part: Sequence[Any]) -> list[Any]:
        began = time.monotonic()
        try:
            with self._renewed(number):
                content = self._content(part)
            try:
                digest = hashlib.sha256(content).hexdigest().encode()
                write_bytes(self._path(number), digest + b"\n" + content, patience_s=self._lease_s)
            except OSError as error:  # others compute it again
                log.warning("a part is not kept: %s", error)
        finally:
            self._claims.release(number, self._parts.claim)
            self._parts.computed_s += time.monotonic() - began
        found: list[Any] = json.loads(content)
        return found

    def _content(self, part: Sequence[Any]) -> bytes:
        """The values of a part as JSON, from which this task takes them as well as others."""
        values = list(self._compute(part))
        if len(values) != len(part):
            raise ValueError(f"a part of {len(part)} has {len(values)} values; expected one for each")
        return json.dumps(values).encode()

    @contextlib.contextmanager
    def _renewed(self, number: int) -> Iterator[None]:
        """Renew the claim of a part meanwhile, so that others see this process live."""
        done = threading.Event()

        def renew() -> None:
            while not done.wait(self._lease_s / RENEWALS_PER_LEASE):
                try:
                    self._claims.renew(number, self._parts.claim)
                except OSError as error:  # tried again soon; a stale claim has its part computed twice
                    log.debug("the claim of part %d is not renewed: %s", number, error)

        thread = threading.Thread(target=renew, name="claim of a part", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _of_files(operation: Callable[[], T]) -> T:
    """The result of what reads and writes files; _NotSharedError in place of an OSError."""
    try:
        return operation()
    except OSError as error:
        raise _NotSharedError(str(error)) from error


def _read(path: Path, n_values: int) -> list[Any] | None:
    """The values of a part; None for a file that cannot be read, or is damaged."""
    try:
        digest, _, content = read_bytes(path, max_bytes=MOST_BYTES).partition(b"\n")
    except OSError as error:
        log.warning("%s cannot be read, and its part is computed again: %s", path, error)
        return None
    if hashlib.sha256(content).hexdigest().encode() != digest:
        log.warning("%s is damaged, and its part is computed again", path)
        return None
    values: list[Any] = json.loads(content)
    return values if len(values) == n_values else None
