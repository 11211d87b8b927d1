"""The join: every row of every whole shard, in input order, in one file that can be verified again at any time."""

import ctypes
import errno
import itertools
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmgpu.merge import merged_file, sources
from slurmgpu.merge.join import verify_joined
from slurmgpu.run.lock import LockLostError
from slurmgpu.shards import shard_file as shards
from slurmgpu.shards.columns import Array, Text
from slurmgpu.shards.names import shard_name
from slurmgpu.shards.numbers import OFFSET_DTYPE
from slurmgpu.shards.piece_table import OffsetsWriter
from slurmgpu.shards.userblock import DamagedShardError
from tests.support.limited import check_cannot_grow
from tests.support.nightly import by_night
from tests.support.shard_files import (
    FINGERPRINT,
    assert_same_datasets,
    changed,
    craft,
    datasets,
    flips,
    join_parts,
    rows_of,
    small_disk,  # noqa: F401
    write,
    write_parts,
)

FAILED = {2, 7, 8}


@pytest.fixture
def whole(tmp_path):
    """All rows of items 0 to 29 in a single shard: what any join of their shards must equal."""
    return datasets(write(tmp_path / "whole.h5", 0, 30, failed=FAILED))


@pytest.mark.parametrize("bounds", [[0, 30], [0, 10, 20, 30], [0, 1, 2, 29, 30], list(range(31))])
def test_the_merged_datasets_do_not_depend_on_how_the_shards_were_cut(tmp_path, whole, bounds):
    target = tmp_path / "merged.h5"
    joined = join_parts(write_parts(tmp_path, bounds, FAILED), target)
    assert_same_datasets(datasets(target), whole)
    assert (joined.n_rows, joined.damaged) == (30, ())
    assert joined.errors == [(index, f"item {index} is schlecht ⚠") for index in sorted(FAILED)]
    assert verify_joined(target) == []


@pytest.mark.parametrize("bounds", [[0, 30], [0, 3, 8, 30], list(range(31))])
@pytest.mark.parametrize("small_bytes", [4 << 10, 64 << 10])
def test_all_failed_items_are_counted_and_the_first_are_listed(tmp_path, monkeypatch, bounds, small_bytes):
    monkeypatch.setattr(merged_file, "MOST_LISTED", 2)
    monkeypatch.setattr(sources, "_SMALL_BYTES", small_bytes)
    joined = join_parts(write_parts(tmp_path, bounds, FAILED | {20, 21}), tmp_path / "merged.h5")
    assert joined.errors == [(index, f"item {index} is schlecht ⚠") for index in (2, 7)]
    assert joined.n_failed == {"item_error": 5}


def test_errors_of_a_shard_that_is_left_out_take_no_places_of_others(tmp_path, monkeypatch):
    """The first shard was copied once, and is removed before all are copied again."""
    monkeypatch.setattr(merged_file, "MOST_LISTED", 2)
    monkeypatch.setattr(sources, "_SMALL_BYTES", 4 << 10)
    parts = write_parts(tmp_path, [0, 10, 20, 30], FAILED | {12, 13, 24})

    def review(copied, damaged):
        parts[0][1].unlink(missing_ok=True)
        return [sources.Source(*parts[2])] if 0 in copied else []

    joined = join_parts(parts, tmp_path / "merged.h5", review=review)
    assert ([index for index, _ in joined.errors], joined.n_failed) == ([12, 13], {"item_error": 3})


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_first_errors_are_kept_in_whatever_order_shards_come(order, monkeypatch):
    monkeypatch.setattr(merged_file, "MOST_LISTED", 3)
    first = merged_file.FirstErrors()
    errors = {shard: [(10 * shard + n, f"error {n} of shard {shard}") for n in range(2)] for shard in range(4)}
    for shard in order:
        first.add(errors[shard])
    assert first.listed() == [*errors[0], errors[1][0]]
    assert len(first._found) < 2 * 3


def test_a_merged_file_that_is_missing_is_a_problem(tmp_path):
    assert verify_joined(tmp_path / "merged.h5") == [f"{tmp_path / 'merged.h5'} does not exist"]


def test_rows_with_nan_and_infinities_are_counted_for_each_column(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_BLOCK_BYTES", 64)  # values are written in several blocks
    rows = rows_of(0, 30, failed=FAILED)
    for index, value in ((3, np.nan), (4, np.inf), (5, -np.inf), (29, np.nan)):
        rows[index]["score"][...] = value
    rows[11]["logits"][:] = np.nan
    rows[11]["logits"][0, 0] = np.inf
    rows[17]["phases"] = np.array([1, complex(0, np.nan), np.inf], "<c16")
    parts = [(n, write(tmp_path / shard_name(n), 10 * n, 10 * n + 10, rows=rows[10 * n :][:10])) for n in range(3)]
    parts = [(n, path, 10 * n, 10 * n + 10) for n, path in parts]
    assert [shards.read_directory(path).notes["not_finite"] for _, path, _, _ in parts] == [
        {"score": [1, 2]},
        {"logits": [1, 1], "phases": [1, 1]},
        {"score": [1, 0]},
    ]
    assert join_parts(parts, tmp_path / "merged.h5").not_finite == {
        "logits": {"nan": 1, "infinite": 1},
        "phases": {"nan": 1, "infinite": 1},
        "score": {"nan": 2, "infinite": 2},
    }


def test_nan_is_not_counted_where_it_means_unknown(tmp_path):
    columns = {"speed": Array("float32", nan_is_unknown=True), "score": Array("float32")}
    values = [(np.nan, 1), (np.nan, np.nan), (np.inf, 1)]
    rows = [{"speed": np.array(speed, "<f4"), "score": np.array(score, "<f4")} for speed, score in values]
    path = write(tmp_path / shard_name(0), 0, columns=columns, rows=rows)
    assert join_parts([(0, path, 0, 3)], tmp_path / "merged.h5", columns=columns).not_finite == {
        "score": {"nan": 1, "infinite": 0},
        "speed": {"nan": 0, "infinite": 1},
    }


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_shards_with_any_texts_are_joined_in_order(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("any")
    columns = {"t": Text(), "n": Array("int32")}
    shards = data.draw(st.lists(st.lists(st.text(max_size=4), min_size=1, max_size=4), min_size=1, max_size=6))
    parts, start = [], 0
    for shard, texts in enumerate(shards):
        rows = [{"t": text.encode(), "n": np.array(start + row, "<i4")} for row, text in enumerate(texts)]
        stop = start + len(rows)
        parts.append((shard, write(folder / shard_name(shard), start, columns=columns, rows=rows), start, stop))
        start = stop
    join_parts(parts, folder / "merged.h5", columns=columns)
    found = datasets(folder / "merged.h5")
    texts = [text.encode() for texts in shards for text in texts]
    assert found["t/values"].tobytes() == b"".join(texts)
    assert np.diff(found["t/offsets"]).tolist() == [len(text) for text in texts]
    assert found["n"].tolist() == found["index"].tolist() == list(range(len(texts)))
    shutil.rmtree(folder)


def test_the_attributes_say_what_was_merged(tmp_path):
    parts = write_parts(tmp_path, [0, 4, 10])
    join_parts(parts, tmp_path / "merged.h5", attributes={"run": "größer", "seed": 7, "dirty": True})
    with h5py.File(tmp_path / "merged.h5", locking=False) as file:
        found = dict(file.attrs)
        assert found.pop("columns").startswith(b'{"score":{"kind":"array","dtype":"<f4","shape":[]}')
        assert found.pop("run").decode() == "größer"
        assert found == {
            "format": b"slurmgpu merged",
            "version": 1,
            "fingerprint": FINGERPRINT.encode(),
            "n_items": 10,
            "complete": True,
            "seed": 7,
            "dirty": True,
        }


def test_equal_shards_make_equal_files(tmp_path):
    parts = write_parts(tmp_path, [0, 4, 10, 30], FAILED)
    for name in ("a.h5", "b.h5"):
        join_parts(parts, tmp_path / name)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


@pytest.mark.skipif(not shutil.which("h5dump"), reason="h5dump (Debian: hdf5-tools) is not installed")
def test_h5dump_reads_a_merged_file(tmp_path):
    join_parts(write_parts(tmp_path, [0, 4, 10]), tmp_path / "merged.h5")
    done = subprocess.run(["h5dump", "-d", "/index", tmp_path / "merged.h5"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "(0): 0, 1, 2, 3, 4, 5, 6, 7, 8, 9" in done.stdout


def test_a_missing_shard_leaves_a_file_that_says_that_it_is_not_complete(tmp_path):
    first, _, last = write_parts(tmp_path, [0, 10, 20, 30])
    joined = join_parts([first, last], tmp_path / "merged.h5", n_items=30)
    found = datasets(tmp_path / "merged.h5")
    assert found["index"].tolist() == [*range(10), *range(20, 30)]
    assert joined.n_rows == 20
    with h5py.File(tmp_path / "merged.h5", locking=False) as file:
        assert not file.attrs["complete"]
    assert verify_joined(tmp_path / "merged.h5") == []


def test_no_shards_at_all_make_an_empty_file_that_can_be_read(tmp_path):
    joined = join_parts([], tmp_path / "merged.h5", n_items=30)
    found = datasets(tmp_path / "merged.h5")
    assert joined.n_rows == len(found["index"]) == 0
    assert found["shout/offsets"].tolist() == [0]
    assert verify_joined(tmp_path / "merged.h5") == []


def test_shards_larger_than_the_buffers_are_joined(tmp_path):
    """Their offsets and texts take several megabytes, so that chunks end in the middle of both."""
    columns = {"t": Text(), "n": Array("int32")}
    n_rows, parts = 150_000, []
    for shard in range(3):
        rows = [{"t": b"%d" % (row % 100_003), "n": np.array(row, "<i4")} for row in range(n_rows)]
        bounds = (shard * n_rows, (shard + 1) * n_rows)
        parts.append((shard, write(tmp_path / shard_name(shard), bounds[0], columns=columns, rows=rows), *bounds))
    join_parts(parts, tmp_path / "merged.h5", columns=columns)
    found = datasets(tmp_path / "merged.h5")
    expected = [b"%d" % (row % 100_003) for row in range(n_rows)] * 3
    assert found["t/values"].tobytes() == b"".join(expected)
    assert found["t/offsets"].tolist() == [0, *np.cumsum([len(text) for text in expected])]
    assert found["n"].tolist() == [*range(n_rows)] * 3
    assert verify_joined(tmp_path / "merged.h5") == []
    for offset in flips(tmp_path / "merged.h5", range(0, (tmp_path / "merged.h5").stat().st_size, 999_983)):
        assert verify_joined(tmp_path / "merged.h5"), f"unnoticed at byte {offset}"


@pytest.mark.nightly
def test_a_piece_table_larger_than_the_buffer_is_read_again(tmp_path):
    columns = {f"column_{number}": Text() for number in range(200)}
    path = write(tmp_path / "a.h5", columns=columns, rows=[dict.fromkeys(columns, b"text")])
    parts = [(shard, path, 0, 1) for shard in range(400)]
    join_parts(parts, tmp_path / "merged.h5", columns=columns)
    assert verify_joined(tmp_path / "merged.h5") == []
    with h5py.File(tmp_path / "merged.h5", locking=False) as file:
        assert file.userblock_size > 1 << 20
        assert file["column_199/values"][-8:].tobytes() == b"texttext"


# Damaged and foreign shards.


def damage(path, kind):
    content = path.read_bytes()
    middle = len(content) // 2
    match kind:
        case "user block":
            content = bytes([content[0] ^ 1]) + content[1:]
        case "data":
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        case "zeroed page":
            content = content[:4096] + bytes(4096) + content[8192:]
        case "truncation":
            content = content[:middle]
        case "appended":
            content += b"\0"
        case "empty":
            content = b""
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["user block", "data", "zeroed page", "truncation", "appended", "empty"])
def test_a_damaged_shard_is_left_out_and_named(tmp_path, kind):
    parts = write_parts(tmp_path, [0, 10, 20, 30], FAILED)
    damage(parts[1][1], kind)
    joined = join_parts(parts, tmp_path / "merged.h5")
    [(shard, reason)] = joined.damaged
    assert shard == 1
    assert reason
    assert joined.n_rows == 20
    assert len(joined.errors) == 3
    expected = [*range(10), *range(20, 30)]
    found = datasets(tmp_path / "merged.h5")
    assert found["index"].tolist() == expected
    assert found["score"][~np.isnan(found["score"])].tolist() == [n / 4 for n in expected if n not in FAILED]
    assert verify_joined(tmp_path / "merged.h5") == []


def test_the_newest_whole_file_of_a_shard_is_joined(tmp_path):
    """Of three files, the two newest are damaged."""
    parts = write_parts(tmp_path, [0, 10, 20])
    oldest = parts[1][1]
    newer = [Path(shutil.copy(oldest, tmp_path / name)) for name in ("00001.r2.h5", "00001.r1.h5")]
    for path in newer:
        os.truncate(path, 100)
    found = [parts[0], (1, newer[0], 10, 20, (newer[1], oldest))]
    joined = join_parts(found, tmp_path / "merged.h5", n_items=20)
    assert (joined.n_rows, joined.damaged, [path for path, _ in joined.aside]) == (20, (), newer)


def test_several_damaged_shards_are_all_named(tmp_path):
    parts = write_parts(tmp_path, list(range(0, 31, 3)))
    for shard, kind in [(1, "truncation"), (4, "data"), (5, "data"), (9, "user block")]:
        damage(parts[shard][1], kind)
    joined = join_parts(parts, tmp_path / "merged.h5")
    assert [shard for shard, _ in joined.damaged] == [1, 4, 5, 9]
    assert len(datasets(tmp_path / "merged.h5")["index"]) == joined.n_rows == 18


def test_when_every_shard_is_damaged_none_is_merged(tmp_path):
    parts = write_parts(tmp_path, [0, 5, 10])
    for _, path, *_ in parts:
        damage(path, "data")
    joined = join_parts(parts, tmp_path / "merged.h5")
    assert [shard for shard, _ in joined.damaged] == [0, 1]
    assert joined.n_rows == 0


def test_a_shard_of_another_plan_is_left_out_and_named(tmp_path):
    parts = write_parts(tmp_path, [0, 5, 10, 15, 20])
    write(parts[1][1], 5, 10, fingerprint="00" * 32)
    write(parts[2][1], 11, 16)
    rows = [{"score": np.array(1, "<f8")}] * 5
    write(parts[3][1], 15, columns={"score": Array("float64")}, rows=rows)
    joined = join_parts(parts, tmp_path / "merged.h5")
    reasons = dict(joined.damaged)
    assert list(reasons) == [1, 2, 3]
    assert "fingerprint" in reasons[1]
    assert "start" in reasons[2]
    assert "columns" in reasons[3]
    assert datasets(tmp_path / "merged.h5")["index"].tolist() == list(range(5))


@pytest.mark.parametrize(
    "chunks",
    [[[1, 2, 5]], [[0, 3, 2, 5]], [[0, 3], [2, 5]], [[0, 2, 4]], [[0, 2, 6]], [[5, 5]]],
    ids=["not from 0", "falling", "falling between chunks", "too few", "too many", "not from 0 and equal"],
)
def test_offsets_that_would_give_rows_the_values_of_others_are_damage(chunks):
    """Their checksum may be right: whoever wrote them may have been wrong."""
    writer = OffsetsWriter(lambda content, offset: None, position=0, base=0, n_values=5)
    for chunk in chunks:
        writer.write(np.array(chunk, OFFSET_DTYPE).tobytes())
    with pytest.raises(DamagedShardError, match="its offsets are not those of 5 values"):
        writer.check()


@pytest.mark.parametrize("small_bytes", [4 << 10, 64 << 10], ids=["streamed", "in memory"])
@pytest.mark.parametrize("name", ["shout", "lengths", "error"])
def test_a_shard_whose_offsets_mix_up_its_rows_is_left_out(tmp_path, monkeypatch, small_bytes, name):
    """The checksums are right: whoever wrote the file was wrong."""
    monkeypatch.setattr(sources, "_SMALL_BYTES", small_bytes)
    parts = write_parts(tmp_path, [0, 10, 20, 30], {2, 12, 13, 22})

    def fall(directory, content):
        path = f"{name}/offsets"
        [offset] = [offset for each, _, _, offset, *_ in directory["datasets"] if each == path]
        last = OFFSET_DTYPE.itemsize * 9
        content[offset + last : offset + last + 8] = content[offset + 8 : offset + 16]

    craft(parts[1][1], fall)
    joined = join_parts(parts, tmp_path / "merged.h5")
    assert [(shard, "its offsets are not those of" in why) for shard, why in joined.damaged] == [(1, True)]
    assert datasets(tmp_path / "merged.h5")["index"].tolist() == [*range(10), *range(20, 30)]


@pytest.mark.parametrize(
    "other",
    [{"x": Array("float32", (3, 2))}, {"x": Array("int32", (2, 3))}, {"y": Array("float32", (2, 3))}],
    ids=["shape", "dtype", "name"],
)
def test_a_shard_with_other_columns_of_the_same_size_is_left_out(tmp_path, other):
    columns = {"x": Array("float32", (2, 3))}
    parts = []
    for number, written in enumerate((columns, other)):
        [(name, column)] = written.items()
        rows = [{name: np.full(column.shape, index, column.dtype)} for index in range(5)]
        path = write(tmp_path / shard_name(number), 5 * number, columns=written, rows=rows)
        parts.append((number, path, 5 * number, 5 * number + 5))
    joined = join_parts(parts, tmp_path / "merged.h5", columns=columns)
    assert joined.damaged == ((1, "its datasets are not those of the plan's columns"),)


@pytest.mark.parametrize("is_in_shape", [False, True])
@pytest.mark.parametrize("name", ["score", "shout/offsets"])
def test_a_dataset_with_too_few_bytes_or_entries_moves_no_row_of_others(tmp_path, name, is_in_shape):
    parts = write_parts(tmp_path, [0, 10, 20, 30])

    def shorten(directory, content):
        [region] = [region for region in directory["datasets"] if region[0] == name]
        region[2][0] -= is_in_shape
        region[4] -= np.dtype(region[1]).itemsize

    craft(parts[1][1], shorten)
    joined = join_parts(parts, tmp_path / "merged.h5")
    assert [(shard, f"its dataset {name} has" in why) for shard, why in joined.damaged] == [(1, True)]
    join_parts([parts[0], parts[2]], tmp_path / "others.h5")
    assert_same_datasets(datasets(tmp_path / "merged.h5"), datasets(tmp_path / "others.h5"))


def test_a_merged_file_is_no_shard(tmp_path):
    parts = write_parts(tmp_path, [0, 5])
    join_parts(parts, tmp_path / "merged.h5")
    joined = join_parts([(0, tmp_path / "merged.h5", 0, 5)], tmp_path / "again.h5")
    assert "slurmgpu merged" in joined.damaged[0][1]
    assert "slurmgpu shard" in verify_joined(parts[0][1])[0]


# Verification of a merged file.


@pytest.fixture
def merged(tmp_path):
    join_parts(write_parts(tmp_path, [0, 4, 5, 10], FAILED), tmp_path / "merged.h5")
    return tmp_path / "merged.h5"


def test_any_flipped_bit_of_a_merged_file_is_found(merged):
    for offset in flips(merged, range(merged.stat().st_size)):
        assert verify_joined(merged), f"unnoticed at byte {offset}"
    assert verify_joined(merged) == []


def test_any_zeroed_page_of_a_merged_file_is_found(merged):
    content = merged.read_bytes()
    for offset in range(0, len(content), 128):
        before = content[offset : offset + 128]
        with changed(merged, offset, bytes(len(before))):
            assert verify_joined(merged) or not any(before), f"unnoticed at byte {offset}"


def test_a_merged_file_that_was_cut_off_or_appended_to_is_found(merged):
    content = merged.read_bytes()
    for changed_content in [content[:-1], content[:3000], content[:20], b"", content + b"\0"]:
        merged.write_bytes(changed_content)
        assert verify_joined(merged), f"unnoticed with {len(changed_content)} bytes"


def test_verification_names_the_dataset_and_the_shard(merged):
    with h5py.File(merged, locking=False) as file:
        score = file["score"].id.get_offset()
        shout = file["shout/values"].id.get_offset()
        in_shard_2 = file["shout/offsets"][7]
    with changed(merged, score + 4 * 4, b"\xff"), changed(merged, shout + in_shard_2, b"\xff"):
        assert verify_joined(merged) == [
            "the checksum of score of shard 1 differs",
            "the checksum of shout/values of shard 2 differs",
        ]


# Whole or not at all.


@pytest.fixture
def old(tmp_path):
    """A merged file of an earlier time, which a join that fails must leave alone."""

    def put(folder):
        (folder / "merged.h5").write_bytes(b"old")
        return folder / "merged.h5"

    return put


def test_a_full_disk_leaves_the_old_file_alone_and_nothing_beside_it(tmp_path, small_disk, old):  # noqa: F811
    parts = write_parts(tmp_path, [0, 2000, 4000])
    disk = small_disk(128 << 10)
    target = old(disk)
    with pytest.raises(OSError) as caught:
        join_parts(parts, target)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(disk) == ["merged.h5"]
    assert target.read_bytes() == b"old"


@pytest.mark.parametrize("limit", [500, by_night(5000), 50_000])
def test_a_file_that_cannot_grow_leaves_the_old_file_alone(tmp_path, old, limit):
    parts = write_parts(tmp_path, [0, 2000, 4000])
    target = old(tmp_path)
    before = "from tests.support.shard_files import join_parts"
    check_cannot_grow(limit, before, f"join_parts({parts!r}, Path({str(target)!r}))")
    assert sorted(os.listdir(tmp_path)) == ["00000.h5", "00001.h5", "merged.h5"]
    assert target.read_bytes() == b"old"


@pytest.mark.parametrize("numbers", [[errno.EOPNOTSUPP], [errno.ENOSYS], [errno.EINTR, 0]])
def test_a_file_system_that_reserves_no_space_is_no_error(tmp_path, monkeypatch, numbers):
    def fallocate(*given):
        ctypes.set_errno(number := numbers.pop(0))
        return -1 if number else 0

    monkeypatch.setattr(merged_file, "_LIBC", SimpleNamespace(fallocate=fallocate))
    assert join_parts(write_parts(tmp_path, [0, 10]), tmp_path / "merged.h5").n_rows == 10
    assert numbers == []
    assert verify_joined(tmp_path / "merged.h5") == []


def failing_fsyncs(monkeypatch, number, n_failures):
    """Let fsyncs of files fail, and lose a page that was written before, as a kernel that drops it; the failures."""
    real, failed = os.fsync, []

    def fsync(fd):
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        if not is_file or len(failed) == n_failures:
            return real(fd)
        failed.append(os.pwrite(fd, bytes(4096), os.fstat(fd).st_size - 4096))
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    return failed


@pytest.mark.parametrize("n_failures", [1, 3])
def test_a_join_whose_fsync_fails_writes_all_of_it_again(tmp_path, old, monkeypatch, n_failures):
    parts, target = write_parts(tmp_path, [0, 2000, 4000]), old(tmp_path)
    failed = failing_fsyncs(monkeypatch, errno.EIO, n_failures)
    join_parts(parts, target)
    assert len(failed) == n_failures
    assert verify_joined(target) == []


@pytest.mark.parametrize(("number", "n_expected"), [(errno.EIO, 4), (errno.ENOSPC, 1), (errno.EDQUOT, 1)])
def test_a_join_whose_fsync_goes_on_failing_leaves_the_old_file_alone(tmp_path, old, monkeypatch, number, n_expected):
    parts, target = write_parts(tmp_path, [0, 2000, 4000]), old(tmp_path)
    failed = failing_fsyncs(monkeypatch, number, 100)
    with pytest.raises(OSError) as caught:
        join_parts(parts, target)
    assert (caught.value.errno, len(failed)) == (number, n_expected)
    assert sorted(os.listdir(tmp_path)) == ["00000.h5", "00001.h5", "merged.h5"]
    assert target.read_bytes() == b"old"


def test_a_join_replaces_an_old_file_and_what_a_killed_join_left(tmp_path, old):
    parts = write_parts(tmp_path, [0, 10])
    target = old(tmp_path)
    (tmp_path / ".merged.h5.12345.partial").write_bytes(b"half")
    join_parts(parts, target)
    assert verify_joined(target) == []
    assert sorted(os.listdir(tmp_path)) == ["00000.h5", "merged.h5"]


def test_a_join_whose_own_file_is_removed_writes_it_anew(tmp_path):
    parts, removed = write_parts(tmp_path, [0, 10, 20]), []

    def check():
        for path in () if removed else tmp_path.glob(".*.partial"):
            removed.append(path)
            path.unlink()

    joined = join_parts(parts, tmp_path / "merged.h5", check=check)
    assert removed
    assert (joined.n_rows, joined.damaged) == (20, ())
    assert verify_joined(tmp_path / "merged.h5") == []
    assert sorted(os.listdir(tmp_path)) == ["00000.h5", "00001.h5", "merged.h5"]


def test_a_join_that_has_lost_its_file_with_its_lock_ends_as_who_lost_that(tmp_path):
    parts, removed = write_parts(tmp_path, [0, 10]), []

    def check():
        if removed:
            raise LockLostError("lost")
        for path in tmp_path.glob(".*.partial"):
            removed.append(path)
            path.unlink()

    with pytest.raises(LockLostError):
        join_parts(parts, tmp_path / "merged.h5", check=check)
    assert os.listdir(tmp_path) == ["00000.h5"]


def test_a_join_whose_own_file_is_always_removed_ends(tmp_path):
    def check():
        for path in tmp_path.glob(".*.partial"):
            path.unlink()

    with pytest.raises(FileNotFoundError):
        join_parts(write_parts(tmp_path, [0, 10]), tmp_path / "merged.h5", check=check)
    assert os.listdir(tmp_path) == ["00000.h5"]


@pytest.mark.parametrize("small_bytes", [4 << 10, 64 << 10])
def test_a_shard_that_is_replaced_by_a_larger_one_moves_no_row_of_others(tmp_path, monkeypatch, small_bytes):
    """It is measured before it is replaced, and copied after that."""
    monkeypatch.setattr(sources, "_KEPT_BYTES", 0)
    monkeypatch.setattr(sources, "_SMALL_BYTES", small_bytes)
    parts, copy_all = write_parts(tmp_path, [0, 10, 20, 30]), merged_file.MergedFile.copy_all

    def replaced(self, *given):
        write(parts[1][1], 10, 20, rows=rows_of(30, 40))
        return copy_all(self, *given)

    monkeypatch.setattr(merged_file.MergedFile, "copy_all", replaced)
    joined = join_parts(parts, tmp_path / "merged.h5")
    assert joined.damaged == ((1, "it was replaced while it was being joined"),)
    assert datasets(tmp_path / "merged.h5")["index"].tolist() == [*range(10), *range(20, 30)]
    assert verify_joined(tmp_path / "merged.h5") == []


def test_shards_that_come_during_the_join_are_joined_twice_and_then_left_to_the_next(tmp_path):
    parts = write_parts(tmp_path, [0, 10, 20, 30, 40])
    late = iter(parts[1:])
    more = {"review": lambda copied, damaged: [sources.Source(*next(late))]}
    assert join_parts(parts[:1], tmp_path / "merged.h5", **more).shards == {0, 1, 2}
    assert verify_joined(tmp_path / "merged.h5") == []


@pytest.mark.parametrize("do_all", ["map", "pool.map"])
def test_more_shards_than_a_thread_reads_at_a_time_are_all_joined(tmp_path, monkeypatch, do_all):
    for module in (sources, merged_file):
        monkeypatch.setattr(module, "CHUNK", 2)
    # Without threads all of the time is computed; with them none is.
    monkeypatch.setattr(sources.time, "thread_time", time.perf_counter if do_all == "map" else lambda: 0.0)
    joined = join_parts(write_parts(tmp_path, range(0, 50, 7)), tmp_path / "merged.h5")
    assert joined.n_rows == 49
    assert datasets(tmp_path / "merged.h5")["index"].tolist() == list(range(49))


def test_a_shard_that_vanishes_is_missing(tmp_path):
    parts = write_parts(tmp_path, [0, 10, 20])
    parts[1][1].unlink()
    joined = join_parts(parts, tmp_path / "merged.h5")
    assert (joined.n_rows, joined.shards, joined.damaged) == (10, {0}, ())
    assert sorted(os.listdir(tmp_path)) == ["00000.h5", "merged.h5"]


def test_memory_stays_bounded_however_large_the_shards_are(tmp_path):
    columns = {"x": Array("float16", (16 << 20,))}
    rows = [{"x": np.full(16 << 20, shard, "<f2")} for shard in range(2)]
    parts = [
        (
            shard,
            write(tmp_path / shard_name(shard), 4 * shard, columns=columns, rows=[row] * 4),
            4 * shard,
            4 * shard + 4,
        )
        for shard, row in enumerate(rows)
    ]
    code = f"""
import sys
from pathlib import Path, PosixPath
sys.path[:0] = {sys.path!r}
from slurmgpu.shards.columns import Array
from slurmgpu.merge.join import join
from slurmgpu.merge.sources import Source
from tests.support.shard_files import peak_memory_bytes
target = Path({str(tmp_path / "merged.h5")!r})
columns = {{"x": Array("float16", (16 << 20,))}}
parts = [Source(*part) for part in {parts!r}]
join(parts, columns, fingerprints=[{FINGERPRINT!r}], n_items=8, target=target, attributes={{}})
print(peak_memory_bytes())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (tmp_path / "merged.h5").stat().st_size > 256 << 20
    assert int(done.stdout) < 128 << 20
