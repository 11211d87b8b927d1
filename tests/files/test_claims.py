"""Claims and leases: one of many takers gets a shard, and a stale claim is taken over."""

import errno
import json
import os
import resource
import threading
from dataclasses import replace

import pytest

from slurmgpu.run.claims import UNOWNED, UNREADABLE, Claim, Claims, Watch
from slurmgpu.run.records import Attempt, new_record
from slurmgpu.task.leases import MOST_DROPPED, Leases
from tests.support.clocks import Clock
from tests.support.failing import TRANSIENT, Failing
from tests.support.runs import planned_run


def owner(name: str) -> Claim:
    return Claim(task=name, attempt=f"{name}.0", host="node1", pid=1)


@pytest.fixture
def claims(tmp_path):
    return Claims(tmp_path)


@pytest.fixture
def failing(monkeypatch):
    return Failing(monkeypatch)


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


def test_a_claim_that_sshfs_refuses_without_saying_why_is_anothers_if_it_is_there(claims, failing):
    """SFTP has one error for a file that exists and one that may not be made, and sshfs makes it EPERM."""
    assert claims.take(3, owner("1_0"))
    failing("open", errno.EPERM, of="00003")
    assert not claims.take(3, owner("1_1"))
    assert claims.read(3) == owner("1_0")
    failing("open", errno.EPERM, of="00004")
    with pytest.raises(PermissionError):
        claims.take(4, owner("1_1"))


def test_a_folder_of_claims_that_a_purge_has_removed_is_made_again(claims, tmp_path):
    tmp_path.rmdir()
    assert claims.take(3, owner("1_0"))
    assert not claims.take(3, owner("1_1"))
    with pytest.raises(FileNotFoundError):  # the run directory is gone
        Claims(tmp_path / "gone" / "claims").take(3, owner("1_0"))


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
    claims.release(3, former)
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
    claims.release(3, stale)
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


def test_who_is_doubted_lives_only_if_it_renews_from_then_on():
    """It may have renewed for the last time just after it was looked at before a shard that took an hour."""
    clock = Clock()
    watch = Watch(lease_s=10, clock=clock)
    claims = [replace(owner("1_0"), renewals=number) for number in range(4)]
    assert [watch.look(3, claim) for claim in claims[:2]] == ["unknown", "alive"]
    clock.now = 3600
    watch.doubt()
    assert watch.look(3, claims[2]) == "unknown"
    assert watch.look(3, claims[3]) == "alive"
    watch.doubt()
    clock.now = 3605
    assert watch.look(3, claims[3]) == "unknown"
    clock.now = 3611
    assert watch.look(3, claims[3]) == "stale"


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
    assert claims.drop_earlier(Claim("1_0", "1_0.1", "n", 1), sorted(claims.numbers())) == [1]
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


@pytest.mark.parametrize("number", TRANSIENT)
def test_a_claim_that_cannot_be_read_is_neither_stale_nor_alive_before_a_lease_is_over(claims, failing, number):
    clock = Clock()
    watch = Watch(lease_s=10, clock=clock)
    claims.take(3, owner("1_0"))
    failing("open", number, of="00003", times=4)
    for clock.now in (0.0, 9.9):
        assert claims.observe(3) is UNREADABLE
        assert watch.look(3, UNREADABLE) == "unknown"
    assert [claim for _, claim in claims.held()] == [UNREADABLE]
    assert watch.look(3, claims.observe(3)) == "unknown"
    assert watch.look(3, claims.observe(3)) == "unknown"
    clock.now = 15.0
    assert watch.look(3, UNREADABLE) == "unknown"  # from now on again
    clock.now = 25.1
    assert watch.look(3, UNREADABLE) == "stale"


def test_what_an_attempt_must_know_of_its_own_claim_is_asked_for_again(claims, failing):
    mine = owner("1_0")
    claims.take(3, mine)
    failing("open", errno.ESTALE, of="00003", times=2)
    assert claims.holds(3, mine)
    failing("open", errno.EIO, of="00003", times=2)
    claims.release(3, mine)
    assert claims.read(3) is None
    assert failing.n_failed == 4


def test_a_renewal_that_fails_says_so_and_the_next_one_counts_further(claims, failing):
    first = owner("1_0")
    claims.take(3, first)
    second = claims.renew(3, first)
    failing("open", errno.EIO, of="00003")
    with pytest.raises(OSError, match="Input/output"):
        claims.renew(3, second)
    claims._rewrite(3, replace(second, renewals=2))  # one whose reply was lost
    assert claims.renew(3, second).renewals == 3


def test_a_claim_is_written_anew_after_an_error_and_is_no_hole_after_a_lost_reply(claims, failing, monkeypatch):
    real, left = os.fdopen, [2]

    def fdopen(fd, *args, **kwargs):
        if left[0]:
            left[0] -= 1
            os.close(fd)
            raise OSError(errno.EIO, "injected")
        return real(fd, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdopen", fdopen)
        assert claims.take(3, owner("1_0"))
    assert claims.read(3) == owner("1_0")
    failing("open", errno.EIO, of="00004", lost=True)
    assert not claims.take(4, owner("1_0"))
    assert claims.take_over(4, claims.observe(4), owner("1_1"))  # nobody's, and stale after a lease


def test_a_claim_that_is_taken_over_before_it_is_written_is_not_made_again(claims, monkeypatch):
    def taken_over(fd, *args, **kwargs):
        os.close(fd)
        claims.path(3).unlink()  # the taker has renamed it
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdopen", taken_over)
        assert not claims.take(3, owner("1_0"))
    assert os.listdir(claims.folder) == []


@pytest.mark.parametrize("use", ["renew", "park", "take_over"])
def test_a_claim_that_goes_after_it_was_read_is_not_made_again(claims, monkeypatch, use):
    """A merge clears the claims of tasks that it takes for dead, and of two takers one is faster."""
    mine = owner("1_0")
    uses = {
        "renew": lambda: claims.renew(3, mine),
        "park": lambda: claims.park(3, mine),
        "take_over": lambda: claims.take_over(3, mine, owner("1_1")),
    }
    monkeypatch.setattr("slurmgpu.run.claims._read", lambda path, patience_s: mine)
    assert not uses[use]()
    assert os.listdir(claims.folder) == []


def test_a_claim_that_is_gone_or_parked_is_nobodys_to_renew_drop_or_release(claims):
    mine = owner("1_0")
    for _ in ("gone", "parked"):
        assert not claims.holds(3, mine)
        assert claims.renew(3, mine) is None
        assert claims.drop_earlier(replace(mine, attempt="1_0.1"), [3]) == []
        claims.take(3, mine)
        claims.park(3, mine)
    claims.release(3, mine)
    assert claims.read(3).parked


def test_a_claim_that_cannot_be_read_for_long_is_taken_over_and_a_release_leaves_it(claims, failing, caplog):
    claims.take(3, owner("1_0"))
    failing("open", errno.EIO, of="00003", times=2)
    assert claims.take_over(3, UNOWNED, owner("1_1"))
    assert claims.read(3) == owner("1_1")
    failing("open", errno.EIO, of="00003", times=1)
    replace(claims, patience_s=0.0).release(3, owner("1_1"))
    assert "shard 3 was not given back" in caplog.text
    assert claims.read(3) == owner("1_1")


def test_a_claim_that_cannot_be_written_is_removed_and_its_error_names_it(claims):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # as a full disk: it is created, and no byte of it is written
    try:
        with pytest.raises(OSError, match="00003") as raised:
            claims.take(3, owner("1_0"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.errno == errno.EFBIG
    assert os.listdir(claims.folder) == []


@pytest.mark.parametrize("function", ["rename", "unlink"])
@pytest.mark.parametrize("lost", [False, True])
def test_a_take_over_works_when_an_operation_fails_or_its_reply_is_lost(claims, failing, function, lost):
    claims.take(3, owner("1_0"))
    failing(function, errno.ETIMEDOUT, of="00003", lost=lost)
    assert claims.take_over(3, owner("1_0"), owner("1_1"))
    assert claims.read(3) == owner("1_1")
    assert failing.n_failed == 1
    assert os.listdir(claims.folder) == ["00003"]


def test_without_hard_links_a_take_over_that_comes_late_loses_no_living_claim(claims, failing, monkeypatch):
    stale, first, second = owner("1_0"), owner("1_1"), owner("1_2")
    claims.take(3, stale)
    reads = [claims.read(3)]
    assert claims.take_over(3, stale, first)
    # What it read before it renamed was the stale claim still.
    real = Claims._stands
    monkeypatch.setattr(Claims, "_stands", lambda self, path: reads.pop() if reads else real(self, path))
    failing("link", errno.EPERM, of="00003")
    assert not claims.take_over(3, stale, second)
    assert claims.read(3) == first
    assert claims.renew(3, first).renewals == 1
    assert os.listdir(claims.folder) == ["00003"]


def test_tasks_of_two_clusters_with_one_job_id_have_claims_of_their_own(claims):
    ours, theirs = owner("1_0"), replace(owner("1_0"), cluster="b")
    claims.take(3, ours)
    assert claims.renew(3, theirs) is None
    claims.park(3, theirs)
    claims.release(3, theirs)
    assert claims.drop_earlier(replace(theirs, attempt="1_0.1"), sorted(claims.numbers())) == []
    assert not claims.holds(3, theirs)
    assert claims.read(3) == ours
    assert claims.drop_earlier(replace(ours, attempt="1_0.1"), sorted(claims.numbers())) == [3]


STRANGE = {
    "a FIFO": os.mkfifo,
    "a folder": os.mkdir,
    "a link": lambda path: path.symlink_to("/dev/zero"),
    "an empty file": lambda path: path.touch(),
    "a huge file": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
    "a list": lambda path: path.write_text("[1]"),
    "a number for a text": lambda path: path.write_text('{"task": "", "attempt": 1, "host": "", "pid": 0}'),
    "a text for a number": lambda path: path.write_text('{"task": "", "attempt": "", "host": "", "pid": "0"}'),
    "no UTF-8": lambda path: path.write_bytes(b"\xff\xfe"),
    "too deep": lambda path: path.write_text("[" * 60_000),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_what_lies_where_a_claim_should_be_costs_itself_alone(claims, kind):
    STRANGE[kind](claims.path(3))
    (claims.folder / "000009").touch()
    claims.take(4, owner("1_0"))
    assert claims.read(3) == UNOWNED
    assert not claims.take(3, owner("1_0"))
    assert claims.renew(3, owner("1_0")) is None
    assert dict(claims.held()) == {3: UNOWNED, 4: owner("1_0")}
    assert claims.take_over(3, UNOWNED, owner("1_0"))
    assert claims.read(3) == owner("1_0")
    assert claims.clear() == [3, 4]


def test_a_task_gives_back_what_its_workers_claimed_unless_it_is_published_or_anothers(tmp_path):
    run = planned_run(tmp_path / "run", shard_items=10)
    leases = Leases(run, Attempt("7", 0), "here")
    for shard in range(4):
        assert run.claims.take(shard, leases.claim)
        leases.add(shard)
    leases.let_go(0)  # it is published
    assert leases.leave(1)
    assert run.claims.take_over(2, run.claims.read(2), owner("8_0"))
    assert not leases.leave(2)
    assert leases.hold_all() == [1, 2, 3]  # its next worker looks which of them it still holds
    leases.give_back()
    assert [(shard, claim.attempt) for shard, claim in run.claims.held()] == [(0, "7_0.0"), (2, "8_0.0")]


def with_a_claim_among_many(folder, shard):
    """A run in which others hold the first shards, and have published the last, and this task claimed another one."""
    run = planned_run(folder, n_items=200, shard_items=1)
    for number in range(MOST_DROPPED):
        run.claims.take(number, owner("8_0"))
        run.claims.take(199 - number, owner("8_0"))
        run.shard_path(199 - number).touch()
    run.claims.take(shard, Leases(run, Attempt("7", 0), "here").claim)
    return run


def own_record(shard, published=()):
    record = new_record(Attempt("7", 0), "here", 1, [], 0.0)
    return {**record, "shard": shard, "published": [[each, 0.0, 1.0, True] for each in published]}


@pytest.mark.parametrize("record", [own_record(150), own_record(None, [185]), own_record(149, [3])])
def test_a_task_gives_back_what_its_worker_claimed_and_could_not_report(tmp_path, record):
    run = with_a_claim_among_many(tmp_path / "run", 150)
    leases = Leases(run, Attempt("7", 0), "here")
    found = leases.find_unreported(record)
    assert found == [150]
    leases.give_back(found)
    assert {claim.attempt for _, claim in run.claims.held()} == {"8_0.0"}


def test_a_task_whose_claims_cannot_be_listed_ends_all_the_same(tmp_path, failing):
    run = with_a_claim_among_many(tmp_path / "run", 150)
    failing("listdir", errno.EIO, of="claims")
    assert Leases(run, Attempt("7", 0), "here").find_unreported(own_record(150)) == []


def test_a_requeued_task_looks_for_its_earlier_claims_where_its_last_life_was(tmp_path):
    run = with_a_claim_among_many(tmp_path / "run", 150)
    (run.tasks / "7_0.0.json").write_text(json.dumps(own_record(150)))
    Leases(run, Attempt("7", 0, restart=1), "here").drop_earlier()
    assert {claim.attempt for _, claim in run.claims.held()} == {"8_0.0"}


def test_leases_are_renewed_six_times_in_their_time_and_after_an_error_at_the_next_look(
    tmp_path, failing, monkeypatch, caplog
):
    clock = Clock()
    monkeypatch.setattr("slurmgpu.task.leases.time.monotonic", clock)
    run = planned_run(tmp_path / "run", shard_items=20, lease_s=60.0)
    leases = Leases(run, Attempt("7", 0), "here")
    for shard in range(2):
        run.claims.take(shard, leases.claim)
        leases.add(shard)

    def renewals_at(now):
        clock.now = now
        leases.renew_if_due()
        return [claim.renewals for _, claim in run.claims.held()]

    assert [renewals_at(now) for now in (9.9, 10.0, 10.1, 19.9, 20.0)] == [[0, 0], [1, 1], [1, 1], [1, 1], [2, 2]]
    for now, meanwhile, then in ((30.0, [2, 4], [3, 5]), (40.0, [3, 7], [4, 8])):
        failing("open", errno.EIO, of="00000", times=2)
        clock.now = now
        leases.renew_if_due()
        assert renewals_at(now) == meanwhile  # the other one is renewed
        assert renewals_at(now) == then
    assert caplog.text.count("was not renewed") == 2
    run.claims.take_over(1, run.claims.read(1), owner("8_0"))
    for now in (50.0, 60.0):
        assert renewals_at(now) == [now / 10, 0]  # it computes the shard to its end, and leaves the claim
    leases.let_go(0)
    assert renewals_at(70.0) == [6, 0]


def test_a_shard_that_was_left_is_its_tasks_unless_its_claim_is_anothers_or_gone(tmp_path, failing):
    run = planned_run(tmp_path / "run", shard_items=20)
    leases = Leases(run, Attempt("7", 0), "here")
    assert not leases.leave(0)  # a merge has cleared it
    run.claims.take(0, leases.claim)
    leases.add(0)
    assert leases.leave(0)
    assert not leases.held  # nobody's lease: another task may take it over
    failing("open", errno.EIO, of="00000")
    assert leases.leave(0)  # most probably
