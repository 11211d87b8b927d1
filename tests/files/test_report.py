"""The report: what became of attempts; and of what use a damaged one is, or one of a run that was moved."""

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
from datetime import datetime

import h5py
import numpy as np
import pytest

from slurmgpu import page as pages
from slurmgpu import results
from slurmgpu.cli.console import wide_console
from slurmgpu.cli.views.report import _show_errors
from slurmgpu.errors import SlurmGPUError
from slurmgpu.merge.item_names import name_of
from slurmgpu.merge.merge import merge
from slurmgpu.operations import wait
from slurmgpu.page import page
from slurmgpu.page.facts import item_reasons
from slurmgpu.report import build, report_file
from slurmgpu.report.attempts import attempts_of
from slurmgpu.report.ledger import KINDS
from slurmgpu.report.outcomes import CUT_FINER, TOO_LARGE, Accounted
from slurmgpu.report.report_file import judged_attempts, last_report, read_report, report_path
from slurmgpu.report.status import read_status
from slurmgpu.report.versions import computed_with, versions_in_words
from slurmgpu.run.directory import Run
from slurmgpu.shards.columns import Array, columns_from_json, convert_row
from slurmgpu.shards.shard_file import write_shard
from tests.support.pretend_runs import BEGIN, pretend_run, reported
from tests.support.published_runs import published_run


@pytest.fixture
def run(tmp_path):
    return pretend_run(tmp_path / "run", 600, n_tasks=4, n_shards=40, sample_s=0)


ODD = """
from slurmgpu import Array, ItemError

class Odd:
    columns = {"score": Array("float64"), "pair": Array("float32", (2,)), "n": Array("int64")}
    batch_size = 4

    def load(self, task):
        pass

    def __call__(self, items):
        scores = {3: float("nan"), 9: float("inf"), 10: float("nan")}
        pairs = {4: [0, float("nan")]}
        return [
            ItemError("no")
            if item.index == 5
            else {"score": scores.get(item.index, 1.0), "pair": pairs.get(item.index, [0, 1]), "n": 1}
            for item in items
        ]
"""


def test_the_report_says_which_columns_have_nan_and_infinities(project, slurmgpu):
    folder = project(16, workload="Odd")
    (folder / "workloads.py").write_text(ODD)
    shown = slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0).stdout
    told = shown.partition("not finite: ")[2].splitlines()
    assert told[0] == "pair (NaN in 1 row), score (NaN in 2 rows, infinity in 1 row)"
    command = told[1].partition(" as for what is unknown. ")[2]
    assert command == f"slurmgpu show {folder}/run --where 'isnan(score - score)'"
    pytest.importorskip("pyarrow")
    rows = slurmgpu(*shlex.split(command)[1:], "--json", cwd=folder, expect=0).stdout
    assert [row["index"] for row in json.loads(rows)["rows"]] == [3, 9, 10]
    run = Run.open(folder / "run")
    assert read_report(run)["not_finite"] == {"pair": {"nan": 1, "infinite": 0}, "score": {"nan": 2, "infinite": 1}}
    pytest.importorskip("matplotlib")
    pages.write_page(run, read_report(run), folder / "page.html")
    page = (folder / "page.html").read_text()
    assert '<tr><th scope="row">score<td class="n"><data data-key="not_finite.score.nan" value="2">2</data>' in page


IMPORTING = """
import sys
import types

from slurmgpu import Array

class Importing:
    columns = {"x": Array("float64")}
    batch_size = 4

    def load(self, task):
        sys.modules["torch"] = types.SimpleNamespace(__version__="2.13.0+cpu", cuda=None)

    def __call__(self, items):
        sys.modules["vllm"] = types.SimpleNamespace(__version__="0.32.0")  # only when it is needed
        return [{"x": 1.0} for _ in items]
"""


def test_the_report_says_which_versions_computed(project, slurmgpu):
    folder = project(16, workload="Importing")
    (folder / "workloads.py").write_text(IMPORTING)
    shown = slurmgpu("submit", "--executor", "local", "--gpus", "0", cwd=folder, expect=0).stdout
    assert "computed with: torch 2.13.0+cpu, vllm 0.32.0\n" in shown
    run = Run.open(folder / "run")
    found = read_report(run)["computed_with"]
    assert found == {
        "python": {platform.python_version(): 1},
        "numpy": {np.__version__: 1},
        "h5py": {h5py.__version__: 1},
        "torch": {"2.13.0+cpu": 1},
        "vllm": {"0.32.0": 1},
    }
    pytest.importorskip("matplotlib")
    pages.write_page(run, read_report(run), folder / "page.html")
    assert "torch 2.13.0+cpu, vllm 0.32.0</dd>" in (folder / "page.html").read_text()


def test_the_report_alone_says_what_was_computed_from_what(project, slurmgpu):
    """Years later, of a run whose directory has gone except for merged.h5 and report.json."""
    settings = {"marks": "", "held": "https://ada:letmein@example.org/"}
    folder = project(8, settings=settings)
    path = folder / "slurmgpu.toml"
    path.write_text('keep = ["text"]\n' + path.read_text())
    slurmgpu("submit", "--executor", "local", "--gpus", "0", cwd=folder, expect=0)
    told = json.loads((folder / "run" / "report.json").read_text())["provenance"]
    plan, source = Run.open(folder / "run").plan, folder / "items.jsonl"
    assert told == {
        **plan.provenance,
        "workload": plan.workload,
        "settings": {"marks": "", "held": "https://•••@example.org/"},
        "input": {
            "format": "jsonl",
            "n_files": 1,
            "files": [{"path": str(source), "sha256": hashlib.sha256(source.read_bytes()).hexdigest()}],
            "folders": [],
        },
        "input_digest": plan.input_digest,
        "seed": plan.seed,
        "batch_size": plan.batch_size,
        "keep": {"text": "text"},
    }


def test_attempts_with_other_versions_are_told_apart():
    used = [("3.11.7", {"torch": "2.11.0"}), ("3.11.7", {"torch": "2.13.0"}), ("3.11.7", {"torch": "2.11.0"})]
    records = [{"published": [[0, 0, 0]], "surroundings": {"python": python, "used": each}} for python, each in used]
    idle = {"published": [], "surroundings": {"used": {"torch": "1.0"}}}
    damaged = {"published": [[0, 0, 0]], "surroundings": {"python": 3, "used": [{}]}}
    found = computed_with([*records, idle, damaged])
    assert found == {"python": {"3.11.7": 3}, "torch": {"2.11.0": 2, "2.13.0": 1}}
    assert versions_in_words(found, leaving_out=["python"]) == "torch 2.11.0 (2 attempts), torch 2.13.0 (1 attempt)"


def test_items_that_failed_by_the_same_message_are_one_line_of_the_report(project, slurmgpu):
    lines = [{"text": f"line {i}"} for i in range(8)]
    folder = project(workload="Rows", items=lines, settings={"faults": {str(i): "item_error" for i in (2, 5, 6)}})
    shown = slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0).stdout
    assert '  item 2 (text = "line 2") and 2 more: item_error: not this one\n\n' in shown


def test_of_too_many_messages_those_that_differ_in_numbers_are_one_line_of_the_report(capsys):
    found = [(i, "item_error", f"found {i / 2}, expected 1") for i in range(30)] + [(30, "crash", "gone")]
    errors = [{"index": i, "class": kind, "message": message} for i, kind, message in found]
    report = {"errors": errors, "n_errors": 31, "errors_by_class": {"item_error": 30, "crash": 1}}
    _show_errors(wide_console(), report)
    said = "  item 0 and 29 more like it: item_error: found 0.0, expected 1\n  item 30: crash: gone\n"
    assert capsys.readouterr().out == f"\nfailed items  30 item_error, 1 crash\n{said}"


def test_failed_items_are_told_by_their_first_fields_and_configurations_by_their_settings(project, slurmgpu):
    lines = [{"text": "of\x1b[2J many" * 20, "x": [i], "id": None, "more": 1} for i in range(8)]
    folder = project(workload="Rows", items=lines, settings={"faults": {"3": "item_error"}})
    shown = slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0).stdout
    [error] = read_report(Run.open(folder / "run"))["errors"]
    assert error["name"].startswith('text = "of\\u001b[2J many')
    assert error["name"].endswith("…, x = [3], id = null")
    assert f"  item 3 ({error['name']}): item_error: not this one\n" in shown
    # A later merge without the input says as much as it can.
    (folder / "items.jsonl").unlink()
    assert "  item 3: item_error: not this one\n" in slurmgpu("merge", "run", cwd=folder, expect=0).stdout
    (folder / "slurmgpu.toml").write_text(
        'run_dir = "sweep"\nhtml = false\n[workload]\nuse = "workloads.py:Rows"\n[settings.faults]\n3 = "item_error"\n'
        "[sweep]\nlr = [0.1, 0.01]\nwidth = [32, 64]\ntext = 'a b'\n"
    )
    shown = slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0).stdout
    assert '  item 3 (lr = 0.01, width = 64, text = "a b"): item_error: not this one\n' in shown


def test_a_row_of_an_earlier_run_is_told_by_what_that_run_kept(project, slurmgpu):
    """Not by its index, and the first of what was computed."""
    lines = [{"text": f"line {i}", "id": i} for i in range(8)]
    folder = project(workload="Rows", items=lines, keep=["id", "text"])
    slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)
    (folder / "second.toml").write_text(
        'input = "run/merged.h5"\nrun_dir = "second"\nhtml = false\n'
        '[workload]\nuse = "workloads.py:Rows"\n[settings.faults]\n3 = "item_error"\n'
    )
    shown = slurmgpu("submit", "second.toml", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0).stdout
    assert '  item 3 (id = 3, text = "line 3"): item_error: not this one\n' in shown


def test_an_item_has_a_name_of_one_line():
    assert name_of({"a": "x\ny", "b": datetime(2026, 1, 2), "c": 3}, 2) == 'a = "x\\ny", b = "2026-01-02 00:00:00"'
    assert name_of({}) is None
    assert len(name_of({str(n): "long " * 9 for n in range(9)})) == 160


def change(run, name, **fields):
    path = run.tasks / f"{name}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def write_report(run, **verdicts):
    """A report as the merge writes it, but that it gives these failures to the attempts of tasks."""
    report = reported(run, errors=())
    for row in report["attempts"]:
        if (task := f"task{row['attempt'].partition('_')[2][0]}") in verdicts:
            row.update(failure=verdicts[task], message="so accounting says")
    report_path(run).write_text(json.dumps(report))
    return report


STOPPED = "stopped by SIGTERM; its shards were given back"


@pytest.mark.parametrize(
    ("own", "reason", "slurms", "by_us", "expected"),
    [
        ("timeout", None, "cancelled", False, "cancelled"),  # scancel, a minute before the end
        ("timeout", None, None, True, "cancelled"),  # slurmgpu cancel, where accounting says nothing
        ("timeout", None, "timeout", True, "timeout"),  # the others were cancelled, later
        ("timeout", None, "timeout", False, "timeout"),
        ("timeout", None, "preempted", False, "preempted"),
        ("timeout", "deadline", None, True, "timeout"),  # it ended by itself
        ("preempted", None, "cancelled", False, "cancelled"),
        ("preempted", None, "timeout", False, "timeout"),
        ("preempted", None, "node_fail", False, "node_fail"),  # its node was set down
        ("timeout", None, "node_fail", False, "node_fail"),
        ("preempted", None, "preempted", True, "preempted"),
        ("preempted", None, None, True, "cancelled"),
        ("preempted", None, None, False, "preempted"),
    ],
)
def test_whoever_stopped_an_attempt_is_not_told_by_when_that_was(run, own, reason, slurms, by_us, expected):
    advice = f". Shard 3 {TOO_LARGE}{CUT_FINER}" if own == "timeout" and reason is None else ""
    ended = {"state": "ended", "ended": BEGIN + 600, "failure": own, "message": STOPPED + advice, "reason": reason}
    change(run, "4711_0.0", **ended)
    if by_us:
        run.record_submission({"submission": 1, "cancelled": True})
    accounting = None if slurms is None else {"4711_0": [Accounted(slurms.upper(), slurms, True, 600, 1, "gpu000")]}
    [row] = [row for row in attempts_of(run, accounting) if row["attempt"] == "4711_0.0"]
    assert row["failure"] == expected
    assert row["bad_node"] == (row["node"] if expected == "node_fail" else None)
    # How much walltime a shard needs is no advice to somebody who cancelled it.
    assert (TOO_LARGE in row["message"]) == (expected == "timeout" and bool(advice))


@pytest.mark.parametrize(
    ("slurms", "others", "per_node", "expected"),
    [
        ("host_oom", {"deaths": [{"class": "host_oom", "message": "", "at": BEGIN}]}, 2, "lost"),
        ("crash", {"failure": "crash"}, 2, "lost"),
        ("host_oom", {}, 2, "host_oom"),  # whoever's it was, more memory is needed
        ("crash", {"failure": "crash"}, 1, "crash"),  # each has its own job
        ("node_fail", {"failure": "node_fail"}, 2, "node_fail"),  # the node of both
        ("timeout", {"failure": "timeout"}, 2, "timeout"),
    ],
)
def test_a_killed_task_is_not_blamed_for_what_slurm_says_of_another_of_its_job(run, slurms, others, per_node, expected):
    run.record_submission({"submission": 1, "tasks_per_node": per_node})
    change(run, "4711_0.0", state="running", ended=None, failure=None, message="")
    change(run, "4711_1.0", state="ended", ended=BEGIN + 600, **{"failure": None, "deaths": [], **others})
    told = Accounted("FAILED", slurms, True, 600, 1, "gpu000")
    rows = {row["attempt"]: row for row in attempts_of(run, {f"4711_{task}": [told] for task in range(4)})}
    assert (rows["4711_0.0"]["failure"], rows["4711_0.0"]["slurm_state"]) == (expected, "FAILED")


def test_what_a_task_published_between_its_last_word_and_its_death_is_its_own(run):
    before = reported(run, errors=())
    [dead] = [record for record in run.attempts() if record["attempt"] == "4711_1.0"]
    shard, plan = dead["shard"], run.plan
    start, stop = plan.bounds(shard)
    columns = columns_from_json(plan.columns)
    write_shard(
        run.shard_path(shard),
        columns,
        start=start,
        rows=[convert_row(columns, {"score": 1.0}) for _ in range(start, stop)],
        fingerprint=plan.fingerprint,
        notes={},
        made_by={"attempt": "4711_1.0", "started": dead["shard_started"], "seconds": 58.0},
    )
    report = reported(run, errors=())
    [was], [row] = ([a for a in told["attempts"] if a["attempt"] == "4711_1.0"] for told in (before, report))
    assert (row["n_items"], row["n_shards"]) == (was["n_items"] + stop - start, was["n_shards"] + 1)
    assert row["shards"][-1] == [shard, round(dead["shard_started"], 3), 58.0, True]
    assert row["spent"]["useful"] == pytest.approx(was["spent"]["useful"] + 58, abs=0.01)
    assert row["spent"]["lost"] < was["spent"]["lost"]
    assert sum(row["spent"][kind] for kind in KINDS) == pytest.approx(row["seconds"])
    assert [a for a in report["attempts"] if a is not row] == [a for a in before["attempts"] if a is not was]
    # Also if another attempt has recorded that it was late with this shard.
    [late] = [record for record in run.attempts() if record["attempt"] == "4711_0.0"]
    change(run, "4711_0.0", published=[*late["published"], [shard, late["started"], 58.0, False]])
    assert [a["shards"] for a in reported(run, errors=())["attempts"] if a["attempt"] == "4711_1.0"] == [row["shards"]]


def test_of_attempts_that_do_not_live_the_report_knows_best_what_became_of_them(run):
    assert {row["failure"] for row in judged_attempts(run)} == {None}
    change(run, "4711_0.0", state="ended", ended=BEGIN + 600, failure="preempted", message=STOPPED)
    write_report(run, task0="cancelled", task1="node_fail", task2="lost")
    told = json.loads(report_path(run).read_text())
    told["attempts"].append({**told["attempts"][0], "attempt": "4711_9.0", "submission": None, "failure": "node_fail"})
    report_path(run).write_text(json.dumps(told))
    change(run, "4711_2.0", updated=BEGIN + 900)  # it was slow, and lives on
    judged = {row["attempt"]: row["failure"] for row in judged_attempts(run)}
    assert judged == {
        "4711_0.0": "cancelled",
        "4711_1.0": "node_fail",
        "4711_2.0": None,
        "4711_3.0": "lost",
        "4711_9.0": "node_fail",
    }
    run.record_submission({"submission": 1, "state": "ended"})
    assert {row["attempt"]: row["failure"] for row in judged_attempts(run)}["4711_2.0"] == "lost"


DAMAGE = [
    b'{"comp',
    b"",
    b"[]",
    b"3",
    b"null",
    b"{}",
    b'{"complete": true, "attempts": [1]}',
    b"[" * 100_000,
    b"\xff\xfe",
    {"version": 2},
    {"attempts": [1]},
    {"attempts": {}},
    {"attempts": [{"attempt": "4711_0.0"}]},
    {"errors": None},
    {"missing": [[3]]},
    {"complete": "yes"},
    {"n_items": None},
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: repr(damage)[:40])
def test_a_damaged_report_is_refused_in_a_sentence_and_costs_what_it_says_alone(run, damage):
    whole = write_report(run, task0="cancelled")
    assert read_report(run)["attempts"] == whole["attempts"]
    content = damage if isinstance(damage, bytes) else json.dumps({**whole, **damage}).encode()
    report_path(run).write_bytes(content)
    for read in (read_report, last_report):
        with pytest.raises(SlurmGPUError, match=r"report\.json is damaged: .*`slurmgpu merge .*/run` writes it again"):
            read(run)
    assert len(judged_attempts(run)) == 4


def test_a_report_of_a_million_failed_items_is_read_and_has_their_messages_short(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "N_WHOLE_MESSAGES", 2)
    run = published_run(tmp_path / "run", {"y": Array("float32")}, [f"item {i}: {'x' * 400}" for i in range(4)])
    errors = merge(run)["errors"]
    assert [len(item["message"]) for item in errors] == [408, 408, 240, 240]
    assert [len(reason.cases) for reason in item_reasons(read_report(run))[0]] == [4]
    with results.open(run.merged) as merged:
        assert {len(message) for message in merged.errors.values()} == {408}
    os.truncate(report_path(run), 300 << 20)  # the rest are zeros, which are damage, and not too many
    with pytest.raises(SlurmGPUError, match="is damaged"):
        read_report(run)


def test_the_report_of_a_run_that_was_moved_names_it_where_it_is(run, tmp_path):
    write_report(run)
    shutil.move(run.folder, tmp_path / "again")
    report = last_report(Run.open(tmp_path / "again"))
    assert report["run_dir"] == str(tmp_path / "again")
    assert report["run"] == read_status(Run.open(tmp_path / "again"))["run"] == "again"
    assert report["merged"] == str(tmp_path / "again" / "merged.h5")
    assert report["resubmit"] == f"slurmgpu resubmit {tmp_path / 'again'}"


def test_whoever_opens_a_run_reads_in_its_head_what_it_computes(run, slurmgpu):
    own = {"path": "/data/a.jsonl", "size_bytes": 1, "mtime_ns": 0, "sha256": "", "n_items": 1, "source": None}
    converted = {**own, "path": f"{run.folder}/input/00000.parquet", "source": {**own, "path": "/data/b.csv"}}
    plan = json.loads((run.folder / "run.json").read_text())
    plan["input"]["files"] = [converted, *[own] * 6]
    (run.folder / "run.json").write_text(json.dumps(plan))
    run = Run.open(run.folder)
    write_report(run)
    line = "workload: judge, input: /data/b.csv and 6 more"
    for command in ("report", "status"):
        assert slurmgpu(command, run.folder).stdout.splitlines()[1] == line
    told = json.loads(slurmgpu("status", run.folder, "--json").stdout)
    assert told["workload"] == plan["workload"]
    assert told["input"] == {"n_files": 7, "files": ["/data/b.csv", *["/data/a.jsonl"] * 4]}
    assert line in re.sub("<[^>]*>", "", page.render(run, last_report(run)).partition("</header>")[0])


def test_a_report_of_before_the_last_submission_says_that_it_is(run, slurmgpu):
    write_report(run)
    again = {**run.submissions()[0], "submission": 2}
    run.record_submission({**again, "state": "refused"})
    assert "is newer" not in slurmgpu("report", run.folder).stderr
    run.record_submission({**again, "state": "queued"})
    assert "submission 2 is newer: slurmgpu status" in slurmgpu("report", run.folder).stderr


def test_a_report_says_if_the_rows_that_it_is_about_are_gone(run, slurmgpu):
    write_report(run)
    value = json.loads(report_path(run).read_text())
    report_path(run).write_text(json.dumps({**value, "merged": str(run.merged)}))
    run.merged.touch()
    assert "is gone" not in slurmgpu("report", run.folder).stderr
    run.merged.unlink()
    assert "merged.h5 is gone since this report: slurmgpu status" in slurmgpu("report", run.folder).stderr
    report_path(run).write_text(json.dumps({**value, "merged": None}))
    assert "is gone" not in slurmgpu("report", run.folder).stderr


def test_whoever_waits_for_a_run_reads_each_record_once(run, monkeypatch):
    run.record_submission({"submission": 1, "state": "ended"})
    written = write_report(run)
    read, reading, looks = [], Run.attempt, iter(["its merge", "its merge", None])
    monkeypatch.setattr(Run, "attempt", lambda run, name: read.append(name) or reading(run, name))
    monkeypatch.setattr(wait.live_tasks, "alive", lambda run: next(looks))
    told = []
    assert wait.wait_for(run, told.append)["written"] == written["written"]
    assert len(told) == 3
    assert sorted(read) == [f"4711_{task}.0" for task in range(4)]
    # The report of many failed items has megabytes.
    reports, reading_report = [], report_file.read_report
    for module in (report_file, wait):
        monkeypatch.setattr(module, "read_report", lambda run: reports.append(run) or reading_report(run))
    monkeypatch.setattr(wait.live_tasks, "alive", lambda run: None)
    assert wait.wait_for(run)["written"] == written["written"]
    assert len(reports) == 1
    monkeypatch.setattr(wait.live_tasks, "alive", lambda run: None)
    run.record_submission({**run.submissions()[0], "submission": 2, "state": "refused"})
    assert wait.wait_for(run)["written"] == written["written"]
    run.record_submission({**run.submissions()[0], "submission": 3, "state": "ended"})
    with pytest.raises(SlurmGPUError, match="did not finish"):
        wait.wait_for(run)
    (run.folder / "report.json").unlink()  # as where no merge ever did
    with pytest.raises(SlurmGPUError, match="did not finish"):
        wait.wait_for(run)


def test_whoever_lacks_rows_is_sent_to_a_report_only_if_there_is_one(run):
    assert wait.incomplete(run).endswith(f"`slurmgpu merge {run.typed}` writes a report that says why.")
    write_report(run)
    assert f"`slurmgpu report {run.typed}` says " in wait.incomplete(run)
