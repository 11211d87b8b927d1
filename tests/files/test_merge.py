"""The merge: one truth about completeness, reads that fail, and good rows that nothing takes away."""

import errno
import itertools
import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slurmgpu import results
from slurmgpu.cli.views.report import show_report
from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.executors import run_merge
from slurmgpu.executors.run_merge import merge_by_hand
from slurmgpu.merge import failed_items, files_to_join, merged_file, shards_folder, sources
from slurmgpu.merge import merge as merging
from slurmgpu.merge.failed_items import failed_again
from slurmgpu.merge.join import verify_joined
from slurmgpu.merge.merge import merge
from slurmgpu.report.completeness import is_complete
from slurmgpu.report.report_file import read_report
from slurmgpu.report.status import read_status
from slurmgpu.run.directory import Run
from slurmgpu.run.lock import run_lock
from slurmgpu.run.recompute import Again, Recompute, read_recompute, recompute_path, spans_of, write_recompute
from slurmgpu.run.revisions import former_rows, made_again, publish_rows, put_over
from slurmgpu.search.items import story_of_item
from slurmgpu.shards.columns import Array, Ragged, Text, columns_to_json
from slurmgpu.shards.merged_head import read_merged_head
from slurmgpu.shards.shard_file import Directory, read_directory, verify_shard, write_shard
from slurmgpu.shards.userblock import DamagedShardError, Reader, pack_userblock, read_userblock
from slurmgpu.worker import publisher as publishing
from slurmgpu.worker.assignment import Assignment
from slurmgpu.worker.call_failures import Failure
from slurmgpu.worker.computed_shard import Computed, ComputedShard
from slurmgpu.worker.publisher import Publisher
from tests.support.failing import put, read_wrongly_once
from tests.support.runs import planned_run
from tests.support.shard_files import craft

COLUMNS = {"twice": Array("int64"), "word": Text(), "parts": Ragged("float64")}
N_ITEMS, SHARD_ITEMS = 23, 5


def row(index, sign=1):
    twice = 2 * index * sign
    return {"twice": np.array(twice, "<i8"), "word": b"w" * (index % 4), "parts": np.full(index % 3, twice, "<f8")}


@pytest.fixture
def run(tmp_path):
    made = planned_run(
        tmp_path / "run",
        name="judge",
        n_items=N_ITEMS,
        workload="workloads:Twice",
        search_path=str(tmp_path),
        columns=columns_to_json(COLUMNS),
        batch_size=2,
        shard_items=SHARD_ITEMS,
        seed=7,
        lease_s=4.0,
        margin_s=1.0,
        html=False,
    )
    made.record_submission({"submission": 1, "executor": "local", "state": "ended", "time": 0.0})
    return made


def publish(run, shard, *, failed=(), path=None, sign=1):
    start, stop = run.plan.bounds(shard)
    rows = [ItemError(f"item {i} is bad") if i in failed else row(i, sign) for i in range(start, stop)]
    path = path or run.shard_path(shard)
    made_by = {"attempt": "local1_0.0", "started": 1.0, "seconds": 1.0}
    identity = {"start": start, "fingerprint": run.plan.fingerprint}
    write_shard(path, COLUMNS, rows=rows, notes={}, made_by=made_by, **identity)
    return path


def publish_all(run, **what):
    return [publish(run, shard, **what) for shard in range(run.plan.n_shards)]


def publish_again(run, submission, sign=1, failing=()):
    """What a task of `resubmit --failed` publishes."""
    again = run.computing(submission)
    for shard, what in again.recompute.shards.items():
        former = former_rows(run, shard, what.revision, COLUMNS)
        found = {i: ItemError("again") if i in failing else row(i, sign) for span in what.items for i in range(*span)}
        start, _ = run.plan.bounds(shard)
        by = made_again(former.made_by, {"attempt": "local2_0.0", "started": 2.0, "seconds": 1.0}, sorted(found))
        publish_rows(run, shard, what.revision, COLUMNS, put_over(former.rows, found, start), former.notes, by)


def merged_rows(run):
    """What merged.h5 holds: by index the value, None for a failed item."""
    with results.open(run.merged) as merged:
        indices, values, failed = merged.index[:], merged["twice"][:], merged.failed
        assert indices.tolist() == sorted(indices)
        return {int(i): None if f else int(v) for i, v, f in zip(indices, values, failed, strict=True)}


ALL_GOOD = {index: 2 * index for index in range(N_ITEMS)}


def check_one_truth(run):
    """Report, status, resubmit and --after say of the run what merged.h5 holds."""
    head, report = read_merged_head(run.merged), read_report(run)
    n_rows = 0 if head is None else head.n_rows
    assert report["n_rows"] == n_rows == (len(merged_rows(run)) if head else 0)
    assert head is None or head.n_errors == report["n_errors"]
    assert report["n_missing_items"] == N_ITEMS - n_rows
    whole = n_rows == N_ITEMS
    assert (report["complete"], read_status(run)["complete"], is_complete(run)) == (whole,) * 3
    assert verify_joined(run.merged) == [] or head is None


# One truth about completeness


def test_what_is_published_while_the_merge_works_is_joined_as_well(run, monkeypatch):
    paths = publish_all(run)
    (late := paths[2]).rename(run.folder / "late")
    real = merging.join

    def join(parts, columns, *, review, **more):
        def reviewed(copied, damaged):
            if not late.exists() and 2 not in copied:
                (run.folder / "late").rename(late)
            return review(copied, damaged)

        return real(parts, columns, review=reviewed, **more)

    monkeypatch.setattr(merging, "join", join)
    assert merge(run)["complete"]
    assert merged_rows(run) == ALL_GOOD
    check_one_truth(run)


def test_what_is_published_too_late_is_named_as_missing(run, monkeypatch):
    paths = publish_all(run)
    paths[2].rename(run.folder / "late")
    real = merging.build_report

    def build(*given, **more):
        (run.folder / "late").rename(paths[2])
        return real(*given, **more)

    monkeypatch.setattr(merging, "build_report", build)
    report = merge(run)
    assert [hole["shard"] for hole in report["missing"]] == [2]
    assert not report["complete"]
    check_one_truth(run)
    monkeypatch.undo()
    assert merge(run)["complete"]
    check_one_truth(run)


def test_a_listing_that_lacks_a_shard_is_not_believed(run, monkeypatch):
    """As an NFS client has it: the folder's old listing, until one asks for the file by its name."""
    publish_all(run)
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda *at: [name for name in real(*at) if not name.startswith("00003")])
    assert run.published() == {0, 1, 2, 4}
    assert run.published(fresh=True) == {0, 1, 2, 3, 4}
    assert merge(run)["complete"]
    assert merged_rows(run) == ALL_GOOD


def test_files_that_a_listing_still_shows_are_no_error(run, monkeypatch):
    publish_all(run)
    real = os.listdir
    gone = {"shards": ["00004.x.1.partial", "00003.damaged", "00007.h5"], "run": [".merged.h5.9.partial"]}
    monkeypatch.setattr(os, "listdir", lambda at: [*real(at), *gone.get(os.path.basename(at), ())])
    assert merge(run)["complete"]


@pytest.mark.parametrize(
    "name", ["000003.h5", "3.h5", "00003.h5.h5", "00003.r0.h5", "00003.r01.h5", "+0003.h5", "00005.h5"]
)
def test_only_the_exact_name_of_a_shard_counts(run, name):
    publish(run, 3, path=run.shards / name)
    assert run.published() == set()


def test_a_shard_with_other_rows_than_planned_moves_no_other_row(run):
    """Row counts and offsets are the plan's, whatever a file's checksums say."""
    publish_all(run)
    start, stop = run.plan.bounds(1)
    made_by = {"attempt": "x", "started": 0.0, "seconds": 0.0}
    identity = {"start": start, "fingerprint": run.plan.fingerprint, "notes": {}, "made_by": made_by}
    write_shard(run.shard_path(1), COLUMNS, rows=[row(i) for i in range(start, stop + 2)], **identity)
    craft(run.shard_path(1), lambda directory, content: directory["attributes"].update(stop=stop))
    report = merge(run)
    assert [(hole["shard"], "rows" in hole["damaged"]) for hole in report["missing"]] == [(1, True)]
    assert merged_rows(run) == {i: v for i, v in ALL_GOOD.items() if not start <= i < stop}
    check_one_truth(run)


# A failed read is not damage


@pytest.fixture
def failing_reads(monkeypatch):
    """Makes reads of a file fail: `failing_reads("00001.h5", errno.EIO, times=2)`."""

    def fail(name, number, times):
        real, left = os.preadv, iter(range(times))

        def preadv(fd, buffers, offset):
            if os.readlink(f"/proc/self/fd/{fd}").endswith(name) and next(left, None) is not None:
                raise OSError(number, os.strerror(number))
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)

    return fail


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.EAGAIN])
def test_a_read_that_fails_for_a_moment_costs_no_row(run, failing_reads, number):
    publish_all(run)
    failing_reads("00001.h5", number, times=3)
    assert merge(run)["complete"]
    assert merged_rows(run) == ALL_GOOD


def test_a_read_that_fails_for_good_ends_the_merge_and_changes_nothing(run, failing_reads, monkeypatch):
    publish_all(run)
    publish(run, 1, failed={7})
    merge(run)
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    monkeypatch.setattr(files_to_join, "PATIENCE_S", 0.0)  # that of a lease is left
    failing_reads("00001.h5", errno.EIO, times=10**9)
    with pytest.raises(OSError, match=r"Input/output error: .*00001.h5"):
        merge(run)
    assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == before


def test_bytes_that_were_wrong_once_are_read_again(run, monkeypatch):
    publish_all(run)
    wrong = read_wrongly_once(monkeypatch, "00001.h5")
    assert merge(run)["complete"]
    assert not wrong
    assert merged_rows(run) == ALL_GOOD


def test_failed_items_are_found_also_where_a_shard_was_read_wrongly_once(run, monkeypatch):
    publish_all(run, failed={7})
    wrong = read_wrongly_once(monkeypatch, "00001.h5", run.shard_path(1).read_bytes().index(b'"attributes"'))
    assert failed_again(run, 2).shards == {1: Again(1, [(7, 8)])}
    assert not wrong


def test_a_shard_that_was_set_aside_and_is_whole_is_taken_back(run):
    publish_all(run)
    path = run.shard_path(2)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    report = merge(run)
    assert [hole["shard"] for hole in report["missing"]] == [2]
    aside = path.with_suffix(".damaged")
    assert merge(run)["n_rows"] == N_ITEMS - SHARD_ITEMS  # it still is not
    aside.write_bytes(content)
    assert merge(run)["complete"]
    assert not aside.exists()
    assert run.damaged() == {}
    check_one_truth(run)


@pytest.mark.parametrize("kind", ["cut", "of another plan", "of another shard"])
def test_a_shard_that_was_set_aside_and_is_still_damaged_is_not_taken_back(run, caplog, kind):
    path = publish_all(run)[2]
    match kind:
        case "cut":
            path.write_bytes(path.read_bytes()[:-1])
        case "of another plan":
            publish(replace(run, plan=replace(run.plan, seed=8)), 2)
        case "of another shard":
            path.write_bytes(run.shard_path(1).read_bytes())
    for _ in range(2):
        assert [hole["shard"] for hole in merge(run)["missing"]] == [2]
    assert "is used again" not in caplog.text
    assert caplog.text.count("shard 2 is not merged") == 1


@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "huge", "empty"])
def test_what_is_no_shard_at_all_is_set_aside_without_waiting(run, kind, tmp_path):
    publish_all(run)
    path = run.shard_path(2)
    path.rename(tmp_path / "whole.h5")
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to(tmp_path / "whole.h5")
        case "folder":
            path.mkdir()
        case "huge":
            path.touch()
            os.truncate(path, 1 << 40)
        case "empty":
            path.touch()
    report = merge(run)
    assert [hole["shard"] for hole in report["missing"]] == [2]
    assert report["missing"][0]["damaged"]
    publish(run, 2)
    assert merge(run)["complete"]


# Good rows stay


def test_failed_items_are_computed_again_and_no_others(run):
    publish_all(run)
    publish(run, 1, failed={6, 8})
    publish(run, 3, failed={15})
    merge(run)
    again = failed_again(run, 2)
    assert again == Recompute(2, {1: Again(1, [(6, 7), (8, 9)]), 3: Again(1, [(15, 16)])})
    write_recompute(run.folder, again)
    work = run.computing(2)
    assert work.published() == {0, 2, 4}
    assert run.published() == {0, 1, 2, 3, 4}
    assert (work.items_of(1), work.items_of(2)) == ([(6, 7), (8, 9)], [(10, 15)])
    publish_again(run, 2)
    assert work.published() == {0, 1, 2, 3, 4}
    assert merge(run)["n_errors"] == 0
    assert merged_rows(run) == ALL_GOOD
    assert run.computing(3).recompute is None
    by = read_directory(run.revision_path(1, 1)).made_by
    assert (by["attempt"], by["revisions"][0]["items"]) == ("local1_0.0", [[6, 7], [8, 9]])


def test_a_damaged_shard_keeps_no_failed_item_of_others_from_being_computed_again(run):
    publish_all(run)
    publish(run, 3, failed={15})
    os.truncate(run.shard_path(1), 100)
    assert failed_again(run, 2).shards.keys() == {3}


def test_failed_items_are_looked_for_where_the_merged_file_does_not_rule_them_out(run, monkeypatch):
    """Opening each of 100,000 small shards takes ten seconds."""
    for shard in range(4):
        publish(run, shard, failed={15})
    merge(run)
    publish(run, 4, failed={21})
    opened = []
    monkeypatch.setattr(failed_items, "Reader", lambda path: opened.append(path.name) or Reader(path))
    write_recompute(run.folder, again := failed_again(run, 2))
    assert again.shards.keys() == {3, 4}
    assert opened == ["00003.h5", "00004.h5"]
    publish_again(run, 2)
    assert failed_again(run, 3).shards == {}  # and merged.h5 has the errors still
    merge(run)
    run.merged.write_bytes(run.merged.read_bytes()[:-1])
    opened.clear()
    assert failed_again(run, 3).shards == {}
    assert len(opened) == run.plan.n_shards


def test_a_revision_that_is_damaged_leaves_the_former_rows_and_is_named(run, capsys):
    publish_all(run)
    publish(run, 1, failed={6})
    write_recompute(run.folder, failed_again(run, 2))
    publish_again(run, 2)
    path = run.revision_path(1, 1)
    path.write_bytes(path.read_bytes()[:-1])
    report = merge(run)
    assert (report["complete"], report["n_errors"]) == (True, 1)
    assert not path.exists()
    for _ in range(2):
        assert merged_rows(run) == {**ALL_GOOD, 6: None}
        assert list(report["damaged_revisions"]) == ["00001.r1.h5"]
        show_report(report)
        assert "damaged: shards/00001.r1.h5, with recomputed items: " in capsys.readouterr().out
        report = merge(run)
    assert failed_again(run, 3).shards == {1: Again(1, [(6, 7)])}
    publish_again(run, 2)
    assert merge(run)["damaged_revisions"] == {}


def test_a_revision_with_a_wrong_byte_in_its_rows_leaves_the_former_rows(run):
    """Its directory is whole, so that it is found in copying."""
    publish_all(run)
    publish(run, 1, failed={6})
    write_recompute(run.folder, failed_again(run, 2))
    publish_again(run, 2)
    path = run.revision_path(1, 1)
    content = bytearray(path.read_bytes())
    content[content.rindex(row(9)["twice"].tobytes())] ^= 1
    path.write_bytes(content)
    report = merge(run)
    assert (report["complete"], list(report["damaged_revisions"])) == (True, [path.name])
    assert merged_rows(run) == {**ALL_GOOD, 6: None}


def test_a_second_publication_of_a_revision_changes_nothing(run):
    publish(run, 1, failed={6, 7})
    write_recompute(run.folder, failed_again(run, 2))
    publish_again(run, 2)
    content = run.revision_path(1, 1).read_bytes()
    publish_again(run, 2, sign=-1, failing={6, 7})  # of a task that was stopped, and goes on
    assert run.revision_path(1, 1).read_bytes() == content


def test_a_revision_has_the_rows_of_the_revision_before_it(run):
    publish_all(run)
    publish(run, 1, failed={6, 8})
    for submission, failing in ((2, {8}), (3, ())):
        write_recompute(run.folder, failed_again(run, submission))
        publish_again(run, submission, failing=failing)
    assert str(former_rows(run, 1, 2, COLUMNS).rows[3]) == "again"
    assert run.shard_files()[1] == [0, 1, 2]
    makers = read_directory(run.revision_path(1, 2)).made_by["revisions"]
    assert [maker["items"] for maker in makers] == [[[6, 7], [8, 9]], [[8, 9]]]
    assert merge(run)["n_errors"] == 0
    assert merged_rows(run) == ALL_GOOD


def test_no_error_takes_the_place_of_a_good_row(run):
    """A shard that was lost and computed again, by code that fails now: merged.h5 keeps what it had."""
    publish_all(run)
    merge(run)
    run.shard_path(1).unlink()
    publish(run, 1, failed={6, 7, 8, 9, 5})
    run.shard_path(3).unlink()
    publish(run, 3, sign=-1)
    assert merge(run)["n_errors"] == 0
    assert merged_rows(run) == {**ALL_GOOD, **{i: -2 * i for i in range(15, 20)}}


def test_good_rows_that_are_damaged_in_merged_file_are_not_kept_and_that_is_told(run, caplog):
    publish_all(run)
    merge(run)
    content = bytearray(run.merged.read_bytes())
    content[content.index(np.arange(10, 20, 2, dtype="<i8").tobytes())] ^= 1  # `twice` of shard 1
    run.merged.write_bytes(content)
    run.shard_path(1).unlink()
    publish(run, 1, failed={6})
    assert merge(run)["n_errors"] == 1
    assert "rows of shard 1 in merged.h5 cannot be kept: the checksum of twice" in caplog.text
    assert merged_rows(run) == {**ALL_GOOD, 6: None}
    check_one_truth(run)


def test_a_revision_keeps_the_notes_and_names_as_its_own_the_rows_that_it_replaced(run):
    """An item of it failed, which had a good row."""
    publish_all(run)
    run.shard_path(1).unlink()
    publish_rows(run, 1, 0, COLUMNS, [row(index) for index in range(5, 10)], {"tokens": 3}, {})
    write_recompute(run.folder, Recompute(2, {1: Again(1, [(6, 8)])}))
    publisher = Publisher(run.computing(2), Assignment("2_0", "2_0.0"), COLUMNS, print, lambda: None, False)
    publisher.read_former(1, 1)
    publisher.begin(ComputedShard(1, Computed({6: Failure("item_error", "bad"), 7: row(7, -1)}), 2.0, 1.0, None))
    directory = read_directory(run.revision_path(1, 1))
    assert (directory.made_by["revisions"][0]["items"], directory.notes["tokens"]) == ([[7, 8]], 3)
    merge(run)
    assert merged_rows(run) == {**ALL_GOOD, 7: -14}


def test_shards_that_are_gone_are_taken_from_the_former_merged_file(run):
    publish_all(run)
    publish(run, 2, failed={11})
    merge(run)
    before = run.merged.read_bytes()
    for shard in (0, 2, 4):
        run.shard_path(shard).unlink()
    report = merge(run)
    assert (report["complete"], report["n_errors"]) == (True, 1)
    assert run.merged.read_bytes() == before
    check_one_truth(run)


def test_a_merged_file_of_another_plan_has_no_rows_of_this_one(run):
    publish_all(run)
    merge(run)
    run.shard_path(2).unlink()
    other = replace(run, plan=replace(run.plan, seed=8))
    for shard in (0, 1, 3, 4):
        publish(other, shard)
    report = merge(other)
    assert [hole["shard"] for hole in report["missing"]] == [2]
    assert run.merged.with_suffix(".damaged.h5").exists()
    check_one_truth(other)


def test_rows_of_shards_that_are_gone_from_a_damaged_merged_file_are_named(run):
    publish_all(run)
    merge(run)
    with open(run.merged, "r+b") as file:
        content = bytearray(file.read())
        place = content.index(np.arange(10, 15, dtype="<i8").tobytes())  # the index of shard 2
        file.seek(place)
        file.write(b"\xff")
    run.shard_path(2).unlink()
    run.shard_path(3).unlink()
    damaged = run.merged.read_bytes()
    report = merge(run)
    assert [hole["shard"] for hole in report["missing"]] == [2]
    assert run.merged.with_suffix(".damaged.h5").read_bytes() == damaged  # its rows are nowhere else
    check_one_truth(run)


def test_a_merged_file_without_an_intact_row_is_not_complete_once_its_shards_are_gone(run):
    publish_all(run)
    merge(run)
    content = run.merged.read_bytes()
    for shard in range(5):
        start, stop = run.plan.bounds(shard)
        content = content.replace(np.arange(start, stop, dtype="<i8").tobytes(), bytes(8 * (stop - start)))
        run.shard_path(shard).unlink()
    run.merged.write_bytes(content)
    assert merge(run)["n_rows"] == 0
    assert run.merged.with_suffix(".damaged.h5").read_bytes() == content
    check_one_truth(run)


def test_a_merged_file_with_damaged_rows_that_no_shard_has_is_left_beside_its_successor(run):
    publish_all(run)
    publish(run, 1, failed={7})
    write_recompute(run.folder, failed_again(run, 2))
    publish_again(run, 2)
    merge(run)
    path = run.revision_path(1, 1)
    path.write_bytes(path.read_bytes()[:-1])
    content = run.merged.read_bytes().replace(np.arange(5, 10, dtype="<i8").tobytes(), bytes(40))
    run.merged.write_bytes(content)
    merge(run)
    assert merged_rows(run) == {**ALL_GOOD, 7: None}
    assert run.merged.with_suffix(".damaged.h5").read_bytes() == content
    check_one_truth(run)


@pytest.mark.parametrize("content", [b'"attributes"', np.arange(5, 10, dtype="<i8").tobytes(), b"again"])
def test_a_merged_file_that_was_read_wrongly_once_is_read_again(run, monkeypatch, content):
    for shard in range(5):
        publish(run, shard, failed={7, 13})
    write_recompute(run.folder, failed_again(run, 2))
    publish_again(run, 2, failing={13})
    merge(run)
    before = run.merged.read_bytes()
    path = run.revision_path(1, 1)
    path.write_bytes(path.read_bytes()[:-1])  # only merged.h5 has item 7
    run.shard_path(3).unlink()
    wrong = read_wrongly_once(monkeypatch, "merged.h5", before.index(content))
    assert merge(run)["complete"]
    assert not wrong
    assert run.merged.read_bytes() == before
    assert not run.merged.with_suffix(".damaged.h5").exists()


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"shards": shards}
            for shards in (None, {"1": [1, ""]}, {"1": [1, "7:6"]}, {"1": [1, "7:7"]}, {"1": [0, "6"]}, {"1": [1, [6]]})
        ),
        {"version": 1},
        {"format": "slurmgpu plan"},
    ],
)
def test_a_damaged_list_of_what_is_computed_again_is_told_in_a_sentence(run, change):
    publish(run, 1, failed={6})
    write_recompute(run.folder, failed_again(run, 2))
    said = json.loads(recompute_path(run.folder).read_text())
    recompute_path(run.folder).write_text(json.dumps({**said, **change}))
    with pytest.raises(SlurmGPUError, match=r"recompute.json is damaged .* that loses no row"):
        read_recompute(run.folder)


@pytest.mark.parametrize("content", [b"{", b"[]", b"[" * 100_000, b"{}", None])
def test_what_is_no_list_of_what_is_computed_again_is_told_in_a_sentence(run, content):
    path = recompute_path(run.folder)
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(SlurmGPUError, match=r"recompute.json is damaged .* that loses no row"):
        read_recompute(run.folder)


def test_items_are_kept_as_spans_of_neighbours():
    assert spans_of([3, 7, 8, 9, 11]) == [(3, 4), (7, 10), (11, 12)]


# Interrupted at any moment

STEPS = ("fsync", "replace", "rename", "link", "unlink")


def killed_at(number, work):
    """Do `work` in a process that is killed at its step of this number; whether it got so far."""
    if not (pid := os.fork()):
        count = itertools.count()

        def step(real):
            def call(*given, **more):
                if next(count) == number:
                    os._exit(9)
                return real(*given, **more)

            return call

        try:
            for name in STEPS:
                put(name, step(getattr(os, name)))
            work()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 9)
    return code == 9


def good(run):
    return {index for index, value in merged_rows(run).items() if value is not None} if run.merged.exists() else set()


def test_a_merge_that_is_killed_at_any_step_loses_no_row(run, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # a killed process leaves what it has written without
    publish_all(run)
    publish(run, 1, failed={6, 8})
    merge(run)
    content = run.shard_path(4).read_bytes()
    for number in itertools.count():
        run.shard_path(4).write_bytes(content)
        write_recompute(run.folder, failed_again(run, 2))
        run.shard_path(4).write_bytes(content[:-1])  # it is set aside, and its rows are those of merged.h5
        (run.shards / "00000.x.partial").write_bytes(b"half")
        former = good(run)
        was_killed = killed_at(number, lambda: merge(Run.open(run.folder)))
        assert verify_joined(run.merged) == []
        assert good(run) >= former
        assert read_report(run)
        for path in (run.shards / "00004.damaged", *run.shards.glob("00004.r*.h5")):
            path.unlink(missing_ok=True)
        run.shard_path(4).write_bytes(content)
        assert merge(run)["complete"]
        check_one_truth(run)
        if not was_killed:
            break
    assert number > 10


def test_a_merge_looks_at_its_lock_right_before_each_step_that_cannot_be_undone(run, monkeypatch):
    publish_all(run)
    publish(run, 4, failed={21})
    merge(run)
    write_recompute(run.folder, failed_again(run, 2))
    publish_again(run, 2)
    for path in (run.shard_path(0), run.revision_path(4, 1)):
        path.write_bytes(path.read_bytes()[:-1])
    run.shard_path(2).rename(run.shards / "00002.damaged")
    (run.folder / "parts" / "3").mkdir(parents=True)
    for path in (run.shards / ".00003.x.partial", run.folder / ".merged.h5.x.partial", run.claims.folder / "00003"):
        path.touch()
    steps = []

    def noted(name, real):
        return lambda *given, **more: (steps.append(f"{name} {Path(given[-1]).name}"), real(*given, **more))[1]

    for name in ("replace", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    verify = shards_folder.verify_shard
    monkeypatch.setattr(
        shards_folder, "verify_shard", lambda path, **more: (steps.append("read"), verify(path, **more))[1]
    )
    merge(run, None, lambda: steps.append("look"))
    undone = (
        "replace 00002.h5",  # it was set aside, and is whole
        "unlink .merged.h5.x.partial",
        "replace 00000.damaged.txt",
        "replace merged.h5",
        "replace 00004.r1.damaged.txt",
        "replace report.json",
        "unlink 00003",  # a claim
        "rmdir 3",  # parts of an item
        "unlink 00000.damaged",  # its rows are there again
        "unlink .00003.x.partial",
    )
    assert [step for step in undone if steps[steps.index(step) - 1] != "look"] == []


def test_a_shard_whose_unfinished_file_a_merge_removed_is_written_again(run, monkeypatch):
    """The merge took its task for dead, which wakes right before it publishes."""
    real, removed = publishing.publish, []

    def publish(partial, target, **more):
        if not removed:
            removed.append(partial.unlink())
        return real(partial, target, **more)

    monkeypatch.setattr(publishing, "publish", publish)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    publisher = Publisher(run, Assignment("1_0", "1_0.0"), COLUMNS, print, lambda: None, False)
    publisher.begin(ComputedShard(1, Computed({index: row(index) for index in range(5, 10)}), 2.0, 1.0, None))
    assert removed
    assert run.published() == {1}


def test_an_unfinished_shard_that_grows_during_the_merge_is_left(run, monkeypatch):
    publish_all(run)
    dead, grows = (run.shards / f".00003.{name}.partial" for name in ("dead", "grows"))
    for path in (dead, grows):
        path.write_bytes(b"half")
    real = merging.build_report
    monkeypatch.setattr(
        merging, "build_report", lambda *given, **more: (grows.write_bytes(b"a part"), real(*given, **more))[1]
    )
    merge(run)
    assert (dead.exists(), grows.exists()) == (False, True)


def test_failed_items_that_are_computed_again_cost_no_row_wherever_that_is_killed(run, monkeypatch):
    """From the first step of `resubmit --failed` to the last of the merge that ends it."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # a killed process leaves what it has written without

    def mend():
        at = Run.open(run.folder)
        write_recompute(at.folder, failed_again(at, 2))
        failed_items.forget_deaths(at, [1, 3])
        at.record_submission({"submission": 2, "executor": "local", "state": "submitting", "time": 0.0})
        publish_again(at, 2, failing={15})
        at.record_submission({"submission": 2, "state": "ended"})
        merge(at)

    expected = {i: v for i, v in ALL_GOOD.items() if i not in (6, 8, 15)}
    for number in itertools.count():
        for path in run.shards.iterdir():
            path.unlink()
        run.merged.unlink(missing_ok=True)
        publish_all(run)
        publish(run, 1, failed={6, 8})
        publish(run, 3, failed={15})
        merge(run)
        was_killed = killed_at(number, mend)
        for _ in range(2):  # as it was left, and after a merge
            rows = merged_rows(run)
            assert {i: v for i, v in rows.items() if i in expected} == expected
            assert verify_joined(run.merged) == []
            assert merge(run)["complete"]
            run.record_submission({"submission": 2, "executor": "local", "state": "ended", "time": 0.0})
            check_one_truth(run)
        if not was_killed:
            assert merged_rows(run) == {**ALL_GOOD, 15: None}
            break
    assert number > 10


def test_recompute_json_says_what_it_says(run):
    publish(run, 1, failed={6, 7, 9})
    write_recompute(run.folder, failed_again(run, 2))
    assert json.loads(recompute_path(run.folder).read_text()) == {
        "format": "slurmgpu recompute",
        "version": 2,
        "submission": 2,
        "shards": {"1": [1, "6:8,9"]},
    }
    again = read_recompute(run.folder)
    assert (again.n_items, list(again.shards[1].items)) == (3, [(6, 8), (9, 10)])


# What a review found


def test_a_revision_that_rots_after_it_was_merged_costs_no_row(run):
    publish_all(run)
    publish(run, 1, failed={6})
    write_recompute(run.folder, failed_again(run, 2))
    publish_again(run, 2)
    assert merge(run)["n_errors"] == 0
    path = run.revision_path(1, 1)
    path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):
        assert merge(run)["n_errors"] == 0
        assert merged_rows(run) == ALL_GOOD


def test_shards_that_rot_after_they_were_merged_cost_no_row(run, caplog):
    publish_all(run)
    publish(run, 1, failed={6})
    merge(run)
    before = merged_rows(run)
    for shard in range(5):
        path = run.shard_path(shard)
        path.write_bytes(path.read_bytes()[:-1])
        for _ in range(2):
            report = merge(run)
            assert (report["complete"], report["n_errors"]) == (True, 1)
            assert merged_rows(run) == before
        assert f"shard {shard} is damaged; its rows are taken from merged.h5" in caplog.text
        assert verify_shard(path).n_errors == (shard == 1)
    assert sorted(os.listdir(run.shards)) == [f"{shard:05d}.h5" for shard in range(5)]
    for path in run.shards.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert merge(run)["complete"]
    assert merged_rows(run) == before
    assert failed_again(run, 2).shards.keys() == {1}
    check_one_truth(run)


def test_rows_of_other_code_that_rot_after_they_were_merged_are_not_those_of_before(run, caplog):
    """A revision whose former rows were good as well: merged.h5 goes back to no earlier ones."""
    publish_all(run)
    write_recompute(run.folder, Recompute(2, {1: Again(1, [(6, 8)])}))
    publish_again(run, 2, sign=-1)
    merge(run)
    newer = {**ALL_GOOD, 6: -12, 7: -14}
    assert merged_rows(run) == newer
    path = run.revision_path(1, 1)
    path.write_bytes(path.read_bytes()[:-1])
    for is_there in (True, False):  # the merge that sets it aside does not remove it yet
        assert merge(run)["complete"]
        assert merged_rows(run) == newer
        assert path.with_suffix(".damaged").exists() is is_there
    assert "5 rows of merged.h5 are kept, because its newest file is damaged" in caplog.text


def test_the_two_newest_files_of_a_shard_that_rot_after_they_were_merged_cost_no_row(run):
    publish_all(run)
    for submission, revision in ((2, 1), (3, 2)):
        write_recompute(run.folder, Recompute(submission, {1: Again(revision, [(6, 8)])}))
        publish_again(run, submission, sign=-revision)
    merge(run)
    newer = {**ALL_GOOD, 6: -24, 7: -28}
    assert merged_rows(run) == newer
    for revision in (1, 2):
        path = run.revision_path(1, revision)
        path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):
        assert merge(run)["complete"]
        assert merged_rows(run) == newer


def test_a_shard_that_failed_in_part_and_came_after_a_merge_is_merged_as_it_is(run):
    publish_all(run)[4].unlink()
    merge(run)
    publish(run, 4, failed={21})
    assert merge(run)["n_errors"] == 1
    assert merged_rows(run) == {**ALL_GOOD, 21: None}


def test_texts_that_are_cut_elsewhere_are_other_rows_whatever_their_bytes(run):
    """The values of both files are the same; merged.h5 goes back to no text of the earlier file."""
    publish_all(run)
    start, stop = run.plan.bounds(1)
    words = [b"w", b"www", b"ww", b"", b"w"]
    rows = [{**row(index), "word": word} for index, word in zip(range(start, stop), words, strict=True)]
    assert b"".join(words) == b"".join(row(index)["word"] for index in range(start, stop))
    path = publish_rows(run, 1, 1, COLUMNS, rows, {}, {"revisions": []})
    merge(run)
    path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):
        merge(run)
        with results.open(run.merged) as merged:
            assert merged["word"][start:stop] == [word.decode() for word in words]


def test_rows_of_other_code_that_rot_after_they_were_merged_are_of_that_code_still(run):
    publish_all(run)
    start, stop = run.plan.bounds(1)
    rows = [row(index) for index in range(start, stop)]
    by = {"attempt": "local1_0.0", "started": 1.0, "seconds": 1.0, "code": "old"}
    run.shard_path(1).unlink()
    publish_rows(run, 1, 0, COLUMNS, rows, {}, by)
    rows = put_over(rows, {index: row(index, -1) for index in (6, 7)}, start)
    path = publish_rows(run, 1, 1, COLUMNS, rows, {}, made_again(by, {**by, "code": "new"}, [6, 7]))
    for _ in range(2):
        merge(run)
        with results.open(run.merged) as merged:
            assert merged.code[start:stop].tolist() == ["old", "new", "new", "old", "old"]
        if path.exists():
            path.write_bytes(path.read_bytes()[:-1])
    assert run.shard_files()[1] == [0, 2]
    for revision in (0, 2):
        run.revision_path(1, revision).unlink()
    for _ in range(2):
        merge(run)
        with results.open(run.merged) as merged:
            assert merged.code[start:stop].tolist() == ["old", "new", "new", "old", "old"]
    assert run.shard_files()[1] == [0]


def test_a_shard_all_of_whose_files_rot_after_they_were_merged_costs_no_row(run):
    publish_all(run)
    publish(run, 1, failed={6, 8})
    write_recompute(run.folder, failed_again(run, 2))
    publish_again(run, 2, failing={8})
    merge(run)
    before = merged_rows(run)
    assert before == {**ALL_GOOD, 8: None}
    for revision in (0, 1):
        path = run.revision_path(1, revision)
        path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):
        report = merge(run)
        assert (report["complete"], list(report["damaged_revisions"])) == (True, ["00001.r1.h5"])
        assert merged_rows(run) == before
    assert run.shard_files()[1] == [0]
    assert story_of_item(run, 6).ended == "ok"
    assert failed_again(run, 3).shards == {1: Again(1, [(8, 9)])}


def test_a_revision_that_rots_before_it_was_merged_leaves_newer_rows_than_those_of_merged_h5(run):
    """merged.h5 has the first file, and the second is whole: the third's damage brings back no row of the first."""
    publish_all(run)
    merge(run)
    for submission, revision in ((2, 1), (3, 2)):
        write_recompute(run.folder, Recompute(submission, {1: Again(revision, [(6, 8)])}))
        publish_again(run, submission, sign=-1)
    path = run.revision_path(1, 2)
    path.write_bytes(path.read_bytes()[:-1])
    report = merge(run)
    assert merged_rows(run) == {**ALL_GOOD, 6: -12, 7: -14}
    assert list(report["damaged_revisions"]) == ["00001.r2.h5"]


def test_shards_are_listed_as_often_however_many_have_failed_items(run, monkeypatch):
    real, n_lists = os.listdir, []
    monkeypatch.setattr(os, "listdir", lambda *at: n_lists.append(at) or real(*at))
    counts = []
    for failed in ({1}, {1, 6, 11, 16, 21}):
        run.merged.unlink(missing_ok=True)
        publish_all(run, failed=failed)
        merge(run)
        n_lists.clear()
        assert merge(run)["n_errors"] == len(failed)
        counts.append(len(n_lists))
    assert counts[0] == counts[1]


def test_a_report_counts_all_failed_items_and_lists_the_first(run, monkeypatch, capsys):
    monkeypatch.setattr(merged_file, "MOST_LISTED", 2)
    publish_all(run, failed={1, 6, 11, 16})
    report = merge(run)
    assert (report["n_errors"], report["errors_by_class"]) == (4, {"item_error": 4})
    assert [item["index"] for item in report["errors"]] == [1, 6]
    show_report(report)
    assert f"Only the first 2 failed items are listed; `slurmgpu show {run.folder} --failed`" in capsys.readouterr().out
    # With good rows in merged.h5, failures of all take their places, listed or not.
    publish_all(run)
    assert merge(run)["n_errors"] == 0
    publish_all(run, failed={1, 6, 11, 16})
    assert merge(run)["n_errors"] == 0


def test_what_was_set_aside_once_is_gone_when_its_rows_are_there_again(run):
    publish_all(run)
    path = run.shard_path(1)
    path.write_bytes(path.read_bytes()[:-1])
    merge(run)
    publish(run, 1)
    assert merge(run)["complete"]
    assert sorted(os.listdir(run.shards)) == [f"{shard:05d}.h5" for shard in range(5)]
    for shard in range(5):
        run.shard_path(shard).unlink()
    assert merge(run)["complete"]
    assert merged_rows(run) == ALL_GOOD


def test_a_shard_that_was_set_aside_takes_the_place_of_none_that_was_computed_since(run):
    publish_all(run)
    run.shard_path(1).rename(run.shards / "00001.damaged")
    publish(run, 1, sign=-1)
    merge(run)
    assert merged_rows(run) == {**ALL_GOOD, **{index: -2 * index for index in range(5, 10)}}


def test_former_rows_that_were_wrong_once_are_read_again(run, monkeypatch):
    publish(run, 1, failed={6})
    reads, real = [], Directory.verify

    def verify(self, *given):
        reads.append(self.start)
        if len(reads) == 1:
            raise DamagedShardError("the checksum of twice differs")
        real(self, *given)

    monkeypatch.setattr(Directory, "verify", verify)
    assert [isinstance(each, ItemError) for each in former_rows(run, 1, 1, COLUMNS).rows] == [False, True, *[False] * 3]
    assert reads == [5, 5]


def test_what_was_set_aside_stays_until_its_rows_are_merged(run, monkeypatch):
    publish_all(run)
    path = run.shard_path(1)
    path.write_bytes(path.read_bytes()[:-1])
    merge(run)
    real = merging.build_report
    with monkeypatch.context() as patch:
        patch.setattr(merging, "build_report", lambda *given, **more: (publish(run, 1), real(*given, **more))[1])
        assert not merge(run)["complete"]
    assert path.with_suffix(".damaged").exists()
    assert merge(run)["complete"]
    assert not path.with_suffix(".damaged").exists()


def test_a_damaged_shard_is_copied_past_once_and_not_again_and_again(run, monkeypatch):
    publish_all(run)
    path = run.shard_path(1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    n_copies, real = [], merged_file.MergedFile.copy_all
    monkeypatch.setattr(merged_file.MergedFile, "copy_all", lambda *given: n_copies.append(1) or real(*given))
    assert [hole["shard"] for hole in merge(run)["missing"]] == [1]
    assert len(n_copies) == 2


def test_failed_items_alone_are_computed_again_where_a_listing_lacks_their_shard(run, monkeypatch):
    publish(run, 1, failed={6})
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda *at: [name for name in real(*at) if not name.startswith("00001")])
    assert failed_again(run, 2).shards.keys() == {1}
    former = former_rows(run, 1, 1, COLUMNS)
    assert [isinstance(row, ItemError) for row in former.rows] == [False, True, False, False, False]


def test_a_merged_file_that_cannot_be_read_is_left_beside_its_successor(run):
    publish_all(run)
    merge(run)
    content = bytearray(run.merged.read_bytes())
    content[60] ^= 1
    run.merged.write_bytes(content)
    for shard in range(1, 5):
        run.shard_path(shard).unlink()
    assert merge(run)["n_rows"] == SHARD_ITEMS
    assert run.merged.with_suffix(".damaged.h5").read_bytes() == content
    check_one_truth(run)
    run.merged.write_bytes(content)
    run.shard_path(0).unlink()
    assert merge(run)["n_rows"] == 0
    assert not run.merged.exists()
    check_one_truth(run)


@pytest.mark.parametrize("change", [lambda found: found.pop("code"), lambda found: found.update(code=[[0]])])
def test_a_merged_file_whose_directory_makes_no_sense_is_left_beside_its_successor(run, change):
    publish_all(run)
    merge(run)
    with Reader(run.merged) as reader:
        directory, table, size = read_userblock(reader)
    change(directory)
    content = pack_userblock(directory, size, table) + run.merged.read_bytes()[size:]
    run.merged.write_bytes(content)
    assert merge(run)["complete"]
    assert run.merged.with_suffix(".damaged.h5").read_bytes() == content
    check_one_truth(run)


@pytest.mark.parametrize("made_by", [{"revisions": 5}, {"revisions": [{"items": [[0, 1 << 60]]}]}])
def test_makers_that_make_no_sense_cost_their_shard_at_most(run, made_by):
    publish_all(run)
    start, stop = run.plan.bounds(1)
    identity = {"start": start, "fingerprint": run.plan.fingerprint, "notes": {}, "made_by": made_by}
    write_shard(run.shard_path(1), COLUMNS, rows=[row(i) for i in range(start, stop)], **identity)
    assert merge(run)["n_rows"] in (N_ITEMS, N_ITEMS - SHARD_ITEMS)
    check_one_truth(run)


def test_a_copy_that_fails_leaves_no_thread_at_work_on_a_closed_file(run, monkeypatch):
    publish_all(run)
    monkeypatch.setattr(sources, "_KEPT_BYTES", 0)
    monkeypatch.setattr(sources, "_SMALL_BYTES", 4096)  # smaller than any, so that threads copy them
    after, has_begun, is_waited_for = [], threading.Event(), threading.Event()
    real, real_wait = merged_file.MergedFile._copy_chunk, merged_file.wait

    def copy_chunk(self, parts):
        if parts[0].source.shard == 0:
            assert has_begun.wait(60)
            raise OSError(errno.ENOSPC, "full")
        has_begun.set()
        is_waited_for.wait(1)
        try:
            os.fstat(self._fd)
        except OSError:
            after.append(parts)
        return real(self, parts)

    def wait(futures):
        is_waited_for.set()
        return real_wait(futures)

    monkeypatch.setattr(merged_file.MergedFile, "_copy_chunk", copy_chunk)
    monkeypatch.setattr(merged_file, "wait", wait)
    with pytest.raises(OSError, match="full"):
        merge(run)
    assert (is_waited_for.is_set(), after) == (True, [])


@pytest.mark.parametrize(
    ("number", "to_do"),
    [(errno.ENOSPC, "Free space there"), (errno.EDQUOT, "Free space there"), (errno.EFBIG, "Raise `ulimit -f`")],
)
def test_a_full_disk_is_named_with_the_command_that_goes_on(run, monkeypatch, number, to_do):
    publish_all(run)

    def full(fd, size):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(merged_file, "_allocate", full)
        with pytest.raises(SlurmGPUError) as caught:
            merge_by_hand(run)
    said = f"{run.merged}: {os.strerror(number)}. Published shards are kept. {to_do}, then: "
    assert str(caught.value) == f"{said}slurmgpu merge {run.typed}"
    assert merge_by_hand(run)["complete"]


@pytest.mark.parametrize("option", ["--wait", "--json"])
def test_what_makes_no_sense_beside_verify_is_refused(run, slurmgpu, option):
    assert f"Leave out {option}." in slurmgpu("merge", "--verify", option, run.folder, expect=2).stderr


def test_a_merge_by_hand_asks_accounting_before_it_holds_the_lock(run, monkeypatch):
    """Slurm may be silent for minutes, in which a task that joins the run would wait."""
    publish_all(run)

    def ask(run):
        with run_lock(run.folder, "joining"):
            return

    monkeypatch.setattr(run_merge, "accounting_of", ask)
    assert merge_by_hand(run)["complete"]


def test_a_merge_by_hand_asks_accounting_once_cancelled_tasks_have_ended(run, monkeypatch):
    """Before their ends, accounting does not know them."""
    publish_all(run)
    done = []
    monkeypatch.setattr(run_merge, "wait_for_cancelled", lambda run: done.append("the end of the cancelled"))
    monkeypatch.setattr(run_merge, "accounting_of", lambda run: done.append("accounting"))
    assert merge_by_hand(run)["complete"]
    assert done == ["the end of the cancelled", "accounting"]
    assert merge_by_hand(run, force=True)["complete"]
    assert done[2:] == ["accounting"]
