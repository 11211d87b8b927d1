"""What a workload's `summarize` adds to the report: computed by the merge, shown by `report`, and never in its way."""

import json

import pytest

from slurmgpu.cli.console import wide_console
from slurmgpu.cli.views.summaries import show_summary
from slurmgpu.util.amounts import count_of
from tests.support.runs import report

WORKLOAD = """
import os, sys
from slurmgpu import Array
open("imported", "a").write("x")

class Plain:
    columns = {"n": Array("int32")}
    batch_size = 4
    def load(self, task):
        pass
    def __call__(self, items):
        return [{"n": len(item.data["text"])} for item in items]

class Sum(Plain):
    def summarize(self, merged):
        assert os.path.samefile(".", os.path.dirname(__file__))  # as when it was planned
        return {"sum": int(merged["n"][:].sum()), "n_failed": int(merged.failed.sum())}

class Broken(Plain):
    def summarize(self, merged):
        return {"mean": float("nan")}

class Leaving(Plain):
    def summarize(self, merged):
        sys.exit("enough")
"""


@pytest.fixture
def ran(project, slurmgpu):
    def run(name):
        folder = project(6)
        (folder / "w.py").write_text(WORKLOAD)
        text = (folder / "slurmgpu.toml").read_text()
        (folder / "slurmgpu.toml").write_text(text.replace("workloads.py:Rows", f"w.py:{name}"))
        return folder, slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)

    return run


def test_a_workloads_summary_is_in_the_report_and_shown(ran, slurmgpu):
    folder, done = ran("Sum")
    assert report(folder)["summary"] == {"sum": 6 * len("item 0 of many"), "n_failed": 0}
    assert "\nsummary\n  sum     84\n  failed  0\n" in done.stdout
    again = slurmgpu("merge", "run", cwd=folder, expect=0)
    assert "  sum     84\n" in again.stdout


@pytest.mark.parametrize(
    ("name", "reason"), [("Broken", "ValueError: Out of range float values"), ("Leaving", "SystemExit: enough")]
)
def test_a_summary_that_fails_is_a_sentence_in_a_whole_report(ran, slurmgpu, name, reason):
    folder, done = ran(name)
    assert report(folder)["complete"]
    assert report(folder)["summary"]["error"].startswith(reason)
    assert f"the workload could not summarize its rows: {reason}" in done.stdout
    (folder / "run" / "report.json").write_text(json.dumps({**report(folder), "summary": {"error": "another"}}))
    slurmgpu("merge", "run", cwd=folder, expect=0)
    assert report(folder)["summary"]["error"].startswith(reason)


def test_code_that_cannot_be_used_costs_neither_the_merge_nor_the_summary_that_was_made(ran, slurmgpu):
    folder, _ = ran("Sum")
    [snapshot] = (folder / "run" / "code").glob("*/w.py")
    snapshot.write_text("import no_such_module")
    again = slurmgpu("merge", "run", cwd=folder, expect=0)
    assert report(folder)["summary"] == {"sum": 84, "n_failed": 0}
    assert "w.py was changed" in again.stderr
    path = folder / "run" / "report.json"
    former = report(folder)
    for change in ({"n_rows": 5}, {"n_errors": 1}, {"fingerprint": "f"}):  # of other rows
        path.write_text(json.dumps({**former, **change}))
        slurmgpu("merge", "run", cwd=folder, expect=0)
        assert "w.py was changed" in report(folder)["summary"]["error"]


def test_the_summary_of_rows_that_other_code_has_computed_since_is_not_kept(ran, slurmgpu):
    folder, _ = ran("Sum")
    code = WORKLOAD.replace("len(item", "-len(item").replace(
        "return {", "raise ValueError('no longer')\n        return {"
    )
    (folder / "w.py").write_text(code)
    again = slurmgpu("resubmit", "run", "--other-code", cwd=folder, expect=0)
    assert "the summary of an earlier merge" not in again.stderr
    assert report(folder)["summary"] == {"error": "ValueError: no longer"}


def test_a_workload_without_a_summary_is_not_imported_by_the_merge(ran, slurmgpu):
    folder, _ = ran("Plain")
    assert report(folder)["summary"] is None
    (folder / "imported").unlink()
    slurmgpu("merge", "run", cwd=folder, expect=0)
    assert not (folder / "imported").exists()


@pytest.mark.parametrize(("count", "said"), [(0, "0 shards"), (1, "1 shard"), (1234, "1,234 shards")])
def test_one_thing_is_not_in_the_plural(count, said):
    assert count_of(count, "shard") == said


def test_values_are_lines_and_what_has_rows_and_columns_is_a_table(capsys):
    summary = {
        "n_items": 12345,
        "accuracy": 0.5,
        "accuracy_interval": [0.25, 0.75],
        "pass_rate": 1,
        "frame_rate": 30,
        "macro_f1": 0.123456,
        "tokens_per_answer": 1234.56,
        "off_by": {"mean": -0.000012345, "worst": 0.012345, "none": 0.0},
        "nothing": None,
        "labels": {"a": 1, "[b]": 2},
        "confusion": {"a": {"a": 1, "[b]": 0}, "[b]": {"a": 1000, "[b]": 2}},
        "rates": {"a": {"x": {"hit_rate": 0.5}, "y": {"hit_rate": None}}},
        "uneven": {"a": {"x": 1}, "b": {"y": 1}},
        "worst": [{"item": 3, "loss": 1.5, "near": [{"item": 4}]}, {"item": 7, "loss": 0.5, "near": []}],
        "mixed": [{"item": 3}, 4],
        "how": {},
        "groups": {"": {"n": 1}, "b": {"n": 2}},
        "hint": "Do it again.",
    }
    show_summary(wide_console(), summary)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert (
        lines
        == """
summary
  items              12,345
  accuracy           50.0%
  accuracy interval  25.0% – 75.0%
  pass rate          100.0%
  frame rate         30
  macro f1           0.123
  tokens per answer  1,234.6
  nothing            –
  mixed              {"item": 3} – 4
  off by: mean -1.23e-05, worst 0.0123, none 0.000
  labels: a 1, [b] 2

  confusion      a  [b]
  a              1    0
  [b]        1,000    2

  rates: a  hit rate
  x            50.0%
  y                –
  uneven: objects with different keys; report --json lists them

  worst  item   loss         near
  1         3  1.500  {"item": 4}
  2         7  0.500

  groups  n
  (none)  1
  b       2

  Do it again.""".splitlines()
    )
