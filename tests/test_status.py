"""How a run stands, by its files and by what the queue said some time ago."""

import json
import os

import pytest

from slurmgpu.cli.words import merge_words, queue_words
from slurmgpu.status import StatusReader, read_status
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
    rows = [{"attempt": name, "failure": failure, "message": "so it was"} for name, failure in verdicts]
    (ended_run.folder / "report.json").write_text(json.dumps({"complete": False, "attempts": rows}))
    status = read_status(ended_run, None, now=NOW + 500)
    assert status["failures"] == {"cancelled": 1, "node_fail": 1}
    assert [a["failure"] for a in status["attempts"]] == ["cancelled", None, "node_fail"]
    # One that lives, of a later submission, is none of its business.
    assert read_status(ended_run, None, now=NOW + 1)["attempts"][2]["failure"] is None
