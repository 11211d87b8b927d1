"""Rows keep fields of their items, and a field names the items."""

import csv
import gzip
import json
import math
import re
import sqlite3

import pyarrow as pa
import pytest

import slurmgpu as library
from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs.fields import columns_kept
from slurmgpu.inputs.keys import name_by
from slurmgpu.merge.item_names import name_by_key
from slurmgpu.plan.planner import draft_run
from slurmgpu.run.directory import Run
from tests.support.runs import planned_run, report

LOCAL = ("submit", "--executor", "local", "--gpus", "0")
DEBUG = ("submit", "--executor", "debug", "--gpus", "0")


def items(n, **changed):
    found = [{"text": f"item {i} of many", "x": i, "id": f"q{i}", "double": [i, None]} for i in range(n)]
    for index, change in changed.items():
        found[int(index[1:])] |= change
    return found


@pytest.mark.parametrize(
    ("keep", "rename", "said"),
    [
        (["id", "id"], {}, "keep has 'id', which is named twice"),
        (
            ["text"],
            {},
            "keep has 'text', which is a column that the run computes. Give its column another name, rename",
        ),
        (["index"], {}, "keep has 'index', which is a column that slurmgpu adds"),
        (["id"], {"id": "text"}, "rename has 'text', which is a column that the run computes"),
        (["id", "x"], {"x": "id"}, "keep has 'id', which is also the column of 'id'"),
        (
            ["id"],
            {"idd": "y"},
            "rename has 'idd', which is not in keep; expected FIELD = COLUMN",
        ),
    ],
)
def test_a_kept_field_has_a_column_of_its_own(keep, rename, said):
    with pytest.raises(SlurmGPUError) as raised:
        columns_kept(keep, rename, {"text"})
    assert str(raised.value).startswith(said)


def test_rows_of_any_workload_keep_fields_of_their_items(project, slurmgpu):
    folder = project(items=items(16), keep=["id", "double"], rename={"double": "given"}, key="id")
    slurmgpu(*DEBUG, cwd=folder, expect=0)
    with library.open(folder / "run/merged.h5") as merged:
        assert [merged["id"][i] for i in (0, 15)] == ["q0", "q15"]
        assert merged["given"][3] == [3, None]
        assert merged["double"][3] == 6.0


def test_a_failed_item_keeps_its_fields(project, slurmgpu):
    lines = items(16, _3={"text": None}, _5={"text": None, "double": None}, _6={"text": None})
    del lines[6]["double"]
    folder = project(items=lines, keep=["id", "double"], rename={"double": "given"})
    slurmgpu(*DEBUG, cwd=folder, expect=0)
    for _ in range(2):
        with library.open_run(folder / "run").results() as merged:
            assert merged.index[merged.failed].tolist() == [3, 5, 6]
            frame, table = merged.to_pandas(), merged.to_arrow().to_pylist()
        assert frame["id"].tolist() == [row["id"] for row in table] == [f"q{i}" for i in range(16)]
        assert [table[i]["given"] for i in (3, 5, 6)] == [[3, None], None, None]
        assert [table[i]["double"] for i in (2, 3)] == [4.0, None]
        shown = slurmgpu("show", "run", "--items", "3", "--json", cwd=folder, expect=0).stdout
        row = json.loads(shown)["rows"][0]["values"]
        assert (row["id"], row["given"], row["double"]) == ("q3", [3, None], None)
        slurmgpu("export", "run", "--output", "rows.csv", cwd=folder, expect=0)
        with open(folder / "rows.csv", newline="", encoding="utf-8") as file:
            cells = list(csv.DictReader(file))
        assert [(cells[i]["id"], cells[i]["given"]) for i in (3, 5)] == [("q3", "[3,null]"), ("q5", "")]
        slurmgpu("resubmit", "run", "--failed", cwd=folder, expect=0)  # what fails again is put over the former row


def test_a_field_in_which_hundreds_of_lists_lie_in_one_another_costs_its_item_alone(project, slurmgpu):
    deep = "end"
    for _ in range(600):
        deep = [deep]
    folder = project(items=items(8, _2={"id": deep}), keep=["id"], key="id")
    slurmgpu(*DEBUG, cwd=folder, expect=0)
    [failed] = report(folder)["errors"]
    assert (failed["index"], failed["message"]) == (
        2,
        "the field 'id', which the row keeps, has more than 256 nested lists and mappings",
    )
    for name in ("rows.csv", "rows.jsonl"):
        slurmgpu("export", "run", "-o", name, "--with-items", cwd=folder, expect=0)
    slurmgpu("compare", "run", "run", "--key", "id", cwd=folder, expect=0)


def test_an_item_goes_by_its_key_in_logs_and_reports(project, slurmgpu):
    lines = items(16, _3={"text": None}, _5={"id": 17})
    del lines[9]["text"], lines[12]["id"]
    folder = project(items=lines, keep=["id"], key="id")
    told = slurmgpu(*LOCAL, cwd=folder, expect=0)
    assert "key = 'id': 1 item without it, named only by index" in told.stdout + told.stderr
    found = {item["index"]: item["name"] for item in report(folder)["errors"]}
    assert found.keys() == {3, 9, 12}
    assert (found[3], found[9]) == ("q3", "q9")
    for asked in ("3", "q3", "id=q3"):
        done = slurmgpu("logs", "run", "--item", asked, cwd=folder, expect=0)
        assert done.stdout.startswith("Item 3 (q3) failed in attempt ")
        assert "item 3 (q3): item_error: " in done.stdout
    assert slurmgpu("logs", "run", "--item", "id=17", cwd=folder, expect=0).stdout.startswith("Item 5 (17) has its row")
    refused = slurmgpu("logs", "run", "--item", "q99", cwd=folder, expect=2)
    assert "has no item whose id is 'q99'" in refused.stderr
    refused = slurmgpu("logs", "run", "--item", "9" * 5000, cwd=folder, expect=2)
    assert "has no item whose id is '999" in refused.stderr


def test_items_that_share_a_key_are_told_at_planning(project, slurmgpu):
    folder = project(items=items(16, _7={"id": "q2"}, _8={"id": "q2"}, _9={"id": "a \x1b[1m\n b"}), key="id")
    with draft_run(folder / "slurmgpu.toml", {"resources": {"gpus": 0}}) as draft:
        assert draft.plan.placement[-1] == "key = 'id': 3 items share theirs, such as items 2 and 7: 'q2'."
    slurmgpu("plan", cwd=folder, expect=0)
    assert name_by_key(Run.open(folder / "run"), 9) == "a \ufffd[1m b"
    refused = slurmgpu("logs", "run", "--item", "q2", cwd=folder, expect=2)
    assert "several items whose id is 'q2', such as 2 and 7: give a number" in refused.stderr


def test_a_field_that_no_item_has_is_refused(project, slurmgpu):
    for key, value in {"keep": ["idd"], "key": "idd"}.items():
        folder = project(items=items(4), **{key: value})
        refused = slurmgpu(*DEBUG, cwd=folder, expect=2)
        assert f"{key} takes the field 'idd', which " in refused.stderr
        assert "Did you mean 'id'?" in refused.stderr


def test_who_lacks_a_field_of_an_earlier_runs_items_is_told_of_its_keep(project, slurmgpu):
    folder = project(items=items(4))
    slurmgpu(*DEBUG, cwd=folder, expect=0)
    again = ("-s", '.input="run/merged.h5"', "-s", '.keep=["id"]', "--run-dir", "again")
    refused = slurmgpu(*DEBUG, *again, cwd=folder, expect=2)
    assert "keep takes the field 'id', which the input" in refused.stderr
    assert "only if the earlier run's keep names it" in refused.stderr


def test_a_refusal_names_the_input_that_was_given_and_no_file_that_was_made_of_it(project):
    folder = project(items=items(4), keep=["idd"])
    (folder / "items.jsonl.gz").write_bytes(gzip.compress((folder / "items.jsonl").read_bytes()))
    with sqlite3.connect(folder / "items.db") as database:
        database.execute("CREATE TABLE item AS SELECT 1 AS id")
    settings = {"resources": {"gpus": 0}}
    query = f"sqlite:{folder}/items.db?SELECT id FROM item ORDER BY id"
    for given, records, called in (
        ("items.jsonl.gz", None, f"the input {folder}/items.jsonl.gz"),
        (query, None, f"the input {query}"),
        ("items.jsonl", pa.table({"id": [1]}), "the table"),
    ):
        refusal = pytest.raises(SlurmGPUError, match=re.escape(f"keep takes the field 'idd', which {called} lacks"))
        with refusal, draft_run(folder / "slurmgpu.toml", settings | {"input": given}, records=records):
            pass


def test_a_plan_whose_values_give_another_fingerprint_is_refused_before_its_shards_are_taken_for_damaged(tmp_path):
    path = planned_run(tmp_path / "run").folder / "run.json"
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, "lease_s": 7.0}))
    assert Run.open(path.parent).plan.lease_s == 7.0
    path.write_text(json.dumps({**value, "seed": 1}))
    with pytest.raises(SlurmGPUError, match=f"has the fingerprint '{value['fingerprint']}', but its values give"):
        Run.open(path.parent)


def test_settings_whose_keys_are_numbers_have_the_same_fingerprint_before_and_after_run_json(tmp_path):
    planned = planned_run(tmp_path / "run", settings={"weights": {2: 0.5, 10: 1.0}})
    assert Run.open(planned.folder).plan.fingerprint == planned.plan.fingerprint


def test_neither_null_nor_nan_is_a_name():
    assert [name_by("id", {"id": value}) for value in (None, math.nan, "NaN", 0, 1.5)] == [
        None,
        None,
        "NaN",
        "0",
        "1.5",
    ]
    assert name_by("id", {}) is None
