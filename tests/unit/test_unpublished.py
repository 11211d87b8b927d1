"""Shards whose items all failed alike are held back until it is known whether the workload is at fault."""

import pytest

from slurmgpu.worker import unpublished as module
from slurmgpu.worker.assignment import WorkerFailedError
from slurmgpu.worker.call_failures import Failure
from slurmgpu.worker.computed_shard import Computed, ComputedShard
from slurmgpu.worker.unpublished import FEW, LONG_S, MANY, Unpublished

ALIKE = Failure("item_error", "ValueError: no model", way=("load.py", "3"))


def shard(number, n_items, row=ALIKE):
    return ComputedShard(number, Computed(dict.fromkeys(range(n_items), row)), 0.0, 1.0, None)


@pytest.fixture
def now(monkeypatch):
    at = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: at[0])
    return at


def holding(*shards, published=lambda: False):
    held = Unpublished(published)
    for one in shards:
        held.begin()
        held.add(one)
    return held


def test_another_shard_is_wanted_until_enough_items_of_two_have_failed_alike(now):
    assert holding(shard(0, MANY)).wants_another()
    assert holding(shard(0, 1), shard(1, MANY - 2)).wants_another()
    assert not holding(shard(0, 1), shard(1, MANY - 1)).wants_another()
    slow = holding(shard(0, 1), shard(1, FEW - 1))
    assert slow.wants_another()
    now[0] += LONG_S
    assert not slow.wants_another()
    assert not holding(shard(0, MANY, {"x": 1})).wants_another()
    assert not holding(shard(0, MANY), published=lambda: True).wants_another()


def test_items_of_the_current_shard_count_with_those_held_back_and_time_from_the_first_of_them(now):
    held = holding(shard(0, FEW - 1))
    now[0] += LONG_S
    held.begin()
    assert (held.is_enough(0), held.is_enough(1)) == (False, True)


def test_enough_items_that_fail_alike_are_the_workloads_fault_unless_any_task_has_published():
    with pytest.raises(WorkerFailedError, match="ValueError: no model") as raised:
        holding(shard(0, FEW)).take(weighed=True)
    assert raised.value.kind == "workload_error"
    some = [shard(0, 1), shard(1, FEW - 2)]
    assert holding(*some).take(weighed=True) == some
    for held in (holding(shard(0, FEW), published=lambda: True), holding(shard(0, FEW, {"x": 1}))):
        assert len(held.take(weighed=True)) == 1
    assert len(holding(shard(0, FEW)).take(weighed=False)) == 1


def test_a_workload_is_trusted_once_a_shard_is_published_and_looked_for_no_more():
    looks = []
    held = holding(published=lambda: looks.append(0) or len(looks) == 2)
    assert held.take(weighed=True) == []
    assert [held.doubts() for _ in range(3)] == [True, False, False]
    assert len(looks) == 2
    own = holding(shard(0, 1))
    own.take(weighed=True)
    assert own.take(weighed=True) == []
    assert not own.doubts()
