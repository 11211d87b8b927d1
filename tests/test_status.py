"""How a run stands, by its files and by what the queue said some time ago."""

import json
import os
import platform
import subprocess
import sys
import time

import pytest

from slurmgpu.attempts import Life
from slurmgpu.cli.words import failure_words, merge_words, queue_words
from slurmgpu.report import build_report
from slurmgpu.status import StatusReader, read_status
from tests import pretend_runs
from tests.pretend_runs import BEGIN, pretend_run

NOW = BEGIN + 300
MERGE = {"job_id": "4712", "state": "PENDING", "reason": "Dependency", "start": None, "n_tasks": 0}


def job(job_id, state, n_tasks=1):
    return {"job_id": job_id, "state": state, "reason": "Priority", "start": None, "n_tasks": n_tasks}


def change(run, name, **values):
    path = run.tasks / f"{name}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def run(tmp_path):
    """Three tasks at work."""
    return pretend_run(tmp_path / "judge", 300, n_tasks=3)


@pytest.fixture
def ended_run(run):
    """Three tasks that have just ended, and not all is computed."""
    for task in range(3):
        change(run, f"4711_{task}.0", state="ended", shard=None, ended=NOW, failure="preempted", message="SIGTERM")
    return run


def test_tasks_that_started_since_the_queue_was_asked_are_not_pending(run):
    for task in range(3):
        change(run, f"4711_{task}.0", updated=NOW - 1)
    reader, queue = StatusReader(run), [job("4711_[1-5]", "PENDING", 5), MERGE]
    first = reader.read(queue, now=NOW)  # these may have been put back
    assert (first["pace"]["n_waiting"], first["state"]) == (5, "running")
    change(run, "4711_1.0", updated=NOW + 3)
    change(run, "4711_2.0", updated=NOW + 3)
    status = reader.read(queue, now=NOW + 4)
    assert status["pace"]["n_waiting"] == status["queue"][0]["n_tasks"] == 3
    assert queue_words(status).startswith("3 pending (Priority)")
    assert status["pace"]["left_if_queued_start_s"] > first["pace"]["left_if_queued_start_s"]


LATE = [job(f"4711_{task}", "RUNNING") for task in range(3)]


@pytest.mark.parametrize(
    ("queue", "state"),
    [
        ([*LATE, MERGE], "merging"),  # the queue was asked before they ended, or they are leaving it
        ([MERGE], "merging"),
        ([*LATE], "ended"),  # submitted by hand, without a merge
        ([], "ended"),
        (None, "ended"),
        ([*LATE, job("4711_3", "RUNNING"), MERGE], "running"),  # it has not written of itself yet
        ([*LATE, job("4711_[3-9]", "PENDING", 7), MERGE], "queued"),
    ],
)
def test_once_all_tasks_have_ended_the_run_is_not_said_to_run(ended_run, queue, state):
    status = read_status(ended_run, queue, now=NOW + 5)
    assert status["state"] == state
    assert merge_words(status) == ("3 of 3 tasks ended; waiting for the merge" if state == "merging" else "")


def test_a_task_that_was_put_back_and_runs_again_runs(ended_run):
    assert read_status(ended_run, [*LATE, MERGE], now=NOW + 60)["state"] == "running"


def test_the_state_does_not_contradict_the_attempts(run):
    def seen(queue, now):
        status = read_status(run, queue, now=now)
        return status["state"], {attempt["silent"] for attempt in status["attempts"]}

    assert seen(LATE, NOW + 20) == ("running", {False})
    assert seen([], NOW + 5) == ("running", {False})  # they write
    assert seen([], NOW + 20) == ("ended", {True})  # killed, and out of the queue
    assert seen(None, NOW + 20) == ("running", {False})  # what Slurm says is not known


def test_of_another_users_run_the_own_queue_says_nothing(run, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: run.folder.stat().st_uid + 1)
    status = read_status(run, [], now=NOW + 20)
    assert (status["state"], status["queue"]) == ("running", None)


def test_jobs_of_a_submission_that_has_ended_since_are_out_of_the_queue(ended_run):
    reader, queue = StatusReader(ended_run), [*LATE, {**MERGE, "state": "RUNNING"}]
    assert merge_words(reader.read(queue, now=NOW + 5)) == "3 of 3 tasks ended; the merge is at work"
    ended_run.record_submission({"submission": 1, "state": "ended"})
    assert reader.read(queue, now=NOW + 20)["state"] == "incomplete"


def test_the_report_knows_better_why_attempts_ended(ended_run):
    change(ended_run, "4711_2.0", state="running", ended=None, failure=None, message="")
    before = read_status(ended_run, None, now=NOW + 500)
    assert before["failures"] == {"preempted": 2}
    verdicts = [("4711_0.0", "cancelled"), ("4711_1.0", None), ("4711_2.0", "node_fail")]
    report = build_report(ended_run, errors=(), merged_rows=None)
    for row, (name, failure) in zip(report["attempts"], verdicts, strict=True):
        row.update(attempt=name, failure=failure, message="so it was")
    (ended_run.folder / "report.json").write_text(json.dumps(report))
    status = read_status(ended_run, None, now=NOW + 500)
    assert status["failures"] == {"cancelled": 1, "node_fail": 1}
    assert [a["failure"] for a in status["attempts"]] == ["cancelled", None, "node_fail"]
    # One that lives, of a later submission, is none of its business.
    assert read_status(ended_run, None, now=NOW + 1)["attempts"][2]["failure"] is None


@pytest.mark.parametrize("text", ["torn", "[]", '{"complete": true, "attempts": [1]}'])
def test_a_damaged_report_costs_what_only_the_report_knows(ended_run, text):
    (ended_run.folder / "report.json").write_text(text)
    status = read_status(ended_run, [], now=NOW + 60)
    assert (status["state"], status["complete"], status["failures"]) == ("ended", False, {"preempted": 3})


# Failed items


@pytest.fixture
def failing_run(run):
    """Of two shards items have failed, as the first task and the second one wrote."""
    for task, errors in enumerate(({"item_error": 2}, {"item_error": 1, "crash": 1})):
        [[shard, *_], *_] = json.loads((run.tasks / f"4711_{task}.0.json").read_text())["published"]
        change(run, f"4711_{task}.0", n_errors=2, failed=[[shard, errors]])
    return run


def computed_anew(run, task, shard, **errors):
    """An attempt of a second submission has computed a shard."""
    record = json.loads((run.tasks / f"4711_{task}.0.json").read_text())
    name, failed = f"4800_{task}.0", [[shard, errors]] if errors else []
    record |= {"attempt": name, "job": "4800", "submission": 2, "published": [[shard, NOW, 5.0, True]]}
    record |= {"failed": failed, "n_errors": sum(errors.values())}
    (run.tasks / f"{name}.json").write_text(json.dumps(record))


def test_failed_items_are_told_by_class_as_they_happen(failing_run):
    status = read_status(failing_run, now=NOW)
    assert (status["n_errors"], status["errors_by_class"]) == (4, {"crash": 1, "item_error": 3})
    assert failure_words(status) == "items: 1 crash, 3 item_error"


def test_items_that_were_set_aside_or_computed_anew_have_failed_no_more(failing_run):
    [[shard, _]] = json.loads((failing_run.tasks / "4711_0.0.json").read_text())["failed"]
    reader = StatusReader(failing_run)
    assert reader.read(now=NOW)["n_errors"] == 4
    failing_run.shard_path(shard).rename(failing_run.shards / f"{shard:05d}.failed")
    assert reader.read(now=NOW + 1)["errors_by_class"] == {"crash": 1, "item_error": 1}
    failing_run.shard_path(shard).touch()
    computed_anew(failing_run, 0, shard)
    assert reader.read(now=NOW + 2)["errors_by_class"] == {"crash": 1, "item_error": 1}
    computed_anew(failing_run, 0, shard, cuda_oom=1)
    assert reader.read(now=NOW + 3)["errors_by_class"] == {"crash": 1, "cuda_oom": 1, "item_error": 1}


def test_of_records_that_only_count_failed_items_none_is_forgotten(failing_run):
    change(failing_run, "4711_2.0", n_errors=5)
    assert read_status(failing_run, now=NOW)["errors_by_class"] == {"crash": 1, "item_error": 8}


def test_of_a_run_that_has_ended_the_report_tells_what_failed_and_what_it_cost(failing_run):
    lives = {"4711_3": [Life("NODE_FAIL", "node_fail", True, 7200, 2, "gpu9")]}  # it left no record
    report = build_report(failing_run, errors=[(3, "cuda_oom: too long")], merged_rows=16, lives=lives)
    failing_run.record_submission({"submission": 1, "state": "ended"})
    (failing_run.folder / "report.json").write_text(json.dumps(report))
    status = read_status(failing_run, [], now=NOW + 500)
    assert (status["n_errors"], status["errors_by_class"]) == (1, {"cuda_oom": 1})
    assert status["gpu_hours"] == report["gpu_hours"] > 4
    # Not of what was submitted since, and was cancelled before it was merged.
    failing_run.record_submission(
        {**failing_run.submissions()[0], "submission": 2, "state": "ended", "cancelled": True}
    )
    assert read_status(failing_run, [], now=NOW + 500)["n_errors"] == 4


# A run of this machine


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A run of this machine that was just submitted, at work, and one of its processes."""
    monkeypatch.setattr(pretend_runs, "BEGIN", time.time() - 300)
    run = pretend_run(tmp_path / "here", 300, n_tasks=2, executor="local")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        pids = {"host": platform.node(), "pids": [process.pid], "time": time.time()}
        run.record_submission({"submission": 1, "state": "running", **pids})
        yield run, process
        process.kill()


def test_a_run_of_this_machine_whose_processes_were_killed_is_not_said_to_run(here):
    run, process = here
    now = time.time()
    assert read_status(run, now=now)["state"] == "running"
    assert read_status(run, now=now + 500)["state"] == "running"  # it was suspended
    process.kill()
    process.wait()
    assert read_status(run, now=now + 5)["state"] == "running"  # they may be others' children by now
    status = read_status(run, now=now + 20)
    assert (status["state"], {a["silent"] for a in status["attempts"]}) == ("ended", {True})
    assert (status["pace"]["n_living"], status["pace"]["left_s"]) == (0, None)


def test_a_run_of_this_machine_whose_tasks_have_ended_is_merged_as_long_as_it_has_a_process(here):
    run, process = here
    for task in range(2):
        change(run, f"4711_{task}.0", state="ended", ended=time.time(), shard=None)
    assert read_status(run)["state"] == "merging"
    process.kill()
    process.wait()
    assert read_status(run)["state"] == "ended"


def test_where_nobody_can_tell_who_works_attempts_that_are_silent_are_dead(run):
    assert read_status(run, None, now=NOW + 60)["state"] == "running"
    assert read_status(run, None, now=NOW + 500)["state"] == "ended"


def test_a_task_whose_nodes_clock_is_wrong_leaves_the_queue_when_it_has_ended(run):
    reader = StatusReader(run)
    for task in range(3):
        change(run, f"4711_{task}.0", updated=NOW - 900)
    reader.read(LATE, now=NOW)
    for task in range(3):
        ended = NOW - 890
        change(run, f"4711_{task}.0", state="ended", shard=None, updated=ended, ended=ended, failure="preempted")
    assert reader.read([*LATE, MERGE], now=NOW + 10)["state"] == "merging"
