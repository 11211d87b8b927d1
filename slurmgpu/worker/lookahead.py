"""The next shards of a task, claimed and read while one is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slurmgpu.run.recompute import Spans
from slurmgpu.worker.assignment import WorkerFailedError
from slurmgpu.worker.taken_shard import Read, Taken, TakenIn
from slurmgpu.workload import Item

MOST_AHEAD = 2
"""The most shards that are claimed ahead; some may have only a few failed items to compute."""


@dataclass
class Lookahead:
    """Claims and reads what comes next: one shard, or two, where one has fewer than `enough_items` to compute.

    `claim` returns a free shard, None if there is none without waiting. `read` returns the items of spans, and
    `take_in` turns them into the computer's input. `slice_items` are read at once; a whole shard if it is 0.
    """

    claim: Callable[[], Taken | None]
    read: Callable[[Spans], Read]
    take_in: Callable[[Read], TakenIn]
    enough_items: int
    slice_items: int
    _next: deque[Taken] = field(default_factory=deque)
    _reading: tuple[deque[tuple[int, int]], Read] | None = None
    _is_read: bool = False

    def go_on(self) -> None:
        """Read a slice of the shard that was claimed last, or claim another one, up to two if the first is small."""
        if self._reading is not None:
            self._read_on(*self._reading)
            return
        while self._reading is None:
            n_items = sum(stop - start for one in self._next for start, stop in one.spans)
            if len(self._next) == MOST_AHEAD or n_items >= self.enough_items or (found := self.claim()) is None:
                return
            self._next.append(found)
            self._reading = _slices(found.spans, self.slice_items), []
            self._read_on(*self._reading)

    def pop(self) -> Taken | None:
        """The next shard, None if none is claimed; without `taken_in` its items cannot be read now."""
        while len(self._next) == 1 and self._reading is not None:
            self._read_on(*self._reading)
        return self._next.popleft() if self._next else None

    def _read_on(self, slices: deque[tuple[int, int]], items: Read) -> None:
        try:
            if slices:
                items += self.read([slices.popleft()])
        except WorkerFailedError:  # the shard is read again when its turn comes, and the error is raised then
            self._reading = None
            return
        # Sorting a large shard takes as long as a slice.
        if not slices and (len(items) <= self.enough_items or self._is_read):
            self._next[-1].taken_in, self._reading = self.take_in(items), None
        self._is_read = not slices and self._reading is not None

    def first(self) -> tuple[int, Sequence[Item]] | None:
        """The next shard and its first batch; None unless that is read, and computed in one call."""
        if not self._next or (found := self._next[0]).taken_in is None or not found.taken_in.batches:
            return None
        batch = found.taken_in.batches[0]
        return None if found.history.isolates(item.index for item in batch) else (found.shard, batch)


def _slices(spans: Spans, n_items: int) -> deque[tuple[int, int]]:
    found: deque[tuple[int, int]] = deque()
    for start, stop in spans:
        size = n_items or max(1, stop - start)
        found += ((at, min(at + size, stop)) for at in range(start, stop, size))
    return found
