"""A task claims and reads its next shards while it computes one."""

from __future__ import annotations

import pytest

from slurmgpu.run.crash_history import History
from slurmgpu.worker.assignment import WorkerFailedError
from slurmgpu.worker.lookahead import Lookahead
from slurmgpu.worker.taken_shard import Taken, TakenIn
from slurmgpu.workload import Item

BATCH = 4


class Shards:
    """Shards of some items each, and what was claimed, read and taken in."""

    def __init__(self, sizes, history=None, unreadable=()):
        self.left = list(range(len(sizes)))
        self.bounds = [(sum(sizes[:i]), sum(sizes[: i + 1])) for i in self.left]
        self.history, self.unreadable = history or History(), unreadable
        self.did = []

    def claim(self):
        if not self.left:
            return None
        shard = self.left.pop(0)
        self.did.append(f"claim {shard}")
        return Taken(shard, self.history, [self.bounds[shard]])

    def read(self, spans):
        [(start, stop)] = spans
        if start in self.unreadable:
            raise WorkerFailedError("input_error", "no")
        self.did.append(f"read {start}-{stop}")
        return [Item(i, {}) for i in range(start, stop)]

    def take_in(self, items):
        self.did.append(f"take {len(items)}")
        return TakenIn(batches=[items[at : at + BATCH] for at in range(0, len(items), BATCH)])

    def ahead(self, slice_items=8):
        return Lookahead(self.claim, self.read, self.take_in, 2 * BATCH, slice_items)


def test_a_large_shard_is_read_a_slice_at_a_time_and_sorted_after_the_last():
    shards = Shards([20, 20])
    ahead = shards.ahead()
    each = []
    for _ in range(6):
        ahead.go_on()
        each.append(shards.did)
        shards.did = []
    assert each == [["claim 0", "read 0-8"], ["read 8-16"], ["read 16-20"], ["take 20"], [], []]
    assert ahead.pop().shard == 0
    ahead.go_on()
    assert shards.did == ["claim 1", "read 20-28"]


def test_small_shards_are_read_until_two_batches_are_there():
    shards = Shards([4, 4, 4, 4])
    ahead = shards.ahead()
    ahead.go_on()
    assert shards.did == ["claim 0", "read 0-4", "take 4", "claim 1", "read 4-8", "take 4"]
    assert ahead.pop().shard == 0
    assert [item.index for item in ahead.first()[1]] == [4, 5, 6, 7]
    ahead.go_on()
    assert shards.did[-3:] == ["claim 2", "read 8-12", "take 4"]


def test_no_more_than_two_shards_are_claimed_ahead_however_few_items_they_have():
    shards = Shards([1, 1, 1, 1])
    ahead = shards.ahead()
    for _ in range(4):
        ahead.go_on()
    assert shards.left == [2, 3]
    assert ahead.pop().shard == 0
    ahead.go_on()
    assert shards.left == [3]


def test_a_shard_whose_turn_comes_early_is_read_to_its_end():
    shards = Shards([20, 20])
    ahead = shards.ahead()
    ahead.go_on()
    assert ahead.first() is None
    taken = ahead.pop()
    assert [len(batch) for batch in taken.taken_in.batches] == [4] * 5
    assert shards.did == ["claim 0", "read 0-8", "read 8-16", "read 16-20", "take 20"]
    assert ahead.pop() is None


@pytest.mark.parametrize("place", [0, 8])
def test_what_cannot_be_read_ahead_is_left_to_its_turn(place):
    shards = Shards([20, 4], unreadable=[place])
    ahead = shards.ahead()
    for _ in range(3):
        ahead.go_on()
    taken = ahead.pop()
    assert (taken.shard, taken.taken_in) == (0, None)
    ahead.go_on()
    assert ahead.pop().taken_in is not None


def test_a_first_batch_that_is_isolated_is_not_prepared():
    ahead = Shards([8], History(batch_weights={0: 1.0})).ahead()
    ahead.go_on()
    assert ahead.first() is None


def test_a_shard_of_which_no_item_can_be_read_has_no_first_batch():
    shards = Shards([8])
    ahead = Lookahead(shards.claim, shards.read, lambda items: TakenIn(), 2 * BATCH, 8)
    ahead.go_on()
    assert ahead.first() is None
    assert ahead.pop().taken_in == TakenIn()


def test_an_input_without_an_index_is_read_a_shard_at_once():
    shards = Shards([20])
    shards.ahead(slice_items=0).go_on()
    assert shards.did == ["claim 0", "read 0-20"]


def test_nothing_is_there_if_nothing_is_free():
    ahead = Shards([]).ahead()
    ahead.go_on()
    assert ahead.pop() is None
    assert ahead.first() is None
