"""The scripts in sbatch/, submitted by hand on a real Slurm: the same runs, seen and treated like any other."""

import contextlib
import errno
import functools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slurmgpu import submit
from slurmgpu.cli.commands import sweep
from slurmgpu.code import snapshots
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import live_tasks, manual_jobs
from slurmgpu.executors.manual import lines_to_type
from slurmgpu.executors.slurm import Slurm
from slurmgpu.run import lock
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import JOB_KEYS, Submission
from slurmgpu.slurm import commands, queue
from slurmgpu.slurm.own_job import OwnJob, take_share
from slurmgpu.util.pids import own_id
from tests.support.pretend_runs import pretend_run
from tests.support.runs import (
    check_rows,
    datasets,
    holders,
    let_go,
    planned_run,
    published,
    queued_of,
    records,
    report,
    toml,
    wait_until,
)

SCRIPTS = Path(__file__).parents[2] / "sbatch"


@pytest.fixture
def sbatch(cluster, monkeypatch):
    """sbatch as a user types it, in a folder: the id of the job."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")

    def call(folder, *argv):
        command = ["sbatch", "--parsable", *map(str, argv)]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    return call


def submissions(folder):
    return Run.open(folder / "run").submissions()


def accounted(job):
    """The states that Slurm's accounting gives a job, or the tasks of an array."""
    text = subprocess.run(["sacct", "-nPX", "-o", "State,ExitCode", "-j", job], capture_output=True, text=True).stdout
    return {tuple(line.split("|")) for line in text.splitlines()}


def merge_behind(sbatch, folder, job):
    return sbatch(folder, f"--dependency=afterany:{job}", SCRIPTS / "merge.sbatch", "run")


def wait_for_end(job):
    wait_until(lambda: not queued_of([job]), f"the end of job {job}")


def wait_for_holders(folder, *jobs):
    """Until one task of each of these jobs, an array's among them, holds a shard."""
    wait_until(lambda: sorted(record["job"] for record in holders(folder)) == sorted(jobs), "tasks with a shard")


# Whole runs


@pytest.mark.slurm
def test_the_two_lines_of_plan_make_the_file_that_submit_makes(project, slurmgpu, sbatch):
    tables = {"resources": {"gpus": 2, "array": True, "device": "cpu"}}
    folder = project(80, held_from=0, **tables, slurm={"time": "00:10:00"})
    let_go(folder)
    slurmgpu("submit", "--executor", "local", "--gpus", "0", cwd=folder, expect=0)
    before = datasets(folder)
    (folder / "run").rename(folder / "local")
    (folder / "held").touch()

    done = slurmgpu("plan", cwd=folder, expect=0)
    tasks, merge = done.stdout.splitlines()
    assert "nothing is queued" in done.stderr
    shown = slurmgpu("status", "run", cwd=folder, expect=0)
    assert "run  planned" in shown.stdout
    assert (
        f"next: slurmgpu resubmit {folder}/run, or the two sbatch commands that `slurmgpu plan` printed" in shown.stderr
    )
    held = tasks.replace("--parsable", "--parsable --hold")
    subprocess.run(["bash", "-ec", f"{held}\n{merge}\necho $J > array_job"], cwd=folder, check=True)
    array = (folder / "array_job").read_text().strip()

    # Nothing of it has started, and it is known all the same.
    assert submissions(folder) == []
    assert "run  queued" in slurmgpu("status", "run", cwd=folder, expect=0).stdout
    assert "still running" in slurmgpu("resubmit", "run", cwd=folder, expect=2).stderr
    # A submission that was killed has left its lock; the tasks do not wait for a dead one.
    lock = {"token": "t", "beat": 3, "doing": "submitting", "user": "ada", "since": 0.0, **own_id(), "pid": 4194304}
    (folder / "run" / ".submitting").write_text(json.dumps(lock))
    subprocess.run(["scontrol", "release", array], check=True)
    wait_for_holders(folder, array, array)
    let_go(folder)
    wait_until(lambda: (folder / "run" / "report.json").exists(), "the merge")

    assert datasets(folder) == before
    outcome = report(folder)
    assert outcome["complete"]
    assert outcome["accounting"]
    assert len(outcome["attempts"]) == 2
    [line] = outcome["submissions"]
    assert (line["by_hand"], line["executor"], line["device"]) == (True, "slurm", "cpu")
    assert (line["array_job"], line["n_tasks"], line["gpus_per_task"]) == (array, 2, 1)
    assert all(record["n_gpus"] == 1 and len(record["gpus"]) == 1 for record in records(folder))
    assert all(record["memory_mb"] == 2000 for record in records(folder))
    wait_for_end(line["merge_job"])
    assert "run  complete" in slurmgpu("status", "run", cwd=folder, expect=0).stdout
    said = slurmgpu("logs", "run", f"{array}_1", cwd=folder, expect=0).stdout
    assert f"attempt {array}_1.0 of {folder}/run: 1 GPU, device cpu" in said
    assert all(line in said for line in (folder / f"slurmgpu-{array}_1.out").read_text().splitlines())
    said = slurmgpu("logs", "run", "--merge", cwd=folder, expect=0).stdout
    assert said
    assert all(text in (folder / f"slurmgpu-merge-{line['merge_job']}.out").read_text() for text in said.splitlines())
    assert not (folder / "run" / ".submitting").exists()


@pytest.mark.slurm
def test_tasks_that_start_at_once_are_one_submission(project, slurmgpu, sbatch, monkeypatch):
    folder = project(80)
    slurmgpu("plan", "--gpus", "0", cwd=folder, expect=0)
    options = ("--array=0-4", "--gpus-per-node=0", "--cpus-per-task=1", "--mem=600")
    with monkeypatch.context() as typed_in_a_job:
        # Of `salloc --gpus=2 --gpus-per-task=2 --mem-per-cpu=200`.
        for name, value in (("GPUS", "2"), ("GPUS_PER_TASK", "2"), ("MEM_PER_CPU", "200")):
            typed_in_a_job.setenv(f"SLURM_{name}", value)
        array = sbatch(folder, *options, "--hold", SCRIPTS / "array.sbatch", "run")
    merges = sbatch(folder, SCRIPTS / "merge.sbatch", "run"), merge_behind(sbatch, folder, array)
    early = folder / f"slurmgpu-merge-{merges[0]}.out"
    wait_until(lambda: early.exists() and "waiting: Slurm has" in early.read_text(), "a merge that is early")
    subprocess.run(["scontrol", "release", array], check=True)
    for merge in merges:  # the one waits for the tasks, not for the other
        wait_for_end(merge)
    check_rows(folder, 80)
    lines = (folder / "run" / "submissions.jsonl").read_text().splitlines()
    assert [json.loads(line)["submission"] for line in lines] == [1] * len(lines)
    assert sum("array_job" in json.loads(line) for line in lines) == 1
    assert {record["submission"] for record in records(folder)} == {1}
    assert {record["n_gpus"] for record in records(folder)} == {0}
    for merge in merges:
        wait_until(lambda job=merge: accounted(job) == {("COMPLETED", "0:0")}, "the accounting of the merges")


@pytest.mark.slurm
def test_a_killed_task_and_a_requeued_one_lose_nothing(project, slurmgpu, sbatch, cluster):
    folder = project(80, held_from=16)
    slurmgpu("plan", "--gpus", "3", "--array", "--device", "cpu", cwd=folder, expect=0)
    array = sbatch(folder, "--array=0-2", SCRIPTS / "array.sbatch", "run")
    merge = merge_behind(sbatch, folder, array)
    # Those that no fault holds: a task may hold one of them for a moment.
    wait_until(lambda: len(published(folder)) == 2, "the first two shards")
    wait_for_holders(folder, array, array, array)
    cluster.run("scontrol", "requeue", f"{array}_1")
    wait_until(lambda: any(job.reason == "BeginTime" for job in queued_of([array])), "the requeue")
    cluster.run("scontrol", "update", f"JobId={array}_1", "StartTime=now")
    wait_until(lambda: any(record["restart"] == 1 for record in records(folder)), "the second life")
    [victim] = [record for record in records(folder) if record["task"] == 0]
    os.kill(victim["pid"], signal.SIGKILL)
    let_go(folder)
    wait_for_end(merge)
    check_rows(folder, 80)
    outcome = report(folder)
    assert {record["submission"] for record in records(folder)} == {1}
    failures = {attempt["attempt"]: attempt["failure"] for attempt in outcome["attempts"]}
    assert failures[f"{array}_0.0"] in ("crash", "lost")
    assert failures[f"{array}_1.0"] == "preempted"
    assert outcome["complete"]


@pytest.mark.slurm
def test_cancel_resubmit_and_another_array_by_hand_go_on_with_such_a_run(project, slurmgpu, sbatch):
    folder = project(80, held_from=16, resources={"gpus": 2, "array": True, "device": "cpu"})
    slurmgpu("plan", cwd=folder, expect=0)
    array = sbatch(folder, "--array=0-1", SCRIPTS / "array.sbatch", "run")
    merge = merge_behind(sbatch, folder, array)
    wait_for_holders(folder, array, array)
    assert "still running" in slurmgpu("merge", "run", cwd=folder, expect=2).stderr
    done = slurmgpu("cancel", "run", cwd=folder, expect=0)
    assert f"Slurm jobs {array}, {merge}" in done.stdout
    wait_for_end(array)
    slurmgpu("resubmit", "run", "--dry-run", cwd=folder, expect=0)
    assert submissions(folder)[0]["cancelled"]

    again = sbatch(folder, SCRIPTS / "array.sbatch", folder / "run")  # a plain job, that names the run in full
    wait_for_holders(folder, again)
    assert [line["array_job"] for line in submissions(folder)] == [array, again]
    shown = slurmgpu("status", "run", cwd=folder, expect=0).stdout
    assert "run  running" in shown
    subprocess.run(["scancel", again], check=True)
    wait_for_end(again)
    wait_for_end(merge_behind(sbatch, folder, again))
    assert report(folder)["failures"] == {"cancelled": 3}
    assert {line["state"] for line in submissions(folder)} == {"ended"}

    let_go(folder)
    slurmgpu("resubmit", "run", "--wait", cwd=folder, expect=0)
    check_rows(folder, 80)
    assert [line.get("by_hand", False) for line in submissions(folder)] == [True, True, False]
    assert submissions(folder)[2]["n_tasks"] == 2


@pytest.mark.slurm
def test_an_incomplete_run_ends_its_merge_job_with_exit_code_3(project, slurmgpu, sbatch):
    folder = project(40, workload="Unloadable")
    slurmgpu("plan", "--gpus", "0", cwd=folder, expect=0)
    array = sbatch(folder, "--gpus-per-node=0", SCRIPTS / "array.sbatch", "run")
    merge = merge_behind(sbatch, folder, array)
    wait_for_end(merge)
    assert report(folder)["failures"] == {"workload_error": 1}
    wait_until(lambda: accounted(array) == {("FAILED", "1:0")}, "the accounting of the task")
    wait_until(lambda: accounted(merge) == {("FAILED", "3:0")}, "the accounting of the merge")


@pytest.mark.slurm
def test_a_script_by_hand_helps_a_run_that_submit_has_at_work_and_its_merge_waits_for_it(project, slurmgpu, sbatch):
    folder = project(80, held_from=16)
    slurmgpu("submit", "--gpus", "1", "--device", "cpu", cwd=folder, expect=0)
    [first] = submissions(folder)
    job = sbatch(folder, SCRIPTS / "array.sbatch", "run")
    nothing = sbatch(folder, SCRIPTS / "array.sbatch")
    wait_for_holders(folder, first["array_job"], job)
    subprocess.run(["scancel", first["array_job"]], check=True)
    log = folder / "run" / "logs" / f"{first['merge_job']}_0_log.err"
    wait_until(lambda: log.exists() and f"waiting: task {job}_0.0" in log.read_text(), "a merge that waits")
    assert not (folder / "run" / "report.json").exists()
    let_go(folder)
    wait_for_end(first["merge_job"])
    check_rows(folder, 80)
    assert [(line["state"], line.get("by_hand", False)) for line in submissions(folder)] == [
        ("ended", False),
        ("ended", True),
    ]
    assert "run  complete" in slurmgpu("status", "run", cwd=folder, expect=0).stdout
    assert submissions(folder)[1]["cluster"] == first["cluster"]
    wait_for_end(nothing)
    assert "the run directory is missing: sbatch" in next(folder.glob(f"slurmgpu-{nothing}_*.out")).read_text()


@pytest.mark.slurm
def test_the_image_comes_from_the_run_not_from_the_script(project, slurmgpu, sbatch, apptainer, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    site = tmp_path / "config" / "slurmgpu" / "site.toml"
    site.parent.mkdir(parents=True)
    site.write_text(f"container = {toml(apptainer.table())}\n")
    folder = project(40)
    slurmgpu("plan", "--device", "cpu", cwd=folder, expect=0)
    site.unlink()
    job = sbatch(folder, SCRIPTS / "array.sbatch", "run")
    wait_for_end(merge_behind(sbatch, folder, job))
    check_rows(folder, 40)
    [record] = records(folder)
    assert record["image"] == str(apptainer.sif)
    assert record["surroundings"]["image"] == apptainer.sif.name


@pytest.mark.slurm
def test_a_planned_run_is_submitted_by_resubmit_as_well(project, slurmgpu, sbatch):
    folder = project(40)
    slurmgpu("plan", cwd=folder, expect=0)
    argv = ("--gpus", "2", "--array", "--device", "cpu", "--slurm", "time=5")
    slurmgpu("resubmit", "run", *argv, "--wait", cwd=folder, expect=0)
    check_rows(folder, 40)
    [line] = submissions(folder)
    assert (line["n_tasks"], line["slurm"]) == (2, {"time": "5"})


@pytest.mark.slurm
def test_a_run_can_wait_for_one_that_was_submitted_by_hand(project, slurmgpu, sbatch):
    folder = project(16, resources={"gpus": 1, "device": "cpu"})
    slurmgpu("plan", cwd=folder, expect=0)
    array = sbatch(folder, "--hold", SCRIPTS / "array.sbatch", "run")
    merge = merge_behind(sbatch, folder, array)
    slurmgpu("submit", "--after", "run", "--run-dir", "second", cwd=folder, expect=0)
    [line] = Run.open(folder / "second").submissions()
    assert line["after"] == [merge]
    # What Slurm makes of it, test_a_run_waits_for_another_runs_merge_also_across_its_resubmissions shows.
    assert merge in dict(queue.dependents(merge))[line["array_job"]]
    slurmgpu("submit", "--after", "run", "--after", "second", "--run-dir", "third", cwd=folder, expect=0)
    [last] = Run.open(folder / "third").submissions()
    assert last["after"] == [merge, line["merge_job"]]
    assert {merge, line["merge_job"]} <= set(re.findall(r"\d+", dict(queue.dependents(merge))[last["array_job"]]))
    commands.cancel(array, merge, *(each[job] for each in (line, last) for job in ("array_job", "merge_job")))


@pytest.mark.slurm
def test_two_merges_that_resubmit_at_once_both_postpone_the_run_that_waits_for_them(
    project, slurmgpu, sbatch, monkeypatch, caplog
):
    folder = project(16, resources={"gpus": 1, "device": "cpu"})
    held = functools.partial(sbatch, folder, "--hold")
    jobs, afters = [], []
    for name in ("run", "second"):
        slurmgpu("plan", "--run-dir", name, cwd=folder, expect=0)
        array = held(SCRIPTS / "array.sbatch", name)
        merge = sbatch(folder, f"--dependency=afterany:{array}", SCRIPTS / "merge.sbatch", name)
        jobs += [array, merge]
        afters += [(merge, held("--wrap", "true"))]
    slurmgpu("submit", "--after", "run", "--after", "second", "--run-dir", "third", cwd=folder, expect=0)
    [line] = Run.open(folder / "third").submissions()
    array = line["array_job"]
    assert {merge for merge, _ in afters} == set(re.findall(r"\d+", dict(queue.dependents(afters[0][0]))[array]))

    def postpone(merge, later):
        monkeypatch.setenv("SLURM_JOB_ID", merge)
        Slurm().hand_over({"merge": {}}, {"merge_job": later})

    other, asked = threading.Thread(target=postpone, args=afters[1]), commands.run

    def ask(*command):
        if "update" in command and threading.current_thread() is not other and not other.ident:
            other.start()  # it comes between the question and the change
            wait_until(lambda: not other.is_alive() or "waiting for process" in caplog.text, "the other merge")
        return asked(*command)

    monkeypatch.setattr(commands, "run", ask)
    caplog.set_level(logging.INFO)
    postpone(*afters[0])
    other.join()
    [(_, dependency)] = [found for found in queue.dependents(afters[0][1]) if found[0] == array]
    assert set(re.findall(r"\d+", dependency)) == {later for _, later in afters}
    commands.cancel(*jobs, array, line["merge_job"], *(later for _, later in afters))


@pytest.mark.slurm
def test_a_run_that_is_queued_while_the_one_before_is_resubmitted_waits_for_the_next_merge(
    project, slurmgpu, sbatch, monkeypatch
):
    folder = project(16, resources={"gpus": 1, "device": "cpu"})
    slurmgpu("plan", cwd=folder, expect=0)
    array = sbatch(folder, "--hold", SCRIPTS / "array.sbatch", "run")
    merges, place = [merge_behind(sbatch, folder, array)], Slurm.place

    def resubmitted(self, run, submission):
        merges.append(merge_behind(sbatch, folder, array))
        assert queue.dependents(merges[0]) == []  # so the merge that has resubmitted ends
        return place(self, run, submission)

    monkeypatch.setattr(Slurm, "place", resubmitted)
    submit(folder / "slurmgpu.toml", after=folder / "run", run_dir=folder / "second")
    [line] = Run.open(folder / "second").submissions()
    assert line["after"] == merges[:1]
    assert queue.dependents(merges[1]) == [(line["array_job"], f"afterok:{merges[1]}")]
    commands.cancel(array, *merges, line["array_job"], line["merge_job"])


def test_a_run_that_is_queued_stays_so_if_what_it_waits_for_cannot_be_asked_again(tmp_path, monkeypatch, caplog):
    first, second = (pretend_run(tmp_path / name, 300.0) for name in ("first", "second"))
    monkeypatch.setattr(
        queue, "own_jobs", lambda and_of=(): []
    )  # the other run's merge is over, and here its file is not seen yet
    Slurm().wait_for(second, [first])
    assert "job 4711 waits for has ended just now, Slurm cancels it: " in caplog.text
    assert "Slurm has no job that will complete it" in caplog.text


def test_the_last_merge_job_is_that_of_the_last_submission_also_where_ids_began_again(tmp_path, monkeypatch):
    run = pretend_run(tmp_path / "run", 300.0)
    run.record_submission({**run.last_submission(), "submission": 2, "array_job": "12", "merge_job": "13"})
    line = run.submissions()[0]
    jobs = [queue.QueuedJob(job, "PENDING", "", queue.MERGE_NAME, "/", "") for job in ("13", line["merge_job"])]
    monkeypatch.setattr(queue, "own_jobs", lambda and_of=(): jobs)
    monkeypatch.setattr(queue, "jobs_of", lambda run, among: among)
    assert Slurm().jobs_completing(run) == ("13",)
    jobs.append(queue.QueuedJob("9", "PENDING", "", queue.MERGE_NAME, "/", ""))  # by hand, and not recorded yet
    assert Slurm().jobs_completing(run) == ("9",)


def test_a_waiting_job_that_slurm_does_not_change_keeps_no_other_from_the_next_merge(monkeypatch, caplog):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(queue, "own_jobs", list)
    monkeypatch.setattr(queue, "dependents", lambda job: [("11", f"afterok:{job}"), ("12", f"afterok:{job}")])
    asked = []

    def run(*command):
        asked.append(command[2:])
        if "JobId=11" in command:
            raise commands.SlurmUnavailableError("scontrol update failed: Job/step already completing or completed")

    monkeypatch.setattr(commands, "run", run)
    Slurm().hand_over({"merge": {}}, {"merge_job": "9"})
    assert asked == [("JobId=11", "Dependency=afterok:9"), ("JobId=12", "Dependency=afterok:9")]
    assert "job 11 waits for this job, which ends: scontrol update failed" in caplog.text


def test_a_waiting_run_that_cannot_be_locked_waits_for_the_next_merge_like_the_others(tmp_path, monkeypatch, caplog):
    run = pretend_run(tmp_path / "waits", 300.0)
    job = queue.QueuedJob("11", "PENDING", "", "", "", "", comment=f"{queue.COMMENT}{run.folder}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(queue, "own_jobs", lambda: [job])
    monkeypatch.setattr(queue, "dependents", lambda merge: [("11", f"afterok:{merge}"), ("12", f"afterok:{merge}")])
    asked = []
    monkeypatch.setattr(commands, "run", lambda *command: asked.append(command[2:]))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lock, "_write", full)
    Slurm().hand_over({"merge": {}}, {"merge_job": "9"})
    assert asked == [("JobId=11", "Dependency=afterok:9"), ("JobId=12", "Dependency=afterok:9")]
    assert "job 11 is postponed without its run's lock: [Errno 28] No space left on device" in caplog.text
    Slurm().wait_for(run, [])
    assert "if what job 4711 waits for has ended just now, Slurm cancels it: [Errno 28]" in caplog.text


@pytest.mark.slurm
def test_a_model_parallel_task_holds_all_gpus_of_its_job(project, slurmgpu, sbatch):
    folder = project(40)
    slurmgpu("plan", "--gpus", "4", "--device", "cpu", cwd=folder, expect=0)
    job = sbatch(folder, SCRIPTS / "model-parallel.sbatch", "run")
    wait_for_end(merge_behind(sbatch, folder, job))
    check_rows(folder, 40)
    [record] = records(folder)
    assert (record["n_gpus"], len(record["gpus"])) == (4, 4)
    assert submissions(folder)[0]["gpus_per_task"] == 4


@pytest.mark.nightly
@pytest.mark.slurm
def test_a_task_that_trains_has_a_process_for_each_gpu_of_its_node(project, slurmgpu, sbatch):
    pytest.importorskip("torch")
    folder = project(40)
    slurmgpu("plan", "--gpus", "4", "--processes", "per-gpu", "--device", "cpu", cwd=folder, expect=0)
    job = sbatch(folder, "--gpus-per-node=2", "--cpus-per-task=2", SCRIPTS / "train.sbatch", "run")
    wait_for_end(merge_behind(sbatch, folder, job))
    check_rows(folder, 40)
    [record] = records(folder)
    assert record["n_gpus"] == 2  # what Slurm gave, not what was planned
    assert (folder / f"slurmgpu-train-{job}.out").read_text()


@pytest.mark.slurm
def test_a_task_on_two_nodes_is_one_task(project, slurmgpu, sbatch):
    pytest.importorskip("torch")
    folder = project(40)
    argv = ("--gpus", "2", "--nodes-per-task", "2", "--processes", "per-gpu", "--device", "cpu")
    slurmgpu("plan", *argv, cwd=folder, expect=0)
    job = sbatch(folder, "--gpus-per-node=1", "--cpus-per-task=2", SCRIPTS / "multi-node.sbatch", "run")
    wait_for_end(merge_behind(sbatch, folder, job))
    check_rows(folder, 40)
    [record] = records(folder)
    assert (record["n_gpus"], record["n_nodes"]) == (1, 2)
    [line] = submissions(folder)
    assert (line["gpus_per_task"], line["nodes_per_task"]) == (2, 2)


def test_a_job_with_a_shard_sees_the_gpu_that_it_is_a_part_of(project, slurmgpu, sbatch):
    folder = project(16, slurm={"gres": "shard:1", "cpus_per_task": 1})
    shown = slurmgpu("plan", "--array", cwd=folder, expect=0).stdout
    [line] = [line for line in shown.splitlines() if "array.sbatch" in line]
    assert "--gpus-per-node=0 --gres=shard:1" in line
    job = sbatch(folder, "--gpus-per-node=0", "--gres=shard:1", "--cpus-per-task=1", SCRIPTS / "array.sbatch", "run")
    wait_until(lambda: records(folder), "the task")
    [record] = records(folder)
    wait_for_end(job)
    assert (record["n_gpus"], len(record["gpus"])) == (1, 1)


def test_a_script_that_asks_for_several_tasks_of_a_job_starts_one_on_each_gpu(project, slurmgpu, sbatch):
    folder = project(160, held_from=0, slurm={"mem_per_cpu": "100M"})
    shown = slurmgpu(
        "plan", "--gpus", "4", "--array", "--tasks-per-node", "4", "--device", "cpu", cwd=folder, expect=0
    ).stdout
    assert "--gpus-per-node=4 --ntasks-per-node=4 --array=0 " in shown
    asked = ["--gpus-per-node=4", "--ntasks-per-node=4", "--array=0-1", "--cpus-per-task=1"]
    job = sbatch(folder, *asked, SCRIPTS / "array.sbatch", "run")
    wait_until(lambda: len(holders(folder)) == 8, "eight tasks")
    let_go(folder)
    wait_for_end(job)
    slurmgpu("merge", "run", cwd=folder, expect=0)
    check_rows(folder, 160)
    [line] = submissions(folder)
    assert (line["n_tasks"], line["gpus_per_task"], line["tasks_per_node"]) == (8, 1, 4)
    gpus = {record["task"]: record["gpus"] for record in records(folder)}
    assert gpus == {task: [str(task % 4)] for task in range(8)}
    said = slurmgpu("logs", "run", f"{job}_6.0", cwd=folder, expect=0).stdout
    assert f"attempt {job}_6.0 of" in said


# The lines that plan prints


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({"gpus_per_task": 1}, "--gpus-per-node=1 --array=0 {}/array.sbatch"),
        ({"gpus_per_task": 0}, "--gpus-per-node=0 --array=0 {}/array.sbatch"),
        ({"gpus_per_task": 4, "gpu_type": "a100"}, "--gpus-per-node=a100:4 --array=0 {}/model-parallel.sbatch"),
        ({"n_tasks": 12, "n_concurrent": 8, "tasks_per_node": 4, "slurm": {"mem": "2G"}},
         "--mem=8G --gpus-per-node=4 --ntasks-per-node=4 --array=0-2%2 {}/array.sbatch"),
        ({"gpus_per_task": 8, "nodes_per_task": 2}, "--gpus-per-node=4 --nodes=2 --array=0 {}/multi-node.sbatch"),
        ({"n_tasks": 20, "n_concurrent": 4}, "--gpus-per-node=1 --array=0-19%4 {}/array.sbatch"),
        ({"n_tasks": 3, "n_concurrent": 3}, "--gpus-per-node=1 --array=0-2 {}/array.sbatch"),
        ({"slurm": {"gres": "shard:2"}}, "--gpus-per-node=0 --gres=shard:2 --array=0 {}/array.sbatch"),
        ({"slurm": {"gres": "gpu:a100:1,shard:2"}}, "--gpus-per-node=a100:1 --gres=shard:2 --array=0 {}/array.sbatch"),
        ({"slurm": {"comment": "a b", "exclusive": True, "hold": False, "setup": ["x"]}, "exclude": ("n1", "n2")},
         "'--comment=a b' --exclusive --exclude=n1,n2 --gpus-per-node=1 --array=0 {}/array.sbatch"),
    ],
)  # fmt: skip
def test_a_line_has_the_script_that_fits_and_its_options(tmp_path, monkeypatch, asked, shown):
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path / "runs" / "x y", None)
    usual = {"n_tasks": 1, "n_concurrent": 1, "gpus_per_task": 1}
    submission = Submission(submission=1, executor="slurm", device="auto", **{**usual, **asked})
    tasks, merge = lines_to_type(run, submission)
    comment = f"'--comment=slurmgpu:{tmp_path}/runs/x y'"
    shown = shown if "--comment" in shown else f"{comment} {shown}"
    assert tasks == f"J=$(sbatch --parsable {shown.format(SCRIPTS)} 'runs/x y')"
    options = f"{comment} --kill-on-invalid-dep=yes"
    assert merge == f"sbatch --dependency=afterany:${{J%%;*}} {options} {SCRIPTS}/merge.sbatch 'runs/x y'"


def test_a_copy_of_the_scripts_in_the_working_directory_is_the_one_to_submit(project, slurmgpu):
    folder = project(4, slurm={"setup": "module load apptainer"})
    (folder / "sbatch").symlink_to(SCRIPTS)
    done = slurmgpu("plan", "--json", cwd=folder, expect=0, PATH="/nowhere")
    shown = json.loads(done.stdout)
    assert shown["run_dir"] == str(folder / "run")
    options = f"--comment=slurmgpu:{folder}/run --gpus-per-node=1 --array=0"
    assert shown["lines"][0] == f"J=$(sbatch --parsable {options} sbatch/array.sbatch run)"
    assert shown["lines"][1].endswith("sbatch/merge.sbatch run")
    assert "add these lines to them: module load apptainer" in done.stderr
    assert "already holds a run" in slurmgpu("plan", cwd=folder, expect=2).stderr


def test_the_scripts_ask_for_what_the_task_and_slurm_need():
    for path in SCRIPTS.glob("*.sbatch"):
        text = path.read_text()
        assert re.search(r"^#SBATCH --job-name=slurmgpu", text, re.M), path
        assert re.search(r"^#SBATCH --open-mode=append$", text, re.M), path
        [output] = re.findall(r"^#SBATCH --output=(.*)$", text, re.M)
        assert "/" not in output, path
        assert re.search(r"^#SBATCH --requeue$", text, re.M), path
        if path.name != "merge.sbatch":
            assert re.search(r"^#SBATCH --signal=USR2@\d+$", text, re.M), path
            assert re.search(r"^#SBATCH --array=0$", text, re.M), path
            step = """sh -c 'trap "" USR2; exec "$0" "$@"' slurmgpu task --own-array "$RUN"\n"""
            cpus = """--cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" """
            if path.name in ("array.sbatch", "model-parallel.sbatch"):
                assert re.search(r"^#SBATCH --ntasks-per-node=1$", text, re.M), path
                each = "--ntasks=$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE))"
                each = f'{each} --ntasks-per-node="$SLURM_NTASKS_PER_NODE" \\\n    '
                cpus += "--kill-on-bad-exit=0 --wait=0 "
            else:
                each = '--ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 '
            assert text.endswith(f"srun --export=ALL {each}{cpus}\\\n    {step}"), path


# What a task is told of its job


def test_a_task_outside_slurm_says_what_to_do_instead(project, slurmgpu):
    done = slurmgpu("task", "run", cwd=project(4), expect=2)
    assert "slurmgpu resubmit RUN --executor local" in done.stderr


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_NUM_NODES": "1"},
        {"SLURM_JOB_NUM_NODES": "2"},
    ],
    ids=["four on one node", "two nodes without srun"],
)
def test_a_task_that_is_not_alone_on_its_node_or_leaves_one_out_is_refused(project, slurmgpu, environment):
    folder = project(4)
    slurmgpu("plan", cwd=folder, expect=0, PATH="/nowhere")
    done = slurmgpu("task", "run", cwd=folder, expect=2, SLURM_JOB_ID="1", **environment)
    assert "expected once per node: srun --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1" in done.stderr
    assert "need the GPUs of all of them: sbatch --ntasks-per-node=4 --gpus-per-node=4." in done.stderr


@pytest.mark.parametrize(("n_tasks", "is_refused"), [(4, False), (3, False), (8, True)])
def test_tasks_on_cpus_share_a_job_by_hand_if_the_run_was_planned_so(monkeypatch, tmp_path, n_tasks, is_refused):
    # Three, where the run has three shards: plan prints --ntasks-per-node=3.
    run = planned_run(tmp_path / "run", resources={"gpus": 0, "tasks": 8, "tasks_per_node": 4})
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", str(n_tasks))
    with pytest.raises(SlurmGPUError, match="started 8 times") if is_refused else contextlib.nullcontext():
        assert manual_jobs.own_gpus(run) == 0


@pytest.mark.parametrize(
    ("environment", "n_gpus"),
    [
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1"}, 4),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({}, 0),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_NUM_TASKS": "4"}, 1),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_NUM_TASKS": "3"}, "started 3 times"),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_STEP_NUM_TASKS": "4"}, "started 4 times"),  # the run plans one for each
        ({"SLURM_STEP_NUM_TASKS": "4"}, "started 4 times"),
    ],
)
def test_the_gpus_of_a_task_are_those_that_slurm_gave(monkeypatch, tmp_path, environment, n_gpus):
    run = planned_run(tmp_path / "run", resources={"gpus": 8, "array": True})
    for name in ("SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if isinstance(n_gpus, int):
        assert manual_jobs.own_gpus(run) == n_gpus
    else:
        with pytest.raises(SlurmGPUError, match=n_gpus):
            manual_jobs.own_gpus(run)


@pytest.mark.parametrize(
    ("visible", "n_gpus", "own"),
    [("0,1,2,3", 1, "2"), ("GPU-a,GPU-b,GPU-c,GPU-d", 1, "GPU-c"), ("3", 1, "3"), (None, 1, "2"), (None, 2, "4,5")],
)
def test_a_task_that_shares_a_node_sees_its_own_gpus_only(monkeypatch, visible, n_gpus, own):
    monkeypatch.setenv("SLURM_LOCALID", "2")
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):  # set first, so that they are put back
        monkeypatch.setenv(name, visible or "")
        monkeypatch.delenv(name)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(32))
    take_share(n_gpus, 4, "one")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own
    assert os.environ.pop("OMP_NUM_THREADS") == "8"
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    take_share(2, 4, "per-gpu")
    assert os.environ.pop("OMP_NUM_THREADS") == "3"


def test_a_job_by_hand_has_the_code_of_the_last_submission_or_of_the_plan_or_none(tmp_path, monkeypatch):
    def code_of_a_job(job):
        return manual_jobs.join(run, OwnJob(job, 0, 0), 0, None)["code"]

    run = pretend_run(tmp_path / "run", 0, n_tasks=1)
    assert code_of_a_job("8") is None
    submitted = {"digest": "d" * 64, "left_out": []}
    run.record_submission({**run.submissions()[-1], "submission": 3, "code": submitted})
    monkeypatch.setattr(snapshots, "digests_in", lambda folder: ["the plan's"])
    assert code_of_a_job("9") == submitted


# Jobs of a run, by their names and arguments


@pytest.mark.parametrize(
    ("name", "folder", "command", "is_of"),
    [
        ("slurmgpu", "/home/ada", "/home/ada/sbatch/array.sbatch runs/x", True),
        ("slurmgpu-merge", "/home/ada", "merge.sbatch /home/ada/runs/x", True),
        ("slurmgpu", "/home/ada/runs", "array.sbatch ./x", True),
        ("slurmgpu", "/home/ada", "array.sbatch runs/x --device cpu", True),
        ("slurmgpu", "/home/ada", "array.sbatch runs/xy", False),
        ("slurmgpu", "/home/bob", "array.sbatch runs/x", False),
        ("plots", "/home/ada", "plots.sbatch runs/x", False),
        ("slurmgpu:x", "/elsewhere", "/home/ada/runs/x/logs/submission_file.sh", True),
    ],
)
def test_a_job_is_of_a_run_by_its_script_or_its_name_and_arguments(name, folder, command, is_of):
    run = Run(Path("/home/ada/runs/x"), None)
    assert queue.QueuedJob("7", "PENDING", "None", name, folder, command).is_of(run) is is_of
    blank = Run(Path("/home/ada/runs/x y"), None)
    assert queue.QueuedJob("7", "PENDING", "None", name, folder, f"{command} y").is_of(blank) is (
        is_of and "submission" not in command and "--device" not in command
    )


@pytest.mark.parametrize(
    ("comment", "is_of"),
    [("slurmgpu:/home/ada/runs/x", True), ("slurmgpu:/home/ada/runs/../runs/x", True), ("slurmgpu:/home/ada/x", False)],
)
def test_a_job_is_of_the_run_that_its_comment_names(comment, is_of):
    run = Run(Path("/home/ada/runs/x"), None)
    job = queue.QueuedJob("7", "PENDING", "None", "any", "/", "array.sbatch", comment=comment)
    assert job.is_of(run) is is_of


@pytest.fixture
def cancelling(tmp_path, monkeypatch):
    """`cancelling(jobs, **line)`: what `cancel` stops of a run whose one submission by hand is job 7, on "here".

    `here` is the cluster's name, None if Slurm does not say it; `logs` is what the run's logs are a link to.
    """

    def cancel(*jobs, mode=0o644, here="here", logs=None, **line):
        def cluster_name():
            if here is None:
                raise commands.SlurmUnavailableError("scontrol does not answer")
            return here

        run = pretend_run(tmp_path / "run", 0, n_tasks=1)
        first = {"by_hand": True, "array_job": "7", "uid": os.getuid(), "state": "queued"}
        run.record_submission({"submission": 1, **first, **line})
        (run.folder / "submissions.jsonl").chmod(mode)
        if logs is not None:
            shutil.rmtree(run.logs)
            run.logs.symlink_to(logs)
        stopped = []
        monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
        monkeypatch.setattr(commands, "cluster_name", cluster_name)
        monkeypatch.setattr(queue, "own_jobs", lambda and_of=(): list(jobs))
        monkeypatch.setattr(commands, "cancel", lambda *ids: stopped.extend(ids))
        live_tasks.cancel(run)
        return stopped, run.submissions()[-1].get("cancelled", False)

    return cancel


@pytest.mark.parametrize(("answer_s", "n_answers"), [(60.0, 1), (-1.0, 3)])
def test_one_answer_of_the_queue_is_for_the_runs_of_a_sweep(tmp_path, monkeypatch, answer_s, n_answers):
    runs = [pretend_run(tmp_path / f"run{number}", 0, n_tasks=1) for number in range(3)]
    jobs, stopped, asked = [], [], []
    for number, run in enumerate(runs[:2], 1):
        run.record_submission({"submission": 1, "array_job": f"{number}", "cluster": "here"})
        jobs.append(queue.QueuedJob(f"{number}", "RUNNING", "None", "any", "/", f"{run.logs}/submission_file.sh"))
    monkeypatch.setattr(live_tasks, "ANSWER_S", answer_s)
    monkeypatch.setattr(queue, "own_cluster", lambda: asked.append("scontrol") or "here")
    monkeypatch.setattr(queue, "own_jobs", lambda and_of=(): asked.append("squeue") or jobs)
    monkeypatch.setattr(commands, "cancel", lambda *ids: stopped.append(ids))
    assert sweep.cancel([run.folder for run in runs]) == 0
    assert stopped == ([("1", "2")] if n_answers == 1 else [("1",), ("2",)])
    # The cluster's name matters only to the run that has no jobs.
    assert asked == ["squeue"] * n_answers + ["scontrol"]
    assert [run.submissions()[0].get("cancelled") for run in runs] == [True, True, None]


@pytest.mark.parametrize(
    ("said", "n_calls", "expected"),
    [
        (
            "error: Kill job error on job id 2: Access/permission denied",
            4,
            ["Slurm jobs 1", "2: Access", "Slurm jobs 3"],
        ),
        ("error: Kill job error on job id 2: Invalid job id specified", 1, [f"Slurm jobs {job}" for job in "123"]),
        ("error: Unable to contact slurm controller (connect failure)", 1, ["Unable to contact"] * 3),
    ],
)
def test_one_scancel_ends_the_jobs_of_a_folder_of_runs_and_each_has_its_own_failure(
    tmp_path, monkeypatch, said, n_calls, expected
):
    """Each scancel takes as long as the command needs to start."""
    calls, jobs, runs = tmp_path / "calls", [], []
    scancel = tmp_path / "bin" / "scancel"
    scancel.parent.mkdir()
    scancel.write_text(
        f'#!/bin/bash\necho "$@" >> {calls}\n[[ " $* " != *" 2 "* ]] && exit\necho "scancel: {said}" >&2\nexit 1\n'
    )
    scancel.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scancel.parent}:{os.environ['PATH']}")
    for number in "123":
        runs.append(run := pretend_run(tmp_path / number, 0, n_tasks=1))
        run.record_submission({"submission": 1, "array_job": number, "cluster": "here"})
        jobs.append(queue.QueuedJob(number, "RUNNING", "None", "any", "/", f"{run.logs}/submission_file.sh"))
    monkeypatch.setattr(queue, "own_cluster", lambda: "here")
    monkeypatch.setattr(queue, "own_jobs", lambda and_of=(): jobs)
    told = [str(done) for _, done in live_tasks.cancel_all(runs)]
    assert all(words in line for words, line in zip(expected, told, strict=True)), told
    lines = calls.read_text().splitlines()
    assert (lines[0], len(lines)) == ("--quiet 1 2 3", n_calls)


@pytest.mark.parametrize(
    ("line", "name", "stops"),
    [
        ({"cluster": "here", "array_name": "train"}, "train", True),
        ({"cluster": "here", "array_name": "train"}, "precious", False),  # ids have begun again
        ({"cluster": "here"}, "slurmgpu", True),  # whose name is not known
        ({"cluster": "here"}, "any", False),
        ({"cluster": "here", "by_hand": False}, "slurmgpu:run", True),
        ({"cluster": "here", "by_hand": False}, "slurmgpu:other", False),
        ({"cluster": "here", "by_hand": False, "slurm": {"job_name": "mine"}}, "mine", True),
        ({"array_job": "6", "merge_job": "7", "merge_name": "join"}, "join", True),
        ({"array_job": "6", "merge_job": "7", "merge_name": "join"}, "precious", False),
        ({"array_job": "6", "merge_job": "7", "by_hand": False}, "slurmgpu-merge:run", True),
    ],
)
def test_a_job_that_has_the_same_id_and_is_not_the_runs_is_not_cancelled(cancelling, line, name, stops):
    job = queue.QueuedJob("7", "RUNNING", "None", name, "/home/ada", "train.sh x")
    assert cancelling(job, **line) == ((["7"], True) if stops else ([], False))


@pytest.mark.parametrize("state", ["queued", "ended"])
@pytest.mark.parametrize("n_jobs_here", [0, 1])
def test_jobs_on_another_cluster_are_cancelled_there(cancelling, state, n_jobs_here):
    same_id = [queue.QueuedJob("7", "RUNNING", "None", "train", "/home/ada", "train.sh x")] * n_jobs_here
    line = {"cluster": "there", "array_name": "train", "state": state}
    if state == "ended":
        assert cancelling(*same_id, **line) == ([], False)
        return
    with pytest.raises(SlurmGPUError, match="may be in the queue of the cluster there, which cannot be seen here"):
        cancelling(*same_id, **line)


@pytest.mark.parametrize(("comment", "stops"), [("", False), ("slurmgpu:{run}", True)])
def test_where_others_may_name_jobs_only_what_slurm_shows_to_be_the_runs_is_cancelled(
    cancelling, tmp_path, comment, stops
):
    job = queue.QueuedJob(
        "7", "RUNNING", "None", "precious", "/home/ada", "x", comment=comment.format(run=tmp_path / "run")
    )
    stopped, _ = cancelling(job, mode=0o664, cluster="here", array_name="precious")
    assert stopped == (["7"] if stops else [])


@pytest.mark.parametrize("is_link", [False, True])
def test_a_script_in_the_logs_shows_whose_a_job_is_unless_others_made_them_a_link(cancelling, tmp_path, is_link):
    """Who may write the run directory may let its logs be those of another run, whose jobs would be cancelled."""
    (tmp_path / "same").symlink_to(tmp_path)
    logs = tmp_path / "precious" / "logs"
    logs.mkdir(parents=True)
    folder = logs if is_link else tmp_path / "same" / "run" / "logs"
    job = queue.QueuedJob("7", "RUNNING", "None", "any", "/", f"{folder}/submission_file_7.sh")
    stopped, _ = cancelling(job, mode=0o664, logs=logs if is_link else None, cluster="here", array_name="any")
    assert stopped == ([] if is_link else ["7"])


def test_jobs_are_cancelled_by_their_ids_where_slurm_does_not_say_the_clusters_name(cancelling):
    job = queue.QueuedJob("7", "RUNNING", "None", "train", "/home/ada", "train.sh x")
    assert cancelling(job, here=None, cluster="there", array_name="train") == (["7"], True)


def test_a_submission_that_recorded_no_ids_is_cancelled_with_the_jobs_that_are_the_runs(tmp_path, monkeypatch):
    run = pretend_run(tmp_path / "run", 0, n_tasks=1)
    lost = {name: value for name, value in run.submissions()[0].items() if name not in JOB_KEYS}
    run.record_submission({**lost, "submission": 2, "state": "submitting"})
    job = queue.QueuedJob("7", "RUNNING", "None", "any", "/", f"{run.logs}/submission_file_7.sh")
    monkeypatch.setattr(queue, "own_jobs", lambda and_of=(): [job])
    monkeypatch.setattr(commands, "cancel", lambda *ids: None)
    assert live_tasks.cancel(run) == "Slurm jobs 7"
    assert [line.get("cancelled") for line in run.submissions()] == [None, True]


def test_a_submission_that_has_ended_on_another_cluster_hides_no_job_here_with_its_id(cancelling, tmp_path):
    job = queue.QueuedJob("7", "RUNNING", "None", "any", "/", "x", comment=f"slurmgpu:{tmp_path}/run")
    assert cancelling(job, cluster="there", state="ended") == (["7"], False)


@pytest.mark.parametrize(
    ("told", "state", "stops"),
    [
        ({"array_job": "7"}, "PENDING", True),
        ({"array_job": "7"}, "RUNNING", True),
        ({"array_job": "6", "merge_job": "7"}, "PENDING", True),
        ({"array_job": "6", "merge_job": "7"}, "REQUEUE_HOLD", True),
        ({"array_job": "6", "merge_job": "7"}, "RUNNING", False),  # it tells of the end
        ({"array_job": "6", "merge_job": "7", "merges_again": True}, "RUNNING", True),
    ],
)
def test_a_job_that_was_requeued_after_the_end_is_cancelled(cancelling, tmp_path, told, state, stops):
    script = str(tmp_path / "run" / "logs" / "submission_file_1.sh")
    job = queue.QueuedJob("7", state, "BeginTime", "slurmgpu:run", "/", script)
    assert cancelling(job, cluster="here", by_hand=False, state="ended", **told) == (["7"] if stops else [], False)


def test_a_hetjob_by_hand_is_cancelled_by_its_own_id(cancelling):
    parts = [queue.QueuedJob(f"7+{part}", "PENDING", "None", "any", "/", "x") for part in (0, 1)]
    assert cancelling(*parts, cluster="here", array_name="any") == (["7"], True)


NEWER_SQUEUE = r"""#!{python}
import os, subprocess, sys
done = subprocess.run([{squeue!r}, *sys.argv[1:]], stdout=subprocess.PIPE)
records = done.stdout.split(b"\x1e\n")
for number, record in enumerate(records):
    *fields, command = record.split(b"\x1f")
    records[number] = b"\x1f".join([*fields, command.split(b" ")[0]])
sys.stdout.buffer.write(b"\x1e\n".join(records))
sys.exit(done.returncode)
"""


@pytest.mark.slurm
def test_jobs_by_hand_are_known_where_squeue_shows_no_arguments(project, slurmgpu, sbatch, tmp_path, monkeypatch):
    """As in Slurm 24.11 and later, whichever squeue is here."""
    folder = project(24, resources={"device": "cpu"})
    tasks, _ = slurmgpu("plan", cwd=folder, expect=0).stdout.splitlines()
    newer = tmp_path / "newer" / "squeue"
    newer.parent.mkdir()
    newer.write_text(NEWER_SQUEUE.format(python=sys.executable, squeue=shutil.which("squeue")))
    newer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{newer.parent}:{os.environ['PATH']}")
    short = "J=$(sbatch --parsable --hold --array=0-1 array.sbatch run)"
    shutil.copy(SCRIPTS / "array.sbatch", folder)
    for line in (tasks.replace("--parsable", "--parsable --hold"), short):
        subprocess.run(["bash", "-ec", f"{line}\necho $J > array_job"], cwd=folder, check=True)
        array = (folder / "array_job").read_text().strip()
        wait_until(lambda: "run  queued" in slurmgpu("status", "run", cwd=folder, expect=0).stdout, "accounting")
        assert array in slurmgpu("resubmit", "run", cwd=folder, expect=2).stderr
        assert array in slurmgpu("cancel", "run", cwd=folder, expect=0).stdout
        wait_for_end(array)
        assert "run  planned" in slurmgpu("status", "run", cwd=folder, expect=0).stdout


@pytest.mark.nightly
@pytest.mark.slurm
def test_a_job_that_an_array_task_submits_is_itself_and_not_that_array(project, slurmgpu, sbatch):
    folder = project(24, resources={"device": "cpu"})
    slurmgpu("plan", cwd=folder, expect=0)
    inner = "sbatch --wait --job-name=slurmgpu --gpus-per-node=1 --output=/dev/null --wrap 'srun slurmgpu task run'"
    outer = sbatch(folder, "--array=0-1%1", "--output=/dev/null", "--wrap", f"{inner}; touch over$SLURM_ARRAY_TASK_ID")
    wait_for_end(outer)
    assert sorted(path.name for path in folder.glob("over*")) == ["over0", "over1"]  # none was cancelled
    assert len(published(folder)) == 3
    jobs = [record["job"] for record in records(folder)]
    assert outer not in jobs
    assert len(set(jobs)) == 2


SILENT_SQUEUE = """#!/bin/sh
while ! test -e {answers}; do sleep 0.1; done
exec {squeue} "$@"
"""


@pytest.mark.slurm
def test_no_task_of_the_scripts_waits_for_squeue_and_each_is_itself(project, slurmgpu, sbatch, tmp_path, monkeypatch):
    """Neither a task of an array, nor a job that an array's task submits, while slurmctld does not answer squeue."""
    folder, answers = project(80, held_from=16, resources={"device": "cpu"}), tmp_path / "answers"
    slurmgpu("plan", cwd=folder, expect=0)
    silent = tmp_path / "silent" / "squeue"
    silent.parent.mkdir()
    silent.write_text(SILENT_SQUEUE.format(answers=answers, squeue=shutil.which("squeue")))
    silent.chmod(0o755)
    script = SCRIPTS / "array.sbatch"
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{silent.parent}:{os.environ['PATH']}")
        array = sbatch(folder, "--array=0-1", script, "run")
        inner = f"env -u SLURM_CPUS_PER_TASK sbatch --parsable {script} run > inner"
        outer = sbatch(
            folder, "--array=0-1", "--output=/dev/null", "--wrap", f"test 0 = $SLURM_ARRAY_TASK_ID || {inner}"
        )
    wait_until(lambda: (folder / "inner").exists() and (folder / "inner").read_text(), "the inner job")
    inner = (folder / "inner").read_text().strip()
    wait_for_holders(folder, array, array, inner)
    answers.touch()
    assert {(record["job"], record["task"]) for record in records(folder)} == {(array, 0), (array, 1), (inner, 0)}
    assert outer not in {line["array_job"] for line in submissions(folder)}
    assert not any("squeue has not answered" in path.read_text() for path in folder.glob("slurmgpu-*.out"))
    let_go(folder)
    wait_for_end(array)
    wait_for_end(inner)
    assert len(published(folder)) == 10
