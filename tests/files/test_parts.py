"""Parts of an item: who computes which, what is read of others, and what becomes of those that are lost."""

import threading
from pathlib import Path

import pytest

from slurmgpu.errors import Interrupted
from slurmgpu.run.claims import Claim, Claims
from slurmgpu.worker.parts import Parts, remove_parts
from tests.support.runs import planned_run, wait_until


def planned(folder, lease_s):
    return planned_run(folder, n_items=2, batch_size=1, shard_items=1, parts=4, lease_s=lease_s)


@pytest.fixture
def run(tmp_path):
    return planned(tmp_path / "run", 120.0)


def parts_of(run, name, **options):
    """What an attempt of this name computes of the run's first item."""
    found = Parts(run, Claim(name, f"{name}.0", "node", 1), 1, **options)
    found.begin(0)
    return found


def doubled(seen):
    def compute(some):
        seen.append([*some])
        return [2 * number for number in some]

    return compute


def stage_folder(run, stage=0):
    return run.folder / "parts" / "1" / f"00000.{stage}"


def test_a_task_alone_computes_every_part_and_reads_them_when_it_is_called_again(run):
    mine, seen = parts_of(run, "one"), []
    call = mine.calling(lambda n: [mine.divide(range(n), doubled(seen)), mine.divide("abc", lambda some: [*some])])
    wanted = [[0, 2, 4, 6, 8, 10, 12, 14, 16, 18], ["a", "b", "c"]]
    assert call(10) == wanted
    assert seen == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert call(10) == wanted
    assert len(seen) == 4
    assert mine.divide([], doubled(seen)) == []
    remove_parts(run)
    assert not (run.folder / "parts").exists()
    remove_parts(run)


def test_two_tasks_at_once_compute_each_part_once_and_have_all_values(run):
    barrier, seen, found = threading.Barrier(2), [], {}

    def work(name):
        mine = parts_of(run, name)
        both = [True]

        def compute(some):
            if both.pop():  # its first part: the other has one as well
                barrier.wait(timeout=60)
            both.append(False)
            return doubled(seen)(some)

        found[name] = mine.divide(range(12), compute)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == {name: [*range(0, 24, 2)] for name in ("one", "two")}
    assert sorted(seen) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_a_part_of_a_dead_task_is_computed_once_its_claim_is_stale(tmp_path):
    run = planned(tmp_path / "run", 0.6)
    dead, mine, seen = Claim("dead", "dead.0", "node", 1), parts_of(run, "one"), []
    stage_folder(run).mkdir(parents=True)
    assert Claims(stage_folder(run)).take(2, dead)
    assert mine.divide(range(4), doubled(seen)) == [0, 2, 4, 6]
    assert seen == [[0], [1], [3], [2]]
    assert mine.waited_s > 0.3


def test_a_claim_is_renewed_while_its_part_is_computed_and_then_given_back(tmp_path):
    run = planned(tmp_path / "run", 0.6)
    mine, claims = parts_of(run, "one"), Claims(stage_folder(run))

    def compute(some):
        wait_until(lambda: claims.read(0).renewals > 2, "the claim to be renewed")
        return [*some]

    assert mine.divide([7], compute) == [7]
    assert claims.numbers() == set()


def test_a_task_that_ends_gives_back_what_its_worker_held(run):
    mine, other = parts_of(run, "one"), Claim("two", "two.0", "node", 1)
    mine.give_back()
    stage_folder(run).mkdir(parents=True)
    claims = Claims(stage_folder(run))
    assert claims.take(0, mine.claim)
    assert claims.take(1, other)
    mine.give_back()
    assert claims.numbers() == {1}


def test_a_task_that_has_to_leave_does_not_wait_for_others(run):
    slow, mine, go_on = parts_of(run, "slow"), parts_of(run, "one", shall_leave=lambda: True), threading.Event()
    thread = threading.Thread(target=lambda: slow.divide(range(4), lambda some: [go_on.wait(60) for _ in some]))
    thread.start()
    wait_until((stage_folder(run) / "00000").exists, "the slow task to take a part")
    with pytest.raises(Interrupted):
        mine.divide(range(4), lambda some: [*some])
    go_on.set()
    thread.join(timeout=60)


@pytest.mark.parametrize("content", [b"", b"0123\n[4]", None])
def test_a_value_that_is_damaged_is_computed_again(run, content):
    mine, seen = parts_of(run, "one"), []
    mine.calling(lambda _: mine.divide(range(4), doubled(seen)))(None)
    path = stage_folder(run) / "00002.json"
    if content is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(content)
    assert mine.calling(lambda _: mine.divide(range(4), doubled(seen)))(None) == [0, 2, 4, 6]
    assert seen[4:] == [[2]]


def test_where_the_folder_cannot_be_used_a_task_computes_all_alone(run, caplog):
    mine, seen = parts_of(run, "one"), []
    (run.folder / "parts").write_text("no folder")
    assert mine.divide(range(4), doubled(seen)) == [0, 2, 4, 6]
    assert "the parts that are left are computed by this task alone: " in caplog.text
    assert mine.shard_to_join([1]) is None


def test_an_error_gives_the_part_back_and_a_wrong_number_of_values_is_one(run):
    mine = parts_of(run, "one")

    def fail(some):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        mine.divide(range(4), fail)
    assert not (stage_folder(run) / "00000").exists()
    with pytest.raises(ValueError, match="a part of 1 has 2 values; expected one for each"):
        mine.divide(range(4), lambda some: [1, 2])


def test_the_shard_with_the_most_parts_left_is_joined_and_none_twice(run):
    mine, other = parts_of(run, "one"), Parts(run, Claim("two", "two.0", "node", 1), 1)
    assert other.shard_to_join([]) is None
    assert other.shard_to_join([0, 1]) == 0
    folder = stage_folder(run)
    folder.mkdir(parents=True)
    for name in ("00000", "00001.json", "00001"):
        (folder / name).touch()
    assert other.shard_to_join([0, 1]) == 1
    assert other.shard_to_join([0]) == 0
    for name in ("00002", "00003.json"):
        (folder / name).touch()
    assert other.shard_to_join([0]) is None
    stage_folder(run, 1).mkdir()  # the next stage has begun
    assert other.shard_to_join([0]) == 0
    other.begin(0)
    assert other.shard_to_join([0]) is None
    assert other.shard_to_join([0, 1]) == 1
    # Two things are two parts: nobody need come for more.
    mine.begin(1)
    mine.divide("ab", lambda some: [*some])
    assert other.shard_to_join([1]) is None
    assert sorted(path.name for path in Path(run.folder / "parts" / "1" / "00001.0").iterdir()) == [
        "00000.json",
        "00001.json",
        "00002.none",
        "00003.none",
    ]
