"""From its first instruction on a task understands what asks it to end: under Submitit, and by hand."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from submitit.core.utils import DelayedSubmission

from slurmgpu.executors import job_entry, run_merge, submission
from slurmgpu.executors.resubmission import first_submission
from slurmgpu.executors.slurm import Slurm
from slurmgpu.executors.submission import merge_behind
from slurmgpu.plan.planner import draft_run
from slurmgpu.report.attempts import attempts_of
from slurmgpu.report.outcomes import Accounted
from slurmgpu.run.creation import create_run
from slurmgpu.run.directory import Run
from slurmgpu.run.lock import RUN_LOCK
from slurmgpu.slurm.own_job import own_job
from tests.files.test_shard_claimer import stale
from tests.support.nightly import by_night
from tests.support.runs import holders, let_go, published, records, wait_until

# Sends its process a signal at the moment that SIGNAL_AT names, the first time: an audit event and a part of what is
# audited, such as "import numpy" or "open submissions.jsonl".
HOOK = """
import os, sys
def hook(event, arguments):
    kind, part = os.environ["SIGNAL_AT"].split(" ")
    if event == kind and arguments and part in str(arguments[0]) and "AT" not in os.environ:
        os.environ["AT"] = "sent"
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
sys.addaudithook(hook)
"""
NAMES = ("NTASKS=1", "JOB_NUM_NODES=1", "NODEID=0", "GLOBALID=0", "LOCALID=0", "JOB_ID=1")
JOB = {"SUBMITIT_EXECUTOR": "local", **{f"SUBMITIT_LOCAL_{k}": v for k, v in (name.split("=") for name in NAMES)}}
IN_A_JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_CLUSTER_NAME": "here", "PATH": "/nowhere"}
"""Without squeue: what it says is another test's."""
MOMENTS = [
    "import numpy",  # Submitit begins
    "open 1_submitted.pkl",
    "import slurmgpu.executors.job_entry",  # the job's function is unpickled, before Submitit takes the signals
    "open run.json",  # and behind that
    "open 7_0.0@here.alive",
    "open submissions.jsonl",
    "open telemetry",
]


def each_moment(signum, by_day):
    return [(signum, moment) if moment in by_day else by_night(signum, moment) for moment in MOMENTS]


def make_run(project, n_items=16, **options):
    """A run that was submitted to Slurm, of which no task has started."""
    folder = project(n_items, resources={"device": "cpu"}, **options)
    with draft_run(folder / "slurmgpu.toml") as draft:
        run = create_run(draft.run_dir, draft.plan, draft.items.files)
    submission = first_submission({**run.plan.resources, "executor": "slurm"}, run.plan.n_shards)
    run.record_submission({**submission.to_json(), "state": "queued", "array_job": "7"})
    return run


@pytest.fixture
def run(project):
    return make_run(project)


def environment(tmp_path, signum=0, moment="import nothing", **others):
    (tmp_path / "hook").mkdir(exist_ok=True)
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    hooked = {"PYTHONPATH": str(tmp_path / "hook"), "SIGNAL": str(int(signum)), "SIGNAL_AT": moment}
    return {**os.environ, **hooked, **IN_A_JOB, **others}


def check_that_it_has_ended(run, done, signum):
    assert done.returncode == 75, done.stderr
    [record] = records(run.folder.parent)
    expected = "cancelled" if signum == signal.SIGINT else "preempted"
    assert (record["state"], record["failure"]) == ("ended", expected)
    assert published(run.folder.parent) == []
    assert list(run.claims.folder.iterdir()) == []
    assert not list(run.tasks.glob("*.alive"))


@pytest.mark.parametrize(
    ("signum", "moment"),
    [
        (signal.SIGINT, MOMENTS[2]),
        *each_moment(signal.SIGTERM, by_day=(MOMENTS[0], MOMENTS[3], MOMENTS[6])),
        *each_moment(signal.SIGUSR2, by_day=(MOMENTS[2],)),
    ],
)
def test_a_signal_before_a_task_of_submitits_listens_is_obeyed(run, tmp_path, signum, moment):
    DelayedSubmission(job_entry.run_task, run.folder, 1).dump(run.logs / "1_submitted.pkl")
    command = [sys.executable, *job_entry.BEGIN.split(), "-u", "-m", "submitit.core._submit", str(run.logs)]
    env = environment(tmp_path, signum, moment, **JOB)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    check_that_it_has_ended(run, done, signum)


@pytest.mark.parametrize("moment", ["import typer", by_night("open run.json"), "open submissions.jsonl"])
@pytest.mark.parametrize("signum", [by_night(signal.SIGUSR2), signal.SIGTERM], ids=["USR2", "TERM"])
def test_a_signal_before_a_task_by_hand_listens_is_obeyed(run, tmp_path, signum, moment):
    command = [sys.executable, "-m", "slurmgpu", "task", str(run.folder)]
    env = environment(tmp_path, signum, moment)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    check_that_it_has_ended(run, done, signum)


def test_without_a_signal_the_same_task_computes_all(run, tmp_path):
    DelayedSubmission(job_entry.run_task, run.folder, 1).dump(run.logs / "1_submitted.pkl")
    command = [sys.executable, *job_entry.BEGIN.split(), "-u", "-m", "submitit.core._submit", str(run.logs)]
    done = subprocess.run(command, env=environment(tmp_path, **JOB), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert len(published(run.folder.parent)) == 2


def test_what_came_before_is_told_to_whoever_listens():
    code = (
        "import os, signal\nfrom slurmgpu.util import early_signals\nearly_signals.remember()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nfrom slurmgpu.task.worker_process import StopSignals\n"
        "with StopSignals() as signals: print(signals.events.get()['signum'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{int(signal.SIGTERM)}\n"


# Job ids of two clusters


def test_a_job_of_another_cluster_with_the_same_id_is_a_submission_of_its_own(run, slurmgpu):
    first = run.submissions()[0]
    run.record_submission({"submission": 1, "cluster": "here"})
    for cluster in ("there", "there", "here"):
        slurmgpu("task", run.folder, expect=0, **IN_A_JOB | {"SLURM_CLUSTER_NAME": cluster})
    assert first["array_job"] == "7"
    lines = run.submissions()
    assert [(line["array_job"], line["cluster"]) for line in lines] == [("7", "here"), ("7", "there")]
    assert {(record["attempt"], record["submission"]) for record in records(run.folder.parent)} == {
        ("7_0.0@there", 2),
        ("7_0.0", 1),
    }
    accounting = {"7_0": [Accounted("FAILED", "crash", True, 5, 1, "n1")] * 2}
    rows = {row["attempt"]: row["slurm_state"] for row in attempts_of(run, accounting)}
    assert rows == {"7_0.0": "FAILED", "7_0.0@there": None, "7_0.1": "FAILED"}


def test_a_merge_job_ends_the_submission_of_its_own_cluster(run, tmp_path, monkeypatch):
    for number, cluster in enumerate(("there", "here", "elsewhere"), 1):
        line = run.submissions()[0] | {"submission": number, "cluster": cluster, "merge_job": "9"}
        run.record_submission(line)
    (tmp_path / "squeue").write_text("#!/bin/sh\n")  # nothing is queued
    (tmp_path / "squeue").chmod(0o755)
    for name, value in {"PATH": str(tmp_path), "SLURM_JOB_ID": "9", "SLURM_CLUSTER_NAME": "here"}.items():
        monkeypatch.setenv(name, value)
    assert merge_behind(run, 2) == 3
    assert [line["state"] for line in run.submissions()] == ["queued", "ended", "queued"]


@pytest.mark.parametrize("state", ["queued", "ended"])
def test_a_merge_job_that_is_requeued_after_it_resubmitted_makes_no_other_submission(run, monkeypatch, state):
    first = run.submissions()[0] | {"merge_job": "8"}
    run.record_submission(first)
    run.record_submission(first | {"submission": 2, "array_job": "9", "merge_job": "10", "round": 1, "state": state})
    run.record_submission(first | {"submission": 3, "array_job": "11", "merge_job": "12", "by_hand": True})
    again, handed_over = Run(run.folder, replace(run.plan, auto_resubmit=5)), []
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(submission, "_goes_on", lambda *_: True)
    monkeypatch.setattr(submission, "start", lambda *_, **more: pytest.fail("it was resubmitted twice"))
    monkeypatch.setattr(Slurm, "hand_over", lambda self, line, jobs: handed_over.append((line["submission"], jobs)))
    assert merge_behind(again, 1) == 3
    assert handed_over == [(1, {"array_job": "9", "merge_job": "10"})] * (state == "queued")
    assert [line["state"] for line in again.submissions()] == ["ended", state, "queued"]


def test_accounting_is_asked_before_the_run_is_locked_about_all_that_has_run(run, monkeypatch):
    """Tasks that join wait for the lock, and a Slurm that is silent is asked for minutes."""
    run.record_submission(run.submissions()[0] | {"merge_job": "8"})
    monkeypatch.setenv("PATH", "/nowhere")
    asked = []

    def answer(run, *, settled):
        asked.append((run.folder / RUN_LOCK).exists())
        if len(asked) == 1:  # another array comes and goes
            run.record_submission(run.submissions()[0] | {"submission": 2, "array_job": "9", "state": "ended"})

    monkeypatch.setattr(run_merge, "accounting_of", answer)
    assert merge_behind(run, 1) == 3
    assert asked == [False, False]


def test_an_attempt_that_no_listing_shows_while_accounting_is_asked_is_asked_for(run, monkeypatch):
    """An NFS client believes a listing as long as the folder's time is the same, which has the server's resolution."""
    run.record_submission(run.submissions()[0] | {"merge_job": "8"})
    monkeypatch.setenv("PATH", "/nowhere")
    asked = []

    def answer(run, *, settled):
        asked.append(before := os.listdir(run.tasks))
        if len(asked) == 1:  # a task comes and goes
            (run.tasks / "9_0.0.json").write_text("{}")
            stale(monkeypatch, run, run.tasks, before)

    monkeypatch.setattr(run_merge, "accounting_of", answer)
    assert merge_behind(run, 1) == 3
    assert asked == [[], ["9_0.0.json"]]


def test_a_merge_job_that_was_killed_while_it_resubmitted_does_so_once_it_is_requeued(run, monkeypatch):
    first = run.submissions()[0] | {"merge_job": "8"}
    run.record_submission(first)
    lost = {key: value for key, value in first.items() if key not in ("array_job", "merge_job")}
    run.record_submission(lost | {"submission": 2, "round": 1, "state": "submitting"})
    again, started = Run(run.folder, replace(run.plan, auto_resubmit=1)), []
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(submission, "_goes_on", lambda run, report, done: done == 0)
    jobs = {"array_job": "9", "merge_job": "10"}
    monkeypatch.setattr(
        submission, "start", lambda run, *_, **more: started.append(run) or submission.Outcome(None, jobs)
    )
    monkeypatch.setattr(Slurm, "hand_over", lambda *_: None)
    assert merge_behind(again, 1) == 3
    assert len(started) == 1
    assert [line["state"] for line in again.submissions()] == ["ended", "refused"]


# When its walltime ends


SQUEUE = """#!{python}
import sys, time
from pathlib import Path
while not Path({go!r}).exists():
    time.sleep(0.02)
print("7 7 N/A 0 {left}")
"""


@pytest.fixture
def slow_squeue(tmp_path):
    """A squeue that answers once it may: `slow_squeue(left)` gives a PATH with it and what lets it."""

    def make(left):
        folder, go = tmp_path / "bin", tmp_path / "go"
        folder.mkdir()
        (folder / "squeue").write_text(SQUEUE.format(python=sys.executable, go=str(go), left=left))
        (folder / "squeue").chmod(0o755)
        return str(folder), go

    return make


def test_no_task_waits_for_squeue_and_its_worker_learns_the_end_when_it_is_told(project, tmp_path, slow_squeue):
    run = make_run(project, 40, held_from=8)
    path, go = slow_squeue("0:02")
    DelayedSubmission(job_entry.run_task, run.folder, 1).dump(run.logs / "1_submitted.pkl")
    command = [sys.executable, *job_entry.BEGIN.split(), "-u", "-m", "submitit.core._submit", str(run.logs)]
    env = environment(tmp_path, **JOB) | {"PATH": path}
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: published(run.folder.parent) == ["00000.h5"], "a shard, while squeue does not answer")
        wait_until(lambda: holders(run.folder.parent), "a task with the second shard")
        assert records(run.folder.parent)[0]["end_time"] is None
        go.touch()
        wait_until(lambda: records(run.folder.parent)[0]["end_time"] is not None, "the end of the walltime")
        let_go(run.folder.parent)
        assert process.wait(280) == 0
    [record] = records(run.folder.parent)
    assert (record["failure"], record["reason"]) == ("timeout", "deadline")
    assert published(run.folder.parent) == ["00000.h5", "00001.h5"]


def test_slurm_says_the_end_in_the_environment_and_squeue_is_not_asked(monkeypatch, slow_squeue):
    path, _ = slow_squeue("0:02")
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "2000000000", "PATH": path}.items():
        monkeypatch.setenv(name, value)
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert own_job(own_array=False).end_time() == 2e9
    for none in (0xFFFFFFFE, 0):  # a job without a limit, and one whose end is not known
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(none))
        assert own_job(own_array=True).end_time() is None


def test_a_year_is_no_walltime(monkeypatch):
    """From Slurm 23.02 on a job without a limit has its start and 365 days as its end."""
    begin = int(time.time())
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_START_TIME": str(begin)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(begin + 365 * 86400))
    assert own_job(own_array=True).end_time() is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(begin + 604800))
    assert own_job(own_array=True).end_time() == begin + 604800


@pytest.mark.parametrize("off_s", [-240, 240])
def test_a_node_whose_clock_is_off_has_the_end_of_its_walltime_from_squeue(monkeypatch, slow_squeue, off_s):
    path, go = slow_squeue("10:00")
    begin = int(time.time()) - off_s  # by slurmctld's clock
    told = {"SLURM_JOB_START_TIME": str(begin), "SLURM_JOB_END_TIME": str(begin + 600)}
    for name, value in {"SLURM_JOB_ID": "7", "PATH": path, **told}.items():
        monkeypatch.setenv(name, value)
    own = own_job(own_array=True)
    assert own.end_time() is None
    go.touch()
    wait_until(own.end_time, "squeue's answer")
    assert begin + off_s + 600 <= own.end_time() <= time.time() + 600
    monkeypatch.setenv("PATH", "/nowhere")
    own = own_job(own_array=True)
    wait_until(own.end_time, "the end by slurmctld's clock, as nobody answers")
    assert own.end_time() == begin + 600


# Whose the environment is: sbatch hands an array's variables on to what is submitted in one of its tasks


def array(job, task, count, **others):
    return {"SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_TASK_COUNT": count, **others}


@pytest.mark.parametrize(
    ("environ", "own_array", "expected"),
    [
        ({}, False, ("9", 0, 0, 1)),
        ({"SLURM_RESTART_COUNT": "2"}, False, ("9", 0, 2, 1)),  # a plain job that was requeued
        (array("9", "3", "4"), False, ("9", 3, 0, 4)),  # the task that started last
        (array("9", "0", "1", SLURM_RESTART_COUNT="1"), False, ("9", 0, 1, 1)),
        (array("7", "0", "1"), False, ("9", 0, 0, 1)),  # an array of one has no other task
        (array("7", "2", "4", SLURM_RESTART_COUNT="1"), True, ("7", 2, 1, 4)),
        (array("7", "2", "4", SLURM_STEP_NUM_TASKS="3", SLURM_PROCID="1"), True, ("7", 7, 0, 12)),  # three in a job
        (
            array("7", "2", "4", SLURM_STEP_NUM_TASKS="3", SLURM_STEP_NUM_NODES="3", SLURM_PROCID="1"),
            True,
            ("7", 2, 0, 4),
        ),
    ],
)
def test_whose_the_environment_is_can_be_told_without_squeue(monkeypatch, caplog, environ, own_array, expected):
    monkeypatch.setattr("slurmgpu.slurm.own_job.IDENTITY_S", 0.0)
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"SLURM_JOB_ID": "9", "SLURM_JOB_END_TIME": "2000000000", "PATH": "/nowhere", **environ}.items():
        monkeypatch.setenv(name, value)
    own = own_job(own_array=own_array)
    assert (own.array_job, own.task, own.restart, own.n_tasks) == expected
    assert own.job_id == f"{own.array_job}_{environ.get('SLURM_ARRAY_TASK_ID', 0)}"
    assert caplog.messages == []  # nobody was asked


def test_a_task_that_is_sure_of_its_job_does_not_wait_for_the_end_of_its_walltime(monkeypatch, slow_squeue, caplog):
    path, go = slow_squeue("0:02")
    monkeypatch.setattr("slurmgpu.slurm.own_job.IDENTITY_S", 0.0)
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    for name, value in {"SLURM_JOB_ID": "7", "PATH": path, **array("6", "2", "4")}.items():
        monkeypatch.setenv(name, value)
    own = own_job(own_array=True)
    assert (own.array_job, own.task, own.end_time()) == ("6", 2, None)
    assert caplog.messages == []
    go.touch()  # which ends squeue


@pytest.mark.parametrize("end", [{}, {"SLURM_JOB_END_TIME": "2000000000"}])
def test_where_the_environment_may_be_another_jobs_squeue_is_asked(monkeypatch, slow_squeue, end):
    path, go = slow_squeue("0:02")
    go.touch()
    monkeypatch.setattr("slurmgpu.slurm.own_job.IDENTITY_S", 280.0)
    for name, value in {"SLURM_JOB_ID": "7", "PATH": path, **array("6", "2", "4"), **end}.items():
        monkeypatch.setenv(name, value)
    own = own_job(own_array=False)
    assert (own.array_job, own.task) == ("7", 0)
