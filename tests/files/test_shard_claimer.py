"""The claimer: free shards, those of dead tasks, and the end of the work; by a clock of the tests'."""

import functools
import itertools
import os
import random
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from slurmgpu.run.claims import UNREADABLE, Claim, Claims, Watch
from slurmgpu.worker import shard_claimer
from slurmgpu.worker.deadline import Deadline
from slurmgpu.worker.shard_claimer import OBSERVED, Claimer
from tests.support.clocks import Clock
from tests.support.failing import TRANSIENT, Failing
from tests.support.runs import planned_run

ME = Claim("1_0", "1_0.0", "here", 1)
OTHER = Claim("1_1", "1_1.0", "there", 2)
LEASE_S = 60.0


@pytest.fixture
def clock(monkeypatch):
    clock = Clock(1000.0)
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(shard_claimer, "Watch", functools.partial(Watch, clock=clock))
    return clock


@pytest.fixture
def run(tmp_path):
    """A run of five shards."""
    return planned_run(tmp_path / "run", n_items=10, batch_size=2, shard_items=2, lease_s=LEASE_S)


def publish(run, *shards):
    for shard in shards:
        run.shard_path(shard).touch()


def test_workloads_that_seed_python_alike_do_not_send_their_tasks_to_the_same_shards(tmp_path):
    many = planned_run(tmp_path / "run", n_items=5000, batch_size=1, shard_items=1)
    places = []
    for claim in (ME, OTHER):
        claimer = Claimer(many, claim)
        random.seed(0)
        before = random.getstate()
        places.append([claimer._place(5000) for _ in range(4)])
        assert random.getstate() == before  # nor is what they draw another number by that
    assert places[0] != places[1]
    assert len(set(places[0][1:] + places[1][1:])) > 3


def never(seconds):
    raise AssertionError("it waited")


def test_free_shards_are_taken_in_order_and_published_ones_left(run):
    publish(run, 1)
    run.claims.take(3, OTHER)
    claimer = Claimer(run, ME)
    assert [claimer.next(), claimer.next(), claimer.next()] == [0, 2, 4]


def test_a_shard_that_was_given_back_is_taken_behind_the_others(run):
    run.claims.take(0, OTHER)
    claimer = Claimer(run, ME, pause=never)
    assert [claimer.next() for _ in range(4)] == [1, 2, 3, 4]
    run.claims.release(0, OTHER)
    assert claimer.next() == 0


def test_a_complete_run_is_known_at_once(run):
    publish(run, *range(5))
    assert Claimer(run, ME, pause=never).next() == "complete"
    assert Claimer(run, ME, pause=never).look() == "complete"


def test_a_worker_that_looks_ahead_does_not_get_a_shard_it_holds_again(run):
    publish(run, *range(3))
    claimer = Claimer(run, ME, pause=never)
    assert [claimer.next(), claimer.next()] == [3, 4]
    assert claimer.next() == "complete"
    publish(run, 3)
    claimer.give_back(4)
    assert claimer.next() == 4


def test_what_living_owners_hold_is_left_to_them(run, clock):
    publish(run, *range(4))
    run.claims.take(4, OTHER)
    claims = [OTHER]

    def live(seconds):
        clock.go(seconds)
        claims.append(run.claims.renew(4, claims[-1]))

    assert Claimer(run, ME, pause=live).next() == "others"
    assert Claimer(run, ME, pause=live).look() == "others"
    assert len(claims) > 2  # each had to see it


def test_an_idle_task_looks_again_soon_then_less_often(run, clock):
    """The merge waits for the ends of idle tasks, which others' last shards keep for milliseconds or for hours."""
    publish(run, *range(4))
    run.claims.take(4, OTHER)
    pauses = []

    def others_compute(seconds):
        clock.go(seconds)
        pauses.append(seconds)
        if len(pauses) == 7:
            publish(run, 4)

    assert Claimer(run, ME, pause=others_compute).next() == "complete"
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0], rel=0.1)  # and time for its listings


def test_after_a_shard_its_first_pause_is_a_short_one_again(run, clock):
    publish(run, *range(3))
    for shard in (3, 4):
        run.claims.take(shard, OTHER)
    pauses = []

    def others_compute(seconds):
        clock.go(seconds)
        pauses.append(seconds)
        if len(pauses) == 4:
            run.claims.release(3, OTHER)
        if len(pauses) == 6:
            publish(run, 4)

    claimer = Claimer(run, ME, pause=others_compute)
    assert claimer.next() == 3
    publish(run, 3)
    assert claimer.next() == "complete"
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.05, 0.1], rel=0.1)


def test_the_claim_of_a_dead_owner_is_taken_over(run, clock):
    publish(run, *range(4))
    run.claims.take(4, OTHER)
    taken, began = [], clock.now
    claimer = Claimer(run, ME, on_takeover=lambda shard, former: taken.append((shard, former)), pause=clock.go)
    assert claimer.next() == 4
    assert clock.now > began + LEASE_S
    assert taken == [(4, OTHER)]
    assert run.claims.read(4) == ME


@pytest.mark.parametrize("take", [Claimer.next, Claimer.next_free])
def test_who_died_while_this_worker_was_busy_is_known_when_it_is_idle(run, clock, take):
    run.claims.take(0, OTHER)
    claimer = Claimer(run, ME, pause=never)
    for shard in (1, 2, 3, 4):
        assert take(claimer) == shard
        publish(run, shard)
        clock.go(0.4 * LEASE_S)  # computing: longer, in all, than a lease
    assert claimer.next() == 0


def test_who_was_seen_alive_long_ago_must_show_it_again(run, clock):
    run.claims.take(0, OTHER)
    claimer = Claimer(run, ME, pause=clock.go)
    assert claimer.next() == 1
    run.claims.renew(0, OTHER)
    clock.go(0.4 * LEASE_S)
    assert claimer.next() == 2  # here the renewal is seen
    publish(run, 1, 2, 3, 4)
    claimer._ahead.clear()
    assert claimer.next() == 0  # the owner has died since: it is taken over, not left to him


def test_a_free_shard_is_claimed_ahead_and_none_is_waited_for(run):
    publish(run, 0)
    run.claims.take(1, OTHER)
    claimer = Claimer(run, ME, pause=never)
    assert [claimer.next_free() for _ in range(4)] == [2, 3, 4, None]
    claimer.give_back(3)
    assert (claimer.held, run.claims.read(3)) == ({2, 4}, None)
    assert claimer.next_free() == 3


def test_leases_of_others_are_watched_four_times_in_a_lease_while_there_is_work(run, clock, monkeypatch):
    run.claims.take(0, OTHER)
    observed, real = [], Claims.observe
    monkeypatch.setattr(Claims, "observe", lambda self, shard: (observed.append(shard), real(self, shard))[1])
    claimer, n_observed = Claimer(run, ME, pause=never), []
    for seconds in (0.0, LEASE_S / 4 - 1, 1.0, 0.0):
        clock.go(seconds)
        publish(run, claimer.next())
        n_observed.append(len(observed))
    assert n_observed == [1, 1, 2, 2]


def test_a_shard_is_lost_once_it_is_seen_that_another_attempt_holds_it(run, clock):
    claimer = Claimer(run, ME)
    assert claimer.next() == 0
    look_s = LEASE_S / 6
    clock.go(look_s)
    run.claims.path(0).write_bytes(b"")  # it is being taken over, perhaps in vain
    assert not claimer.has_lost(0)
    clock.go(look_s)
    run.claims.path(0).unlink()
    assert not claimer.has_lost(0)
    run.claims.take(0, OTHER)
    clock.go(look_s - 1)
    assert not claimer.has_lost(0)  # it looked a moment ago
    clock.go(1)
    assert claimer.has_lost(0)
    run.claims.release(0, OTHER)
    run.claims.take(0, ME)
    clock.go(look_s)
    assert claimer.has_lost(0)  # what it knows stays so, until it claims the shard again
    claimer._begin(0)
    assert not claimer.has_lost(0)


def test_a_parked_shard_is_nobodys_in_this_submission(run):
    publish(run, *range(4))
    run.claims.take(4, OTHER)
    run.claims.park(4, OTHER)
    assert Claimer(run, ME, pause=never).next() == "others"


def test_looking_for_work_claims_nothing(run):
    assert Claimer(run, ME, pause=never).look() == "work"
    assert not run.claims.numbers()


# What listings do not tell


def stale(monkeypatch, run, folder, names):
    """Have a folder's listing be an old one, until something is created in it."""
    real_listing, real_open, is_stale = os.listdir, os.open, [True]

    def listing(path="."):
        return list(names) if is_stale[0] and Path(path) == folder else real_listing(path)

    def opened(path, flags, *args, **kwargs):
        if flags & os.O_CREAT and Path(path).parent == folder:
            is_stale[0] = False
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "listdir", listing)
    monkeypatch.setattr(os, "open", opened)


def test_no_run_is_complete_because_an_old_listing_says_so(run, monkeypatch):
    publish(run, *range(5))
    before = os.listdir(run.shards)
    run.shard_path(2).unlink()  # set aside by a merge
    stale(monkeypatch, run, run.shards, before)
    assert Claimer(run, ME, pause=lambda seconds: None).next() == 2


def test_shards_that_no_listing_shows_are_asked_for_by_their_names(run, monkeypatch):
    publish(run, *range(5))
    monkeypatch.setattr(type(run), "published", lambda self: {0, 1})  # for ever
    claimer = Claimer(run, ME, pause=lambda seconds: None)
    assert claimer.next() == "complete"
    assert not run.claims.numbers()


def test_a_shard_that_was_set_aside_since_it_was_found_by_its_name_is_computed(run, monkeypatch):
    publish(run, *range(5))
    monkeypatch.setattr(type(run), "published", lambda self: {0, 1, 2, 3})  # an old listing
    set_aside = run.shard_path(4)
    monkeypatch.setattr(shard_claimer, "list_fresh", lambda folder: set_aside.unlink(missing_ok=True))
    assert Claimer(run, ME, pause=lambda seconds: None).next() == 4


def test_a_claim_that_only_an_old_listing_shows_keeps_no_shard_from_being_computed(run, monkeypatch):
    publish(run, *range(4))
    stale(monkeypatch, run, run.claims.folder, ["00004"])
    assert Claimer(run, ME, pause=never).look() == "work"
    assert Claimer(run, ME, pause=never).next() == 4


def test_a_stale_claim_of_a_shard_that_is_published_meanwhile_is_given_back(run, clock, monkeypatch):
    publish(run, *range(4))
    run.claims.take(4, OTHER)
    before = os.listdir(run.shards)
    publish(run, 4)
    stale(monkeypatch, run, run.shards, before)
    taken = []
    assert Claimer(run, ME, pause=clock.go).look() == "complete"
    stale(monkeypatch, run, run.shards, before)
    claimer = Claimer(run, ME, on_takeover=lambda *what: taken.append(what), pause=clock.go)
    assert claimer.next() == "complete"
    assert not taken
    assert run.claims.read(4) is None


@pytest.mark.parametrize("is_left", [True, False])
def test_a_shard_that_was_left_or_is_free_in_an_old_listing_is_not_computed_if_it_is_published(
    run, monkeypatch, is_left
):
    publish(run, *range(4))
    before = os.listdir(run.shards)
    publish(run, 4)
    stale(monkeypatch, run, run.shards, before)
    if is_left:
        run.claims.take(4, ME)
    else:
        stale(monkeypatch, run, run.claims.folder, ["00004"])
    assert Claimer(run, ME, pause=lambda seconds: None).next() == "complete"
    assert run.claims.read(4) is None


def test_a_shard_whose_claim_is_gone_is_not_computed_if_another_task_is_faster(run, monkeypatch):
    publish(run, *range(4))
    stale(monkeypatch, run, run.claims.folder, ["00004"])
    real = Claims.take
    monkeypatch.setattr(Claims, "take", lambda self, shard, claim: not real(self, shard, OTHER))
    assert Claimer(run, ME, pause=lambda seconds: publish(run, 4)).next() == "complete"
    assert run.claims.read(4) == OTHER


def test_a_claim_that_a_dead_worker_of_this_attempt_left_is_taken_up(run):
    publish(run, *range(4))
    run.claims.take(4, ME)
    assert Claimer(run, ME, pause=never, held={4}).next() == "complete"  # once it publishes it
    assert Claimer(run, ME, pause=never).look() == "work"
    assert Claimer(run, ME, pause=never).next() == 4


def test_a_task_of_another_cluster_with_this_ones_job_id_is_another_task(run, clock):
    publish(run, *range(4))
    theirs = replace(ME, cluster="b")
    run.claims.take(4, theirs)
    taken = []
    claimer = Claimer(run, ME, on_takeover=lambda *what: taken.append(what), pause=clock.go)
    assert claimer.next() == 4
    assert taken == [(4, theirs)]
    assert Claimer(run, theirs).has_lost(4)


@pytest.mark.parametrize("number", TRANSIENT)
def test_another_ones_claim_that_cannot_be_read_ends_nothing(run, clock, monkeypatch, number):
    publish(run, *range(4))
    run.claims.take(4, OTHER)
    failing = Failing(monkeypatch)
    failing("open", number, of="00004", times=3)
    claims = [OTHER]

    def live(seconds):
        clock.go(seconds)
        if failing.n_failed == 3:
            claims.append(run.claims.renew(4, claims[-1]))

    assert Claimer(run, ME, pause=live).next() == "others"


def test_a_claim_that_nobody_can_read_is_taken_over_in_the_end(run, clock, monkeypatch):
    publish(run, *range(4))
    run.claims.take(4, OTHER)
    real = Claims.observe
    monkeypatch.setattr(Claims, "observe", lambda self, shard: UNREADABLE if shard == 4 else real(self, shard))
    run.claims.path(4).write_text("unreadable for good")
    began = clock.now
    assert Claimer(run, ME, pause=clock.go).next() == 4
    assert LEASE_S < clock.now - began < 2 * LEASE_S


def test_a_shard_that_was_resumed_is_not_computed_when_it_is_published_or_another_ones(run):
    for shard in range(3):
        run.claims.take(shard, ME)
    publish(run, 0)
    run.claims.take_over(1, ME, OTHER)
    claimer = Claimer(run, ME, held={0, 1, 2})
    assert [claimer.is_still_own(shard) for shard in range(3)] == [False, False, True]


def test_a_clock_that_is_set_while_a_worker_works_is_no_deadline(monkeypatch):
    deadline = Deadline(time.time() + 3600, 60, threading.Event())
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 12 * 3600)
    assert deadline.over(1000) is None
    assert deadline.over(3600) == "deadline"


# Scale


class Opens:
    """Counts files opened below a folder, by this process."""

    def __init__(self, folder):
        self.folder, self.n = str(folder), 0
        self.is_on = True
        sys.addaudithook(self._hook)

    def _hook(self, event, arguments):
        if self.is_on and event == "open" and str(arguments[0]).startswith(self.folder):
            self.n += 1

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.is_on = False


@pytest.fixture
def large(tmp_path):
    """A run of 100,000 shards, as it looks from listings."""
    return planned_run(tmp_path / "run", n_items=100_000, batch_size=1, shard_items=1, lease_s=LEASE_S)


@pytest.fixture
def listings(large, monkeypatch):
    """What listings of the large run's folders show beside what is there: `listings["claims"] = range(...)`."""
    shown, real = {"claims": range(0), "shards": range(0)}, os.listdir

    @functools.cache
    def names(shards, end):
        return frozenset(f"{shard:05d}{end}" for shard in shards)

    def listing(path="."):
        name = Path(path).name
        end = {"claims": "", "shards": ".h5"}.get(name)
        return real(path) if end is None else [*names(shown[name], end).union(real(path))]

    monkeypatch.setattr(os, "listdir", listing)
    return shown


def test_a_worker_finds_its_first_shard_with_few_opens_however_many_claims_there_are(large, listings):
    listings["claims"] = range(99_000)  # of as many dead or living tasks; none is published
    with Opens(large.folder) as opens:
        assert 99_000 <= Claimer(large, ME, pause=never).next() < 100_000
    assert opens.n < 50
    listings["claims"], listings["shards"] = range(100_000), range(99_990)
    large.claims.take(99_995, ME)
    with Opens(large.folder) as opens:
        assert Claimer(large, ME, pause=never).look() == "work"
        assert opens.n < 50


def test_many_tasks_that_start_at_once_try_different_shards(large):
    tasks = [Claim(f"1_{number}", f"1_{number}.0", "here", 1) for number in range(20)]
    claimers = [Claimer(large, task) for task in tasks]
    with Opens(large.folder) as opens:
        first = [claimer.next() for claimer in claimers]
        second = [claimer.next() for claimer in claimers]
    assert second == [shard + 1 for shard in first]  # what lies together is computed by one task
    gaps = [after - before for before, after in itertools.pairwise(sorted(first))]
    assert min(gaps) > 1000
    assert opens.n < 20 * (OBSERVED + 10)


def test_a_task_whose_listing_is_old_does_not_try_each_shard_of_it(large, monkeypatch):
    claimer = Claimer(large, ME)
    assert claimer.next() == 0
    tried, real = [], Claims.take
    others = range(1, 75_000)  # have been taken since

    def take(self, shard, claim):
        tried.append(shard)
        return shard not in others and real(self, shard, claim)

    monkeypatch.setattr(Claims, "take", take)
    monkeypatch.setattr(Claims, "numbers", lambda self: set(others))
    assert claimer.next() >= 75_000
    assert len(tried) < 20


def test_an_idle_task_reads_few_claims_a_second_and_finds_a_dead_owner_within_two_leases(large, listings, clock):
    n_open, dead = 75, 42
    listings["claims"], listings["shards"] = range(100_000), range(n_open, 100_000)
    holders = {shard: Claim(f"2_{shard}", f"2_{shard}.0", "there", 2) for shard in range(n_open)}
    for shard, claim in holders.items():
        large.claims.take(shard, claim)

    def live(seconds):
        clock.go(seconds)
        for shard in holders.keys() - {dead}:
            holders[shard] = large.claims.renew(shard, holders[shard])

    began = clock.now
    with Opens(large.folder) as opens:
        claimer = Claimer(
            large,
            ME,
            pause=lambda seconds: (setattr(opens, "is_on", False), live(seconds), setattr(opens, "is_on", True)),
        )
        assert claimer.next() == dead
    assert LEASE_S < clock.now - began <= 1.6 * LEASE_S
    assert opens.n <= 8 * n_open  # each is looked at four times in a lease
