"""How a run stands, by its files and by what the queue said some time ago."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time

import pytest

from slurmgpu.cli.views.columns import MAX_ATTEMPTS, MAX_LISTED
from slurmgpu.cli.views.report import show_report
from slurmgpu.cli.views.status import show_status
from slurmgpu.cli.views.status_poller import Look
from slurmgpu.executors.registry import executor_named
from slurmgpu.report.outcomes import Accounted
from slurmgpu.report.report_file import judged_attempts, read_report
from slurmgpu.report.state_words import failure_words, merge_words, moment, pace_words, parting_words, queue_words
from slurmgpu.report.states import is_told
from slurmgpu.report.status import StatusReader, read_status
from slurmgpu.run.directory import Run
from slurmgpu.run.liveness import is_orphaned, processes_here
from slurmgpu.run.recompute import Again, Recompute, read_recompute, write_recompute
from slurmgpu.run.records import Unread
from slurmgpu.run.telemetry_log import last_sample, some_samples, telemetry_path
from slurmgpu.slurm import queue as slurms_queue
from slurmgpu.util.atomic_files import write_json
from slurmgpu.util.pids import numbering, processes
from tests.support import pretend_runs
from tests.support.pretend_runs import BEGIN, pretend_run, reported, write_merged_head

NOW = BEGIN + 300
MERGE = {"job_id": "4712", "state": "PENDING", "reason": "Dependency", "start": None, "n_tasks": 0}


def job(job_id, state, n_tasks=1):
    return {"job_id": job_id, "state": state, "reason": "Priority", "start": None, "n_tasks": n_tasks}


def change(run, name, **values):
    path = run.tasks / f"{name}.json"
    write_json(path, {**json.loads(path.read_text()), **values}, durable=False)


def submit_again(run, **values):
    """The second submission, of which nothing has started; the merge of the first one made it, and has ended."""
    again = {**run.submissions()[0], "submission": 2, "state": "queued", "array_job": "4800", "merge_job": "4801"}
    run.record_submission({**again, **values})
    run.record_submission({"submission": 1, "state": "ended"})


def report_of(run, **what):
    """The report that a merge writes now, as the run has it from then on."""
    report = reported(run, errors=(), **what)
    (run.folder / "report.json").write_text(json.dumps(report))
    return report


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


def test_tasks_that_started_since_the_queue_was_asked_are_not_pending(run, capsys):
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
    status["queue"][0]["reason"] = "None"  # Slurm has not looked at it
    assert queue_words(status).startswith("3 pending;")
    show_status(status)
    assert "None" not in capsys.readouterr().out
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


def test_of_what_another_user_has_submitted_the_own_queue_says_nothing(run):
    run.record_submission({"submission": 1, "uid": os.getuid() + 1})
    status = read_status(run, [], now=NOW + 20)
    assert (status["state"], status["queue"], status["at_work"]) == ("running", None, None)


def test_a_run_of_which_nobody_can_tell_whether_more_is_queued_is_not_over(ended_run, capsys):
    change(ended_run, "4711_2.0", state="starting", ended=None, failure=None)  # an image is copied to its node
    look = Look(ended_run)
    for now_s in (150, 1000, 100_000):
        status, _ = look.read(None, (), NOW + now_s)
        assert (status["state"], look.has_ended(status)) == ("ended", False)
    assert parting_words(status) == "whether more tasks are queued cannot be seen here"
    show_status(status)
    told = capsys.readouterr()
    assert parting_words(status) in told.out
    assert "next:" not in told.err
    assert [look.has_ended(look.read([], (), NOW + 200_000 + now_s)[0]) for now_s in (0, 60)] == [False, True]


def test_a_line_counts_suspended_tasks_and_names_what_releases_held_ones(run):
    why = "launch failed requeued held"
    held = [{**job(f"4711_{task}", "PENDING"), "reason": why} for task in (0, 1)]
    queue = [*held, job("4711_2", "SUSPENDED"), {**MERGE, "reason": "JobHeldUser"}]
    said = queue_words(read_status(run, queue, now=NOW + 900))
    assert said.startswith(
        f"2 pending ({why}, until `scontrol release 4711`), "
        f"1 pending (JobHeldUser, until `scontrol release {MERGE['job_id']}`), 1 suspended"
    )


def test_a_task_that_is_silent_because_slurm_has_suspended_it_is_told_as_such(run, capsys):
    show_status(read_status(run, [job("4711_2", "SUSPENDED"), job("4711_0", "RUNNING"), MERGE], now=NOW + 900))
    shown = capsys.readouterr().out
    assert "\nsuspended by Slurm: 4711_2; its tasks stay silent until Slurm resumes them\n" in shown
    assert f"\nqueued: merge job {MERGE['job_id']} (Dependency" in shown


def test_what_tasks_of_a_dead_node_had_waits_for_their_leases_and_is_said_to(run):
    for task in (0, 1):  # they live, and find nothing free
        change(run, f"4711_{task}.0", updated=NOW + 200, shard=None, shard_started=None)
    status = read_status(run, LATE, now=NOW + 201)
    assert [attempt["silent"] for attempt in status["attempts"]] == [False, False, True]
    words = "no task computes just now: 1 shard of silent tasks can be taken over once their leases are stale"
    assert pace_words(status) == words
    change(run, "4711_2.0", updated=NOW + 200)
    assert "left, until about" in pace_words(read_status(run, LATE, now=NOW + 201))


def test_a_last_shard_that_takes_longer_than_those_before_is_given_no_time(tmp_path):
    run = pretend_run(tmp_path / "judge", 180, n_tasks=1, n_shards=3, spread=0.0, walltime_s=None)
    queue = [job("4711_0", "RUNNING")]
    assert "left, until about" in pace_words(read_status(run, queue, now=BEGIN + 181))
    change(run, "4711_0.0", updated=BEGIN + 36_000)
    status = read_status(run, queue, now=BEGIN + 36_001)
    assert status["pace"]["left_s"] is None
    assert pace_words(status).endswith(" items/h, 1 shard in hand, for longer than those before")


def test_living_attempts_have_the_last_sample_of_their_gpus(run):
    change(run, "4711_2.0", state="ended", shard=None, ended=NOW)
    reader, names = StatusReader(run), ("4711_0.0", "4711_1.0", "4711_2.0")
    for wanted in (None, names[1:]):
        found = {each["attempt"]: each["gpu"] for each in reader.read(now=NOW + 5, gpus_of=wanted)["attempts"]}
        assert [name for name in names if found[name]] == [name for name in names[:2] if name in (wanted or names)]
        assert found[names[1]]["time"] == NOW - 5
        assert 0 < found[names[1]]["utilisation"] <= 100


def test_a_sample_with_impossible_values_costs_itself_alone(run):
    path, many = telemetry_path(run.folder, "4711_1.0"), "9" * 400
    before = last_sample(path)
    _, *good = path.read_text().splitlines()
    of_a_gpu = good[-1].replace("[[", f"[[{many}, ", 1)
    assert of_a_gpu != good[-1]
    for sample in ("[" * 12_000, f'{{"time": {many}, "ready": true, "gpus": [], "host": null}}', of_a_gpu):
        with open(path, "a") as file:
            file.write(f"{sample}\n")
        damaged = set()
        assert last_sample(path) == before
        assert len(some_samples(path, 10**6, damaged)) == len(good)
        assert damaged == {path}


def test_rows_that_stay_while_others_of_their_shard_are_computed_again_count_as_done(run):
    before, shard = read_status(run, now=NOW + 5), min(run.published())
    start, _ = run.plan.bounds(shard)
    again = Again(1, [(start, start + 1), (start + 3, start + 5)])
    write_recompute(run.folder, Recompute(run.last_submission()["submission"], {shard: again}))
    status = read_status(run, now=NOW + 5)
    assert status["n_items_done"] == before["n_items_done"] - 3
    assert status["n_shards_done"] == before["n_shards_done"] - 1
    change(run, "4711_0.0", shard=shard)
    shown = {each["attempt"]: each["shard_items"] for each in read_status(run, now=NOW + 5)["attempts"]}
    assert shown == {"4711_0.0": 3, "4711_1.0": 16, "4711_2.0": 16}
    run.record_submission({"submission": 1, "state": "ended", "cancelled": True})  # and the rows stay
    assert read_status(run, now=NOW + 5)["n_items_done"] == before["n_items_done"]


def test_the_list_of_items_that_are_computed_again_is_parsed_once(run, monkeypatch):
    shards = sorted(run.published())[:2]
    again = {shard: Again(1, [(run.plan.bounds(shard)[0], run.plan.bounds(shard)[0] + 1)]) for shard in shards}
    write_recompute(run.folder, Recompute(run.last_submission()["submission"], again))
    times = []
    parse = "slurmgpu.report.status.read_recompute"
    monkeypatch.setattr(parse, lambda folder: times.append(folder) or read_recompute(folder))
    reader = StatusReader(run)
    before = reader.read(now=NOW)["n_shards_done"]
    for n_more, shard in enumerate(shards, 1):
        run.revision_path(shard, 1).touch()
        assert reader.read(now=NOW + 20 * n_more)["n_shards_done"] == before + n_more
    assert len(times) == 1


def test_a_thousand_held_tasks_are_a_few_lines(run, capsys):
    held = [{**job(f"4711_{task}", "PENDING"), "reason": "launch failed requeued held"} for task in range(1000)]
    show_status(read_status(run, [*held, MERGE], now=NOW + 5))
    shown = capsys.readouterr().out
    assert shown.count("held: 4711_") == MAX_LISTED
    assert f"  … and {1001 - MAX_LISTED} more; status --json lists them" in shown


@pytest.mark.parametrize(
    ("job_id", "reason", "released"),
    [
        ("4711_2", "job requeued in held state", "4711_2"),
        ("4711_2", "launch_failed_requeued_held", "4711_2"),
        ("4711_2", "JobHoldMaxRequeue", "4711_2"),
        ("4711_[2-3%4]", "JobHeldUser", "4711"),
        ("4711_[2-3]", "JobHeldAdmin", "4711"),
        ("4711_2", "QOSUsageThreshold", None),
    ],
)
def test_a_job_that_is_held_has_no_start_and_how_it_is_released_is_told(run, capsys, job_id, reason, released):
    for name in ("4711_0.0", "4711_1.0", "4711_2.0"):
        change(run, name, state="ended", shard=None, ended=NOW)
    held = slurms_queue.QueuedJob(job_id, "PENDING", reason, "slurmgpu:run", "/", "x", start=NOW + 100).to_json(False)
    status = read_status(run, [held, MERGE], now=NOW + 5)
    show_status(status)
    shown = capsys.readouterr().out
    assert f"{job_id} ({reason}" in shown
    assert (f"`scontrol release {released}`" in shown) == (status["pace"]["left_s"] is None) == (released is not None)
    assert ("start estimated for" in shown) == (released is None)


@pytest.mark.parametrize(
    ("job_id", "per_node", "told"),
    [
        ("4711_[2-4%2]", 1, {"n_tasks": 3}),
        ("4711_[2-4]", 2, {"n_tasks": 6, "tasks_per_node": 2}),
        ("4711_2", 2, {"n_tasks": 2, "tasks_per_node": 2}),
    ],
)
def test_a_job_of_the_queue_tells_how_many_tasks_it_has(job_id, per_node, told):
    job = slurms_queue.QueuedJob(job_id, "PENDING", "Priority", "slurmgpu:run", "/", "x", start=NOW)
    known = {"job_id": job_id, "state": "PENDING", "reason": "Priority", "start": NOW}
    assert job.to_json(False, per_node) == {**known, **told}
    assert job.to_json(True)["n_tasks"] == 0


def test_a_run_that_was_just_submitted_again_waits_whatever_the_queue_said_before(ended_run):
    reader, queue = StatusReader(ended_run), [{**MERGE, "state": "RUNNING"}]
    assert reader.read(queue, now=NOW + 10)["state"] == "merging"
    submit_again(ended_run)
    status = reader.read(queue, now=NOW + 22)
    assert (status["state"], status["queue"]) == ("queued", None)
    assert reader.read(None, now=NOW + 30)["state"] == "queued"
    assert reader.read([], now=NOW + 40)["state"] == "ended"  # by now squeue would tell


def test_the_merge_waits_for_the_tasks_of_the_last_submission(ended_run):
    submit_again(ended_run)
    computed_anew(ended_run, 0, 3)
    change(ended_run, "4800_0.0", state="ended", shard=None, ended=NOW + 200, updated=NOW + 200)
    status = read_status(ended_run, [{**MERGE, "job_id": "4801"}], now=NOW + 205)
    assert (status["state"], merge_words(status)) == ("merging", "1 of 1 task ended; waiting for the merge")


def test_jobs_of_a_submission_that_has_ended_since_are_out_of_the_queue(ended_run):
    reader, queue = StatusReader(ended_run), [*LATE, {**MERGE, "state": "RUNNING"}]
    assert merge_words(reader.read(queue, now=NOW + 5)) == "3 of 3 tasks ended; the merge is running"
    ended_run.record_submission({"submission": 1, "state": "ended"})
    assert reader.read(queue, now=NOW + 20)["state"] == "incomplete"


def test_a_task_that_works_behind_the_end_of_its_run_is_no_lost_one(run):
    """Somebody has requeued it, or has taken the merge's dependency away."""
    run.record_submission({"submission": 1, "state": "ended"})
    script = str(run.logs / "submission_file_1.sh")
    jobs = [slurms_queue.QueuedJob(f"4711_{task}", "RUNNING", "None", "slurmgpu:run", "/", script) for task in range(3)]
    merge = slurms_queue.QueuedJob("4712", "RUNNING", "None", "slurmgpu-merge:run", "/", script)
    status = read_status(run, slurms_queue.queued_jobs(run, [*jobs, merge]), now=NOW + 5)
    assert (status["state"], status["at_work"], status["failures"]) == ("running", True, {})
    assert [job["job_id"] for job in status["queue"]] == [job.job_id for job in jobs]
    over = read_status(run, slurms_queue.queued_jobs(run, [merge]), now=NOW + 5)
    assert (over["state"], over["failures"]) == ("incomplete", {"lost": 3})


def test_jobs_in_slurms_queue_are_not_those_of_a_copy_of_the_run(run):
    again = {**run.submissions()[0], "submission": 2, "array_job": "4800", "merge_job": "4801"}
    run.record_submission(again)
    names = {4800: f"slurmgpu:{run.plan.name}", 4801: f"slurmgpu-merge:{run.plan.name}"}
    jobs = [slurms_queue.QueuedJob(f"{number}", "PENDING", "", name, "/", "x") for number, name in names.items()]
    copy = Run.open(shutil.copytree(run.folder, run.folder.parent / "copy"))
    assert slurms_queue.jobs_of(copy, jobs) == []
    assert read_status(copy, slurms_queue.queued_jobs(copy, jobs), now=NOW + 500)["state"] == "ended"
    moved = Run.open(run.folder.rename(run.folder.parent / "moved"))
    assert slurms_queue.jobs_of(moved, jobs) == jobs
    assert read_status(moved, slurms_queue.queued_jobs(moved, jobs), now=NOW + 500)["state"] == "queued"
    path = moved.folder / "submissions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    renumbered = [{**line, "folder": str(moved.folder), "inode": 9} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in renumbered))
    assert slurms_queue.jobs_of(moved, jobs) == jobs  # a file system that numbers its files again at each mount


def test_an_estimate_has_the_day_and_the_year_where_they_are_not_the_next():
    day = 86_400
    texts = [moment(NOW + ahead, NOW) for ahead in (3600, 10 * day, 365 * day)]
    assert [len(text.split()) for text in texts] == [1, 4, 5]
    assert texts[2].split()[3] == time.strftime("%Y", time.localtime(NOW + 365 * day))


@pytest.mark.parametrize("accounting", [None, {"4711_0": [Accounted("FAILED", "crash", True, 2, 1, "gpu1")]}])
@pytest.mark.parametrize("wrote", [True, False])
def test_where_no_task_has_begun_the_logs_are_named_if_there_are_any(ended_run, accounting, wrote, capsys):
    for path in (*ended_run.tasks.iterdir(), *ended_run.shards.iterdir()):
        path.unlink()
    if wrote:
        (ended_run.logs / "4711_0_0_log.err").write_text("module: command not found\n")
    logs = f": slurmgpu logs {ended_run.folder} lists what their jobs wrote\n"
    advice = f"no task has started{logs if wrote else ', and no job could write a log: if they ended at once, '}"
    show_status(read_status(ended_run, [], now=NOW))  # as where the nodes lack the folder, so that the merge fails, too
    assert advice in capsys.readouterr().err
    ended_run.record_submission({"submission": 1, "state": "ended"})
    report = report_of(ended_run, accounting=accounting)
    show_status(read_status(ended_run, [], now=NOW))
    show_report(report)
    told = capsys.readouterr()
    assert advice in told.out
    assert advice in told.err
    assert (f"failed without a record: 1 crash; slurmgpu report {ended_run.folder} names them" in told.out) == bool(
        accounting
    )


def test_the_report_knows_better_why_attempts_ended(ended_run):
    change(ended_run, "4711_2.0", state="running", ended=None, failure=None, message="")
    before = read_status(ended_run, None, now=NOW + 500)
    assert before["failures"] == {"preempted": 2}
    verdicts = [("4711_0.0", "cancelled"), ("4711_1.0", None), ("4711_2.0", "node_fail")]
    report = reported(ended_run, errors=())
    for row, (name, failure) in zip(report["attempts"], verdicts, strict=True):
        row.update(attempt=name, failure=failure, message="so it was")
    (ended_run.folder / "report.json").write_text(json.dumps(report))
    status = read_status(ended_run, None, now=NOW + 500)
    assert status["failures"] == {"cancelled": 1, "node_fail": 1}
    assert [a["failure"] for a in status["attempts"]] == ["cancelled", None, "node_fail"]
    # One that lives, of a later submission, is none of its business.
    assert read_status(ended_run, None, now=NOW + 1)["attempts"][2]["failure"] is None


def test_what_was_at_work_for_a_forced_merge_is_lost_once_its_submission_is_over(ended_run):
    change(ended_run, "4711_2.0", state="running", ended=None, failure=None, message="")
    told = {a["attempt"]: a["failure"] for a in report_of(ended_run, may_live=True)["attempts"]}
    assert told["4711_2.0"] is None
    ended_run.record_submission({"submission": 1, "state": "ended"})
    assert read_status(ended_run, [], now=NOW + 500)["failures"]["lost"] == 1
    assert {a["attempt"]: a["failure"] for a in judged_attempts(ended_run)}["4711_2.0"] == "lost"


def test_a_forced_merge_knows_of_slurm_which_tasks_have_ended(ended_run):
    change(ended_run, "4711_2.0", state="running", ended=None, failure=None, message="")
    accounting = {"4711_2": [Accounted("OUT_OF_MEMORY", "host_oom", True, 10, 1, "gpu2")]}
    told = {a["attempt"]: a["failure"] for a in report_of(ended_run, may_live=True, accounting=accounting)["attempts"]}
    assert told["4711_2.0"] == "host_oom"


def test_status_and_logs_say_the_same_of_every_attempt(ended_run):
    def agreed(**failures):
        status, judged = read_status(ended_run, [], now=NOW + 500), judged_attempts(ended_run)
        found = {a["attempt"]: (a["failure"], a["message"]) for a in status["attempts"]}
        assert found.items() <= {a["attempt"]: (a["failure"], a["message"]) for a in judged}.items()
        assert status["failures"] == failures
        return {name: failure for name, (failure, _) in found.items()}

    accounting = {"4711_3": [Accounted("NODE_FAIL", "node_fail", True, 100, 1, "gpu9")]}  # it left no record
    change(ended_run, "4711_1.0", state="running", ended=None, failure=None, message="")
    assert report_of(ended_run, accounting=accounting)["failures"] == {"lost": 1, "node_fail": 1, "preempted": 2}
    assert agreed(lost=1, node_fail=1, preempted=2)["4711_1.0"] == "lost"
    # It was slow, and lived on to a good end.
    change(ended_run, "4711_1.0", state="ended", ended=NOW + 50, updated=NOW + 50, reason="others")
    assert agreed(node_fail=1, preempted=2)["4711_1.0"] is None
    hours = read_status(ended_run, [], now=NOW + 500)["gpu_hours"]
    assert hours == pytest.approx((3 * 300 + 50 + 100) / 3600, abs=1e-3)
    (ended_run.folder / "report.json").write_text("{")
    # Near the walltime's end it was `slurmgpu cancel`, and no walltime.
    change(ended_run, "4711_0.0", failure="timeout")
    change(ended_run, "4711_2.0", state="running", ended=None, failure=None, message="")
    ended_run.record_submission({"submission": 1, "cancelled": True})
    assert agreed(cancelled=1)["4711_2.0"] is None
    ended_run.record_submission({"submission": 1, "state": "ended"})
    assert agreed(cancelled=2)["4711_0.0"] == "cancelled"
    ended_run.record_submission({"submission": 1, "cancelled": False})
    assert agreed(lost=1, timeout=1)["4711_2.0"] == "lost"


def test_a_report_is_read_once_and_again_when_it_is_another(ended_run, monkeypatch):
    times = []
    monkeypatch.setattr("slurmgpu.report.status.read_report", lambda run: times.append(run) or read_report(run))
    report_of(ended_run)
    reader = StatusReader(ended_run)
    for now_s in (0, 1, 12, 24, 100):
        assert reader.read([], now=NOW + now_s)["failures"] == {"preempted": 3}
        assert len(times) == 1
    ended_run.shard_path(150).touch()
    change(ended_run, "4711_0.0", failure="timeout")
    report_of(ended_run)
    assert reader.read([], now=NOW + 101)["failures"] == {"preempted": 2, "timeout": 1}
    assert len(times) == 2


def test_a_refused_submission_leaves_the_report_in_force(ended_run):
    merged = ended_run.submissions()
    ended_run.record_submission({"submission": 1, "state": "ended"})
    assert is_told(ended_run.submissions(), merged, [])
    assert not is_told(ended_run.submissions(), merged, [job("4711_0", "RUNNING")])  # it was requeued
    ended_run.record_submission({**merged[0], "submission": 2, "state": "refused"})
    assert is_told(ended_run.submissions(), merged, [])
    ended_run.record_submission({"submission": 2, "state": "ended"})
    assert not is_told(ended_run.submissions(), merged, [])
    assert is_told(ended_run.submissions(), ended_run.submissions(), None)


@pytest.mark.parametrize("text", ["torn", "[]", '{"complete": true, "attempts": [1]}'])
def test_a_damaged_report_costs_what_only_the_report_knows(ended_run, text):
    (ended_run.folder / "report.json").write_text(text)
    status = read_status(ended_run, [], now=NOW + 60)
    assert (status["state"], status["complete"], status["failures"]) == ("ended", False, {"preempted": 3})


def test_a_run_whose_rows_are_all_merged_is_complete_though_its_report_is_damaged(tmp_path, caplog):
    run = pretend_run(tmp_path / "judge", 300, n_tasks=3, n_shards=3)
    for shard in range(3):
        run.shard_path(shard).touch()
    run.record_submission({"submission": 1, "state": "ended"})
    (run.folder / "report.json").write_text("torn")
    assert read_status(run, [], now=NOW + 60)["state"] == "incomplete"  # there is no merged file
    for n_rows, state in [(run.plan.n_items - 1, "incomplete"), (run.plan.n_items, "complete")]:
        write_merged_head(run, n_rows)
        assert read_status(run, [], now=NOW + 60)["state"] == state
    assert "`slurmgpu merge" in caplog.text


# Failed items


@pytest.fixture
def failing_run(run):
    """Of two shards items have failed, as the first task and the second one wrote."""
    for task, errors in enumerate(({"item_error": 2}, {"item_error": 1, "crash": 1})):
        [[shard, *_], *_] = json.loads((run.tasks / f"4711_{task}.0.json").read_text())["published"]
        said = f"item {task}: item_error: no text"
        change(run, f"4711_{task}.0", n_errors=2, failed=[[shard, errors]], last_failed=said, updated=NOW + task)
    return run


def computed_anew(run, task, shard, **errors):
    """An attempt of a second submission has computed a shard."""
    record = json.loads((run.tasks / f"4711_{task}.0.json").read_text())
    name, failed = f"4800_{task}.0", [[shard, errors]] if errors else []
    record |= {"attempt": name, "job": "4800", "submission": 2, "published": [[shard, NOW, 5.0, True]]}
    last = f"item 7: {[*errors][-1]}: too long" if errors else None
    record |= {"failed": failed, "n_errors": sum(errors.values()), "last_failed": last}
    write_json(run.tasks / f"{name}.json", record, durable=False)


def test_failed_items_are_told_by_class_as_they_happen(failing_run, capsys):
    status = read_status(failing_run, now=NOW)
    assert (status["n_errors"], status["errors_by_class"]) == (4, {"crash": 1, "item_error": 3})
    assert failure_words(status) == "items: 1 crash, 3 item_error"
    assert status["last_failed"] == "item 1: item_error: no text"
    show_status(status)
    told = "failed items: 1 crash, 3 item_error\none of the last: item 1: item_error: no text\n"
    assert told in capsys.readouterr().out


def test_records_of_versions_that_told_no_last_failed_item_are_read(failing_run):
    for path in failing_run.tasks.glob("*.json"):
        write_json(path, {key: value for key, value in json.loads(path.read_text()).items() if key != "last_failed"})
    status = read_status(failing_run, now=NOW)
    assert (status["n_errors"], status["last_failed"], status["damaged_records"]) == (4, None, [])


def test_items_that_were_set_aside_or_computed_anew_have_failed_no_more(failing_run):
    [[shard, _]] = json.loads((failing_run.tasks / "4711_0.0.json").read_text())["failed"]
    reader = StatusReader(failing_run)
    assert reader.read(now=NOW)["n_errors"] == 4
    failing_run.shard_path(shard).rename(failing_run.shards / f"{shard:05d}.failed")
    # So far apart that the folder is read again, also where all this happens within a tick of the clock.
    assert reader.read(now=NOW + 20)["errors_by_class"] == {"crash": 1, "item_error": 1}
    failing_run.shard_path(shard).touch()
    computed_anew(failing_run, 0, shard)
    status = reader.read(now=NOW + 40)
    assert (status["errors_by_class"], status["last_failed"]) == ({"crash": 1, "item_error": 1}, None)
    computed_anew(failing_run, 0, shard, cuda_oom=1)
    status = reader.read(now=NOW + 60)
    assert status["errors_by_class"] == {"crash": 1, "cuda_oom": 1, "item_error": 1}
    assert status["last_failed"] == "item 7: cuda_oom: too long"


def test_of_a_run_that_has_ended_the_report_tells_what_failed_and_what_it_cost(failing_run):
    accounting = {"4711_3": [Accounted("NODE_FAIL", "node_fail", True, 7200, 2, "gpu9")]}  # it left no record
    report = reported(failing_run, errors=[(3, "cuda_oom: too long")], accounting=accounting)
    failing_run.record_submission({"submission": 1, "state": "ended"})
    (failing_run.folder / "report.json").write_text(json.dumps(report))
    status = read_status(failing_run, [], now=NOW + 500)
    assert (status["n_errors"], status["errors_by_class"], status["last_failed"]) == (1, {"cuda_oom": 1}, None)
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
        pids = {"host": platform.node(), **numbering(), **processes([process.pid]), "time": time.time()}
        run.record_submission({"submission": 1, "state": "running", **pids})
        yield run, process
        process.kill()


def test_a_run_of_this_machine_whose_processes_were_killed_is_not_said_to_run(here):
    run, process = here
    now = pretend_runs.BEGIN + 300  # when its attempts have written last
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


def test_a_run_of_this_machine_that_was_just_submitted_again_is_running_before_its_tasks_have_begun(here):
    run, _ = here
    for task in range(2):
        change(run, f"4711_{task}.0", state="ended", ended=time.time(), shard=None)
    again = {**run.submissions()[0], "submission": 2}
    run.record_submission(again)  # the first one ends when this one has
    assert read_status(run)["state"] == "running"


def test_a_clock_that_was_set_makes_no_living_process_look_dead(here):
    run, process = here
    ids = processes([process.pid])
    [ticks] = ids["ticks"]
    hours_ago = {"submission": 1, "time": time.time() - 7200}  # as by a clock that was set forward, or a paused machine
    run.record_submission({**hours_ago, **numbering(), **ids})
    [line] = run.submissions()
    assert processes_here(line) == [process.pid]
    assert not is_orphaned(run, 1)
    assert executor_named("local").look(run, [line], None).at_work == f"process {process.pid} works on it"
    run.record_submission({"submission": 1, **processes([os.getpid(), process.pid])})  # the slot behind its submitter
    assert executor_named("local").cancel(run, run.submissions())
    assert process.wait(200) == -signal.SIGTERM
    own = {**line, "pids": [os.getpid()]}
    assert processes_here({**own, "ticks": [ticks]}) == []  # a later process that has the pid of one
    own["ticks"] = [None]  # where /proc does not show it there is the time alone
    assert processes_here(own) == []
    assert processes_here({**own, "time": time.time()}) == [os.getpid()]


def test_a_clock_that_was_set_back_makes_no_dead_attempt_look_alive(here):
    run, process = here
    reader = StatusReader(run)
    process.kill()
    process.wait()
    now = pretend_runs.BEGIN + 300
    assert reader.read(now=now)["state"] == "running"
    reader.read(now=now - 7200)
    status = reader.read(now=now - 7200 + 20)
    assert (status["state"], {a["silent"] for a in status["attempts"]}) == ("ended", {True})


def test_of_a_process_that_is_hidden_nobody_can_tell_whether_it_lives(here, monkeypatch):
    run, process = here
    [line] = run.submissions()
    assert processes_here(line) == [process.pid]
    process.kill()
    process.wait()
    assert processes_here(line) == []

    def hidden(pid, signum):
        raise PermissionError

    monkeypatch.setattr(os, "kill", hidden)
    assert processes_here(line) is None


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


def test_a_task_that_was_killed_just_before_the_run_was_over_is_not_running(ended_run):
    change(ended_run, "4711_2.0", state="running", ended=None, failure=None, updated=NOW + 99)
    ended_run.record_submission({"submission": 1, "state": "ended"})
    [task] = [each for each in read_status(ended_run, [], now=NOW + 100)["attempts"] if each["attempt"] == "4711_2.0"]
    assert (task["silent"], task["failure"]) == (True, "lost")


def test_a_task_that_is_requeued_as_its_node_died_is_one_task_of_those_the_merge_waits_for(ended_run):
    change(ended_run, "4711_2.0", state="running", ended=None, failure=None)
    queues = [MERGE], [job("4711_2", "PENDING"), MERGE]
    words = [merge_words({**read_status(ended_run, queue, now=NOW + 900), "state": "merging"}) for queue in queues]
    assert words == ["3 of 3 tasks ended; waiting for the merge", "2 of 3 tasks ended; the merge follows the last one"]
    # Within the time in which a task may write nothing, Slurm knows that its node is dead.
    early, late = (read_status(ended_run, queue, now=NOW + 8) for queue in queues)
    assert merge_words({**late, "state": "merging"}) == words[1]
    seen = [{each["attempt"]: each["silent"] for each in status["attempts"]}["4711_2.0"] for status in (early, late)]
    assert seen == [False, True]
    assert [status["pace"]["n_living"] for status in (early, late)] == [1, 0]


def test_a_record_under_the_name_of_another_attempt_is_left_out(tmp_path):
    run = pretend_run(tmp_path / "run", 3, n_tasks=1)
    [path] = run.tasks.iterdir()
    path.with_name("4711_7.0.json").write_bytes(path.read_bytes())
    records, left_out = run.read_attempts()
    assert [record["attempt"] for record in records] == [path.stem]
    assert left_out == {"4711_7.0": Unread.DAMAGED}


def test_lines_that_are_of_no_submission_are_passed_over(tmp_path):
    run = pretend_run(tmp_path / "run", 3, n_tasks=1)
    [line] = run.submissions()
    odd = [
        '{"state": "ended"}',
        "5",
        "[]",
        "",
        '{"submission": null}',
        '{"submission": "1", "state": "ended"}',
        "{torn",
    ]
    with open(run.folder / "submissions.jsonl", "a") as file:
        file.write("\n".join(odd))
    assert run.submissions() == [line]
    run.record_submission({"submission": 1, "state": "ended"})
    assert run.submissions() == [{**line, "state": "ended"}]


def test_of_hundreds_of_attempts_those_that_ended_well_are_counted_alone(tmp_path, capsys):
    run = pretend_run(tmp_path / "judge", 300, n_tasks=MAX_ATTEMPTS + 50, n_shards=5000, sample_s=0)
    names = [f"4711_{task}.0" for task in range(MAX_ATTEMPTS + 50)]
    for name in names[3:]:
        failure = "crash" if name == names[-1] else None
        change(run, name, state="ended", shard=None, ended=NOW, failure=failure, message="SIGSEGV" if failure else "")
    show_status(read_status(run, now=NOW))
    told = capsys.readouterr().out
    assert [line.split()[0] for line in told.splitlines() if line.startswith("4711_")] == [*names[:3], names[-1]]
    assert f"  … and {MAX_ATTEMPTS + 46} more; status --json lists them\n" in told
    assert f"  {names[-1]}: crash: SIGSEGV\n" in told
