"""`slurmgpu show`: rows of a run, also while it is at work, on a terminal and as JSON."""

import io
import json
import sys

import pytest

from slurmgpu.cli.console import result_json
from slurmgpu.merge.export import export
from slurmgpu.merge.merge import merge
from slurmgpu.shards.columns import Array, Json, Text
from slurmgpu.shards.shard_file import FailedRow
from tests.support.published_runs import publish, published_run
from tests.support.terminals import Terminal

COLUMNS = {"score": Array("float32"), "told": Text(), "meta": Json(), "vector": Array("float32", (3, 40))}
N_ITEMS = 30


def row(index, told="short"):
    if index % 10 == 4:
        return f"item {index} is \x1b[31mtoo dark"
    return {"score": index / 8, "told": told, "meta": {"n": index}, "vector": [[index] * 40] * 3}


@pytest.fixture
def run(tmp_path):
    """At work: of six shards 0 is merged, 1 to 3 are published."""
    items = [{"id": f"q{index}", "text": "Why?"} for index in range(N_ITEMS)]
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    rows = [row(index) for index in range(N_ITEMS)]
    made = published_run(tmp_path / "run", COLUMNS, rows, shards=[0], input_file=path)
    merge(made)
    for shard in (1, 2, 3):
        publish(made, shard, rows[5 * shard : 5 * shard + 5])
    return made.folder


def shown(slurmgpu, *argv):
    return json.loads(slurmgpu("show", *argv, "--json", expect=0).stdout)


def indices(found):
    return [each["index"] for each in found["rows"]]


def test_rows_are_chosen_by_items_conditions_and_failures(slurmgpu, run):
    found = shown(slurmgpu, run, "--items", "18:25,3:6,4", "--columns", "score")
    assert found["rows"] == [
        {"index": 3, "error": None, "values": {"score": 0.375}},
        {"index": 4, "error": "item 4 is \x1b[31mtoo dark", "values": {"score": None}},
        {"index": 5, "error": None, "values": {"score": 0.625}},
        {"index": 18, "error": None, "values": {"score": 2.25}},
        {"index": 19, "error": None, "values": {"score": 2.375}},
    ]
    assert (found["format"], found["version"], found["n_missing"], found["damaged"]) == ("slurmgpu rows", 1, 5, [])
    assert indices(shown(slurmgpu, run)) == list(range(10))
    assert indices(shown(slurmgpu, run, "--failed")) == [4, 14]
    assert indices(shown(slurmgpu, run, "--where", "score > 1 and meta['n'] < 16", "-n", "4")) == [9, 10, 11, 12]
    assert shown(slurmgpu, run, "--where", "score > 99")["rows"] == []


def test_random_rows_are_the_same_for_the_same_seed_and_are_chosen_ones(slurmgpu, run):
    first, again, other = (shown(slurmgpu, run, "--random", "6", "--seed", seed) for seed in (0, 0, 1))
    assert first == again
    assert len(set(indices(first))) == 6
    assert indices(first) != indices(other)
    assert indices(shown(slurmgpu, run, "--random", "99")) == list(range(20))
    found = indices(shown(slurmgpu, run, "--random", "3", "--where", "score >= 1"))
    assert len(set(found)) == 3
    assert min(found) >= 8
    assert indices(shown(slurmgpu, run, "--random", "9", "--failed")) == [4, 14]


def test_the_item_of_each_row_stands_beside_it(slurmgpu, run):
    found = shown(slurmgpu, run, "--items", "17", "--with-items", "--columns", "meta")
    assert found["rows"] == [
        {"index": 17, "error": None, "item": {"id": "q17", "text": "Why?"}, "values": {"meta": {"n": 17}}}
    ]
    text = slurmgpu("show", run, "--items", "17", "--with-items", "--columns", "meta", expect=0).stdout
    assert text.splitlines() == ["item 17", "  item id    q17", "  item text  Why?", '  meta       {"n": 17}']
    (run.parent / "items.jsonl").write_text("{}\n")
    done = slurmgpu("show", run, "--with-items", expect=2)
    assert "The input has changed since the run was planned" in done.stderr


def test_rows_are_exported_beside_the_fields_of_their_items(slurmgpu, run):
    items = run.parent / "items.jsonl"
    done = slurmgpu("export", run, "-o", "-", "--columns", "item.id,score", "--where", "score < 0.3", expect=0)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"item.id": f"q{index}", "score": index / 8} for index in range(3)
    ]
    slurmgpu("export", run, run / "rows.csv", "--with-items", "--where", "score == 1", expect=0)
    head, row = (run / "rows.csv").read_text().splitlines()
    assert head == "index,score,told,meta,vector,error,item.id,item.text"
    assert row.startswith('8,1.0,short,"{""n"":8}"')
    assert row.endswith(",q8,Why?")
    refused = [
        (
            ("a.csv", "--columns", "score,text"),
            "There is no column 'text'; for the field of the items write item.text.",
        ),
        (("a.pt", "--with-items"), "'pt' cannot have fields of the items"),
        (("a.csv", "--with-items", "--columns", "score"), "name item.FIELD in --columns"),
        (("a.csv", "--columns", "item.txet"), "No item has the field 'txet'. Did you mean 'text'?"),
        (("a.csv", "--columns", "item.id,item.id"), "'item.id' is named twice"),
        (("a",), "a has no suffix to tell its format"),
        (("a.csv", "-o", "b.csv"), "Name one file to write"),
        ((), "Name one file to write"),
    ]
    for given, sentence in refused:
        assert sentence in slurmgpu("export", run, *given, expect=2).stderr
    odd = run.rename(run.with_name("a run"))
    assert f"slurmgpu export '{odd}' -o rows.csv" in slurmgpu("export", odd, expect=2).stderr
    odd.rename(run)
    items.write_text("{}\n")
    assert "The input has changed" in slurmgpu("export", run, "-o", "-", "--with-items", expect=2).stderr


def test_fields_of_items_have_types_in_parquet_and_in_a_data_set(tmp_path, slurmgpu):
    pq = pytest.importorskip("pyarrow.parquet")
    texts = [{"id": 7, "tags": ["a"], "meta": {"n": 1}, "odd": 1}, {"id": 8, "meta": {"m": 0.5}, "odd": "x"}, {"id": 9}]
    lines = [{**text, "none": None} for text in texts] * 1000
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = published_run(
        tmp_path / "run", COLUMNS, [*map(row, range(3000))], None, 1500, input_file=tmp_path / "items.jsonl"
    ).folder
    slurmgpu("export", run, tmp_path / "all.parquet", "--with-items", expect=0)
    whole = pq.ParquetFile(tmp_path / "all.parquet").read()
    plain = [
        json.loads(line) for line in slurmgpu("export", run, "-o", "-", "--with-items", expect=0).stdout.splitlines()
    ]
    assert whole.column_names == list(plain[0])
    assert str(whole.schema.field("item.id").type) == "int64"
    assert whole["item.id"].to_pylist() == [line["item.id"] for line in plain]
    assert whole["item.tags"].to_pylist()[:3] == [["a"], None, None]
    assert whole["item.meta"].to_pylist()[-3:] == [{"n": 1, "m": None}, {"n": None, "m": 0.5}, None]
    assert whole["item.odd"].to_pylist()[:3] == ["1", '"x"', None]
    assert set(whole["item.none"].to_pylist()) == {None}
    assert whole["index"].to_pylist() == list(range(3000))
    names = ["--columns", "item.id,score", "--where", "score > 374.7"]
    slurmgpu("export", run, "-o", tmp_path / "set", "--format", "hf", *names, expect=0)
    [file] = (tmp_path / "set" / "data").iterdir()
    assert pq.ParquetFile(file).read().to_pylist() == [{"item.id": 8 + n, "score": 374.75 + n / 8} for n in range(2)]
    slurmgpu("export", run, tmp_path / "none.parquet", "--columns", "item.id", "--where", "score < 0", expect=0)
    assert pq.ParquetFile(tmp_path / "none.parquet").read().num_rows == 0


@pytest.mark.parametrize("name", ["jsonl", "csv"])
def test_fields_of_items_may_have_names_that_utf_8_cannot_hold(tmp_path, name):
    (tmp_path / "items.jsonl").write_text('{"a\\ud800": {"\\udfff": 1}}\n')
    run = published_run(tmp_path / "run", COLUMNS, [row(0)], input_file=tmp_path / "items.jsonl")
    assert export(run, name, tmp_path / "rows", with_items=True).n_rows == 1
    text = (tmp_path / "rows").read_text()
    if name == "jsonl":
        assert json.loads(text)["item.a\\ud800"] == {"\\udfff": 1}
    else:
        assert text.splitlines()[0].endswith(",item.a\\ud800")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii", "cp1252"])
def test_json_is_valid_whatever_the_encoding_of_stdout(monkeypatch, encoding):
    value = {"é": "“ß 😀\ud800"}
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding, "backslashreplace", write_through=True))
    result_json(value)
    assert json.loads(written.getvalue()) == value


def test_one_item_is_asked_for_by_the_option_of_logs(slurmgpu, run):
    assert indices(shown(slurmgpu, run, "--item", "17")) == [17]


def test_what_is_missing_and_what_is_damaged_is_said_on_stderr(slurmgpu, run):
    path = run / "shards" / "00003.h5"
    path.write_bytes(path.read_bytes()[:-10])
    done = slurmgpu("show", run, "--items", "14:", "--columns", "score", expect=0)
    assert done.stdout.splitlines() == [
        "index  error",
        "   14  item 14 is too dark",
    ]
    assert "15 items without a row" in done.stderr
    assert "00003.h5 is damaged (" in done.stderr
    assert "), and its rows count as missing." in done.stderr
    found = shown(slurmgpu, run)
    assert (found["n_missing"], len(found["damaged"])) == (10, 0)  # its first ten rows lie before
    found = shown(slurmgpu, run, "-n", "99")
    assert (found["n_missing"], len(found["damaged"]), len(found["rows"])) == (15, 1, 15)
    for seed in range(3):
        found = shown(slurmgpu, run, "--random", "15", "--seed", seed)
        assert (indices(found), found["n_missing"], len(found["damaged"])) == (list(range(15)), 15, 1)


def test_what_a_failed_item_keeps_is_shown_with_its_error(slurmgpu, tmp_path):
    columns = {"id": Json(), "score": Array("float32")}
    rows = [{"id": "a", "score": 0.5}, FailedRow("too dark", {"id": b'"b"'})]
    run = published_run(tmp_path / "run", columns, rows)
    assert slurmgpu("show", run.folder, expect=0).stdout.splitlines() == [
        "index  id  score  error",
        "    0  a     0.5",
        "    1  b       –  too dark",
    ]
    done = slurmgpu("show", run.folder, "--failed", "--columns", "id", expect=0)
    assert done.stdout.splitlines()[1].split() == ["1", "b", "too", "dark"]


def test_items_that_a_look_lacks_are_refused_by_name(slurmgpu, tmp_path):
    chosen = {"format": "jsonl", "files": [], "columns": None, "n_items": 4, "stride": 1, "ranges": [[1, 2], [5, 8]]}
    chosen |= {"folders": [], "repacked": False}
    run = published_run(tmp_path / "run", COLUMNS, [row(index) for index in range(4)], look="look", input=chosen)
    assert indices(shown(slurmgpu, run.folder, "--items", "0:6")) == [1, 5]
    said = slurmgpu("show", run.folder, "--items", "2:4", expect=2).stderr
    assert f"--items 2:4: {run.folder} has the items 1, 5 to 7." in said


def test_a_run_without_rows_says_so(slurmgpu, tmp_path):
    run = published_run(tmp_path / "run", COLUMNS, [row(0), row(1)], shards=[])
    done = slurmgpu("show", run.folder, expect=0)
    assert (done.stdout, "No row is published yet." in done.stderr) == ("", True)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--columns", "scoer"], "There is no column 'scoer'. Did you mean 'score'?"),
        (["--where", "scoer > 1"], "there is no column 'scoer'. Did you mean 'score'?"),
        (["--items", "5:x"], "'5:x': expected items and ranges"),
        (["--items", "30"], "30 is not within the run, whose items are 0 to 29."),
        (["--items", "7:7"], "7:7 is empty."),
        (["--items", "29:29"], "29:29 is empty."),
        (["--items", ""], "'': expected items and ranges"),
    ],
)
def test_what_cannot_be_chosen_is_refused_in_a_sentence(slurmgpu, run, argv, sentence):
    assert sentence in slurmgpu("show", run, *argv, expect=2).stderr


def test_short_rows_are_a_table_and_long_ones_stand_below_each_other(slurmgpu, tmp_path):
    told = "first line\nsecond \x1b]0;title\x07line\x00 " + "word " * 30
    rows = [{**row(0), "told": "kurz ü"}, {**row(1), "told": told}, {**row(2), "told": "x" * 5000}]
    run = published_run(tmp_path / "run", COLUMNS, rows)
    done = slurmgpu("show", run.folder, "--columns", "score,told,meta", "-n", "1", expect=0)
    assert done.stdout.splitlines() == ["index  score  told    meta", '    0    0.0  kurz ü  {"n": 0}']
    with Terminal("show", run.folder, "--columns", "told,vector", "-n", "1", cwd=tmp_path) as terminal:
        assert terminal.end() == 0
        display = [line for line in terminal.display if line]
    assert display == [
        "item 0",
        "  told    kurz ü",
        "  vector  [[0. 0. 0. ... 0. 0. 0.] [0. 0. 0. ... 0. 0. 0.] [0. 0. 0. ... 0. 0.",
        "          0.]] float32 (3, 40)",
        "1 of 3 rows; -n shows more.",
    ]
    long = slurmgpu("show", run.folder, "--columns", "told", "--items", "1:3", expect=0).stdout
    assert "  told  first line\n        second line\ufffd word word" in long
    assert "… (5,000 characters)" in long
