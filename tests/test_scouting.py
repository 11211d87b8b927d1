import threading
import time

import pytest

from slurmgpu.claims import Claim
from slurmgpu.scouting import Scout
from tests.runs import planned_run

ME = Claim("1_0", "1_0.0", "here", 1)
OTHER = Claim("1_1", "1_1.0", "there", 2)


@pytest.fixture
def run(tmp_path):
    """A run of five shards with leases of half a second."""
    return planned_run(tmp_path / "run", n_items=10, batch_size=2, shard_items=2, lease_s=0.5)


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


def test_what_living_owners_hold_is_left_to_them(run):
    publish(run, *range(4))
    run.claims.take(4, OTHER)
    stop = threading.Event()

    def live():
        claim = OTHER
        while not stop.wait(0.05):
            claim = run.claims.renew(4, claim)

    owner = threading.Thread(target=live)
    owner.start()
    try:
        assert Scout(run, ME).next() == "others"
        assert Scout(run, ME).look() == "others"
    finally:
        stop.set()
        owner.join()


def test_the_claim_of_a_dead_owner_is_taken_over(run):
    publish(run, *range(4))
    run.claims.take(4, OTHER)
    taken = []
    assert Scout(run, ME, on_takeover=lambda shard, former: taken.append((shard, former))).next() == 4
    assert taken == [(4, OTHER)]
    assert run.claims.read(4) == ME


def test_who_died_while_this_worker_was_busy_is_known_when_it_is_idle(run):
    run.claims.take(0, OTHER)
    scout = Scout(run, ME, pause=never)
    for shard in (1, 2, 3, 4):
        assert scout.next() == shard
        publish(run, shard)
        time.sleep(0.2)  # computing: longer, in all, than a lease
    assert scout.next() == 0


def test_who_was_seen_alive_long_ago_must_show_it_again(run):
    run.claims.take(0, OTHER)
    scout = Scout(run, ME)
    assert scout.next() == 1
    run.claims.renew(0, OTHER)
    time.sleep(0.2)
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
