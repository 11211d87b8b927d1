"""Shards: what is in them, that they appear whole or not at all, and that no damage goes unnoticed."""

import errno
import json
import os
import shutil
import subprocess
import threading
import time
from dataclasses import asdict

import h5py
import numpy as np
import pytest
from h5py import h5o
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from slurmgpu.errors import ItemError
from slurmgpu.shards import hdf5_layout, shard_file
from slurmgpu.shards.columns import Array, Ragged, Text, columns_from_json, convert_row
from slurmgpu.shards.names import shard_name
from slurmgpu.shards.shard_file import (
    ForeignShardError,
    publish,
    read_directory,
    verify_shard,
    write_shard,
)
from slurmgpu.shards.userblock import DamagedShardError
from tests.support.failing import Failing
from tests.support.limited import check_cannot_grow
from tests.support.shard_files import (
    COLUMNS,
    FINGERPRINT,
    MADE_BY,
    assert_same_datasets,
    changed,
    datasets,
    flips,
    plain_row,
    rows_of,
    small_disk,  # noqa: F401
    write,
)

NUMBERS = ["bool", "int8", "uint8", "int16", "int32", "int64", "uint64"]
NUMBERS += ["float16", "float32", "float64", "complex64", "complex128"]


def texts(found, name):
    bounds = found[f"{name}/offsets"]
    content = found[f"{name}/values"].tobytes()
    return [content[bounds[row] : bounds[row + 1]].decode() for row in range(len(bounds) - 1)]


def lists(found, name):
    return np.split(found[f"{name}/values"], found[f"{name}/offsets"][1:-1])


def test_the_names_of_shards_sort_and_grow():
    assert [shard_name(42), shard_name(123456)] == ["00042.h5", "123456.h5"]


@pytest.mark.parametrize("dtype", [*NUMBERS, "S5"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (2, 0, 3)])
def test_plain_h5py_reads_an_array_column_with_its_own_dtype(tmp_path, dtype, shape):
    columns = {"x": Array(dtype, shape)}
    values = (np.arange(4 * np.prod(shape, dtype=int)).reshape(4, *shape) % 2).astype(dtype)
    rows = [convert_row(columns, {"x": value}) for value in values]
    found = datasets(write(tmp_path / "a.h5", columns=columns, rows=rows))
    np.testing.assert_array_equal(found["x"], values, strict=True)


def test_plain_h5py_reads_every_kind_of_column(tmp_path):
    found = datasets(write(tmp_path / "a.h5", 20, 30))
    expected = [plain_row(index) for index in range(20, 30)]
    assert found["index"].tolist() == list(range(20, 30))
    for name in ("score", "logits", "ok", "phase", "tag"):
        assert found[name].tolist() == np.array([row[name] for row in expected]).tolist(), name
    assert found["nothing"].shape == (10, 0)
    assert texts(found, "shout") == [row["shout"] for row in expected]
    assert texts(found, "silence") == [""] * 10
    assert [values.tolist() for values in lists(found, "lengths")] == [list(row["lengths"]) for row in expected]
    assert [values.tolist() for values in lists(found, "phases")] == [row["phases"] for row in expected]
    assert texts(found, "error") == [""] * 10


def values_of(dtype):
    return arrays.from_dtype(np.dtype(dtype))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n_rows=st.integers(0, 5), start=st.integers(0, 2**40))
def test_whatever_rows_are_written_are_read_again(tmp_path_factory, data, n_rows, start):
    dtype, ragged_dtype = data.draw(st.sampled_from(NUMBERS)), data.draw(st.sampled_from(NUMBERS))
    shape = data.draw(arrays.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3))
    columns = {"x": Array(dtype, shape), "t": Text(), "r": Ragged(ragged_dtype)}
    plain = [
        {
            "x": data.draw(arrays.arrays(dtype, shape)),
            "t": data.draw(st.text(max_size=5)),
            "r": data.draw(arrays.arrays(ragged_dtype, st.integers(0, 3))),
        }
        for _ in range(n_rows)
    ]
    path = tmp_path_factory.getbasetemp() / "any.h5"
    write(path, start, columns=columns, rows=[convert_row(columns, row) for row in plain])
    assert verify_shard(path, fingerprint=FINGERPRINT, start=start, stop=start + n_rows).n_rows == n_rows
    found = datasets(path)
    assert found["index"].tolist() == list(range(start, start + n_rows))
    assert found["x"].tobytes() == b"".join(row["x"].tobytes() for row in plain)
    assert texts(found, "t") == [row["t"] for row in plain]
    assert found["r/values"].tobytes() == b"".join(row["r"].tobytes() for row in plain)
    assert np.diff(found["r/offsets"]).tolist() == [len(row["r"]) for row in plain]


def test_the_attributes_say_what_the_file_is(tmp_path):
    with h5py.File(write(tmp_path / "a.h5", 20, 30), locking=False) as file:
        found = dict(file.attrs)
    columns = found.pop("columns")
    assert found == {
        "format": b"slurmgpu shard",
        "version": 1,
        "fingerprint": FINGERPRINT.encode(),
        "start": 20,
        "stop": 30,
    }
    assert columns_from_json(json.loads(columns)) == COLUMNS


def test_every_dataset_is_contiguous_unfiltered_and_lies_where_the_directory_says(tmp_path):
    path = write(tmp_path / "a.h5")
    with h5py.File(path, locking=False) as file:
        for region in read_directory(path).datasets:
            dataset = file[region.path]
            assert (dataset.chunks, dataset.compression) == (None, None)
            assert (dataset.dtype, dataset.shape) == (np.dtype(region.dtype), region.shape)
            if region.n_bytes:
                assert dataset.id.get_offset() == region.offset
                assert region.offset % 8 == 0


@pytest.mark.skipif(not shutil.which("h5dump"), reason="h5dump (Debian: hdf5-tools) is not installed")
def test_h5dump_reads_every_dataset(tmp_path):
    path = write(tmp_path / "a.h5", failed=[3])
    done = subprocess.run(["h5dump", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("index", "score", "logits", "ok", "phase", "tag", "shout", "lengths", "error"):
        assert f'"{name}"' in done.stdout


def test_a_failed_item_has_its_error_and_a_blank_row(tmp_path):
    path = write(tmp_path / "a.h5", failed=[3, 4])
    found = datasets(path)
    expected = [f"item {index} is schlecht ⚠" if index in (3, 4) else "" for index in range(10)]
    assert texts(found, "error") == expected
    assert np.isnan(found["score"][3:5]).all()
    assert np.isnan(found["logits"][3:5]).all()
    assert not np.isnan(found["score"][5:]).any()
    assert found["ok"][4] == False  # noqa: E712
    assert texts(found, "shout")[3] == ""
    assert read_directory(path).n_errors == 2


@pytest.mark.parametrize(
    ("error", "text"),
    [(ItemError(), "ItemError"), (ItemError(""), "ItemError"), (ItemError("\udcff.txt"), "\\udcff.txt")],
)
def test_a_failed_item_always_has_a_text_that_utf8_can_hold(tmp_path, error, text):
    found = datasets(write(tmp_path / "a.h5", rows=[error]))
    assert texts(found, "error") == [text]


def test_the_datasets_do_not_depend_on_who_made_them_and_the_file_on_nothing_else(tmp_path):
    first = write(tmp_path / "a.h5", notes={})
    second = int(time.time())
    while int(time.time()) == second:  # HDF5's timestamps have whole seconds
        time.sleep(0.01)
    again = write(tmp_path / "b.h5", notes={})
    other = write(tmp_path / "c.h5", notes={"oom": "batch of 4 ⚠" * 500})
    assert first.read_bytes() == again.read_bytes()
    assert_same_datasets(datasets(other), datasets(first))


def test_no_object_of_a_shard_has_a_time(tmp_path):
    found = {}
    with h5py.File(write(tmp_path / "a.h5")) as file:
        file.visititems(lambda name, item: found.update({name: h5o.get_info(item.id)}))
    assert {"score", "shout", "shout/values"} <= found.keys()
    assert {name for name, info in found.items() if info.btime or info.ctime or info.mtime or info.atime} == set()


def test_a_shard_has_the_same_bytes_whatever_was_written_before(tmp_path):
    rows = rows_of(0, 4)
    first, second, again = (write(tmp_path / f"{n}.h5", start, rows=rows) for n, start in enumerate((5, 2**40, 5)))
    write(tmp_path / "other.h5", 0, 9)
    alone = write(tmp_path / "alone.h5", 2**40, rows=rows)
    assert first.read_bytes() == again.read_bytes() != second.read_bytes() == alone.read_bytes()
    with h5py.File(second) as file:
        assert (file.attrs["start"], file.attrs["stop"]) == (2**40, 2**40 + 4)


@pytest.mark.parametrize("others", [{"columns": {"x": Array("int64")}, "rows": [{"x": np.int64(1)}] * 10}, {}])
def test_an_interrupt_while_libhdf5_writes_costs_no_later_shard(tmp_path, monkeypatch, others):
    n_writes, fails_at = 0, -1

    def interrupted(memory, content):
        nonlocal n_writes
        n_writes += 1
        if n_writes == fails_at:
            raise KeyboardInterrupt
        return original(memory, content)

    original = hdf5_layout._Memory.write
    monkeypatch.setattr(hdf5_layout._Memory, "write", interrupted)
    write(tmp_path / "first.h5", **others)
    n_writes = 0
    expected = write(tmp_path / "whole.h5").read_bytes()
    last = n_writes
    write(tmp_path / "as first.h5", **others)
    n_writes, fails_at = 0, last
    with pytest.raises((KeyboardInterrupt, RuntimeError, SystemError)):  # it comes through libhdf5
        write(tmp_path / "interrupted.h5")
    assert write(tmp_path / "after.h5").read_bytes() == expected


def test_the_directory_says_what_the_shard_holds(tmp_path):
    path = write(tmp_path / "a.h5", 20, 30, failed=[21], notes={"why": "größer"})
    directory = verify_shard(path, fingerprint=FINGERPRINT, start=20, stop=30)
    assert directory == read_directory(path)
    assert (directory.start, directory.stop, directory.n_rows, directory.n_errors) == (20, 30, 10, 1)
    assert directory.notes == {"why": "größer", "not_finite": {}}
    assert directory.made_by == MADE_BY
    assert directory.file_size == path.stat().st_size
    assert asdict(directory)["fingerprint"] == FINGERPRINT


@pytest.mark.parametrize("n_columns", [100, 1500])
def test_the_user_block_and_the_attributes_grow_with_the_columns(tmp_path, n_columns):
    columns = {f"column_{number}": Text() if number % 2 else Array("int32") for number in range(n_columns)}
    row = convert_row(columns, {name: "x" if isinstance(columns[name], Text) else 1 for name in columns})
    path = write(tmp_path / "a.h5", columns=columns, rows=[row, row])
    directory = verify_shard(path)
    assert directory.userblock_size > 4096
    assert read_directory(path) == directory
    assert datasets(path)["column_98"].tolist() == [1, 1]


def test_rows_larger_than_the_buffers_are_written_and_verified(tmp_path):
    columns = {"x": Array("uint8", (3 << 20,)), "t": Text()}
    rows = [
        {"x": np.random.default_rng(seed).integers(0, 256, 3 << 20, np.uint8), "t": bytes([97 + seed]) * (2 << 20)}
        for seed in range(3)
    ]
    path = write(tmp_path / "a.h5", columns=columns, rows=rows)
    found = datasets(path)
    assert verify_shard(path).file_size == path.stat().st_size
    assert all((found["x"][row] == rows[row]["x"]).all() for row in range(3))
    assert texts(found, "t") == [row["t"].decode() for row in rows]
    for offset in flips(path, range(0, path.stat().st_size, 499_979)):
        with pytest.raises(DamagedShardError):
            pytest.fail(f"unnoticed at byte {offset}: {verify_shard(path)}")


def test_a_row_that_was_not_converted_is_a_bug_that_leaves_no_file(tmp_path):
    path = tmp_path / "a.h5"
    with pytest.raises(ValueError, match="x: 8 bytes, expected 4"):
        write(path, columns={"x": Array("f4")}, rows=[{"x": np.zeros((), "f8")}])
    assert not path.exists()


# Damage. What is flipped, zeroed, cut off or appended must be found, wherever it is.


def test_any_flipped_bit_is_found(tmp_path):
    path = write(tmp_path / "a.h5", failed=[3])
    for offset in flips(path, range(path.stat().st_size)):
        with pytest.raises(DamagedShardError):
            pytest.fail(f"unnoticed at byte {offset}: {verify_shard(path)}")
    assert verify_shard(path).n_errors == 1


@pytest.mark.parametrize("n_bytes", [64, 512, 4096])
def test_any_zeroed_page_is_found(tmp_path, n_bytes):
    path = write(tmp_path / "a.h5", 0, 300)
    content = path.read_bytes()
    n_damaged = 0
    for offset in range(0, len(content), n_bytes):
        zeroes = bytes(len(content[offset : offset + n_bytes]))
        if zeroes == content[offset : offset + n_bytes]:
            continue
        n_damaged += 1
        with changed(path, offset, zeroes), pytest.raises(DamagedShardError):
            pytest.fail(f"unnoticed at byte {offset}: {verify_shard(path)}")
    assert n_damaged > 5


def test_a_shard_that_was_cut_off_anywhere_is_found_by_its_directory_already(tmp_path):
    path = write(tmp_path / "a.h5")
    whole = path.read_bytes()
    for size in [*range(0, len(whole), 61), len(whole) - 1]:
        path.write_bytes(whole[:size])
        for check in (read_directory, verify_shard):
            with pytest.raises(DamagedShardError, match=r"bytes|sizes"):
                pytest.fail(f"unnoticed with {size} bytes: {check(path)}")


@pytest.mark.parametrize("tail", [b"\0", b"x" * 5000])
def test_a_shard_with_bytes_appended_is_damaged(tmp_path, tail):
    path = write(tmp_path / "a.h5")
    path.write_bytes(path.read_bytes() + tail)
    with pytest.raises(DamagedShardError, match="bytes, but had"):
        read_directory(path)


def test_the_damaged_dataset_is_named(tmp_path):
    path = write(tmp_path / "a.h5")
    region = next(region for region in read_directory(path).datasets if region.path == "shout/values")
    with changed(path, region.offset, b"\xff"), pytest.raises(DamagedShardError, match=r"checksum of shout/values"):
        verify_shard(path)


@pytest.mark.parametrize("content", [b"", b"not HDF5 at all\n" * 1000, b"\x89HDF\r\n\x1a\n" + bytes(5000)])
def test_what_is_no_shard_is_damaged(tmp_path, content):
    (tmp_path / "a.h5").write_bytes(content)
    with pytest.raises(DamagedShardError):
        read_directory(tmp_path / "a.h5")


def test_what_is_no_file_is_damaged(tmp_path):
    with pytest.raises(DamagedShardError, match="it is a folder, not a file"):
        read_directory(tmp_path)


@pytest.mark.parametrize(
    "asked",
    [{"fingerprint": "00" * 32}, {"start": 1}, {"stop": 11}, {"fingerprint": FINGERPRINT, "start": 0, "stop": 9}],
)
def test_a_shard_of_another_plan_or_range_is_foreign(tmp_path, asked):
    path = write(tmp_path / "a.h5")
    with pytest.raises(ForeignShardError, match="another plan"):
        verify_shard(path, **asked)
    assert verify_shard(path, fingerprint=FINGERPRINT, start=0, stop=10)


# Publication.


def test_the_first_shard_published_wins(tmp_path):
    target = tmp_path / "00000.h5"
    first, second = write(tmp_path / "1.partial"), write(tmp_path / "2.partial", notes={"attempt": 2})
    whole = first.read_bytes()
    assert publish(first, target)
    assert not publish(second, target)
    assert target.read_bytes() == whole
    assert os.listdir(tmp_path) == ["00000.h5"]


def test_of_many_that_publish_at_once_one_wins(tmp_path):
    target = tmp_path / "00000.h5"
    partials = [tmp_path / f"{number}.partial" for number in range(16)]
    for partial in partials:
        partial.write_text(partial.name)
    start, won = threading.Barrier(len(partials)), []

    def compete(partial):
        start.wait()
        if publish(partial, target):
            won.append(partial.name)

    threads = [threading.Thread(target=compete, args=[partial]) for partial in partials]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [target.read_text()]
    assert os.listdir(tmp_path) == ["00000.h5"]


def test_a_link_that_was_made_although_nfs_says_it_existed_is_ours(tmp_path):
    partial, target = write(tmp_path / "1.partial"), tmp_path / "00000.h5"
    os.link(partial, target)
    assert publish(partial, target)
    assert os.listdir(tmp_path) == ["00000.h5"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV])
def test_publication_works_on_a_file_system_without_hard_links(tmp_path, monkeypatch, code):
    def refuse(*_):  # stands in for FAT, and for some of FUSE's, which cannot be mounted everywhere
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    test_the_first_shard_published_wins(tmp_path)


@pytest.mark.parametrize("function", ["link", "stat"])
@pytest.mark.parametrize("lost", [False, True])
def test_a_shard_is_published_though_linking_fails_or_its_reply_is_lost(tmp_path, monkeypatch, function, lost):
    partial, target = write(tmp_path / "1.partial"), tmp_path / "00000.h5"
    failing = Failing(monkeypatch)
    if function == "stat":  # how it is known whose link it is that exists
        os.link(partial, target)
    failing(function, errno.EIO, lost=lost and function == "link", times=2)
    assert publish(partial, target)
    assert failing.n_failed >= 1
    assert os.listdir(tmp_path) == ["00000.h5"]


def test_a_shard_is_published_without_hard_links_though_the_reply_to_its_rename_is_lost(tmp_path, monkeypatch):
    partial, target = write(tmp_path / "1.partial"), tmp_path / "00000.h5"
    failing = Failing(monkeypatch)
    failing("link", errno.EPERM, times=2)
    failing("replace", errno.ETIMEDOUT, lost=True)
    assert publish(partial, target)
    assert failing.n_failed == 2
    assert os.listdir(tmp_path) == ["00000.h5"]


def test_nothing_that_follows_the_link_fails_a_task(tmp_path, monkeypatch, caplog):
    partial, target = write(tmp_path / "1.partial"), tmp_path / "00000.h5"
    monkeypatch.setattr(shard_file, "FINISHING_PATIENCE_S", 0.0)
    failing = Failing(monkeypatch)
    failing("unlink", errno.EACCES)
    failing("open", errno.EACCES, of=tmp_path.name)  # the folder's, to sync it
    assert publish(partial, target)
    verify_shard(target)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "00000.h5 is published, but cleaning up failed",
        f"shards in {tmp_path} are published, but not synced",
    ]


def test_an_error_that_linking_has_not_foreseen_is_raised(tmp_path):
    partial = write(tmp_path / "1.partial")
    with pytest.raises(FileNotFoundError):
        publish(partial, tmp_path / "missing" / "00000.h5")
    assert partial.exists()


# Full disks.


def test_a_full_disk_is_an_oserror_and_leaves_no_file(small_disk):  # noqa: F811
    disk = small_disk(64 << 10)
    write(disk / "fits.h5")
    with pytest.raises(OSError) as caught:
        write(disk / "large.h5", 0, 2000)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(disk) == ["fits.h5"]
    verify_shard(disk / "fits.h5")


@pytest.mark.parametrize("limit", [100, 3000, 9000, 12000])
def test_a_file_that_cannot_grow_is_an_oserror_and_leaves_no_file(tmp_path, limit):
    """Wherever in the file the limit lies."""
    path = tmp_path / "a.h5"
    before = f"from tests.support.shard_files import write; write(Path({str(path)!r}))"
    check_cannot_grow(limit, before, f"write(Path({str(path)!r}).with_name('b.h5'))")
    assert path.stat().st_size > limit
    assert os.listdir(tmp_path) == ["a.h5"]


def test_an_interrupted_write_leaves_no_file(tmp_path, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path / "a.h5", COLUMNS, start=0, rows=rows_of(0, 3), fingerprint="", notes={}, made_by={})
    assert os.listdir(tmp_path) == []
