"""Tables of a sweep's runs: columns with names of their own, conditions over all runs, and what is missing."""

import io
import json
import shutil

import pytest

import slurmgpu as package
from slurmgpu.errors import SlurmGPUError
from slurmgpu.merge.sweep_export import export_sweep, sweep_columns
from slurmgpu.run.directory import Run
from slurmgpu.run.sweep_file import record_runs
from slurmgpu.shards.columns import Array
from tests.support.published_runs import published_run

WORKLOAD = """
from slurmgpu import Array, Json, Text


class Clash:
    batch_size = 4

    def __init__(self, model, run, options):
        self.model = model
        self.columns = {"model": Text(), "run": Text(), "value": Json()}
        if model == "b":
            self.columns |= {"more": Array("int64"), "note": Text()}

    def __call__(self, items):
        value = {"a": 2, "b": "two"}[self.model]
        rows = [{"model": f"of {self.model}", "run": "mine", "value": value} for _ in items]
        return [{**row, "more": 7, "note": "Yes"} if self.model == "b" else row for row in rows]

    def summarize(self, merged):
        return {"rows": 11, "share": 0.5}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a sweep of the runs `a` and `b`, whose keys have the names of columns and of a kept field."""
    tmp_path = tmp_path_factory.mktemp("clash")
    (tmp_path / "clash.py").write_text(WORKLOAD)
    items = [{"text": text, "input": text} for text in ("one", "two")]
    (tmp_path / "items.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in items))
    (tmp_path / "run.toml").write_text(
        'run_dir = "runs"\nkeep = ["input"]\n[workload]\nuse = "clash.py:Clash"\n[sweep]\nmodel = ["a", "b"]\n'
        'input = "items.jsonl"\nrun = 1\noptions = {x = 1, "item.y" = true}\n'
    )
    package.submit_all(tmp_path / "run.toml", executor="debug", gpus=0)
    return tmp_path / "runs"


def rows_of(folder, columns=(), where=None):
    file = io.BytesIO()
    export_sweep(folder, "jsonl", file, columns, where)
    return [json.loads(line) for line in file.getvalue().splitlines()]


OF_SWEEP = {"sweep.run": "a", "sweep.model": "a", "sweep.input": "items.jsonl", "sweep.sweep.run": 1}
"""The columns of the sweep, in the first row."""


def test_each_column_has_a_name_of_its_own_and_none_hides_another(folder):
    rows = rows_of(folder)
    own = {
        "index": 0,
        "model": "of a",
        "run": "mine",
        "value": 2,
        "input": "one",
        "error": None,
        "more": None,
        "note": None,
    }
    assert rows[0] == {**OF_SWEEP, "x": 1, 'options."item.y"': True, **own}
    assert [(row["sweep.run"], row["sweep.model"], row["model"], row["more"]) for row in rows] == [
        ("a", "a", "of a", None), ("a", "a", "of a", None), ("b", "b", "of b", 7), ("b", "b", "of b", 7),
    ]  # fmt: skip
    columns = ["model", "sweep.model", "item.text", 'options."item.y"']
    assert rows_of(folder, columns, "index == 1")[0] == dict(zip(columns, ("of a", "a", "two", True), strict=True))


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ('col("sweep.model") == "b" and index == 0', [("b", 0)]),
        ('col("sweep.run") != "b" and x == 1', [("a", 0), ("a", 1)]),
        ("more > 5 and index > 0", [("b", 1)]),  # a column that only one run has
        ('more in [7, 8] and lower(note) == "yes" and matches(note, "Y") and "es" in note', [("b", 0), ("b", 1)]),
        ("more is None", [("a", 0), ("a", 1)]),
    ],
)
def test_a_condition_may_name_the_columns_of_the_sweep_and_those_that_a_run_lacks(folder, where, found):
    for columns in (["sweep.run", "index"], ["sweep.run", "index", "item.text"]):
        assert [(row["sweep.run"], row["index"]) for row in rows_of(folder, columns, where)] == found


def test_failed_and_missing_items_of_all_runs_are_counted(tmp_path):
    rows = ["it failed", *[{"n": 1}] * 4, "it failed", {"n": 2}]
    for name, shards in (("a", [0, 1]), ("b", [0])):
        published_run(tmp_path / name, {"n": Array("int64")}, rows, shards)
    record_runs(tmp_path, {"a": {"x": 1}, "b": {"x": 2}})
    found = export_sweep(tmp_path, "jsonl", io.BytesIO(), (), None)
    assert (found.n_rows, found.n_failed, found.n_missing, found.missing) == (12, 3, 2, {"b": 2})


@pytest.fixture
def copied(folder, tmp_path):
    """A copy of the folder, to change."""
    return shutil.copytree(folder, tmp_path / "runs")


def damage(folder):
    with open(folder / "b" / "merged.h5", "r+b") as file:
        file.seek(-1, 2)
        last = file.read()
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))


@pytest.mark.parametrize(
    ("change", "columns", "where", "said"),
    [
        (None, ["index"], "value > 1", "Run b: .*it does not fit the columns"),
        (None, ["index"], "sweep == 1", "Run a: .*there is no column 'sweep'"),
        (None, ["index", "sweep.run", "index"], None, "The column 'index' is named twice"),
        (None, ["sweep.run", "sweep.run"], None, "The column 'sweep.run' is named twice"),
        (None, ["sweep.modell"], None, "There is no column 'sweep.modell'. Did you mean 'sweep.model'"),
        (None, ["text"], None, r"There is no column 'text'; for the field of the items write item\.text"),
        (None, ["item.txet"], None, "No item has the field 'txet'. Did you mean 'text'"),
        (damage, ["index"], None, r"Run b: .*merged\.h5"),
    ],
)
def test_nothing_is_written_before_a_refusal_whichever_run_it_is_about(copied, change, columns, where, said):
    if change is not None:
        change(copied)
    file = io.BytesIO()
    with pytest.raises(SlurmGPUError, match=said):
        export_sweep(copied, "csv", file, columns, where)
    assert file.getvalue() == b""


def test_runs_that_are_not_there_are_named_and_so_are_those_that_lack_rows(copied, slurmgpu):
    run = Run.open(copied / "a")
    (copied / "a" / "merged.h5").unlink()
    run.shard_path(0).unlink()
    done = slurmgpu("export", copied, "-o", "-", expect=0)
    assert len(done.stdout.splitlines()) == 2
    assert "Runs are incomplete: 2 items without a row (a 2)." in done.stderr
    shutil.rmtree(copied / "a")
    done = slurmgpu("export", copied, "-o", "-", "--where", 'col("sweep.model") == "b"', expect=0)
    assert len(done.stdout.splitlines()) == 2
    assert done.stderr.strip() == "a: not submitted. Repeat the command that submitted the others to submit it."
    shutil.rmtree(copied / "b")
    assert "have no rows. " in slurmgpu("export", copied, "-o", "-", expect=2).stderr


def test_the_rows_of_a_sweep_take_formats_of_lines_only(folder):
    with pytest.raises(SlurmGPUError, match="can be written as jsonl, csv or tsv, not as 'parquet'"):
        export_sweep(folder, "parquet", io.BytesIO(), (), None)


def test_the_rows_of_a_sweep_replace_no_input_of_its_runs(folder):
    items = folder.parent / "items.jsonl"
    before = items.read_bytes()
    with pytest.raises(SlurmGPUError, match=r"items.jsonl is the input of .*/runs/a, and would be replaced"):
        export_sweep(folder, "jsonl", items, (), None)
    assert items.read_bytes() == before


def test_a_value_of_the_summaries_is_not_taken_for_a_column_of_the_report(folder, slurmgpu):
    lines = [line.split() for line in slurmgpu("report", folder, expect=0).stdout.splitlines()]
    assert ["run", "rows", "failed", "summary.rows", "share"] in lines
    assert ["a", "2", "of", "2", "0", "11"] in [line[:6] for line in lines]


@pytest.mark.parametrize(("failed", "columns"), [([0, 0], []), ([0, 1], ["summary.failed"])])
def test_a_summary_that_counts_the_failed_items_gets_no_second_column_of_them(copied, slurmgpu, failed, columns):
    for name, n_failed in zip("ab", failed, strict=True):
        report = json.loads((copied / name / "report.json").read_text())
        (copied / name / "report.json").write_text(json.dumps({**report, "summary": {"n_failed": n_failed}}))
    lines = [line.split() for line in slurmgpu("report", copied, expect=0).stdout.splitlines()]
    assert ["run", "rows", "failed", *columns] in lines


@pytest.mark.parametrize(
    ("keys", "known", "found"),
    [
        (["settings.lr", "seed"], ["index", "y", "error"], ["run", "lr", "seed"]),
        (["settings.lr", "optimizer.lr"], ["y"], ["run", "settings.lr", "optimizer.lr"]),
        (["lr", "optimizer.lr"], ["y"], ["run", "lr", "optimizer.lr"]),
        (["settings.y", ".seed"], ["y", "seed"], ["run", "settings.y", "sweep.seed"]),
        (["run", "index"], ["index"], ["run", "sweep.run", "sweep.index"]),
        (["run", "sweep.run"], ["run"], ["sweep.run", "sweep.sweep.run", "sweep.sweep.sweep.run"]),
        (['settings."item.y"', "item.x"], [], ["run", 'settings."item.y"', "x"]),
    ],
)
def test_columns_of_values_have_the_last_part_of_the_key_the_whole_key_or_more(keys, known, found):
    run_name, names = sweep_columns(keys, dict.fromkeys(known))
    assert [run_name, *(names[key] for key in keys)] == found
