"""Columns of JSON: any nested value in, the same value out, wherever results are read."""

import csv
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import slurmgpu
from slurmgpu.errors import ItemError
from slurmgpu.inputs import tables
from slurmgpu.merge.export import export
from slurmgpu.shards.columns import Json, columns_from_json, columns_to_json, convert_row
from slurmgpu.util.json_values import json_value
from slurmgpu.util.redact import hidden
from tests.support.shard_files import join_parts, write

COLUMNS = {"told": Json()}
VALUES = [{"steps": ["a\nb", "größe ⚠"], "right": True}, ["12", 12, 0.1, None], "12", 12, None]
FAILED = len(VALUES)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


def convert(value):
    return convert_row(COLUMNS, {"told": value})["told"]


@pytest.fixture
def merged(tmp_path):
    rows = [convert_row(COLUMNS, {"told": value}) for value in VALUES] + [ItemError("too dark")]
    part = write(tmp_path / "part.h5", 0, len(rows), columns=COLUMNS, rows=rows)
    join_parts([(0, part, 0, len(rows))], tmp_path / "merged.h5", columns=COLUMNS)
    return tmp_path / "merged.h5"


@given(json_values)
def test_a_value_is_stored_as_its_compact_json(value):
    assert json.loads(convert(value)) == value
    assert convert({"a": ["ß", 1]}) == '{"a":["ß",1]}'.encode()


@pytest.mark.parametrize("value", [float("nan"), [float("inf")], {1, 2}, b"x", {(1, 2): 3}, object(), "\ud800"])
def test_what_json_has_no_words_for_is_the_items_error(value):
    with pytest.raises(ValueError, match="column 'told': found"):
        convert(value)


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        ({1: "first", "1": "second"}, "1 and '1'"),
        ([{"a": ({"true": 1, True: 2},)}], "'true' and True"),
        ({"null": 1, None: 2}, "'null' and None"),
        ({"a": {1e16: 1, "1e+16": 2}}, r"1e\+16 and '1e\+16'"),
    ],
)
def test_keys_that_json_makes_one_are_the_items_error(value, keys):
    with pytest.raises(ValueError, match=f"column 'told': found .* the keys {keys} of a dict are the same key in JSON"):
        convert(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.int64(3), "3"),
        (np.bool_(True), "true"),
        (np.float32(0.5), "0.5"),
        (np.array(7, "uint8"), "7"),
        ({"a": [np.int64(-1), (np.bool_(False), None)]}, '{"a":[-1,[false,null]]}'),
    ],
)
def test_numbers_of_numpy_are_those_of_json(value, text):
    assert convert(value) == text.encode()


@pytest.mark.parametrize(
    "value",
    [np.complex64(1), np.float32("nan"), np.longdouble(1), np.datetime64("2026-01-01"), np.bytes_(b"x"), np.ones(2)],
)
def test_what_json_has_no_words_for_is_none_from_numpy_either(value):
    with pytest.raises(ValueError, match=r"column 'told': found .* that JSON cannot hold"):
        convert([value])


def nested(levels, inner=1):
    """Lists and mappings in one another."""
    for level in range(levels):
        inner = [inner, "["] if level % 2 else {"a": inner}
    return inner


def test_as_many_lists_in_one_another_as_all_readers_take_are_a_value(tmp_path):
    value = nested(256)
    rows = [convert_row(COLUMNS, {"told": each}) for each in (value, ["["] * 1000, nested(256, 2))]
    part = write(tmp_path / "part.h5", 0, 3, columns=COLUMNS, rows=rows)
    join_parts([(0, part, 0, 3)], tmp_path / "merged.h5", columns=COLUMNS)
    for name in ("jsonl", "csv", "parquet"):
        assert export(tmp_path / "merged.h5", name, tmp_path / "rows").n_rows == 3
    assert slurmgpu.compare(tmp_path / "merged.h5", tmp_path / "merged.h5", key="told").equal
    assert hidden(json_value(value)) == value
    with slurmgpu.open(tmp_path / "merged.h5") as merged:
        assert merged.to_pandas()["told"][0] == value
        assert len(merged.to_arrow()) == 3
    for deeper in (nested(257), [nested(256)], [[], {"b": nested(256)}]):
        with pytest.raises(ValueError, match="with more than 256 nested lists and mappings"):
            convert(deeper)


def test_what_lies_deeper_is_shown_as_text():
    for levels in (257, 5000):
        shown = json_value(nested(levels))
        for _ in range(256):
            shown = shown["a"] if isinstance(shown, dict) else shown[0]
        assert isinstance(shown, str)
    assert json.loads(json.dumps(json_value(nested(400))))


def test_keys_that_stay_apart_become_texts():
    assert json.loads(convert({1: {2: 0, True: [{3.5: None}]}, None: 1})) == {
        "1": {"2": 0, "true": [{"3.5": None}]},
        "null": 1,
    }


def test_the_kind_survives_the_file_that_describes_it():
    assert columns_to_json(COLUMNS) == {"told": {"kind": "json"}}
    assert columns_from_json(columns_to_json(COLUMNS)) == COLUMNS


def test_values_come_back_and_a_failed_item_has_none(merged):
    with slurmgpu.open(merged) as found:
        assert found["told"][:] == [*VALUES, None]
        assert found["told"][1] == VALUES[1]
        assert found["told"][[0, 3]] == [VALUES[0], VALUES[3]]
        assert [row["told"] for row in found.rows()] == [*VALUES, None]
        assert found.to_pandas()["told"].tolist() == [*VALUES, None]
        texts = found.to_arrow()["told"].to_pylist()
        assert texts[-2:] == [None, None]
        assert [json.loads(text) for text in texts[:-2]] == VALUES[:-1]


def test_an_export_has_the_value_as_jsonl_and_as_csv_its_json_but_for_texts_and_null(merged, tmp_path):
    export(merged, "jsonl", tmp_path / "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["told"] for line in lines] == [*VALUES, None]
    export(merged, "csv", tmp_path / "a.csv")
    with open(tmp_path / "a.csv", encoding="utf-8", newline="") as file:
        texts = [row["told"] for row in csv.DictReader(file)]
    for text, value in zip(texts, [*VALUES, None], strict=True):
        assert ((text or None) if value is None or isinstance(value, str) else json.loads(text)) == value


def test_a_later_run_finds_the_value_in_its_items(merged):
    items = tables.MergedRows(str(merged)).read(0, len(VALUES) + 1)
    assert [item["told"] for item in items] == [*VALUES, None]
    assert items[FAILED]["error"] == "too dark"
