import threading
from dataclasses import replace

import pytest

from slurmgpu.claims import Claim, Claims, Watch


def owner(name: str) -> Claim:
    return Claim(task=name, attempt=f"{name}.0", host="node1", pid=1)


@pytest.fixture
def claims(tmp_path):
    return Claims(tmp_path)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_of_many_takers_one_wins_each_shard(claims):
    wins: dict[int, list[str]] = {shard: [] for shard in range(50)}

    def take_all(name):
        for shard in wins:
            if claims.take(shard, owner(name)):
                wins[shard].append(name)

    threads = [threading.Thread(target=take_all, args=(f"1_{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(winners) == 1 for winners in wins.values())
    assert all(claims.read(shard).task == winners[0] for shard, winners in wins.items())


def test_renewing_counts_the_lease_up_and_keeps_the_file_readable(claims):
    claim = owner("1_0")
    claims.take(3, claim)
    for n in range(1, 1001):
        claim = claims.renew(3, claim)
        assert claim.renewals == n
    assert claims.read(3) == claim


def test_a_claim_that_was_taken_over_is_not_renewed_parked_or_released_by_its_former_owner(claims):
    former, taker = owner("1_0"), owner("1_1")
    claims.take(3, former)
    assert claims.take_over(3, former, taker)
    assert claims.renew(3, former) is None
    claims.park(3, former)
    claims.release(3, former.attempt)
    assert claims.read(3) == taker


def test_of_two_observers_of_a_stale_claim_one_takes_it_over(claims):
    stale, first, second = owner("1_0"), owner("1_1"), owner("1_2")
    claims.take(3, stale)
    assert claims.take_over(3, stale, first)
    assert not claims.take_over(3, stale, second)  # it renames the first one's new claim, sees it, and puts it back
    assert claims.read(3) == first
    assert claims.numbers() == {3}
    assert [path.name for path in claims.folder.iterdir()] == ["00003"]


def test_a_claim_that_was_given_back_cannot_be_taken_over(claims):
    stale = owner("1_0")
    claims.take(3, stale)
    claims.release(3, stale.attempt)
    assert not claims.take_over(3, stale, owner("1_1"))
    assert claims.read(3) is None


def test_a_lease_is_stale_only_when_this_observer_has_not_seen_it_change(claims):
    clock = Clock()
    watch = Watch(lease_s=10, clock=clock)
    claim = owner("1_0")
    assert watch.look(3, claim) == "unknown"
    clock.now = 9
    assert watch.look(3, claim) == "unknown"
    clock.now = 9.5
    claim = replace(claim, renewals=1)
    assert watch.look(3, claim) == "alive"
    clock.now = 19
    assert watch.look(3, claim) == "alive"
    clock.now = 20
    assert watch.look(3, claim) == "stale"


def test_a_claim_never_seen_renewed_becomes_stale_after_one_lease():
    clock = Clock()
    watch = Watch(lease_s=10, clock=clock)
    watch.look(3, owner("1_0"))
    clock.now = 10.1
    assert watch.look(3, owner("1_0")) == "stale"


def test_a_requeued_task_drops_its_own_earlier_claims_and_no_others(claims):
    claims.take(1, Claim("1_0", "1_0.0", "n", 1))
    claims.take(2, Claim("1_1", "1_1.0", "n", 1))
    claims.take(3, Claim("1_0", "1_0.0", "n", 1, parked=True))
    assert claims.drop_earlier("1_0", "1_0.1") == [1]
    assert claims.numbers() == {2, 3}


def test_a_claim_whose_writer_died_before_writing_it_can_be_taken_over(claims):
    claims.path(3).touch()
    empty = claims.read(3)
    assert empty is not None
    assert empty.attempt == ""
    assert claims.take_over(3, empty, owner("1_1"))


def test_clearing_keeps_the_histories(claims):
    claims.take(1, owner("1_0"))
    (claims.folder / "00001.history").write_text("{}")
    assert claims.clear() == [1]
    assert [path.name for path in claims.folder.iterdir()] == ["00001.history"]
