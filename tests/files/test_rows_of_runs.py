"""The rows of a run at work: those of merged.h5, and of shards that it lacks."""

import contextlib
import itertools
import tracemalloc
from functools import partial
from types import SimpleNamespace

import pytest

from slurmgpu import results
from slurmgpu.errors import ItemError, NoAnswerError, SlurmGPUError
from slurmgpu.merge.merge import merge
from slurmgpu.operations import wait
from slurmgpu.results.published import FileRows, RunRows
from slurmgpu.run.revisions import former_rows, made_again
from slurmgpu.shards.columns import Array, Text, columns_from_json, convert_row
from slurmgpu.shards.shard_file import write_shard
from slurmgpu.shards.userblock import DamagedShardError, Reader, pack_userblock, read_userblock
from tests.support.failing import read_wrongly_once
from tests.support.published_runs import publish, published_run
from tests.support.shard_files import changed

COLUMNS = {"twice": Array("int64"), "word": Text()}
N_ITEMS = 23


def row(index, sign=1):
    return f"item {index} failed" if index % 7 == 3 else {"twice": 2 * index * sign, "word": "ü" * (index % 4)}


ROWS = [row(index) for index in range(N_ITEMS)]


def told(run, start=0, stop=None):
    with RunRows(run) as rows:
        found = list(rows.rows(start, stop))
        return [each.index for each in found], [each.error or dict(each.values) for each in found], rows.problems


def test_rows_of_merged_file_and_of_later_shards_come_in_input_order(tmp_path):
    run = published_run(tmp_path / "run", COLUMNS, ROWS, shards=[0, 3])
    merge(run)
    for shard in (1, 4):
        publish(run, shard, ROWS[slice(*run.plan.bounds(shard))])
    (run.shards / "00000.h5").unlink()  # as users do who need the space
    there = [*range(10), *range(15, 23)]
    assert told(run) == (there, [ROWS[index] for index in there], [])
    with RunRows(run) as rows:
        assert len(rows) == len(there)
    for start, stop in [(3, 17), (0, 1), (22, 23), (9, 16), (10, 15), (-3, None), (5, 5), (20, 999)]:
        expected = [index for index in there if index in range(N_ITEMS)[start:stop]]
        assert told(run, start, stop)[0] == expected


@pytest.mark.parametrize("is_merged", [True, False])
def test_rows_of_a_part_of_the_input_are_found_by_their_indices_in_it(tmp_path, is_merged):
    ranges = [(3, 10), (20, 25), (40, 51)]
    its_input = {"format": "jsonl", "files": [], "columns": None, "n_items": N_ITEMS, "stride": 1}
    its_input |= {"ranges": ranges, "folders": [], "repacked": False}
    run = published_run(tmp_path / "run", COLUMNS, ROWS, shards=[0, 1, 3, 4], input=its_input, look="look")
    if is_merged:
        merge(run)
    number_of = {index: number for number, index in enumerate(i for each in ranges for i in range(*each))}
    there = [index for index, number in number_of.items() if number not in range(10, 15)]
    assert told(run) == (there, [ROWS[number_of[index]] for index in there], [])
    for start, stop in [(0, 4), (9, 21), (10, 20), (24, 41), (44, None), (50, 99)]:
        assert told(run, start, stop)[0] == [index for index in there if index in range(start, stop or 99)]
    with RunRows(run) as rows:
        assert rows.present() == [(3, 10), (20, 23), (43, 51)]
        assert rows.present(8, 45) == [(8, 10), (20, 23), (43, 45)]


def test_the_row_of_a_failed_item_has_no_values(tmp_path):
    """Its columns hold zeros and empty texts in the file."""
    run = published_run(tmp_path / "run", COLUMNS, ROWS, shards=[0])
    merge(run)
    publish(run, 2, ROWS[10:15])
    with RunRows(run) as rows:
        failed = [each for each in rows.rows() if each.error]
    assert [(each.index, dict(each)) for each in failed] == [
        (index, {"twice": None, "word": None}) for index in (3, 10)
    ]
    with pytest.raises(KeyError, match="Did you mean 'word'"):
        failed[0]["wrod"]


@pytest.mark.parametrize("shards", [[], [0], [4], [0, 4], [1, 3]])
def test_the_number_of_rows_is_known_whichever_shards_are_there(tmp_path, shards):
    run = published_run(tmp_path / "run", COLUMNS, ROWS, shards=shards)
    with RunRows(run) as rows:
        assert len(rows) == len(list(rows.rows()))


@pytest.mark.parametrize("is_merged", [True, False])
def test_a_shard_that_is_set_aside_meanwhile_is_read_from_merged_file_or_counts_as_missing(tmp_path, is_merged):
    run = published_run(tmp_path / "run", COLUMNS, ROWS)
    again = [{"twice": -1, "word": "again"} if isinstance(each, str) else each for each in ROWS[5:10]]
    path = publish(run, 1, again, revision=1)
    if is_merged:
        merge(run)
    with RunRows(run) as rows:
        path.unlink()
        if not is_merged:
            run.revision_path(1, 0).unlink()
        found = [each.error or dict(each.values) for each in rows.rows(5, 10)]
        assert (found, rows.problems) == (again if is_merged else [], [])
        assert len(rows) == N_ITEMS - 5 * (not is_merged)


@pytest.fixture
def steps(monkeypatch):
    """What happens at each look whether a run is alive, until it has ended: a list of functions."""
    left, times = [], itertools.count(100, 10)

    def alive(run):
        if not left:
            return None
        left.pop(0)()
        return "a task is alive"

    monkeypatch.setattr(wait.live_tasks, "alive", alive)
    monkeypatch.setattr(wait, "time", SimpleNamespace(sleep=lambda pause_s: None, monotonic=lambda: next(times)))
    return left


def test_rows_of_a_run_at_work_are_followed_in_input_order_and_each_once(tmp_path, steps):
    run = published_run(tmp_path / "run", COLUMNS, ROWS, shards=[0, 2])
    later = [partial(publish, run, shard, ROWS[slice(*run.plan.bounds(shard))]) for shard in (1, 4, 3)]
    steps += [lambda: None, *later, lambda: pytest.fail("all of its rows are there")]
    found = [(row.index, row.error or dict(row)) for row in wait.follow_rows(run)]
    assert found == list(enumerate(ROWS))
    assert len(steps) == 1


@pytest.mark.parametrize("waits", [lambda run: list(wait.follow_rows(run)), wait.wait_for], ids=["rows", "end"])
def test_looks_that_take_long_take_a_fifth_of_the_time(tmp_path, steps, monkeypatch, waits):
    run, pauses = published_run(tmp_path / "run", COLUMNS, ROWS, shards=[0]), []
    steps += [partial(publish, run, shard, ROWS[slice(*run.plan.bounds(shard))]) for shard in (1, 2)]
    steps += [partial(merge, run), lambda: None]
    monkeypatch.setattr(wait.time, "sleep", pauses.append)  # a look takes ten seconds of this clock
    with contextlib.suppress(SlurmGPUError):  # it lacks rows
        waits(run)
    assert len(pauses) == 4
    assert max(pauses) >= 40


def test_rows_that_a_run_lacks_at_its_end_are_counted_behind_those_that_it_has(tmp_path, steps):
    run, found = published_run(tmp_path / "run", COLUMNS, ROWS, shards=[0, 2]), []
    steps += [lambda: None, partial(publish, run, 4, ROWS[20:])]
    with pytest.raises(SlurmGPUError, match="lacks 10 rows of its 23"):
        found.extend(row.index for row in wait.follow_rows(run))
    assert found == [*range(5), *range(10, 15), *range(20, 23)]


def test_a_queue_that_does_not_answer_ends_no_wait_and_is_told_once(tmp_path, steps, caplog):
    def be_silent():
        raise NoAnswerError("Slurm does not answer.", is_silent=True)

    run = published_run(tmp_path / "run", COLUMNS, ROWS, shards=[])
    steps += [be_silent, be_silent, partial(publish, run, 0, ROWS[:5])]
    with pytest.raises(SlurmGPUError, match="lacks 18 rows"):
        list(wait.follow_rows(run))
    assert caplog.messages == ["Slurm does not answer."]


def test_a_later_revision_counts_and_a_damaged_one_gives_way_to_the_rows_before_it(tmp_path):
    run = published_run(tmp_path / "run", COLUMNS, ROWS)
    merge(run)
    again = [{"twice": -1, "word": "again"} if isinstance(each, str) else each for each in ROWS[:5]]
    path = publish(run, 0, again, revision=1)
    assert told(run) == (list(range(N_ITEMS)), [*again, *ROWS[5:]], [])
    with changed(path, path.stat().st_size - 1, b"\xff" if path.read_bytes()[-1:] != b"\xff" else b"\0"):
        indices, values, problems = told(run)
        assert (indices, values) == (list(range(N_ITEMS)), ROWS)
        assert len(problems) == 1
        assert "00000.r1.h5 is damaged" in problems[0]
        assert problems[0].endswith(", and the rows in merged.h5 are used instead.")
        assert told(run, 2, 4)[0] == [2, 3]
        run.merged.unlink()
        _, values, problems = told(run)
        assert values == ROWS
        assert problems[0].endswith(", and the rows from before its items were recomputed are used instead.")


def test_a_listing_that_lacks_the_revision_in_merged_file_brings_no_failed_row_back(tmp_path):
    run = published_run(tmp_path / "run", COLUMNS, ROWS)
    publish(run, 2, ROWS[10:15], revision=1)  # it failed again
    again = [{"twice": -1, "word": "again"} if isinstance(each, str) else each for each in ROWS[10:15]]
    path = publish(run, 2, again, revision=2)
    merge(run)
    path.rename(path.with_suffix(".unseen"))  # as a client of NFS may list the folder for a minute
    assert told(run) == (list(range(N_ITEMS)), [*ROWS[:10], *again, *ROWS[15:]], [])
    assert told(run, 10, 12)[1] == again[:2]


@pytest.mark.parametrize("revision", [0, 1])
def test_a_merged_file_that_lacks_a_shard_takes_the_place_of_no_damaged_one(tmp_path, revision):
    run = published_run(tmp_path / "run", COLUMNS, ROWS, shards=[0, 2, 3, 4])
    merge(run)
    for each in range(revision + 1):
        path = publish(run, 1, ROWS[5:10], revision=each)
    path.write_bytes(path.read_bytes()[:-1])
    indices, _, problems = told(run)
    assert (5 in indices) is bool(revision)
    end = (
        "the rows from before its items were recomputed are used instead." if revision else "its rows count as missing."
    )
    assert [problem.endswith(end) for problem in problems] == [True]


def test_a_damaged_shard_is_named_and_costs_its_own_rows_alone(tmp_path):
    run = published_run(tmp_path / "run", COLUMNS, ROWS)
    path = run.shards / "00002.h5"
    path.write_bytes(path.read_bytes()[:-10])
    (run.shards / "00003.h5").write_bytes((run.shards / "00001.h5").read_bytes())
    indices, _, problems = told(run)
    assert indices == [*range(10), *range(20, 23)]
    assert [problem[:8] for problem in problems] == ["00002.h5", "00003.h5"]
    assert "belongs to another plan" in problems[1]
    with RunRows(run) as rows:
        assert (len(rows), rows.present()) == (23, [(0, 23)])
        for _ in range(2):
            assert len(list(rows.rows())) == 13
        assert (len(rows), rows.present(), len(rows.problems)) == (13, [(0, 10), (20, 23)], 2)


def test_bytes_of_a_shard_that_were_wrong_once_are_read_again(tmp_path, monkeypatch):
    run = published_run(tmp_path / "run", COLUMNS, ROWS)
    wrong = read_wrongly_once(monkeypatch, "00001.h5")
    assert told(run) == (list(range(N_ITEMS)), ROWS, [])
    assert not wrong


def test_shards_of_the_run_that_another_extends_are_read(tmp_path):
    former = published_run(tmp_path / "former", COLUMNS, ROWS[:10])
    run = published_run(tmp_path / "run", COLUMNS, ROWS, shards=[2], extends=[former.plan.fingerprint])
    for shard in range(2):
        run.shard_path(shard).write_bytes(former.shard_path(shard).read_bytes())
    assert told(run) == (list(range(15)), ROWS[:15], [])


@pytest.mark.parametrize(("stop", "n_rows", "why"), [(10, 4, "it has 4 rows"), (12, 5, "7 entries for 5 items")])
def test_a_shard_that_says_it_has_other_rows_than_it_has_costs_its_own_rows_alone(tmp_path, stop, n_rows, why):
    run = published_run(tmp_path / "run", COLUMNS, ROWS)
    path, rows = run.shard_path(1), [convert_row(COLUMNS, row(0))] * (stop - 5)
    write_shard(path, COLUMNS, start=5, rows=rows, fingerprint=run.plan.fingerprint, notes={}, made_by={})
    with Reader(path) as reader:
        directory, _, size = read_userblock(reader)
    directory |= {"n_rows": n_rows, "attributes": {**directory["attributes"], "stop": 10}}
    path.write_bytes(pack_userblock(directory, size) + path.read_bytes()[size:])
    indices, _, problems = told(run)
    assert indices == [*range(5), *range(10, N_ITEMS)]
    assert why in problems[0]
    merge(run)
    assert told(run)[0] == indices


def test_a_run_without_rows_has_none_and_a_foreign_merged_file_is_refused(tmp_path):
    run = published_run(tmp_path / "run", COLUMNS, ROWS, shards=[])
    assert told(run) == ([], [], [])
    other = published_run(tmp_path / "other", COLUMNS, ROWS, seed=1)
    merge(other)
    run.merged.write_bytes(other.merged.read_bytes())
    with pytest.raises(SlurmGPUError, match="belong to different plans"):
        RunRows(run)


def test_a_changed_byte_of_merged_file_is_found_before_its_row_is_returned(tmp_path):
    run = published_run(tmp_path / "run", COLUMNS, ROWS)
    merge(run)
    with Reader(run.merged) as reader:
        [twice] = [region for region in read_userblock(reader)[0]["datasets"] if region[0] == "twice"]
    at = twice[3] + 6 * 8
    with changed(run.merged, at, b"\x0d"):
        with pytest.raises(SlurmGPUError, match="checksum of twice of shard 1"):
            told(run, 5, 8)
        with results.open(run.merged) as merged, pytest.raises(SlurmGPUError, match="checksum of twice of shard 1"):
            list(FileRows(merged).blocks(5, 8))


def test_memory_is_bounded_by_a_block_not_by_the_run(tmp_path):
    wide = {"vector": Array("float32", (4096,))}
    run = published_run(tmp_path / "run", wide, [{"vector": [index] * 4096} for index in range(400)], shard_items=200)
    tracemalloc.start()
    with RunRows(run) as rows:
        n_rows = sum(block.stop - block.start for block in rows.blocks(n_bytes=1 << 18) if block.rows())
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n_rows == 400
    assert peak < 3 << 20  # the file has 6.5 MB


def test_a_revision_is_made_of_the_newest_whole_file_and_of_none_without_one(tmp_path):
    run = published_run(tmp_path / "run", COLUMNS, ROWS, shards=[0])
    columns = columns_from_json(run.plan.columns)
    again = [{"twice": -1, "word": "again"} if isinstance(each, str) else each for each in ROWS[:5]]
    path = publish(run, 0, again, revision=1)

    def failed(before):
        return [str(each) for each in former_rows(run, 0, before, columns).rows if isinstance(each, ItemError)]

    assert (failed(1), failed(2), failed(4)) == ([ROWS[3]], [], [])  # files that a listing has, and more
    path.write_bytes(path.read_bytes()[:-1])
    assert failed(2) == [ROWS[3]]
    run.revision_path(0, 0).write_bytes(b"")
    with pytest.raises(DamagedShardError, match=r"^00000\.r1\.h5: .*; 00000\.h5: "):
        failed(2)
    with pytest.raises(DamagedShardError, match="shard 1 is not published"):
        former_rows(run, 1, 2, columns)


def test_the_items_of_a_revision_are_ascending_in_whatever_order_they_were_computed():
    first, second = ({"attempt": name, "started": 1.0, "seconds": 1.0} for name in ("a", "b"))
    made_by = made_again(made_again(first, second, [7, 3, 4]), second, [3])
    assert made_by["attempt"] == "a"
    assert [each["items"] for each in made_by["revisions"]] == [[[3, 5], [7, 8]], [[3, 4]]]
