"""Exports: the rows of a merged file as other programs read them, whole or not at all."""

import csv
import errno
import gzip
import io
import json
import os
import re
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import slurmgpu.results
import slurmgpu.results.selection
from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.merge.export import FORMATS, export
from slurmgpu.results import stored
from slurmgpu.shards.columns import Array, Json, Ragged, Text, convert_row
from tests.support.limited import check_cannot_grow
from tests.support.published_runs import published_run
from tests.support.runs import planned_run
from tests.support.shard_files import (
    COLUMNS,
    FINGERPRINT,
    changed,
    join_parts,
    one_bit_everywhere,
    plain_row,
    write,
    write_parts,
)

FAILED = {2, 7, 8}
N_ROWS = 12


@pytest.fixture
def merged(tmp_path):
    join_parts(write_parts(tmp_path, [0, 4, 5, N_ROWS], FAILED), tmp_path / "merged.h5")
    return tmp_path / "merged.h5"


@pytest.fixture(params=["in one block", "row by row"])
def _blocks(request, monkeypatch):
    if request.param == "row by row":
        monkeypatch.setattr(slurmgpu.results.selection, "BLOCK_BYTES", 1)
        monkeypatch.setattr(slurmgpu.results.selection, "ROW_GROUP_BYTES", 1)


def plain(value):
    """A value as JSON has it."""
    match value:
        case complex():
            return [value.real, value.imag]
        case bytes():
            return value.decode()
        case list() | range() | np.ndarray():
            return [plain(one) for one in value]
        case np.generic():
            return value.item()
    return value


def expected_rows():
    for index in range(N_ROWS):
        row = plain_row(index)
        values = {name: None if index in FAILED else plain(row[name]) for name in COLUMNS}
        yield {"index": index, **values, "error": f"item {index} is schlecht ⚠" if index in FAILED else None}


@pytest.mark.parametrize("n_items", [N_ROWS, N_ROWS + 3])
def test_a_merged_file_is_exported_without_its_run_directory(tmp_path, slurmgpu, n_items):
    join_parts(write_parts(tmp_path, [0, N_ROWS], FAILED), tmp_path / "found.h5", n_items=n_items)
    done = slurmgpu("export", "found.h5", "-o", "-", cwd=tmp_path, expect=0)
    assert [json.loads(line) for line in done.stdout.splitlines()] == list(expected_rows())
    assert f"{len(FAILED)} of the rows belong to failed items" in done.stderr
    assert ("3 items without a row" in done.stderr) == (n_items > N_ROWS)
    chosen = ("--columns", "index", "--where", "error is not None")
    slurmgpu("export", "found.h5", "failed.csv", *chosen, cwd=tmp_path, expect=0)
    assert (tmp_path / "failed.csv").read_text().split() == ["index", *map(str, sorted(FAILED))]


@pytest.mark.usefixtures("_blocks")
def test_jsonl_has_an_object_for_each_row(merged, tmp_path):
    assert export(merged, "jsonl", tmp_path / "a.jsonl").n_rows == N_ROWS
    lines = (tmp_path / "a.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == list(expected_rows())
    assert "Größe ⚠" in lines[1]
    assert [path.name for path in tmp_path.glob("a*")] == ["a.jsonl"]


@pytest.mark.usefixtures("_blocks")
def test_csv_has_a_record_for_each_row_and_json_for_what_is_neither_number_nor_text(merged, tmp_path):
    assert export(merged, "csv", tmp_path / "a.csv").n_rows == N_ROWS
    with open(tmp_path / "a.csv", newline="", encoding="utf-8") as file:
        header, *records = csv.reader(file)
    assert header == ["index", *COLUMNS, "error"]
    for record, row in zip(records, expected_rows(), strict=True):
        for cell, value in zip(record, row.values(), strict=True):
            if value is None:
                assert cell == ""
            else:
                assert (cell if isinstance(value, str) else json.loads(cell)) == value


def test_csv_has_texts_of_a_json_column_without_quotes(tmp_path):
    columns = {"kept": Json()}
    values = ["q0", 'say "hi"', "1", 1, None, True, ["a"], {"a": None}]
    rows = [convert_row(columns, {"kept": value}) for value in values]
    export(write(tmp_path / "a.h5", columns=columns, rows=rows), "csv", tmp_path / "a.csv")
    with open(tmp_path / "a.csv", newline="", encoding="utf-8") as file:
        cells = [record[1] for record in csv.reader(file)][1:]
    assert cells == ["q0", 'say "hi"', "1", "1", "", "true", '["a"]', '{"a":null}']


@pytest.mark.usefixtures("_blocks")
def test_parquet_has_every_row(merged, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert export(merged, "parquet", tmp_path / "a.parquet").n_rows == N_ROWS
    table = parquet.read_table(tmp_path / "a.parquet")
    assert str(table.schema.field("logits").type).count("halffloat") == 1
    for row, wanted in zip(table.to_pylist(), expected_rows(), strict=True):
        assert list(row) == list(wanted)
        for name in wanted.keys() - {"phase", "phases", "tag", "told"}:
            assert row[name] == wanted[name], name
        if wanted["error"] is None:
            assert row["phase"] == {"real": wanted["phase"][0], "imag": wanted["phase"][1]}
            assert row["phases"] == [{"real": real, "imag": imag} for real, imag in wanted["phases"]]
            assert row["tag"].decode() == wanted["tag"]
            assert json.loads(row["told"]) == wanted["told"]


def test_pt_has_tensors_that_torch_loads_and_totals_beside_them(merged, tmp_path):
    torch = pytest.importorskip("torch")
    report = {"fingerprint": FINGERPRINT, "summary": {"accuracy": 0.75}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    (tmp_path / "run.json").write_text(json.dumps({"fingerprint": "of another run", "settings": {}}))
    assert export(merged, "pt", tmp_path / "a.pt").n_rows == N_ROWS
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert list(found) == ["index", *COLUMNS, "error"]
    for index in set(range(N_ROWS)) - FAILED:
        row = plain_row(index)
        assert found["index"][index] == index
        for name in ("score", "logits", "ok", "phase", "nothing", "lengths", "phases"):
            np.testing.assert_array_equal(found[name][index].numpy(), np.asarray(row[name]))
        assert [found[name][index] for name in ("tag", "shout", "told", "error")] == [
            row["tag"].decode(),
            row["shout"],
            row["told"],
            None,
        ]
    assert found["shout"][2] is None
    assert found["score"][2].isnan()
    assert "schlecht" in found["error"][2]
    about = json.loads((tmp_path / "a.pt.json").read_text())
    assert (about["n_rows"], about["n_errors"], about["complete"]) == (N_ROWS, len(FAILED), True)
    assert about["summary"] == {"accuracy": 0.75}
    assert about["settings"] is None


def test_pt_counts_the_items_without_a_row(tmp_path):
    pytest.importorskip("torch")
    join_parts(write_parts(tmp_path, [0, 4, 10], {5, 6})[1:], tmp_path / "merged.h5", n_items=10)
    exported = export(tmp_path / "merged.h5", "pt", tmp_path / "a.pt")
    assert (exported.n_rows, exported.n_missing, exported.n_failed) == (6, 4, 2)


def test_pt_without_pytorch_says_what_to_install(merged, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SlurmGPUError, match=r"slurmgpu\[torch\]"):
        export(merged, "pt", tmp_path / "a.pt")
    assert list(tmp_path.glob("*a.pt*")) == []


def test_what_json_has_no_words_for_is_null(tmp_path):
    columns = {"x": Array("float32"), "v": Array("float16", (2,)), "r": Ragged("float64"), "z": Array("complex64")}
    row = {"x": np.inf, "v": [np.nan, 1], "r": [-np.inf, 2], "z": complex(np.nan, 1)}
    path = write(tmp_path / "a.h5", columns=columns, rows=[convert_row(columns, row)])
    export(path, "jsonl", tmp_path / "a.jsonl")
    found = json.loads((tmp_path / "a.jsonl").read_text())
    assert found == {"index": 0, "x": None, "v": [None, 1], "r": [None, 2], "z": [None, 1], "error": None}


def test_csv_keeps_quotes_commas_and_line_ends_of_texts(tmp_path):
    texts = ['"quoted", and more', "two\nlines", "a\r\nb", "\rc", " blanks ", ""]
    rows = [{"t": text.encode()} for text in texts]
    path = write(tmp_path / "a.h5", columns={"t": Text()}, rows=[*rows, ItemError("bad, in short\nand at length")])
    export(path, "csv", tmp_path / "a.csv")
    with open(tmp_path / "a.csv", newline="", encoding="utf-8") as file:
        records = list(csv.reader(file))
    assert [record[1] for record in records[1:]] == [*texts, ""]
    assert records[-1] == ["6", "", "bad, in short"]


def test_tsv_is_csv_with_tabs(merged, tmp_path):
    for name in ("csv", "tsv"):
        export(merged, name, tmp_path / f"a.{name}")
    with (
        open(tmp_path / "a.csv", newline="", encoding="utf-8") as one,
        open(tmp_path / "a.tsv", newline="", encoding="utf-8") as other,
    ):
        assert list(csv.reader(one)) == list(csv.reader(other, delimiter="\t"))
    assert (tmp_path / "a.tsv").read_text().startswith("index\t")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_float_has_the_digits_that_its_dtype_has(tmp_path, dtype):
    columns, values = {"x": Array(dtype), "v": Ragged(dtype)}, [0.03, 1.0, 1e-7, np.nan]
    rows = [convert_row(columns, {"x": value, "v": [value, 0.1]}) for value in values]
    path = write(tmp_path / "a.h5", columns=columns, rows=rows)
    export(path, "csv", tmp_path / "a.csv")
    with open(tmp_path / "a.csv", newline="", encoding="utf-8") as file:
        records = list(csv.DictReader(file))
    assert [record["x"] for record in records] == ["0.03", "1.0", "1e-07", ""]
    assert records[0]["v"] == "[0.03, 0.1]"
    export(path, "jsonl", tmp_path / "a.jsonl")
    read = [json.loads(line)["x"] for line in (tmp_path / "a.jsonl").read_text("utf-8").splitlines()]
    assert np.array(read[:3], dtype).tobytes() == np.array(values[:3], dtype).tobytes()


@pytest.mark.parametrize("file_format", FORMATS)
def test_no_rows_are_exported_as_no_rows(tmp_path, file_format):
    join_parts([], tmp_path / "merged.h5", n_items=5)
    output = tmp_path / f"a.{file_format}"
    assert export(tmp_path / "merged.h5", file_format, output).n_rows == 0
    if file_format == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        assert parquet.read_table(output).column_names == ["index", *COLUMNS, "error"]
    elif file_format == "pt":
        torch = pytest.importorskip("torch")
        assert list(torch.load(output, weights_only=True)) == ["index", *COLUMNS, "error"]
    elif file_format == "hf":
        parquet = pytest.importorskip("pyarrow.parquet")
        assert parquet.read_table(output / "data").column_names == ["index", *COLUMNS, "error"]
    else:
        assert len(output.read_text().splitlines()) == {"csv": 1, "tsv": 1, "jsonl": 0}[file_format]


def test_an_unknown_format_is_refused_with_the_closest_one(merged, tmp_path):
    with pytest.raises(SlurmGPUError, match=r"no export format 'json'\. Did you mean 'jsonl'"):
        export(merged, "json", tmp_path / "a.json")


def test_without_pyarrow_a_sentence_says_what_to_install(merged, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    with pytest.raises(SlurmGPUError, match=r"pip install 'slurmgpu\[parquet\]'"):
        export(merged, "parquet", tmp_path / "a.parquet")
    assert not list(tmp_path.glob("*a.parquet*"))


@pytest.mark.parametrize("file_format", FORMATS)
def test_an_export_that_fails_leaves_the_old_file_alone(merged, tmp_path, file_format):
    output = tmp_path / f"a.{file_format}"
    if file_format != "hf":  # a folder, which replaces nothing
        output.write_bytes(b"old")
    before = sorted(os.listdir(tmp_path))
    call = f"export(Path({str(merged)!r}), {file_format!r}, Path({str(output)!r}))"
    check_cannot_grow(700, "from slurmgpu.merge.export import export", call)
    assert file_format == "hf" or output.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == before


def test_no_turned_bit_is_exported_and_nothing_is_left(merged, tmp_path):
    stream = io.BytesIO()
    (tmp_path / "a.jsonl").write_bytes(b"old")
    before = sorted(os.listdir(tmp_path))
    for name, at, _ in one_bit_everywhere(merged):
        with pytest.raises(SlurmGPUError, match=r"`slurmgpu merge RUN` rewrites merged\.h5"):
            export(merged, "jsonl", tmp_path / "a.jsonl")
        with pytest.raises(SlurmGPUError):
            export(merged, "csv", stream)
        assert (tmp_path / "a.jsonl").read_bytes() == b"old", (name, at)
    assert sorted(os.listdir(tmp_path)) == before
    assert stream.getvalue() == b""


@pytest.mark.parametrize("file_format", FORMATS)
def test_no_format_exports_a_turned_bit(merged, tmp_path, file_format):
    before = sorted(os.listdir(tmp_path))
    with changed(merged, merged.stat().st_size - 1, b"\xa5"), pytest.raises(SlurmGPUError, match="has changed since"):
        export(merged, file_format, tmp_path / f"a.{file_format}")
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("file_format", ["jsonl", "csv"])
def test_an_export_needs_little_memory_however_many_rows_there_are(tmp_path, file_format):
    columns = {"t": Text()}
    path = write(tmp_path / "a.h5", columns=columns, rows=[{"t": b"x" * 20_000}] * 5_100)
    assert path.stat().st_size > 96 << 20
    tracemalloc.start()
    try:
        assert export(path, file_format, tmp_path / "a").n_rows == 5_100
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20


def test_damaged_records_beside_a_merged_file_keep_no_rows_back(merged, tmp_path, caplog):
    (tmp_path / "run.json").write_text('{"exports": ')
    assert export(merged, "csv", tmp_path / "a.csv").n_rows == N_ROWS
    assert "run.json is damaged and not used for the export" in caplog.text
    (tmp_path / "run.json").write_text("[1]")
    assert export(merged, "csv", tmp_path / "a.csv").n_rows == N_ROWS


def test_an_export_starts_again_if_another_client_replaces_the_file_meanwhile(merged, tmp_path, monkeypatch):
    preadv, reopened = os.preadv, []

    class Replaced(stored.Results):
        def read_into(self, found, start):
            if not reopened:
                reopened.append(True)
                (tmp_path / "new").write_bytes(merged.read_bytes())
                (tmp_path / "new").rename(merged)
                monkeypatch.setattr(os, "preadv", stale)
            super().read_into(found, start)

    def stale(*arguments):
        monkeypatch.setattr(os, "preadv", preadv)
        raise OSError(errno.ESTALE, "as told")

    export(merged, "jsonl", tmp_path / "whole.jsonl")
    monkeypatch.setattr(slurmgpu.results, "Results", Replaced)
    export(merged, "jsonl", tmp_path / "again.jsonl")
    assert reopened
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_run_without_rows_leads_to_the_command_that_says_why(tmp_path):
    run = planned_run(tmp_path / "run")
    with pytest.raises(SlurmGPUError, match=f"{run.folder} has no rows. `slurmgpu status {run.folder}` shows why"):
        export(run, "jsonl", tmp_path / "rows.jsonl")
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize("name", ["run.json", "submissions.jsonl", "report.json", "tasks/local1_0.0.json", "../link"])
def test_an_export_replaces_no_file_of_its_run(tmp_path, name):
    run = published_run(tmp_path / "run", {"n": Array("int64")}, [{"n": 1}])
    own = run.folder / name
    if not own.exists():
        own.symlink_to(run.folder / "run.json") if "link" in name else own.write_text("{}")
    before = own.read_bytes()
    with pytest.raises(SlurmGPUError, match="is a file of the run itself, and would be replaced"):
        export(run, "jsonl", own)
    assert own.read_bytes() == before
    (run.folder / "rows.jsonl").write_text("of an earlier export")
    assert export(run, "jsonl", run.folder / "rows.jsonl").n_rows == 1


def test_an_export_replaces_no_file_that_the_reference_lists(tmp_path):
    run = planned_run(tmp_path / "run")
    page = (Path(__file__).parents[2] / "docs/reference/files.md").read_text()
    cells = re.findall(r"^\| (`[^|]*) \|", page.partition("## The directory")[2].partition("\n## ")[0], re.M)
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert {"private.json", "function.SHA256.pkl", "checkpoints/NNNNN/", ".planned"} <= {*names}
    for name in names:
        own = run.folder / name.replace("SHA256", 16 * "a") / ("x" if name.endswith("/") else "")
        own.parent.mkdir(parents=True, exist_ok=True)
        own.touch()
        with pytest.raises(SlurmGPUError, match="is a file of the run itself, and would be replaced"):
            export(run, "jsonl", own)


@pytest.mark.parametrize("name", ["rows.h5", "link.h5"])
def test_an_export_does_not_replace_the_file_whose_rows_it_writes(merged, tmp_path, name):
    merged.rename(tmp_path / "rows.h5")
    (tmp_path / "link.h5").symlink_to("rows.h5")
    with pytest.raises(SlurmGPUError, match="is the file whose rows are exported, and would be replaced"):
        export(tmp_path / "rows.h5", "csv", tmp_path / name)
    assert export(tmp_path / "rows.h5", "csv", tmp_path / "rows.csv").n_rows


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_an_export_replaces_no_input_of_its_run_by_no_name(tmp_path, suffix):
    items, content = tmp_path / f"items.{suffix}", b'{"n": 1}\n{"n": 2}\n'
    items.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    run = published_run(tmp_path / "run", {"n": Array("int64")}, [{"n": 1}, {"n": 2}], input_file=items)
    (tmp_path / "link.jsonl").symlink_to(items)
    (tmp_path / "rows.jsonl").write_text("of an earlier export")
    before = items.read_bytes()
    for name in (items.name, "link.jsonl"):
        with pytest.raises(SlurmGPUError, match=rf"{name} is the input of .*/run, and would be replaced"):
            export(run, "jsonl", tmp_path / name)
    assert items.read_bytes() == before
    (tmp_path / "of its name").mkdir()
    (tmp_path / "of its name" / items.name).touch()
    for other in ("rows.jsonl", f"of its name/{items.name}"):
        assert export(run, "jsonl", tmp_path / other).n_rows == 2
    items.unlink()
    assert export(run, "jsonl", items).n_rows == 2
