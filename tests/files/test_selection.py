"""Chosen columns and rows, and their types: of a merged file, and of a run at work."""

import csv
import io
import json
import math
import operator
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmgpu import results
from slurmgpu.errors import SlurmGPUError
from slurmgpu.merge.export import export
from slurmgpu.merge.merge import merge
from slurmgpu.results.published import RunRows
from slurmgpu.results.selection import Selection
from slurmgpu.shards.columns import Array, Json, Ragged, Text
from slurmgpu.shards.shard_file import Directory
from tests.support.published_runs import publish, published_run
from tests.support.shard_files import changed

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
Condition = pytest.importorskip("slurmgpu.results.conditions").Condition

COLUMNS = {"id": Json(), "score": Array("float32"), "label": Text(), "parts": Ragged("int16"), "odd name": Json()}


def row(index):
    if index % 10 == 4:
        return f"item {index} is too dark"
    score = math.nan if index % 10 == 5 else index / 8
    label = "yes" if index % 3 else "no, never"
    return {"id": f"q{index}", "score": score, "label": label, "parts": range(index % 4), "odd name": {"n": index}}


ROWS = [row(index) for index in range(23)]
GOOD = {index: each for index, each in enumerate(ROWS) if not isinstance(each, str)}


@pytest.fixture
def run(tmp_path):
    """At work: shards 0 and 2 are merged, 3 is published, 1 and 4 are missing."""
    made = published_run(tmp_path / "run", COLUMNS, ROWS, shards=[0, 2])
    merge(made)
    publish(made, 3, ROWS[15:20])
    return made


THERE = [*range(5), *range(10, 20)]


def chosen(run, where, names=("index",)):
    with RunRows(run) as rows:
        return [each.index for each in Selection(rows, names, where).rows()]


@pytest.mark.parametrize(
    ("where", "truth"),
    [
        ("score > 0.5", lambda row: row["score"] > 0.5),
        ("not score > 0.5", lambda row: not row["score"] > 0.5),
        ("0.25 <= score < 2 and label == 'yes'", lambda row: 0.25 <= row["score"] < 2 and row["label"] == "yes"),
        ("isnan(score) or score == 0", lambda row: math.isnan(row["score"]) or row["score"] == 0),
        ("index in [3, 11, 12, 99]", lambda row: row["index"] in [3, 11, 12]),
        ("id not in ('q0', 'q12')", lambda row: row["id"] not in ("q0", "q12")),
        ("'never' in label", lambda row: "never" in row["label"]),
        ("'never' not in label", lambda row: "never" not in row["label"]),
        ('matches(id, "^q1[0-3]$")', lambda row: row["id"] in ("q10", "q11", "q12", "q13")),
        ("len(label) == 3 and len(parts) > 1", lambda row: len(row["label"]) == 3 and len(row["parts"]) > 1),
        ('col("odd name")["n"] * 2 - 1 >= 2 + 20 / 1', lambda row: row["odd name"]["n"] * 2 - 1 >= 22),
        ("len(parts) / 2 > 0.9", lambda row: len(row["parts"]) > 1),
        ("lower(id) != id", lambda row: False),
        ("abs(-score) > 1.9", lambda row: row["score"] > 1.9),
    ],
)
def test_a_condition_chooses_the_rows_for_which_it_is_true(run, where, truth):
    expected = [index for index in THERE if index in GOOD and truth({"index": index, **GOOD[index]})]
    assert chosen(run, where) == expected


def test_failed_items_are_chosen_by_their_error_alone(run):
    assert chosen(run, "error is not None") == [4, 14]
    assert chosen(run, "error is None and index < 4") == [0, 1, 2, 3]
    assert chosen(run, "'dark' in error or score > 2.3") == [4, 14, 19]
    with RunRows(run) as rows:
        assert [each.error for each in Selection(rows, failed=True).rows()] == [ROWS[4], ROWS[14]]


def test_failed_items_may_have_to_meet_a_condition_as_well(run):
    with RunRows(run) as rows:
        assert [each.index for each in Selection(rows, where="index > 4", failed=True).rows()] == [14]


@pytest.mark.parametrize(
    ("where", "failed", "among"),
    [(None, False, THERE), ("index > 2", False, [index for index in THERE if index > 2]), (None, True, [4, 14])],
)
def test_rows_are_drawn_among_those_that_are_chosen_and_come_in_order(run, where, failed, among):
    with RunRows(run) as rows:
        drawn = [Selection(rows, where=where, failed=failed).draw(3, seed) for seed in range(60)]
        assert drawn[7] == Selection(rows, where=where, failed=failed).draw(3, 7)
        assert Selection(rows, where=where, failed=failed).draw(99, 0) == among
    assert all(each == sorted({*each}) and len(each) == min(3, len(among)) for each in drawn)
    assert sorted({index for each in drawn for index in each}) == among


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("scoer > 1", r"there is no column 'scoer'\. Did you mean 'score'"),
        ("score = 1", r"a single = does not compare; write =="),
        ("score > 'a'", "does not fit the columns"),
        ("score", "neither true nor false"),
        ("score >", "invalid syntax at character"),
        ("__import__('os').system('true')", r"cannot be used here\. A condition may use columns|no column"),
        ("open('x') == index", r"there is no column 'open'|cannot be used here"),
        ("index.real == 1", "cannot be used here"),
        ("1 < 2", "it names no column"),
        ("[x for x in label] == label", "there is no column 'x'|cannot be used here"),
        ("label == None", "cannot be used here"),
        ("score is 1", "works only with None"),
        ("index in score", "cannot be searched"),
        ("index in ['a']", "does not fit the columns"),
        ("matches(label, '[')", "does not fit the columns"),
        (f"label > {1 << 70}", "does not fit the columns"),
        (f"label in [{1 << 70}]", "does not fit the columns"),
        ("label in ['yes', 1]", "does not fit the columns"),
        ("label / 2 > 1", "does not fit the columns"),
        ("index in [True]", "does not fit the columns"),
        ("index > 1 / 0", "its numbers cannot be computed: division by zero"),
        (f"index + {10**400} > 1", "its numbers cannot be computed: int too large to convert to float"),
        ("(" * 300 + "score" + ")" * 300, "cannot be used"),
        ("", "cannot be used"),
    ],
)
def test_a_condition_that_cannot_be_used_is_refused_before_a_row_is_read(run, where, sentence):
    with pytest.raises(SlurmGPUError, match=sentence):
        chosen(run, where)


def test_a_condition_that_is_nested_too_deeply_is_refused(run):
    with pytest.raises(SlurmGPUError, match=r"nested too deeply|cannot be read"):
        chosen(run, "not " * sys.getrecursionlimit() + "(score > 1)")


def test_integers_that_overflow_are_refused_and_not_wrapped(run):
    with pytest.raises(SlurmGPUError, match=r"overflows 64 bits\. Write 1\.0 \*"):
        chosen(run, "index * 9223372036854775807 > 0")
    assert chosen(run, "1.0 * index * 9223372036854775807 > 1e20") == [index for index in THERE if index > 10]


SIZES = [0, 2**24, 2**31, 2**53, 2**63, 2**64]
EDGES = [
    *(sign * (size + step) for sign in (1, -1) for size in SIZES for step in (-1, 0, 1)),
    *(sign * size for sign in (1, -1) for size in (*map(float, SIZES), 0.5, 1e300, math.inf)),
    2**63 - 513, 2**63 - 512, 2**64 - 1025, 2.0**53 - 1, 2.0**63 - 1024, 2.0**64 - 2048, -1.5, math.nan, None,
]  # fmt: skip
WRITTEN = [*(each for each in EDGES if each is not None and math.isfinite(each)), 10**400, -(10**400), 255, 256, 0.1]
SIGNS = {
    "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def stored(values, kind):
    """Those of the values that a column of this type has, as Python's numbers."""
    if pa.types.is_floating(kind):
        with np.errstate(over="ignore"):
            floats = [None if each is None else float(kind.to_pandas_dtype()(each)) for each in values]
        return [each for each, value in zip(floats, values, strict=True) if each == value or value is None]
    limits = np.iinfo(kind.to_pandas_dtype())
    return [None if each is None else int(each) for each in values if each is None or is_whole(each, limits)]


def is_whole(value, limits):
    return math.isfinite(value) and value == int(value) and int(limits.min) <= value <= int(limits.max)


TYPES = [pa.int8(), pa.int64(), pa.uint8(), pa.uint32(), pa.uint64(), pa.float16(), pa.float32(), pa.float64()]


def holds(where, **columns):
    """A mask, by a condition on columns that are lists of (values, type)."""
    arrays = {
        name: pa.array([None if each is None else kind.to_pandas_dtype()(each) for each in values], kind)
        for name, (values, kind) in columns.items()
    }
    return Condition(where, arrays).chosen(pa.table(arrays)).tolist()


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_columns_of_numbers_are_compared_without_rounding(kind):
    for other in TYPES:
        pairs = [(x, y) for x in stored(EDGES, kind) for y in stored(EDGES, other)]
        for sign, is_true in SIGNS.items():
            found = holds(f"a {sign} b", a=([x for x, _ in pairs], kind), b=([y for _, y in pairs], other))
            assert found == [None not in (x, y) and is_true(x, y) for x, y in pairs], (sign, other)
            denied = holds(f"not a {sign} b", a=([x for x, _ in pairs], kind), b=([y for _, y in pairs], other))
            assert denied == [None not in (x, y) and not is_true(x, y) for x, y in pairs], (sign, other)


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_a_number_that_is_written_may_have_any_size(kind):
    values = stored(EDGES, kind)
    for number in WRITTEN:
        beside = number
        if kind in (pa.float16(), pa.float32()) and abs(number) <= float(np.finfo(kind.to_pandas_dtype()).max):
            beside = float(kind.to_pandas_dtype()(number))  # it has the precision of the column
        for sign, is_true in SIGNS.items():
            expected = [each is not None and is_true(each, beside) for each in values]
            assert holds(f"a {sign} {number}", a=(values, kind)) == expected, (sign, number)
        expected = [each is not None and each == beside for each in values]
        assert holds(f"{number} == a", a=(values, kind)) == expected
        assert holds(f"a in [{number}, 1e999, None]", a=(values, kind)) == [
            each or value == math.inf for each, value in zip(expected, values, strict=True)
        ]


@pytest.mark.parametrize(
    ("where", "kinds", "rows", "expected"),
    [
        ("a / 2 > 1", "q", [2**60, 2**53 + 1, 1], [True, True, False]),
        ("a / 2 > 1", "Q", [2**64 - 1, 2, 3], [True, False, True]),
        ("a + 0.5 > 2", "q", [2**63 - 1, 1, 2], [True, False, True]),
        ("a + 1 == 18446744073709551615", "Q", [2**64 - 2, 5], [True, False]),
        ("a - b < 0", "BB", [(3, 5), (5, 3)], [True, False]),
        ("a * a > 16000", "b", [127, -128, 1], [True, True, False]),
        ("-a == 128 and abs(a) == 128", "b", [-128, 127], [True, False]),
        ("-a == -255", "B", [255, 1], [True, False]),
        ("abs(a) >= 18446744073709551615", "Q", [2**64 - 1, 5], [True, False]),
        ("a - b > 1e19", "Qq", [(2**64 - 1, 1), (5, 3)], [True, False]),
        ("a + 36893488147419103232 > 1e19", "q", [5, -5], [True, True]),
        ("a + b > 16777217.5", "if", [(16777217, 1.0), (16777216, 1.0)], [True, False]),
        ("a in [-1, 2.5, 18446744073709551615, 3.0]", "Q", [2**64 - 1, 3, 2], [True, True, False]),
        ("a in [0]", "d", [-0.0, 1.0], [True, False]),
        ("2 * 3 - 1 < a < 10 / 2 + 3", "q", [5, 6, 8], [False, True, False]),
        ("1 < 2 and a > -(-1)", "q", [1, 2], [False, True]),
    ],
)
def test_arithmetic_goes_by_types_and_fails_at_no_value_but_an_overflow(where, kinds, rows, expected):
    columns = zip(*(each if isinstance(each, tuple) else (each,) for each in rows), strict=True)
    typed = {
        name: (values, pa.from_numpy_dtype(kind)) for name, kind, values in zip("ab", kinds, columns, strict=False)
    }
    assert holds(where, **typed) == expected


@pytest.mark.parametrize(
    "where",
    [
        "kept > 0.5", f"kept < {1 << 64}", "kept == 'a'", "kept == kept", "len(kept) > 0",
        "'a' in kept", "kept in [1]", "kept in ['a']", "kept + 1 > 0", "1 / kept > 0", "abs(-kept) > 0", "isnan(kept)",
        "lower(kept) == 'a'", "matches(kept, 'a')", "kept['a']['b'] > 1", "kept == index", "kept == label",
    ],
)  # fmt: skip
def test_a_json_column_that_has_only_null_yet_fits_any_condition(tmp_path, where):
    rows = [{"kept": None, "label": "a"}, {"kept": None, "label": "b"}]
    run = published_run(tmp_path / "run", {"kept": Json(), "label": Text()}, rows)
    assert chosen(run, where) == []
    assert chosen(run, f"not ({where})") == []
    assert chosen(run, f"({where}) is None") == [0, 1]


def test_an_export_of_a_run_at_work_has_what_is_published_and_counts_the_rest(run, tmp_path):
    done = export(run, "jsonl", tmp_path / "a.jsonl", ["label", "index", "error"], "label == 'yes'")
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    expected = [index for index in THERE if index in GOOD and GOOD[index]["label"] == "yes"]
    assert [list(line.items()) for line in lines] == [
        [("label", "yes"), ("index", index), ("error", None)] for index in expected
    ]
    assert (done.n_rows, done.n_missing, done.n_failed) == (len(expected), 8, 0)
    stream = io.BytesIO()
    done, n_failed = export(run, "csv", stream), len(THERE) - len(set(THERE) & GOOD.keys())
    assert (done.n_rows, done.n_failed) == (len(THERE), n_failed)
    assert export(run, "parquet", tmp_path / "a.parquet", where="error is not None").n_failed == n_failed > 1
    records = list(csv.DictReader(io.StringIO(stream.getvalue().decode())))
    assert [int(record["index"]) for record in records] == THERE
    assert [record["id"] for record in records] == [f"q{index}" if index in GOOD else "" for index in THERE]


def test_a_shard_that_is_damaged_is_named_and_counted_as_missing(run, tmp_path):
    path = run.shards / "00003.h5"
    path.write_bytes(path.read_bytes()[:-10])
    done = export(run, "parquet", tmp_path / "a.parquet")
    assert (done.n_rows, done.n_missing, len(done.problems)) == (10, 13, 1)
    assert "00003.h5 is damaged" in done.problems[0]


def test_columns_that_there_are_not_and_formats_of_whole_runs_are_refused(run, tmp_path):
    with pytest.raises(SlurmGPUError, match=r"no column 'scores'\. Did you mean 'score'"):
        export(run, "csv", tmp_path / "a.csv", ["scores"])
    with pytest.raises(SlurmGPUError, match="named twice"):
        export(run, "csv", tmp_path / "a.csv", ["score", "score"])
    with pytest.raises(SlurmGPUError, match="has all columns and rows"):
        export(run, "pt", tmp_path / "a.pt", ["score"])
    run.merged.unlink()
    with pytest.raises(SlurmGPUError, match=r"made from merged\.h5, which does not exist"):
        export(run, "pt", tmp_path / "a.pt")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def nested(levels):
    """A number within alternating lists and records, and its type."""
    value, kind = 1, pa.int64()
    for level in range(levels):
        value, kind = ({"n": value}, pa.struct([("n", kind)])) if level % 2 else ([value], pa.large_list(kind))
    return value, kind


JSON_VALUES = {
    "text": (["q0", "ü", None], pa.large_string()),
    "whole": ([1, None, -(2**63)], pa.int64()),
    "number": ([-(2**53), 2.5, None], pa.float64()),
    "flag": ([True, None, False], pa.bool_()),
    "list": ([["a"], [], [None, "b"]], pa.large_list(pa.large_string())),
    "lists": ([[[1]], [[], [2.5]], None], pa.large_list(pa.large_list(pa.float64()))),
    "record": (
        [{"n": 1}, {"n": 2.5, "t": ["x"]}, {"t": None}],
        pa.struct([("n", pa.float64()), ("t", pa.large_list(pa.large_string()))]),
    ),
    "empty lists": ([[], None, []], pa.large_list(pa.null())),
    "mixed": ([1, "1", None], None),
    "flag and number": ([True, 1, 0], None),
    "rounded": ([2**53 + 1, 0.5, None], None),
    "rounded below": ([-(2**53) - 1, 0.5], None),
    "huge": ([2**63, 1, 1], None),
    "nothing": ([None, None, None], None),
    "empty record": ([{}, {}, {}], None),
    "empty record within": ([{"n": 1, "t": {}}], None),
    "list of empty records": ([[{}], []], None),
    "dictionary": ([{f"k{n}": 1} for n in range(3)] + [{f"k{n}": n for n in range(300)}], None),
    "fields": ([{f"k{n}": n for n in range(257)}], None),
    "deepest": ([nested(16)[0]], nested(16)[1]),
    "too deep": ([nested(17)[0]], None),
    "late": (["a"] * 20 + [1], None),
}


@pytest.mark.parametrize("name", JSON_VALUES)
def test_a_json_column_has_the_type_that_all_of_its_values_have(tmp_path, name):
    values, kind = JSON_VALUES[name]
    run = published_run(tmp_path / "run", {"kept": Json()}, [*({"kept": value} for value in values), "failed"])
    for merged in (False, True):
        if merged:
            merge(run)
        output = tmp_path / f"{merged}.parquet"
        export(run, "parquet", output)
        table = parquet.read_table(output)
        assert table.schema.field("kept").type == (pa.large_string() if kind is None else kind)
        found = table["kept"].to_pylist()
        assert found[-1] is None
        if kind is None:
            assert [text and json.loads(text) for text in found[:-1]] == values
        elif name == "record":
            assert found[:-1] == [{"n": 1, "t": None}, {"n": 2.5, "t": ["x"]}, {"n": None, "t": None}]
        else:
            assert found[:-1] == values


@pytest.mark.parametrize("name", JSON_VALUES)
def test_null_of_json_is_null_whatever_the_other_values_are(tmp_path, name):
    values, _ = JSON_VALUES[name]
    run = published_run(tmp_path / "run", {"kept": Json()}, [*({"kept": value} for value in values), "failed"])
    nulls = [index for index, value in enumerate(values) if value is None]
    others = [index for index, value in enumerate(values) if value is not None]
    for merged in (False, True):
        if merged:
            merge(run)
        assert chosen(run, "kept is None and error is None") == nulls
        assert chosen(run, "kept is not None") == others
        export(run, "parquet", tmp_path / "a.parquet", where="kept is not None")
        assert parquet.read_table(tmp_path / "a.parquet")["kept"].null_count == 0
    with results.open(run.merged) as file:
        assert file.to_arrow()["kept"].is_null().to_pylist() == [value is None for value in [*values, None]]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xy"), inner, min_size=1, max_size=2),
    max_leaves=6,
)


@settings(max_examples=200)
@given(st.lists(json_values, min_size=1, max_size=6), st.integers(1, 6))
def test_a_type_loses_no_value_and_does_not_depend_on_the_blocks(values, size):
    from slurmgpu.results.json_types import common_types

    kind = common_types(["it"], [{"it": values}.__getitem__])["it"]
    parts = [{"it": values[at : at + size]}.__getitem__ for at in range(0, len(values), size)]
    assert common_types(["it"], parts)["it"] == kind
    if kind is not None:
        for found, value in zip(pa.array(values, kind).to_pylist(), values, strict=True):
            assert without_nulls(found) == without_nulls(value)


def without_nulls(value):
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if without_nulls(each) not in (None, {})}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def test_hugging_face_datasets_loads_the_folder(run, tmp_path):
    pytest.importorskip("datasets")
    output = tmp_path / "my scores"
    assert export(run, "hf", output, ["index", "id", "score"], "score >= 0").n_rows == 12
    code = (
        "import datasets, json, sys\n"
        "found = datasets.load_dataset(sys.argv[1])\n"
        "print(json.dumps([list(found), found['train'][:], str(found['train'].features['id'].dtype)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, output],
        env={**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    splits, columns, kind = json.loads(done.stdout.splitlines()[-1])
    there = [index for index in THERE if index in GOOD and GOOD[index]["score"] >= 0]
    assert (splits, kind) == (["train"], "large_string")
    assert columns == {
        "index": there,
        "id": [f"q{index}" for index in there],
        "score": [GOOD[index]["score"] for index in there],
    }
    with pytest.raises(SlurmGPUError, match="A data set needs a new folder"):
        export(run, "hf", output)


def test_a_data_set_is_not_written_over_the_working_folder(run, tmp_path, monkeypatch):
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(SlurmGPUError, match="name one with -o"):
        export(run, "hf", Path())


def test_a_large_data_set_has_several_files_and_every_row(run, tmp_path, monkeypatch):
    monkeypatch.setattr("slurmgpu.results.data_set._FILE_BYTES", 100)
    monkeypatch.setattr("slurmgpu.results.selection.ROW_GROUP_BYTES", 100)
    export(run, "hf", tmp_path / "set")
    names = sorted(path.name for path in (tmp_path / "set" / "data").iterdir())
    assert len(names) > 3
    assert names[1] == "train-00001.parquet"
    assert parquet.read_table(tmp_path / "set" / "data")["index"].to_pylist() == THERE


def test_a_table_of_several_json_columns_verifies_each_shard_once_and_again_after_a_change(run, monkeypatch):
    verified = []

    def counted(directory, reader):
        verified.append(directory.start)
        return verify(directory, reader)

    verify = Directory.verify
    monkeypatch.setattr(Directory, "verify", counted)
    run.merged.unlink()
    with RunRows(run) as rows:
        selection = Selection(rows, (), "id != 'q1'")
        opened = []
        monkeypatch.setattr(rows, "blocks", lambda *args, blocks=rows.blocks: opened.append(args) or blocks(*args))
        assert sum(map(len, selection.tables())) == sum(each in GOOD and each != 1 for each in THERE)
        assert verified == [0, 10, 15]
        assert len(opened) == 2  # the type of the other JSON column, then the rows
        path = run.shards / "00003.h5"
        with changed(path, path.stat().st_size - 1, b"\xff"):
            assert sum(map(len, selection.tables())) == sum(each in GOOD and 1 != each < 15 for each in THERE)
        assert "00003.h5 is damaged" in rows.problems[0]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_number_in_a_condition_has_the_precision_of_the_column(tmp_path, dtype):
    rows = [{"s": value} for value in (-0.1, 0.1, 0.3, math.inf)]
    made = published_run(tmp_path / "run", {"s": Array(dtype)}, rows)
    for where, expected in {
        "s == 0.1": [1], "0.1 == s": [1], "s != 0.1": [0, 2, 3], "s > 0.1": [2, 3], "s >= 0.1": [1, 2, 3],
        "s < 0.1": [0], "s <= 0.1": [0, 1], "0.1 < s < 0.3": [], "s in [0.1, 7]": [1], "s not in [0.1]": [0, 2, 3],
        "s == -0.1": [0], "abs(s) == 0.1": [0, 1], "-s == 0.1": [0], "isnan(s)": [],
        "s <= 1e300": [0, 1, 2], "s in [1e300]": [], "s in []": [], "s < 16777217": [0, 1, 2], "s == 1e999": [3],
        "s / 1 == 0.1 and 1 * s + 0 <= 0.1": [] if dtype == "float16" else [1],  # computed as float32
    }.items():  # fmt: skip
        assert chosen(made, where) == expected, where
    with pytest.raises(SlurmGPUError, match="does not fit the columns"):
        chosen(made, "s in ['x']")
