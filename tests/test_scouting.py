"""Scouts: free shards, those of the dead, and the knowledge that there is nothing left; by a clock of the tests'."""

import functools
import time

import pytest

from slurmgpu import scouting
from slurmgpu.claims import Claim, Watch
from slurmgpu.scouting import Scout
from tests.runs import planned_run

ME = Claim("1_0", "1_0.0", "here", 1)
OTHER = Claim("1_1", "1_1.0", "there", 2)
LEASE_S = 60.0


class Clock:
    """Seconds that pass when somebody pauses."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def go(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(scouting, "Watch", functools.partial(Watch, clock=clock))
    return clock


@pytest.fixture
def run(tmp_path):
    """A run of five shards."""
    return planned_run(tmp_path / "run", n_items=10, batch_size=2, shard_items=2, lease_s=LEASE_S)


def publish(run, *shards):
    for shard in shards:
        run.shard_path(shard).touch()


def never(seconds):
    raise AssertionError("it waited")


def test_free_shards_are_taken_in_order_and_published_ones_left(run):
    publish(run, 1)
    run.claims.take(3, OTHER)
    scout = Scout(run, ME)
    assert [scout.next(), scout.next(), scout.next()] == [0, 2, 4]


def test_a_shard_that_was_given_back_is_taken_behind_the_others(run):
    run.claims.take(0, OTHER)
    scout = Scout(run, ME, pause=never)
    assert [scout.next() for _ in range(4)] == [1, 2, 3, 4]
    run.claims.release(0, OTHER.attempt)
    assert scout.next() == 0


def test_a_complete_run_is_known_at_once(run):
    publish(run, *range(5))
    assert Scout(run, ME, pause=never).next() == "complete"
    assert Scout(run, ME, pause=never).look() == "complete"


def test_what_living_owners_hold_is_left_to_them(run, clock):
    publish(run, *range(4))
    run.claims.take(4, OTHER)
    claims = [OTHER]

    def live(seconds):
        clock.go(seconds)
        claims.append(run.claims.renew(4, claims[-1]))

    assert Scout(run, ME, pause=live).next() == "others"
    assert Scout(run, ME, pause=live).look() == "others"
    assert len(claims) > 2  # each had to see it


def test_the_claim_of_a_dead_owner_is_taken_over(run, clock):
    publish(run, *range(4))
    run.claims.take(4, OTHER)
    taken, began = [], clock.now
    scout = Scout(run, ME, on_takeover=lambda shard, former: taken.append((shard, former)), pause=clock.go)
    assert scout.next() == 4
    assert clock.now > began + LEASE_S
    assert taken == [(4, OTHER)]
    assert run.claims.read(4) == ME


def test_who_died_while_this_worker_was_busy_is_known_when_it_is_idle(run, clock):
    run.claims.take(0, OTHER)
    scout = Scout(run, ME, pause=never)
    for shard in (1, 2, 3, 4):
        assert scout.next() == shard
        publish(run, shard)
        clock.go(0.4 * LEASE_S)  # computing: longer, in all, than a lease
    assert scout.next() == 0


def test_who_was_seen_alive_long_ago_must_show_it_again(run, clock):
    run.claims.take(0, OTHER)
    scout = Scout(run, ME, pause=clock.go)
    assert scout.next() == 1
    run.claims.renew(0, OTHER)
    clock.go(0.4 * LEASE_S)
    assert scout.next() == 2  # here the renewal is seen
    publish(run, 1, 2, 3, 4)
    scout._cursor = 5
    assert scout.next() == 0  # the owner has died since: it is taken over, not left to him


def test_a_parked_shard_is_nobodys_in_this_submission(run):
    publish(run, *range(4))
    run.claims.take(4, OTHER)
    run.claims.park(4, OTHER)
    assert Scout(run, ME, pause=never).next() == "others"


def test_looking_for_work_claims_nothing(run):
    assert Scout(run, ME, pause=never).look() == "work"
    assert not run.claims.numbers()
