"""Reading results: NumPy's indexing on every kind of column, errors by item, pandas and Arrow."""

import errno
import json
import multiprocessing
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmgpu import results
from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.results import stored, verifier, views
from slurmgpu.results.published import FileRows
from slurmgpu.shards.columns import Array, Ragged, Text, convert_row
from slurmgpu.shards.userblock import Reader, read_userblock
from slurmgpu.util.shared_files import is_transient
from tests.support.shard_files import (
    COLUMNS,
    FINGERPRINT,
    changed,
    flips,
    join_parts,
    one_bit_everywhere,
    plain_row,
    write,
    write_parts,
)

FAILED = {2, 7, 8}
N_ROWS = 12
NAMES = ["index", *COLUMNS, "error"]
DOCS = Path(__file__).parents[2] / "docs" / "reference" / "hdf5.md"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    join_parts(write_parts(folder, [0, 4, 5, N_ROWS], FAILED), folder / "merged.h5", attributes={"run": "judge"})
    return folder / "merged.h5"


@pytest.fixture(scope="module")
def merged(path):
    with results.open(path) as opened:
        yield opened


def expected(name):
    """The column's values as a list, as they were given to the workload's rows."""
    if name in ("index", "error"):
        texts = [f"item {index} is schlecht ⚠" if index in FAILED else "" for index in range(N_ROWS)]
        return texts if name == "error" else list(range(N_ROWS))
    column = COLUMNS[name]
    blank = column.blank()
    if isinstance(blank, bytes):
        blank = None if name == "told" else blank.decode()
    return [blank if index in FAILED else plain_row(index)[name] for index in range(N_ROWS)]


def assert_same(found, wanted, name):
    if isinstance(wanted, str | dict) or wanted is None:
        assert found == wanted
    elif isinstance(found, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other, name)
    else:
        dtype = np.dtype("int64") if name == "index" else COLUMNS[name].dtype
        np.testing.assert_array_equal(found, np.array(wanted, dtype).reshape(found.shape))
        assert found.dtype.kind == dtype.kind
        assert not isinstance(found, np.ndarray) or found.dtype == dtype


def test_a_file_that_is_shown_says_what_it_has(path):
    with results.open(path) as opened:
        assert repr(opened) == f"<12 rows of {', '.join(COLUMNS)} in {path}>"
    assert repr(opened).startswith("<12 rows")


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_column_has_numpys_slices(merged, name):
    for key in [
        np.s_[:],
        np.s_[3:9],
        np.s_[-4:],
        np.s_[9:3],
        np.s_[5:5],
        np.s_[::3],
        np.s_[::-2],
        np.s_[8:2:-1],
        np.s_[20:],
    ]:
        assert_same(merged[name][key], expected(name)[key], name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", [0, 5, N_ROWS - 1, -1, -N_ROWS, np.int32(3)])
def test_every_kind_of_column_is_indexed_by_an_integer(merged, name, number):
    assert_same(merged[name][number], expected(name)[number], name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [[0], [5, 1, 1, -1], np.array([11, 3]), []])
def test_every_kind_of_column_is_indexed_by_integers(merged, name, rows):
    found = merged[name][np.array(rows, int)]
    assert_same(found, [expected(name)[row] for row in rows], name)
    assert_same(merged[name][np.array(rows, int).tolist() or slice(0)], [expected(name)[row] for row in rows], name)


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_column_is_indexed_by_a_mask(merged, name):
    mask = merged["ok"][:]
    assert mask.any()
    assert not mask.all()
    assert_same(merged[name][mask], [value for value, ok in zip(expected(name), mask, strict=True) if ok], name)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"nothing"}))  # in which NumPy 1 finds any row
@pytest.mark.parametrize("number", [N_ROWS, -N_ROWS - 1, [0, N_ROWS], np.ones(3, bool)])
def test_a_row_that_there_is_not_is_an_index_error(merged, name, number):
    with pytest.raises(IndexError):
        merged[name][number]


@pytest.mark.parametrize("key", ["3", 1.5, [1.5], [[0, 1]]])
def test_texts_have_no_rows_by_anything_else(merged, key):
    with pytest.raises(IndexError, match="an integer, a slice, integers or a mask"):
        merged["shout"][key]


@given(start=st.integers(-15, 15), stop=st.integers(-15, 15), step=st.integers(-4, 4).filter(bool))
def test_any_slice_of_texts_is_the_slice_of_their_list(path, start, stop, step):
    with results.open(path) as opened:
        assert opened["shout"][start:stop:step] == expected("shout")[start:stop:step]


def test_an_array_column_has_the_further_dimensions_of_numpy_too(merged):
    assert merged["logits"].shape == (N_ROWS, 2, 3)
    assert merged["logits"][3:5, 1].tolist() == [[6, 7, 8], [7, 8, 9]]
    assert merged["logits"][4, 1, 2] == 9
    np.testing.assert_array_equal(np.asarray(merged["index"]), range(N_ROWS))
    assert np.asarray(merged["index"], dtype="f4").dtype == np.float32


def test_what_was_read_may_be_changed_and_changes_nothing_else(path):
    with results.open(path) as opened:
        opened["score"][:][:] = 7
        opened["logits"][3][:] = 7
        opened["lengths"][3][:] = 7
        assert opened["score"][1] == 0.25
        assert opened["logits"][3][0, 0] == 3
        assert opened["lengths"][3].tolist() == [0, 1, 2]


def test_several_lists_are_views_of_one_array(merged):
    first, second = merged["lengths"][3:5]
    assert first.base is second.base is not None


@pytest.mark.parametrize(
    "key",
    [
        *((), ..., (..., 1), None, (None, 3), (3, None), (3, [0, 1], 2), np.int64(3), np.array(3), -1, True),
        *([4, -1, 4, 0], ([4, -1], 1), ([4, 1], slice(None), 2), ([4, 1], [0, 1]), [[4, 1], [0, 2]], ([3, 1], None)),
        *(slice(9, 2, -3), (slice(1, 11, 4), [1, 0]), slice(5, 2), np.zeros((N_ROWS, 2), bool), np.arange(12) % 3 == 0),
        *([], (np.arange(12) > 8, slice(None, None, 2)), ([True, False] * 6, 0), np.array([11, 0], np.uint8)),
    ],
)
def test_an_array_column_takes_every_key_of_numpy(merged, key):
    found, whole = merged["logits"][key], merged["logits"][:]
    np.testing.assert_array_equal(found, whole[key])
    assert type(found) is type(whole[key])
    assert found.dtype == whole.dtype


def test_rows_far_apart_are_read_in_their_order(tmp_path, monkeypatch):
    for module in (stored, views):
        monkeypatch.setattr(module, "NEAR_BYTES", 16)
        monkeypatch.setattr(module, "PART_BYTES", 24)
    path = write(tmp_path / "a.h5", 0, 50)
    with results.open(path) as opened:
        for rows in ([49, 0, 3, 3, 20, 21, 22, 1], [5], list(range(50)), list(range(49, -1, -7))):
            assert opened["index"][rows].tolist() == rows
            assert opened["logits"][rows].tolist() == opened["logits"][:][rows].tolist()
            for name in (*opened.columns, "error"):
                each = list(opened[name])
                assert repr(list(opened[name][rows])) == repr([each[row] for row in rows])


@pytest.mark.parametrize("rows", [np.array([-3, 100, 0], np.int8), np.array([255, 7], np.uint8)])
def test_integers_whose_type_cannot_hold_the_number_of_rows_choose_rows(tmp_path, rows):
    with results.open(write(tmp_path / "a.h5", 0, 300)) as opened:
        for name in ("index", "logits", "shout"):
            assert np.array_equal(opened[name][rows], opened[name][rows.tolist()])
        assert opened["index"][rows].tolist() == np.arange(300)[rows].tolist()


def test_columns_iterate_and_have_a_length(merged):
    np.testing.assert_array_equal(list(merged["logits"]), merged["logits"][:])
    assert list(merged["shout"]) == expected("shout")
    assert len(merged["shout"]) == len(merged["score"]) == len(merged) == N_ROWS


def test_the_file_says_what_it_holds(merged):
    assert list(merged.columns.items()) == list(COLUMNS.items())
    assert merged.index.tolist() == list(range(N_ROWS))
    assert merged.errors == {index: f"item {index} is schlecht ⚠" for index in FAILED}
    assert merged.complete
    assert merged.attributes["run"] == "judge"
    assert merged.attributes["fingerprint"] == FINGERPRINT


def test_errors_go_by_the_items_index_and_not_by_the_row(tmp_path):
    _, second, third = write_parts(tmp_path, [0, 4, 8, 12], FAILED)
    join_parts([second, third], tmp_path / "merged.h5", n_items=12)
    with results.open(tmp_path / "merged.h5") as opened:
        assert not opened.complete
        assert opened.index.tolist() == list(range(4, 12))
        assert opened.errors == {index: f"item {index} is schlecht ⚠" for index in (7, 8)}


def test_a_row_is_a_mapping_with_pythons_own_numbers(merged):
    row = merged.row(5)
    assert list(row) == ["index", *COLUMNS]
    assert [row[name] for name in ("index", "score", "ok", "phase", "tag")] == [5, 1.25, False, 5 - 1j, b"ab"]
    assert [type(row[name]) for name in ("index", "score", "ok", "phase", "tag")] == [int, float, bool, complex, bytes]
    assert row["shout"] == "Größe ⚠ "
    assert row["logits"].tolist() == [[5, 6, 7], [8, 9, 10]]
    assert merged.row(-1)["index"] == N_ROWS - 1
    with pytest.raises(IndexError):
        merged.row(N_ROWS)


def test_rows_are_those_of_a_slice(merged):
    assert [row["index"] for row in merged.rows()] == list(range(N_ROWS))
    assert [row["shout"] for row in merged.rows(3, 6)] == expected("shout")[3:6]
    assert merged.rows(6, 3) == []


def test_a_shard_is_read_like_a_merged_file(tmp_path):
    with results.open(str(write(tmp_path / "a.h5", 20, 30, failed=[21]))) as opened:
        assert opened["shout"][3] == plain_row(23)["shout"]
        assert opened.errors == {21: "item 21 is schlecht ⚠"}
        assert not opened.complete


def test_a_file_without_rows_is_read(tmp_path):
    join_parts([], tmp_path / "merged.h5", n_items=5)
    with results.open(tmp_path / "merged.h5") as opened:
        assert (len(opened), opened.errors, opened.complete) == (0, {}, False)
        assert opened["shout"][:] == opened.rows() == []
        assert opened["logits"][:].shape == (0, 2, 3)


def test_only_what_is_asked_for_is_read(tmp_path):
    columns = {"x": Array("uint8", (1 << 20,))}
    path = write(tmp_path / "a.h5", columns=columns, rows=[{"x": np.ones(1 << 20, "u1")}] * 64)

    def read_bytes():
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))

    with results.open(path) as opened:
        before = read_bytes()
        assert opened["x"].shape == (64, 1 << 20)
        assert opened["x"][40, :10].tolist() == [1] * 10
        assert opened["x"][[7, 41], 0].tolist() == [1, 1]
        assert read_bytes() - before < 4 << 20
        assert opened["x"][:].all()
        assert read_bytes() - before > 60 << 20


def _read_in_a_child(opened, queue):
    queue.put(opened["shout"][3])


def test_an_open_file_survives_a_fork(merged):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_read_in_a_child, args=(merged, queue))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert queue.get() == plain_row(3)["shout"]


def test_an_open_file_is_not_pickled(merged):
    with pytest.raises(TypeError, match=r"cannot be pickled; open .*merged\.h5 in each process"):
        pickle.dumps(merged)


CUT = """
import os, sys
from pathlib import Path
from slurmgpu import results
from slurmgpu.errors import SlurmGPUError
from slurmgpu.results.published import FileRows

for path in sys.argv[1:]:
    how = Path(path).stem
    with results.open(path, verify=how != "check") as opened:
        column, blocks = opened["logits"], FileRows(opened).blocks(n_bytes=1)
        next(blocks).rows()
        os.truncate(path, 4096)
        try:
            {
                "check": lambda: opened.check_rows(0, len(opened)),
                "blocks": lambda: [block.rows() for block in blocks],
                "rows": opened.rows,
                "column": lambda: column[:],
                "text": lambda: opened["shout"][3000],
                "arrow": opened.to_arrow,
            }[how]()
        except SlurmGPUError as error:
            print(error)
"""


def test_a_file_that_is_cut_while_it_is_read_gets_a_sentence_and_no_signal(tmp_path):
    pytest.importorskip("pyarrow")
    merged = tmp_path / "merged.h5"
    join_parts(write_parts(tmp_path, [0, 2000, 4000]), merged)
    paths = [tmp_path / f"{how}.h5" for how in ("check", "blocks", "rows", "column", "text", "arrow")]
    for path in paths:
        shutil.copy(merged, path)
    done = subprocess.run(
        [sys.executable, "-c", CUT, *paths], capture_output=True, text=True, env={"PYTHONPATH": str(DOCS.parents[2])}
    )
    assert (done.returncode, done.stderr) == (0, "")
    for path, said in zip(paths, done.stdout.splitlines(), strict=True):
        assert re.fullmatch(
            rf"{path} was truncated while it was open: it ends before byte \d+\. `slurmgpu merge RUN` rewrites"
            r" merged\.h5 from the run's shards\.",
            said,
        )


@pytest.fixture
def failing_reads(monkeypatch):
    """A list of errors that the next reads meet."""
    errors, preadv = [], os.preadv

    def read(*arguments):
        if errors:
            raise OSError(errors.pop(0), "as told")
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    return errors


def test_reads_that_fail_for_a_moment_are_tried_again(path, failing_reads):
    with results.open(path) as opened:
        failing_reads += [errno.ESTALE, errno.EIO]
        assert opened["shout"][:] == expected("shout")
        assert not failing_reads
        opened.check_rows(0, N_ROWS)


def test_a_file_that_was_replaced_and_is_stale_is_not_mixed_with_the_new_one(tmp_path, path, failing_reads):
    copy = tmp_path / "merged.h5"
    copy.write_bytes(path.read_bytes())
    with results.open(copy) as opened:
        (tmp_path / "new").write_bytes(path.read_bytes())
        (tmp_path / "new").rename(copy)
        assert opened["shout"][:] == expected("shout")
        failing_reads += [errno.ESTALE]
        with pytest.raises(SlurmGPUError, match=r"merged\.h5 was replaced while it was open\.") as raised:
            opened.check_rows(0, N_ROWS)
        assert is_transient(raised.value.__cause__)


def test_reads_that_fail_for_good_get_a_sentence(path, failing_reads):
    with results.open(path) as opened:
        failing_reads += [errno.ENXIO]
        with pytest.raises(SlurmGPUError, match=r"merged\.h5 cannot be read: as told\."):
            opened["logits"][:]


def test_an_unknown_column_is_refused_with_the_closest_name(merged):
    with pytest.raises(SlurmGPUError, match=r"no column 'scores'\. Did you mean 'score'"):
        merged["scores"]
    with pytest.raises(SlurmGPUError, match="no column 'shout/values'"):
        merged["shout/values"]


def test_rows_and_iteration_are_not_columns(merged):
    with pytest.raises(TypeError, match=r"0 is not a column's name; use row\(0\)"):
        merged[0]
    with pytest.raises(TypeError, match="for columns"):
        list(merged)


def test_a_closed_file_says_so_and_what_was_read_remains(path):
    with results.open(path) as opened:
        column, scores = opened["shout"], opened["score"][:]
    with pytest.raises(SlurmGPUError, match="was closed before 'score' was read"):
        opened["score"]
    assert column[3] == plain_row(3)["shout"]
    assert scores[1] == 0.25


def test_an_hdf5_file_of_another_program_is_told_from_a_damaged_one(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros(3)
    with pytest.raises(SlurmGPUError, match=r"a\.h5 is an HDF5 file of another program; .* write its arrays with np"):
        results.open(tmp_path / "a.h5")


@pytest.mark.parametrize("content", [b"", b"text\n" * 1000])
def test_a_file_that_is_not_ours_is_refused(tmp_path, content):
    (tmp_path / "a.h5").write_bytes(content)
    with pytest.raises(SlurmGPUError, match=r"a\.h5 is not an intact file of slurmgpu: "):
        results.open(tmp_path / "a.h5")


def test_a_run_directory_is_refused_with_the_file_to_open(tmp_path):
    with pytest.raises(SlurmGPUError, match=r"is a folder; expected a merged file .* open\('.*/merged\.h5'\)"):
        results.open(tmp_path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(SlurmGPUError, match=r"^There is no file /.*/merged\.h5\.$"):
        results.open(tmp_path / "merged.h5")
    (tmp_path / "run.json").touch()
    with pytest.raises(SlurmGPUError, match=r"merged\.h5\. The run's merge writes it; `slurmgpu status /"):
        results.open(tmp_path / "merged.h5")


def test_a_file_with_a_damaged_directory_is_refused(tmp_path):
    path = write(tmp_path / "a.h5")
    with changed(path, 100, b"\xff"), pytest.raises(SlurmGPUError, match="checksum of its user block"):
        results.open(path)


@pytest.mark.parametrize("kind", ["merged", "shard"])
def test_a_turned_bit_anywhere_is_found_when_verification_is_asked_for(tmp_path, kind):
    parts = write_parts(tmp_path, [0, 4, 5, N_ROWS], FAILED)
    join_parts(parts, tmp_path / "merged.h5")
    path = tmp_path / "merged.h5" if kind == "merged" else parts[2][1]
    seen = set()
    for name, at, is_in_userblock in one_bit_everywhere(path):
        seen.add(name.split(" of shard")[0])
        with pytest.raises(SlurmGPUError) as raised:
            results.open(path, verify=True)
        if is_in_userblock:
            assert "is not an intact file of slurmgpu: " in str(raised.value), (name, at)
        else:
            assert (
                f"has changed since it was written: the checksum of {'the HDF5 ' if name == 'metadata' else ''}"
                f"{name} differs. `slurmgpu merge" in str(raised.value)
            ), (name, at)
            results.open(path).close()  # which says in its docstring that it does not look
    lists = ["shout", "lengths", "phases", "told", "error"]
    stored = {f"{name}/{part}" for name in lists for part in ("offsets", "values")} | {"silence/offsets"}
    arrays = {"index", *COLUMNS} - {*lists, "silence", "nothing"}
    assert seen == stored | arrays | {"magic", "sizes", "directory", "end of the user block", "metadata"}
    with results.open(path, verify=True) as opened:
        assert opened["shout"][3] == results.open(path)["shout"][3]


def test_what_differs_is_named_in_few_words_and_what_to_do(path, tmp_path):
    copy = tmp_path / "merged.h5"
    copy.write_bytes(path.read_bytes())
    with results.open(copy) as opened:
        start = opened._data["score"]._offset
    with changed(copy, start, b"\xff" * (copy.stat().st_size - start)):
        with pytest.raises(SlurmGPUError, match=r"score of shard 0 differs; .*; and \d+ more\. `slurmgpu merge RUN`"):
            results.open(copy, verify=True)
        (tmp_path / "run.json").write_text("{}")
        with pytest.raises(SlurmGPUError, match=rf"`slurmgpu merge {tmp_path}` rewrites merged\.h5"):
            results.open(copy, verify=True)


def test_verification_needs_little_memory(tmp_path):
    columns = {"x": Array("uint8", (1 << 20,))}
    path = write(tmp_path / "a.h5", columns=columns, rows=[{"x": np.ones(1 << 20, "u1")}] * 64)
    tracemalloc.start()
    try:
        results.open(path, verify=True).close()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_pandas_has_every_column(merged):
    pytest.importorskip("pandas")
    frame = merged.to_pandas()
    assert list(frame) == NAMES
    assert frame["score"].dtype == np.float32
    good = frame[frame.error.isna()]
    assert good["shout"].tolist() == [text for i, text in enumerate(expected("shout")) if i not in FAILED]
    assert frame["lengths"][3].tolist() == [0, 1, 2]
    assert frame["logits"][1].tolist() == plain_row(1)["logits"].tolist()
    assert frame["tag"][3] == b"ab"
    assert frame["error"][2].startswith("item 2")
    assert frame["error"][3] is None


def test_values_of_failed_items_are_missing_in_pandas_and_no_zeros(merged, tmp_path):
    pytest.importorskip("pandas")
    frame = merged.to_pandas()
    for name in merged.columns:
        assert frame[name].isna()[merged.failed].all(), name
    assert (frame["index"].tolist(), frame["index"].dtype) == (merged.index.tolist(), np.int64)
    assert frame["ok"].dtype == "boolean"
    assert int(frame["ok"].count()) == int((~merged.failed).sum())
    path = write(tmp_path / "whole.h5", columns={"n": Array("uint8")}, rows=[{"n": np.uint8(255).tobytes()}])
    with results.open(path) as whole:
        assert whole.to_pandas()["n"].dtype == np.uint8
    rows = [ItemError("none"), {"n": np.uint8(7).tobytes()}]
    path = write(tmp_path / "failed.h5", columns={"n": Array("uint8")}, rows=rows)
    with results.open(path) as failed:
        found = failed.to_pandas()["n"]
        assert (found.dtype, found.isna().tolist(), found[1]) == ("UInt8", [True, False], 7)


def as_arrow(value):
    match value:
        case complex():
            return {"real": value.real, "imag": value.imag}
        case list() | range() | np.ndarray():
            return [as_arrow(one) for one in value]
        case np.generic():
            return value.item()
        case dict():
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return value


@pytest.mark.parametrize(("start", "stop"), [(0, None), (3, 9), (5, 3), (9, 100)])
def test_arrow_has_every_column_and_null_for_failed_items(merged, start, stop):
    pytest.importorskip("pyarrow")
    table = merged.to_arrow(start, stop)
    table.validate(full=True)
    found = table.to_pydict()
    assert list(found) == NAMES
    assert found["index"] == expected("index")[start:stop]
    for name in COLUMNS:
        wanted = [None if index in FAILED else as_arrow(plain_row(index)[name]) for index in range(N_ROWS)]
        assert found[name] == wanted[start:stop], name
    assert found["error"] == [message or None for message in expected("error")][start:stop]


def test_a_table_of_arrow_outlives_the_file(path):
    pytest.importorskip("pyarrow")
    with results.open(path) as opened:
        table = opened.to_arrow()
    assert table["shout"][3].as_py() == plain_row(3)["shout"]


@pytest.mark.parametrize(("module", "method"), [("pandas", "to_pandas"), ("pyarrow", "to_arrow")])
def test_without_pandas_or_pyarrow_a_sentence_says_what_to_install(merged, monkeypatch, module, method):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "slurmgpu.results.arrow", raising=False)
    with pytest.raises(SlurmGPUError, match=rf"{method}\(\) needs {module}: pip install 'slurmgpu\["):
        getattr(merged, method)()


def test_the_examples_of_the_reference_read_a_merged_file(path, tmp_path):
    examples = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    assert len(examples) == 2
    (tmp_path / "merged.h5").write_bytes(path.read_bytes())
    for example in examples:
        subprocess.run(
            [sys.executable, "-c", example], cwd=tmp_path, check=True, env={"PYTHONPATH": str(DOCS.parents[2])}
        )


def test_ranges_of_rows_are_bounded_by_their_own_size_and_not_by_the_average(tmp_path):
    sizes = [0] * 900 + [50_000] * 40 + [3] * 700 + [900_000] + [7] * 900
    columns = {"text": Text(), "x": Array("float32", (2,)), "some": Ragged("int16")}
    rows = [{"text": "x" * n, "x": [0, n], "some": range(n // 1000)} for n in sizes]
    rows = [ItemError("no") if not n else convert_row(columns, row) for n, row in zip(sizes, rows, strict=True)]
    path = write(tmp_path / "rows.h5", 0, len(rows), columns=columns, rows=rows)
    with results.open(path) as merged:
        for most, least in ((200_000, 500), (1_000, 20), (1 << 30, len(rows))):
            ranges = list(merged.ranges(most))
            assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
            assert ranges[-1][1] == len(rows)
            taken = [sum(sizes[start:stop]) for start, stop in ranges]
            assert all(n <= most or stop == start + 1 for n, (start, stop) in zip(taken, ranges, strict=True))
            assert max(stop - start for start, stop in ranges) >= least
        assert list(merged.ranges(200_000, 905, 907)) == [(905, 907)]
        assert list(merged.ranges(200_000, 5, 5)) == []


@pytest.mark.parametrize("chunk_bytes", [5, 1 << 18])
def test_rows_are_compared_with_their_checksums_as_they_are_read(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(verifier, "_CHUNK_BYTES", chunk_bytes)
    bounds = [0, 2, 3, 6]
    path = tmp_path / "merged.h5"
    join_parts(write_parts(tmp_path, bounds, failed=(5,)), path)
    with results.open(path) as file:
        whole = [repr(row) for row in file.rows()]
        file.check_rows(0, 6)
        file.check_rows(2, 2)
    n_refused = 0
    for name, _, in_block in one_bit_everywhere(path):
        if in_block or name == "metadata":
            continue
        hit = set()
        for row in range(6):
            with results.open(path) as file:
                try:
                    file.check_rows(row, row + 1)
                except SlurmGPUError:
                    hit.add(row)
                    for _ in range(2):  # also when they are asked for again
                        with pytest.raises(SlurmGPUError, match=f"the checksum of {name} differs.*slurmgpu merge"):
                            file.check_rows(row, row + 1)
                else:
                    assert repr(file.row(row)) == whole[row]
        shard = int(name.rpartition(" ")[2])
        own = set(range(bounds[shard], bounds[shard + 1]))
        assert hit >= own
        if not name.startswith(("index", "error")):
            # The first value of the next shard begins where the last offset says.
            assert hit == own or "/offsets" in name
        n_refused += len(hit)
    assert n_refused > 50
    with Reader(path) as reader:
        directory, _, _ = read_userblock(reader)
    for name, _, _, offset, _, _ in directory["datasets"]:
        if name.endswith("/offsets"):  # the 0 before all pieces
            for _ in flips(path, [offset]):
                with (
                    results.open(path) as file,
                    pytest.raises(SlurmGPUError, match=f"the first entry of {name} differs"),
                ):
                    file.check_rows(4, 5)


def test_rows_that_were_compared_are_not_read_again(tmp_path, monkeypatch):
    join_parts(write_parts(tmp_path, [0, 2, 3, 6]), tmp_path / "merged.h5")
    with results.open(tmp_path / "merged.h5") as file:
        file.check_rows(1, 3)
        monkeypatch.setattr(verifier, "_Window", None)
        file.check_rows(0, 2)
        with pytest.raises(TypeError):
            file.check_rows(2, 4)


def test_the_bytes_of_many_small_shards_are_read_together(tmp_path, monkeypatch):
    join_parts(write_parts(tmp_path, range(0, 201, 2)), tmp_path / "merged.h5")
    reads, read_into = [], stored.Results.read_into
    monkeypatch.setattr(stored.Results, "read_into", lambda *args: reads.append(args) or read_into(*args))
    with results.open(tmp_path / "merged.h5") as file:
        file.check_rows(0, len(file))
    assert len(reads) < 100  # the number of shards; each of them has a piece in each dataset


def test_texts_near_each_other_are_read_together(tmp_path, monkeypatch):
    reads, read_into = [], stored.Results.read_into
    monkeypatch.setattr(stored.Results, "read_into", lambda *args: reads.append(args) or read_into(*args))
    with results.open(write(tmp_path / "a.h5", 0, 300)) as opened:
        for rows in (slice(None, None, 3), np.arange(300) % 7 == 2):
            reads.clear()
            assert opened["shout"][rows] == np.array(opened["shout"][:], object)[rows].tolist()
            assert len(reads) < 10


def test_a_file_has_the_items_of_its_rows(tmp_path):
    parts = write_parts(tmp_path, [0, 5, 10, 15])
    join_parts([parts[0], parts[2]], tmp_path / "merged.h5")
    join_parts([], tmp_path / "empty.h5", n_items=15)
    with results.open(tmp_path / "merged.h5") as opened:
        assert FileRows(opened).present() == [(0, 5), (10, 15)]
        assert FileRows(opened).present(3, 12) == [(3, 5), (10, 12)]
        assert [row.index for block in FileRows(opened).blocks(3, 12) for row in block.rows([])] == [3, 4, 10, 11]
    with results.open(tmp_path / "empty.h5") as opened:
        assert (FileRows(opened).present(), [*FileRows(opened).blocks()]) == ([], [])
