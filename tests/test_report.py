"""The report: what became of attempts; and of what use a damaged one is, or one of a run that was moved."""

import json
import shutil

import pytest

from slurmgpu import api
from slurmgpu.attempts import TOO_LARGE, Life, attempts_of
from slurmgpu.columns import columns_from_json, convert_row
from slurmgpu.errors import SlurmGPUError
from slurmgpu.ledger import KINDS
from slurmgpu.report import build_report, judged_attempts, last_report, read_report, report_path
from slurmgpu.runs import Run
from slurmgpu.shards import write_shard
from slurmgpu.status import read_status
from tests.pretend_runs import BEGIN, pretend_run


@pytest.fixture
def run(tmp_path):
    return pretend_run(tmp_path / "run", 600, n_tasks=4, n_shards=40, sample_s=0)


def change(run, name, **fields):
    path = run.tasks / f"{name}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def write_report(run, **verdicts):
    """A report as the merge writes it, but that it gives these failures to the attempts of tasks."""
    report = build_report(run, errors=(), merged_rows=1)
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
        ("preempted", None, "preempted", True, "preempted"),
        ("preempted", None, None, True, "cancelled"),
        ("preempted", None, None, False, "preempted"),
    ],
)
def test_whoever_stopped_an_attempt_is_not_told_by_when_that_was(run, own, reason, slurms, by_us, expected):
    advice = f". Shard 3 {TOO_LARGE}" if own == "timeout" and reason is None else ""
    ended = {"state": "ended", "ended": BEGIN + 600, "failure": own, "message": STOPPED + advice, "reason": reason}
    change(run, "4711_0.0", **ended)
    if by_us:
        run.record_submission({"submission": 1, "cancelled": True})
    lives = None if slurms is None else {"4711_0": [Life(slurms.upper(), slurms, True, 600, 1, "gpu000")]}
    [row] = [row for row in attempts_of(run, lives) if row["attempt"] == "4711_0.0"]
    assert row["failure"] == expected
    # How much walltime a shard needs is no advice to somebody who cancelled it.
    assert (TOO_LARGE in row["message"]) == (expected == "timeout" and bool(advice))


def test_what_a_task_published_between_its_last_word_and_its_death_is_its_own(run):
    before = build_report(run, errors=(), merged_rows=None)
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
    report = build_report(run, errors=(), merged_rows=None)
    [was], [row] = ([a for a in told["attempts"] if a["attempt"] == "4711_1.0"] for told in (before, report))
    assert (row["n_items"], row["n_shards"]) == (was["n_items"] + stop - start, was["n_shards"] + 1)
    assert row["shards"][-1] == [shard, round(dead["shard_started"], 3), 58.0, True]
    assert row["spent"]["useful"] == pytest.approx(was["spent"]["useful"] + 58, abs=0.01)
    assert row["spent"]["lost"] < was["spent"]["lost"]
    assert sum(row["spent"][kind] for kind in KINDS) == pytest.approx(row["seconds"])
    assert [a for a in report["attempts"] if a is not row] == [a for a in before["attempts"] if a is not was]


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
        with pytest.raises(SlurmGPUError, match=r"report\.json is damaged: .*`slurmgpu merge .*/run` writes it anew"):
            read(run)
    assert len(judged_attempts(run)) == 4


def test_the_report_of_a_run_that_was_moved_names_it_where_it_is(run, tmp_path):
    write_report(run)
    shutil.move(run.folder, tmp_path / "again")
    report = last_report(Run.open(tmp_path / "again"))
    assert report["run_dir"] == str(tmp_path / "again")
    assert report["run"] == read_status(Run.open(tmp_path / "again"))["run"] == "again"
    assert report["merged"] == str(tmp_path / "again" / "merged.h5")
    assert report["resubmit"] == f"slurmgpu resubmit {tmp_path / 'again'}"


def test_a_report_of_before_the_last_submission_says_that_it_is(run, slurmgpu):
    write_report(run)
    again = {**run.submissions()[0], "submission": 2}
    run.record_submission({**again, "state": "refused"})
    assert "made since" not in slurmgpu("report", run.folder).stderr
    run.record_submission({**again, "state": "queued"})
    assert "submission 2 was made since: slurmgpu status" in slurmgpu("report", run.folder).stderr


def test_whoever_waits_for_a_run_reads_each_record_once(run, monkeypatch):
    run.record_submission({"submission": 1, "state": "ended"})
    written = write_report(run)
    read, reading, looks = [], Run.attempt, iter(["its merge", "its merge", None])
    monkeypatch.setattr(Run, "attempt", lambda run, name: read.append(name) or reading(run, name))
    monkeypatch.setattr(api.living, "alive", lambda run: next(looks))
    told = []
    assert api.wait_for(run, told.append)["written"] == written["written"]
    assert len(told) == 3
    assert sorted(read) == [f"4711_{task}.0" for task in range(4)]
