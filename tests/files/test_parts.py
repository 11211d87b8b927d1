"""Parts of an item: who computes which, what is read of others, and what becomes of those that are lost."""

import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from slurmgpu.errors import Interrupted
from slurmgpu.run.claims import Claim, Claims
from slurmgpu.run.directory import Run
from slurmgpu.worker import parts as module
from slurmgpu.worker.parts import Parts, remove_parts
from slurmgpu.worker.shard_claimer import LATER
from slurmgpu.workload import TaskContext
from tests.support.runs import planned_run, wait_until


def planned(folder, lease_s):
    return planned_run(folder, n_items=2, batch_size=1, shard_items=1, parts=4, lease_s=lease_s)


@pytest.fixture
def run(tmp_path):
    return planned(tmp_path / "run", 120.0)


def parts_of(run, name, *, is_joined=False, **options):
    """What an attempt of this name computes of the run's first item."""
    found = Parts(run, Claim(name, f"{name}.0", "node", 1), 1, **options)
    found.begin(0, is_joined=is_joined)
    return found


def doubled(seen):
    def compute(some):
        seen.append([*some])
        return [2 * number for number in some]

    return compute


def stage_folder(run, stage=0, call=0):
    return run.folder / "parts" / "1" / f"00000.{call}.{stage}"


@pytest.mark.timeout(60)
def test_a_fifo_in_the_place_of_the_parts_is_not_waited_for(run):
    os.mkfifo(run.folder / "parts")
    remove_parts(run)
    assert not (run.folder / "parts").exists()


def test_a_task_alone_computes_every_part_and_its_next_worker_reads_them(run):
    seen = []

    def stages(mine):
        return [mine.divide(range(10), doubled(seen)), mine.divide("abc", lambda some: [*some])]

    for mine in (parts_of(run, "one"), parts_of(run, "one")):
        assert mine.calling(stages)(mine) == [[0, 2, 4, 6, 8, 10, 12, 14, 16, 18], ["a", "b", "c"]]
        assert seen == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
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


def test_a_part_that_a_dead_worker_of_this_attempt_held_is_computed_at_once(run):
    mine, seen = parts_of(run, "one"), []
    stage_folder(run).mkdir(parents=True)
    claims = Claims(stage_folder(run))
    assert claims.take(1, mine.claim)
    assert mine.divide(range(4), doubled(seen)) == [0, 2, 4, 6]
    assert seen == [[0], [1], [2], [3]]  # without waiting for the end of a lease
    assert claims.numbers() == set()


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


def test_a_part_that_is_published_between_the_listing_and_the_claim_is_not_computed_again(run, monkeypatch):
    """As where a listing of NFS takes a moment, in which the owner ends."""
    first, second, seen = parts_of(run, "first"), parts_of(run, "second"), []
    listing = module.list_fresh

    def outdated(folder):
        names = listing(folder)
        monkeypatch.setattr(module, "list_fresh", listing)
        assert first.divide(range(4), lambda some: ["first's" for _ in some]) == ["first's"] * 4
        return names

    monkeypatch.setattr(module, "list_fresh", outdated)
    assert second.divide(range(4), doubled(seen)) == ["first's"] * 4
    assert seen == []
    assert Claims(stage_folder(run)).numbers() == set()


@pytest.mark.parametrize("former", [None, b"damaged"])
def test_of_two_tasks_that_compute_one_part_both_have_the_values_that_were_published_first(run, former):
    """As after the claim of a living task went stale; a damaged file is no values."""
    mine, path = parts_of(run, "one"), stage_folder(run) / "00000.json"

    def compute(some):
        Claims(stage_folder(run)).clear()
        path.unlink(missing_ok=True)
        assert parts_of(run, "other").divide(range(2), lambda some: ["other's" for _ in some]) == ["other's"] * 2
        if former is not None:
            path.write_bytes(former)
        return ["mine" for _ in some]

    assert mine.divide(range(2), compute) == (["other's", "other's"] if former is None else ["mine", "other's"])
    assert mine.divide([], compute) == []
    assert [json.loads(file.read_bytes().partition(b"\n")[2]) for file in sorted(path.parent.glob("*.json"))] == (
        [["other's"], ["other's"]] if former is None else [["mine"], ["other's"]]
    )


def test_a_call_after_one_that_failed_outside_its_parts_computes_them_again_and_another_task_joins_that_call(run):
    seen, busy = [], iter([True, False])

    def row(mine):
        def each(some):
            seen.append([*some])
            return [next(busy, False) if 0 in some else False for _ in some]

        if any(mine.divide(range(4), each)):
            raise ConnectionError("a server was busy")
        return "good"

    mine = parts_of(run, "one")
    call = mine.calling(row)
    with pytest.raises(ConnectionError):
        call(mine)
    assert call(mine) == "good"
    assert len(seen) == 8
    (stage_folder(run, call=1) / "00002.json").unlink()
    other = Parts(run, Claim("two", "two.0", "node", 1), 1)
    assert other.shard_to_join([0]) == 0
    other.begin(0, is_joined=True)
    assert other.calling(row)(other) == "good"
    assert seen[8:] == [[2]]


def test_a_call_after_one_that_failed_in_a_part_computes_only_that(run):
    mine, seen = parts_of(run, "one"), []

    def fail_once(some):
        seen.append([*some])
        if seen == [[0], [1]]:
            raise ConnectionError
        return [*some]

    call = mine.calling(lambda _: mine.divide(range(4), fail_once))
    with pytest.raises(ConnectionError):
        call(None)
    assert call(None) == [0, 1, 2, 3]
    assert seen == [[0], [1], [1], [2], [3]]


def test_values_that_led_to_a_failure_are_computed_again_also_after_one_in_a_part(run):
    mine, seen = parts_of(run, "one"), []

    def row(_):
        values = mine.divide([0], lambda some: [len(seen)] if seen.append(0) or len(seen) > 1 else 1 / 0)
        if values == [2]:
            raise ConnectionError("the server takes no 2")
        return values

    call = mine.calling(row)
    for error in (ZeroDivisionError, ConnectionError):
        with pytest.raises(error):
            call(None)
    assert call(None) == [3]


def test_a_joiner_that_has_to_leave_takes_no_part(run):
    mine, seen = parts_of(run, "one", is_joined=True, shall_leave=lambda: bool(seen)), []
    stage_folder(run).mkdir(parents=True)
    with pytest.raises(Interrupted):
        mine.divide(range(4), doubled(seen))
    assert (seen, mine.has_left) == ([[0]], True)
    mine.begin(1)
    assert not mine.has_left


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
    mine.begin(0)
    if content is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(content)
    assert mine.calling(lambda _: mine.divide(range(4), doubled(seen)))(None) == [0, 2, 4, 6]
    assert seen[4:] == [[2]]


def test_where_the_folder_cannot_be_used_a_task_computes_all_alone(run, caplog):
    mine = parts_of(run, "one")
    (run.folder / "parts").write_text("no folder")
    assert mine.divide(range(4), lambda some: [(2 * each,) for each in some]) == [[0], [2], [4], [6]]  # as in JSON
    assert "this task computes the remaining parts alone: " in caplog.text
    assert mine.shard_to_join([1]) is None


def test_a_task_whose_parts_cannot_be_given_back_ends_all_the_same(run, caplog):
    (run.folder / "parts").write_text("in its place")
    Parts(run, Claim("one", "one.0", "node", 1), 1).give_back()
    assert "parts were not given back; other tasks wait until their leases end" in caplog.text


def test_a_holder_without_a_part_waits_for_its_item_whatever_others_have_left(run):
    other = Claim("two", "two.0", "node", 1)
    mine = Parts(run, Claim("one", "one.0", "node", 1), 1, lambda: mine.waited_s > 0.1)
    for folder in (stage_folder(run), elsewhere := run.folder / "parts" / "1" / "00001.0.0"):
        folder.mkdir(parents=True)
    for number in range(4):
        assert Claims(stage_folder(run)).take(number, other)
    assert mine.shard_to_join([1]) == 1
    mine.begin(0)
    with pytest.raises(Interrupted):
        mine.divide(range(4), doubled([]))
    assert (mine.waited_s > 0.1, list(elsewhere.iterdir())) == (True, [])


def test_a_joiner_leaves_the_item_to_its_holder_where_the_folder_cannot_be_used(run):
    mine, seen = parts_of(run, "one", is_joined=True), []
    with pytest.raises(Interrupted):
        mine.divide(range(4), doubled(seen))
    assert (seen, mine.has_left) == ([], True)
    assert not (run.folder / "parts").exists()
    stage_folder(run).mkdir(parents=True)

    def merged_meanwhile(some):
        remove_parts(run)
        return doubled(seen)(some)

    with pytest.raises(Interrupted):
        mine.divide(range(4), merged_meanwhile)
    assert seen == [[0]]


def test_a_holder_whose_values_others_cannot_read_shares_no_later_stage(run, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "link_first", full)
    mine, seen = parts_of(run, "one"), []

    def both(_):
        return mine.divide(range(4), doubled(seen)), mine.divide("ab", lambda some: [*some])

    assert mine.calling(both)(None) == ([0, 2, 4, 6], ["a", "b"])
    assert seen == [[0], [1], [2], [3]]
    assert not stage_folder(run, 1).exists()
    monkeypatch.undo()
    mine.begin(1)
    mine.calling(both)(None)
    assert len([*(run.folder / "parts/1/00001.0.1").glob("*.json")]) == 2


def test_values_are_those_of_json_also_where_one_task_computes_all(run):
    """A workload that was tried on one GPU does not fail on eight."""
    alone = TaskContext("cpu", 0, Path())
    for divide in (alone.divide, parts_of(run, "one").divide):
        assert divide(range(1), lambda some: [{1: (2, 3)}]) == [{"1": [2, 3]}]
        assert divide([], lambda some: [1]) == []
    for divide in (alone.divide, parts_of(run, "two").divide):
        with pytest.raises(TypeError, match="int64 is not JSON serializable: `divide` takes values that JSON can hold"):
            divide("ab", lambda some: [*np.arange(len(some))])
        with pytest.raises(ValueError, match="values; expected one for each"):
            divide("ab", lambda some: [1, 2, 3])


def test_the_number_of_parts_belongs_to_what_the_rows_depend_on(run, tmp_path):
    other = planned_run(tmp_path / "other", n_items=2, batch_size=1, shard_items=1, parts=2)
    whole = planned_run(tmp_path / "whole", n_items=2, batch_size=1, shard_items=1)
    assert len({each.plan.fingerprint for each in (run, other, whole)}) == 3
    assert Run.open(run.folder).plan.fingerprint == run.plan.fingerprint


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
    folder, second = stage_folder(run), run.folder / "parts" / "1" / "00001.0.0"
    folder.mkdir(parents=True)
    second.mkdir()
    for name in ("00000", "00001.json", "00001"):
        (folder / name).touch()
    (second.parent / "x.0.1").touch()  # not a stage's name
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
    assert sorted(path.name for path in second.iterdir()) == [
        "00000.json",
        "00001.json",
        "00002.none",
        "00003.none",
    ]


@pytest.mark.parametrize(("n_claimed", "n_elsewhere", "stays"), [(4, 3, False), (4, 4, True), (3, 3, True)])
def test_a_joiner_without_a_part_leaves_for_an_item_that_has_one_left(run, n_claimed, n_elsewhere, stays):
    """Tasks that look at the same moment join the same item: a GPU would wait while another item has work for it."""
    other, seen = Claim("two", "two.0", "node", 1), []
    mine = Parts(run, Claim("one", "one.0", "node", 1), 1, lambda: mine.waited_s > 0.1)
    folders = stage_folder(run), run.folder / "parts" / "1" / "00001.0.0"
    for folder in folders:
        folder.mkdir(parents=True)
    assert mine.shard_to_join([0, 1]) in (0, 1)
    mine.begin(0, is_joined=True)
    for folder, n_parts in zip(folders, (n_claimed, n_elsewhere), strict=True):
        for number in range(n_parts):
            assert Claims(folder).take(number, other)
    with pytest.raises(Interrupted):
        mine.divide(range(4), doubled(seen))
    assert (mine.has_left, seen, mine.waited_s > 0) == (True, [[3]] if n_claimed == 3 else [], stays)


def test_a_shard_is_joined_once_its_holder_divides_and_waited_for_during_a_lease(tmp_path, monkeypatch):
    """So an item that kills workers before that kills none that join it."""
    run, now = planned(tmp_path / "run", 60.0), [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    mine = Parts(run, Claim("one", "one.0", "node", 1), 1)
    assert mine.shard_to_join([0, 1]) == LATER
    now[0] += 59.0
    assert mine.shard_to_join([0]) == LATER
    now[0] += 2.0
    assert mine.shard_to_join([0, 1]) is None
    stage_folder(run).mkdir(parents=True)
    assert mine.shard_to_join([0, 1]) == 0


def test_a_run_that_is_merged_during_a_look_has_no_part_left(run, monkeypatch):
    stage_folder(run).mkdir(parents=True)
    list_folder = module.os.listdir

    def listed(folder):
        names = list_folder(folder)
        shutil.rmtree(run.folder / "parts")
        return names

    monkeypatch.setattr(module.os, "listdir", listed)
    assert Parts(run, Claim("two", "two.0", "node", 1), 1).shard_to_join([0]) is None


def test_a_look_for_a_shard_to_join_makes_no_file_and_lists_few_folders(tmp_path, monkeypatch):
    run = planned_run(tmp_path / "run", n_items=40, batch_size=1, shard_items=1, parts=4)
    above, listed, list_folder = run.folder / "parts" / "1", [], module.os.listdir
    for shard in range(40):
        (above / f"{shard:05d}.0.0").mkdir(parents=True)
    before = {folder: folder.stat().st_mtime_ns for folder in (above, *above.iterdir())}
    monkeypatch.setattr(module.os, "listdir", lambda folder: listed.append(folder) or list_folder(folder))
    assert Parts(run, Claim("one", "one.0", "node", 1), 1).shard_to_join(range(40)) in range(40)
    assert len(listed) == 1 + module.COMPARED
    assert {folder: folder.stat().st_mtime_ns for folder in before} == before
