"""Whole runs on a real Slurm: everything that dies there, what the report calls it, and what resubmit computes."""

import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from slurmgpu import open as open_merged
from slurmgpu.executors import slurm_jobs
from slurmgpu.slurm import commands
from tests.local.test_command_runs import make as make_command
from tests.support.access_lists import let_all_write_below
from tests.support.nightly import by_night
from tests.support.runs import (
    check_ledger,
    check_rows,
    datasets,
    holders,
    kill_workers,
    let_go,
    make_project,
    published,
    queued_of,
    records,
    report,
    shard_times,
    start,
    submissions,
    wait_for_end,
    wait_until,
    wait_until_held,
    workers,
)

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("cluster")]

# Stand-in GPUs are allocated, and the CPU computes.
SUBMIT = ("submit", "--device", "cpu", "--array")
WAIT = (*SUBMIT, "--wait")


def test_four_tasks_by_the_scripts_of_the_dry_run_make_one_verified_file(project, slurmgpu):
    folder = project(80, held_from=0, slurm={"time": "00:05:00", "comment": "a, b"}, merge={"partition": "cpu"})
    dry = slurmgpu(*SUBMIT, "--gpus", "4", "--dry-run", cwd=folder, expect=0)
    assert not (folder / "run").exists()
    assert "#SBATCH --array=0-3%4" in dry.stdout
    assert "#SBATCH --time=00:05:00" in dry.stdout
    # Typed within another job, the command does not hand that job on.
    foreign = {"SLURM_JOB_ID": "99999", "SBATCH_TIMELIMIT": "none", "SLURM_CPUS_PER_TASK": "64", "SRUN_DEBUG": "7"}
    process = start(*WAIT, "--gpus", "4", cwd=folder, **foreign)
    wait_until_held(folder, 0, 4)
    let_go(folder)
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    texts = [path.read_text() for path in (folder / "run" / "logs").glob("*_submission.sh")]
    [written] = [text for text in texts if "--array" in text]
    shown = dry.stdout.partition("# ---- array.sbatch ----\n")[2].partition("\n# ---- merge.sbatch")[0]
    assert shown.strip() == written.strip()
    check_rows(folder, 80)
    outcome = report(folder)
    assert outcome["complete"]
    assert len(outcome["attempts"]) == 4
    assert all(len(attempt["gpus"]) == 1 for attempt in outcome["attempts"])
    assert "complete" in output
    files = [path for name in ("logs", "tasks", "telemetry") for path in (folder / "run" / name).iterdir()]
    assert len(files) <= 12 * 4


def test_a_killed_worker_and_a_killed_task_lose_nothing(project, slurmgpu):
    folder = project(160, held_from=24)
    process = start(*WAIT, "--gpus", "3", cwd=folder)
    wait_until_held(folder, 3, 3)
    victim = holders(folder)[0]  # before its next worker loads
    assert kill_workers(folder / "run") == 3
    os.kill(victim["pid"], signal.SIGKILL)
    let_go(folder)
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    check_rows(folder, 160)
    outcome = report(folder)
    assert outcome["worker_deaths"]["crash"] >= 2
    [dead] = [a for a in outcome["attempts"] if a["attempt"] == victim["attempt"]]
    assert dead["failure"] in ("crash", "lost")


@pytest.mark.nightly
def test_faults_of_items_cost_their_items_alone(project, slurmgpu):
    folder = project(80, settings={"faults": {"17": "segfault", "33": "hard_exit", "50": "exception"}})
    slurmgpu(*WAIT, "--gpus", "2", cwd=folder, expect=0)
    check_rows(folder, 80, errors={17, 33, 50})
    assert report(folder)["errors_by_class"] == {"crash": 2, "item_error": 1}
    # And the logs have the line behind each, while Submitit's times do not say their zone.
    [crash, exit_, error] = (
        slurmgpu("logs", "run", "--item", index, cwd=folder, expect=0, TZ="Asia/Tokyo").stdout for index in (17, 33, 50)
    )
    assert "Fatal Python error: Segmentation fault" in crash
    assert "crash: the worker died by SIGSEGV; item 17 of shard 2 was in flight" in crash
    assert "crash: the worker exited with code 3" in exit_
    assert "ValueError: cannot do item 50" in error
    name = next(attempt["attempt"] for attempt in report(folder)["attempts"] if attempt["n_shards"])
    said = slurmgpu("logs", "run", name, cwd=folder, expect=0, TZ="Asia/Tokyo").stdout
    order = [said.index(text) for text in ("Loading pickle", "this worker is process", "takes no more shards")]
    assert order == sorted(order)
    said = slurmgpu("logs", "run", "--merge", cwd=folder, expect=0).stdout
    assert "merged: complete, 80 of 80 rows, 3 of them failed" in said


def test_a_dead_node_is_replaced_by_the_others_and_excluded_from_then_on(project, slurmgpu, cluster):
    # Two tasks fill a node.
    asked = {"no-requeue": True, "cpus-per-task": 8}
    folder = project(80, held_from=32, settings={"item_s": 0.1}, slurm=asked)
    process = start(*WAIT, "--gpus", "4", cwd=folder)
    try:
        wait_until_held(folder, 4, 4)
        cluster.kill_node("gpu2")
        let_go(folder)
        output, _ = process.communicate(timeout=250)
    finally:
        cluster.start_node("gpu2")
    assert process.returncode == 0, output
    check_rows(folder, 80)
    outcome = report(folder)
    failures = {a["failure"] for a in outcome["attempts"] if a["node"] == "gpu2"}
    assert failures <= {"node_fail"}
    assert outcome["failures"]["node_fail"] >= 1
    assert check_ledger(outcome)["unit"] == "GPU-hours"
    last_words = {record["attempt"]: record for record in records(folder)}
    for attempt in outcome["attempts"]:
        if attempt["failure"] == "node_fail" and (last := last_words[attempt["attempt"]])["shard_started"]:
            # The shard in hand, and until Slurm took the node for dead.
            lost = attempt["seconds"] - (last["shard_started"] - last["started"])
            assert attempt["spent"]["lost"] == pytest.approx(lost, abs=0.01)
            assert attempt["spent"]["useful"] > 0 or not attempt["n_shards"]


@pytest.mark.usefixtures("memory_limits")
def test_host_memory_that_runs_out_is_named_and_raised_on_resubmission(project, slurmgpu):
    folder = project(80, settings={"faults": {"17": "memory"}}, slurm={"mem": "800M"})
    done = slurmgpu(*WAIT, "--gpus", "2", cwd=folder, expect=3)
    outcome = report(folder)
    assert outcome["failures"] == {"host_oom": 1}
    assert [hole["shard"] for hole in outcome["missing"]] == [2]
    assert "slurmgpu resubmit" in done.stdout
    kept = shard_times(folder)
    done = slurmgpu("resubmit", "run", "--wait", cwd=folder, expect=0)
    assert "mem is 1200M instead of 800M" in done.stderr
    check_rows(folder, 80)
    assert kept.items() <= shard_times(folder).items()


@pytest.mark.usefixtures("memory_limits")
def test_a_crash_is_not_blamed_on_a_process_that_the_kernel_killed_long_before(project, slurmgpu):
    faults = {"3": "hungry_child", "60": "segfault"}  # more than LATE_S later
    folder = project(64, settings={"faults": faults, "item_s": 0.2}, slurm={"mem": "800M"})
    slurmgpu(*WAIT, "--gpus", "1", cwd=folder, expect=0)
    [record] = records(folder)
    assert {death["class"] for death in record["deaths"]} == {"crash"}


def test_a_shard_that_outlasts_the_walltime_is_given_back_and_none_is_taken_that_would_not_fit(tmp_path, slurmgpu):
    # Two runs at once: Slurm ends the task of the one, and those of the other end themselves, 12 s after their start.
    minute = {"time": "00:01:00"}
    outlasting = make_project(tmp_path / "outlasting", 40, settings={"faults": {"9": "hang"}}, slurm=minute)
    tables = {"settings": {"item_s": 0.4}, "slurm": minute, "margin_s": 48.0, "auto_resubmit": 9}
    fitting = make_project(tmp_path / "fitting", 64, **tables)
    process = start(*WAIT, "--gpus", "1", cwd=outlasting)
    slurmgpu(*SUBMIT, "--gpus", "2", cwd=fitting, expect=0)
    wait_until(lambda: len(submissions(fitting)) > 1, "the automatic resubmission")
    wait_until(lambda: len(published(fitting)) == 8, "the last shard")
    wait_for_end(fitting)
    check_rows(fitting, 64)
    first = [r for r in records(fitting) if r["submission"] == 1]
    # On a busy machine Slurm's notice, half a minute before the end, may come while a task begins.
    ends = {"deadline": "too little of the walltime was left", None: "stopped by SIGUSR2; its shards were given back"}
    for r in first:
        log = (fitting / "run" / "logs" / f"{r['job']}_{r['task']}_0_log.err").read_text()
        assert r["failure"] == "timeout"
        assert log.splitlines()[-1].endswith(ends[r["reason"]])
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 3, output
    assert report(outlasting)["failures"] == {"timeout": 1}
    assert [hole["shard"] for hole in report(outlasting)["missing"]] == [1, 2, 3, 4]
    shown = slurmgpu("status", "run", cwd=outlasting, expect=0).stdout
    assert "timeout" in shown
    assert "Shard 1 did not fit in the walltime" in shown
    said = slurmgpu("logs", "run", "--class", "timeout", "-n", "1", cwd=outlasting, expect=0).stdout
    assert " WARNING slurmgpu.task.supervisor: timeout: stopped by SIGTERM" in said
    assert not any("Bypassing" in log.read_text() for log in (outlasting / "run" / "logs").glob("*_log.*"))


@pytest.mark.nightly
def test_items_that_outlast_the_walltime_go_on_from_their_progress_in_the_next_submissions(project, slurmgpu):
    # Of a minute, about ten seconds are left for two items of thirteen: a third task begins neither.
    tables = {"settings": {"n": 130, "step_s": 0.1}, "slurm": {"time": "00:01:00"}, "margin_s": 48.0}
    folder = project(2, "Long", batch_size=1, shard_items=1, auto_resubmit=9, **tables)
    slurmgpu(*SUBMIT, "--gpus", "2", cwd=folder, expect=0)
    wait_until(lambda: len(published(folder)) == 2, "both items")
    wait_for_end(folder)
    check_rows(folder, 2)
    for index in range(2):
        lines = (folder / "run" / "counts" / str(index)).read_text().splitlines()
        assert [int(line.split()[0]) for line in lines] == list(range(1, 131))
        assert len({line.split()[1] for line in lines}) > 1
    first = [r for r in records(folder) if r["submission"] == 1]
    assert {(r["failure"], r["reason"], r["n_errors"], len(r["deaths"])) for r in first} == {
        ("timeout", "deadline", 0, 0)
    }


@pytest.fixture
def grace(cluster):
    """Give jobs of QOS normal so many seconds to end once they are to be preempted, in this PreemptMode."""
    modify = ("sacctmgr", "-i", "modify", "qos", "normal", "set")
    yield lambda seconds, mode: cluster.run(*modify, f"GraceTime={seconds}", f"PreemptMode={mode}")
    cluster.run(*modify, "GraceTime=0", "PreemptMode=cluster")


@pytest.mark.parametrize(
    ("grace_s", "mode", "is_shared"),
    [(0, "cluster", False), (100, "cluster", True), by_night(100, "cluster", False), by_night(100, "cancel", False)],
)
def test_a_preempted_task_is_requeued_and_the_run_completes(project, cluster, grace, grace_s, mode, is_shared):
    grace(grace_s, mode)
    settings = {"item_s": 0.15, "load_s": 0.1}
    folder = project(56, held_from=24, settings=settings, slurm={"qos": "normal"})
    shared = ["--tasks-per-node", "2"] if is_shared else []
    process = start(*WAIT, "--gpus", "2", *shared, cwd=folder)
    wait_until_held(folder, 3, 2)
    urgent = ["--qos=high", "--nodes=2", "--exclusive", "--wrap", "true"]
    cluster.run("sbatch", "--parsable", "--output=/dev/null", *urgent)
    array = submissions(folder)[0]["array_job"]
    wait_until(lambda: [r["failure"] for r in records(folder)] == ["preempted"] * 2, "the preemption")
    # Slurm lets a requeued job wait for two minutes; that is not what is tested here.
    wait_until(lambda: any(job.reason == "BeginTime" for job in queued_of([array])), "the requeue")
    let_go(folder)
    cluster.run("scontrol", "update", f"JobId={array}", "StartTime=now")
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    check_rows(folder, 56)
    outcome = report(folder)
    assert outcome["failures"].get("preempted", 0) >= 1
    assert any(record["restart"] == 1 for record in records(folder))
    check_ledger(outcome)
    lost = {record["attempt"]: record["lost_s"] for record in records(folder)}
    first = next(a for a in outcome["attempts"] if a["failure"] == "preempted" and a["n_shards"])
    assert first["spent"]["lost"] == lost[first["attempt"]] > 0
    assert first["spent"]["useful"] >= 0.9 * 0.15 * first["n_items"]  # records have milliseconds
    assert sum(a["spent"]["loading"] > 0 for a in outcome["attempts"]) > 2  # also of the restart


@pytest.mark.nightly
def test_scancel_of_a_task_is_no_error_of_the_run(project, slurmgpu, cluster):
    folder = project(80, held_from=16)
    process = start(*WAIT, "--gpus", "2", cwd=folder)
    wait_until_held(folder, 2, 2)
    victim = holders(folder)[0]
    cluster.run("scancel", f"{victim['job']}_{victim['task']}")
    wait_until(lambda: len(holders(folder)) == 1, "the end of the task")
    let_go(folder)
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    check_rows(folder, 80)
    assert report(folder)["failures"] == {"cancelled": 1}


@pytest.mark.parametrize("accounting", ["answers", "is away"])
def test_an_array_that_the_user_cancelled_is_not_resubmitted_automatically(project, slurmgpu, cluster, accounting):
    folder = project(80, held_from=16, auto_resubmit=3)
    slurmgpu(*SUBMIT, "--gpus", "2", cwd=folder, expect=0)
    wait_until_held(folder, 2, 2)
    if accounting == "is away":
        cluster.break_accounting()
    try:
        cluster.run("scancel", submissions(folder)[0]["array_job"])
        wait_for_end(folder)
    finally:
        if accounting == "is away":
            cluster.mend_accounting()
    assert len(submissions(folder)) == 1
    assert set(report(folder)["failures"]) == {"cancelled"}


def test_a_cancelled_run_is_resumed_by_resubmit(project, slurmgpu):
    folder = project(80, held_from=16)
    slurmgpu(*SUBMIT, "--gpus", "2", cwd=folder, expect=0)
    wait_until_held(folder, 2, 2)
    assert "still running" in slurmgpu("resubmit", "run", cwd=folder, expect=2).stderr
    assert "already holds a run" in slurmgpu(*SUBMIT, "--gpus", "2", cwd=folder, expect=2).stderr
    slurmgpu("cancel", "run", cwd=folder, expect=0)
    ids = [submissions(folder)[0][key] for key in ("array_job", "merge_job")]
    wait_until(lambda: not queued_of(ids), "the end of the jobs")
    assert slurmgpu("report", "run", cwd=folder).returncode == 2  # its merge was cancelled, too
    slurmgpu("merge", "run", cwd=folder, expect=3)
    assert set(report(folder)["failures"]) == {"cancelled"}
    kept = shard_times(folder)
    let_go(folder)
    slurmgpu("resubmit", "run", "--gpus", "4", "--wait", cwd=folder, expect=0)
    check_rows(folder, 80)
    assert kept.items() <= shard_times(folder).items()


def test_a_full_disk_loses_nothing_that_was_published(project, slurmgpu, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=320k", "tmpfs", str(disk)], check=True)
    try:
        folder = project(480, run_dir=str(disk / "run"))
        (folder / "run").symlink_to(disk / "run")
        slurmgpu(*SUBMIT, "--gpus", "2", cwd=folder, expect=0)
        ids = [submissions(folder)[0][key] for key in ("array_job", "merge_job")]
        wait_until(lambda: not queued_of(ids), "the end of the jobs")
        n_before = len(published(folder))
        assert 0 < n_before < 60
        subprocess.run(["mount", "-o", "remount,size=20M", str(disk)], check=True)
        kept = shard_times(folder)
        slurmgpu("merge", "run", cwd=folder, expect=3)
        assert "disk_full" in report(folder)["failures"]
        slurmgpu("resubmit", "run", "--wait", cwd=folder, expect=0)
        check_rows(folder, 480)
        assert kept.items() <= shard_times(folder).items()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_an_input_that_vanished_is_named_and_the_run_resumed_when_it_is_back(project, slurmgpu, cluster):
    folder = project(40)
    slurmgpu(*SUBMIT, "--gpus", "1", "--slurm", "hold=true", cwd=folder, expect=0)
    (folder / "items.jsonl").rename(folder / "items.away")
    cluster.run("scontrol", "release", submissions(folder)[0]["array_job"])
    wait_for_end(folder)
    assert report(folder)["failures"] == {"input_error": 1}
    (folder / "items.away").rename(folder / "items.jsonl")
    slurmgpu("resubmit", "run", "--slurm", "hold=false", "--wait", cwd=folder, expect=0)
    check_rows(folder, 40)


def test_a_gpu_that_cuda_cannot_use_is_a_fault_before_anything_is_claimed(project, slurmgpu):
    folder = project(40)
    slurmgpu("submit", "--array", "--gpus", "1", "--wait", "--slurm", "nodelist=gpu1", cwd=folder, expect=3)
    outcome = report(folder)
    assert outcome["failures"] == {"gpu_fault": 1}
    assert "libcuda" in outcome["attempts"][0]["message"]
    assert published(folder) == []
    done = slurmgpu("resubmit", "run", "--device", "cpu", "--slurm", "nodelist=gpu2", "--wait", cwd=folder, expect=0)
    assert "Excluded nodes: gpu1" in done.stderr
    assert {r["node"] for r in records(folder) if r["submission"] == 2} == {"gpu2"}


def test_the_last_one_out_takes_pending_tasks_out_of_the_queue(project, slurmgpu, cluster):
    # One at a time: of two, the one that ends first makes way for others until the second has published its shard.
    folder = project(160)
    slurmgpu(*WAIT, "--gpus", "1", "--tasks", "20", cwd=folder, expect=0)
    assert len(records(folder)) == 1
    assert report(folder)["failures"] == {}


def test_an_array_larger_than_the_cluster_allows_is_cut_and_finishes_the_run(project, slurmgpu, cluster):
    folder = project(2000, shard_items=1, batch_size=1)
    done = slurmgpu(*SUBMIT, "--gpus", "4", "--tasks", "1500", "--dry-run", "--json", cwd=folder, expect=0)
    plan = json.loads(done.stdout)
    assert plan["submission"]["n_tasks"] == 1001
    assert "MaxArraySize" in plan["notes"][0]
    assert "--array=0-1000%4" in plan["scripts"]["array"]


def test_fewer_tasks_are_queued_where_the_account_allows_no_more(project, slurmgpu, cluster):
    folder = project(160)
    set_limit = ("sacctmgr", "--immediate", "modify", "user", "root", "where", "account=test", "set")
    cluster.run("sacctmgr", "--immediate", "add", "account", "course")
    cluster.run("sacctmgr", "--immediate", "add", "user", "root", "account=course", "MaxSubmitJobs=1")
    cluster.run(*set_limit, "MaxSubmitJobs=4")
    other = cluster.run("sbatch", "--parsable", "--begin=now+1hour", "--output=/dev/null", "--wrap", "true").strip()
    try:
        done = slurmgpu(*SUBMIT, "--gpus", "8", cwd=folder, expect=2)
        assert "Your other jobs in the queue count as well: wait until they end, or submit fewer tasks." in done.stderr
        assert not (folder / "run").exists()
        commands.cancel(other)
        done = slurmgpu(*WAIT, "--gpus", "8", cwd=folder, expect=0)
    finally:
        commands.cancel(other)
        cluster.run(*set_limit, "MaxSubmitJobs=-1")
        cluster.run("sacctmgr", "--immediate", "delete", "user", "root", "account=course")
        cluster.run("sacctmgr", "--immediate", "delete", "account", "course")
    assert "MaxSubmitJobs of root in account test (one is for the merge job) is 3" in done.stderr
    assert submissions(folder)[0]["n_tasks"] == 3
    check_rows(folder, 160)


def test_a_submission_that_died_before_it_wrote_its_job_ids_is_still_found(project, slurmgpu):
    folder = project(40, held_from=0)
    slurmgpu(*SUBMIT, "--gpus", "1", cwd=folder, expect=0)
    path = folder / "run" / "submissions.jsonl"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    assert "still running" in slurmgpu("resubmit", "run", cwd=folder, expect=2).stderr
    let_go(folder)
    wait_until(lambda: (folder / "run" / "report.json").exists(), "the merge")
    check_rows(folder, 40)


def test_gres_cores_and_setup_of_the_run_file_are_those_of_the_tasks(project, slurmgpu):
    # exclusive: the 16 cores of the node are the job's, and srun must not fill them with copies of the task.
    asked = {
        "gres": "gpu:a100:1",
        "cpus-per-task": 3,
        "setup": ["export SHEEP=wool"],
        "exclusive": True,
        "export": "NONE",
    }
    folder = project(16, held_from=0, slurm=asked)
    source = (folder / "workloads.py").read_text()
    (folder / "workloads.py").write_text(source.replace("text.upper()", "os.environ['SHEEP']"))
    submit = (*SUBMIT, "--gpus", "2", "--tasks-per-node", "1")
    shown = slurmgpu(*submit, "--dry-run", cwd=folder, expect=0).stdout
    assert "gpus-per-node" not in shown  # they are not asked for twice
    assert "#SBATCH --cpus-per-task=3" in shown
    assert "--cpus-per-task=3 " in shown.partition("srun")[2]
    slurmgpu(*submit, cwd=folder, expect=0)
    wait_until_held(folder, 0, 2)
    let_go(folder)
    wait_for_end(folder)
    assert report(folder)["complete"]
    [line] = submissions(folder)
    logs = {path.name for path in (folder / "run" / "logs").glob(f"{line['array_job']}_*_log.err")}
    assert logs == {f"{line['array_job']}_{task}_0_log.err" for task in range(2)}
    assert all(len(record["gpus"]) == 1 for record in records(folder))
    with open_merged(folder / "run" / "merged.h5") as merged:
        assert set(merged["shout"][:]) == {"wool"}


def test_on_whole_nodes_a_job_has_a_task_for_each_gpu(project, slurmgpu, cluster):
    folder = project(160, held_from=16, slurm={"exclusive": True, "mem": "500M", "cpus_per_task": 2})
    submit = (*SUBMIT, "--gpus", "8")
    shown = slurmgpu(*submit, "--dry-run", cwd=folder, expect=0).stdout
    assert "8 of 1 GPU, 4 on each node, executor slurm" in shown
    assert {"#SBATCH --gpus-per-node=4", "#SBATCH --mem=2000M", "#SBATCH --array=0-1%2"} <= set(shown.splitlines())
    slurmgpu(*submit, cwd=folder, expect=0)
    wait_until_held(folder, 2, 8)
    assert sorted(Counter(record["node"] for record in records(folder)).values()) == [4, 4]
    assert sorted(gpu for record in records(folder) for gpu in record["gpus"]) == sorted("01230123")
    assert {record["memory_mb"] for record in records(folder)} == {500}
    variables = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid, _ in workers(folder / "run")]
    assert len(variables) == 8  # and none is a rank of a program with four
    assert all({b"SLURM_PROCID=0", b"SLURM_LOCALID=0", b"SLURM_NTASKS=1"} <= set(each) for each in variables)
    status = json.loads(slurmgpu("status", "run", "--json", cwd=folder, expect=0).stdout)
    assert (status["pace"]["n_living"], {job["n_tasks"] for job in status["queue"]}) == (8, {0, 4})
    victim = holders(folder)[0]
    os.kill(victim["pid"], signal.SIGKILL)  # ends neither the other tasks of its job nor the run
    let_go(folder)
    wait_for_end(folder)
    check_rows(folder, 160)
    outcome = report(folder)
    assert outcome["complete"]
    [dead] = [attempt for attempt in outcome["attempts"] if attempt["failure"]]
    assert (dead["attempt"], len(outcome["attempts"])) == (victim["attempt"], 8)
    assert {attempt["slurm_state"] for attempt in outcome["attempts"]} == {"COMPLETED", "FAILED"}
    check_ledger(outcome)
    [line] = submissions(folder)
    assert (line["n_tasks"], line["tasks_per_node"], line["slurm"]["mem"]) == (8, 4, "500M")
    for record in records(folder):
        said = slurmgpu("logs", "run", record["attempt"], cwd=folder, expect=0).stdout
        assert f"attempt {record['attempt']} of" in said


def test_tasks_with_shards_share_the_gpus_of_a_node(project, slurmgpu, cluster):
    folder = project(128, held_from=0, slurm={"gres": "shard:1", "nodelist": "gpu1"})
    refused = slurmgpu(*SUBMIT[:-1], "--gpus", "2", cwd=folder, expect=2).stderr
    assert 'gres = "shard:1" gives each task a part of one GPU, but a task of this run asks for 2 GPUs.' in refused
    slurmgpu(*SUBMIT, "--gpus", "8", cwd=folder, expect=0)
    wait_until_held(folder, 0, 8)
    let_go(folder)
    wait_until(lambda: (folder / "run" / "report.json").exists(), "the merge")
    check_rows(folder, 128)
    held = Counter((record["node"], *record["gpus"]) for record in records(folder))
    assert held == {("gpu1", str(gpu)): 2 for gpu in range(4)}


def submit_two(folder, slurmgpu):
    """Submit a run, and a second one, of its rows, that waits for it."""
    text = (folder / "slurmgpu.toml").read_text().replace("items.jsonl", "run/merged.h5").replace('"run"', '"second"')
    (folder / "second.toml").write_text(text.replace("workloads.py:Rows", "second.py:Second").split("[settings]")[0])
    (folder / "second.py").write_text(
        "from slurmgpu import Text\n\n\nclass Second:\n    columns = {'text': Text()}\n    batch_size = 4\n\n"
        "    def load(self, task):\n        pass\n\n"
        "    def __call__(self, items):\n        return [{'text': item.data['shout']} for item in items]\n"
    )
    slurmgpu(*SUBMIT, "--gpus", "1", cwd=folder, expect=0)
    slurmgpu("submit", "second.toml", *SUBMIT[1:], "--gpus", "1", "--after", "run", cwd=folder, expect=0)


def check_second(folder, slurmgpu):
    wait_until(lambda: (folder / "second" / "merged.h5").exists(), "the second run")
    slurmgpu("export", "second", "-o", "rows.jsonl", cwd=folder, expect=0)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == [f"ITEM {i} OF MANY" for i in range(40)]


def test_a_run_waits_for_another_runs_merge_also_across_its_resubmissions(project, slurmgpu, cluster):
    folder = project(40, held_from=16, auto_resubmit=9)
    submit_two(folder, slurmgpu)
    wait_until_held(folder, 2)
    job = submissions(folder)[0]["array_job"]
    cluster.run("scancel", "--signal=USR2", job)
    log = folder / "run" / "logs" / f"{job}_0_log.err"
    wait_until(lambda: "takes no more shards" in log.read_text(), "the task to hear of its preemption")
    let_go(folder)
    check_second(folder, slurmgpu)
    assert len(submissions(folder)) > 1
    check_rows(folder, 40)


@pytest.mark.nightly
def test_a_run_whose_wait_was_in_vain_waits_again_when_it_is_resubmitted(project, slurmgpu, cluster):
    folder = project(40, held_from=16)
    submit_two(folder, slurmgpu)
    wait_until_held(folder, 2)
    slurmgpu("cancel", "run", cwd=folder, expect=0)
    wait_until(lambda: not commands.table("|", 1, "squeue", "--noheader", "--format=%i"), "the end of all jobs")
    assert "the array waited for job" in slurmgpu("status", "second", cwd=folder, expect=0).stderr
    said = slurmgpu("resubmit", "second", cwd=folder, expect=2).stderr
    assert "run is incomplete, and Slurm has no job that will complete it. Type `slurmgpu resubmit" in said
    slurmgpu("resubmit", "run", cwd=folder, expect=0)
    slurmgpu("resubmit", "second", cwd=folder, expect=0)
    let_go(folder)
    check_second(folder, slurmgpu)
    assert "failures" not in slurmgpu("status", "second", cwd=folder, expect=0).stdout


def test_a_task_that_lost_the_file_system_is_known_by_its_exit_code(cluster):
    job = cluster.run("sbatch", "--parsable", "--array=0", "--output=/dev/null", "--wrap", "exit 74").strip()
    wait_until(lambda: [each for each in commands.accounting([job], {}).get(f"{job}_0", ()) if each.ended], "its end")
    assert [each.failure for each in commands.accounting([job], {})[f"{job}_0"]] == ["file_system"]


def test_without_accounting_nothing_is_lost_but_detail(project, slurmgpu, cluster):
    folder = project(80, settings={"item_s": 0.02})
    cluster.break_accounting()
    try:
        slurmgpu(*WAIT, "--gpus", "2", cwd=folder, expect=0)
        assert report(folder)["accounting"] is False
    finally:
        cluster.mend_accounting()
    check_rows(folder, 80)


def test_options_that_slurm_refuses_leave_nothing_behind(project, slurmgpu, cluster):
    folder = project(40, slurm={"partition": "nowhere"})
    done = slurmgpu(*SUBMIT, "--gpus", "1", cwd=folder, expect=2)
    assert "invalid partition" in done.stderr.lower()
    assert not (folder / "run").exists()


def test_a_merge_job_that_slurm_refuses_takes_the_array_along(project, slurmgpu, cluster):
    folder = project(40, merge={"partition": "nowhere"})
    done = slurmgpu(*SUBMIT, "--gpus", "1", cwd=folder, expect=2)
    refused, remedy = "Slurm refuses the merge job: .*", r"`sinfo -s` lists the partitions\. Correct \[merge\], which"
    said = rf"{refused} The array job (\d+) was cancelled\. {remedy}"
    [array] = re.findall(said, done.stderr)
    assert not (folder / "run").exists()
    wait_until(lambda: not queued_of([array]), "the end of the array")


def lose_answers(folder, monkeypatch):
    """Put an sbatch in front of Slurm's that queues an array, and says what Slurm's does if it gets no answer."""
    sbatch = shutil.which("sbatch")
    folder.mkdir()
    (folder / "sbatch").write_text(
        f'#!/bin/bash\ngrep -qs -- --array= "${{@: -1}}" || exec {sbatch} "$@"\n{sbatch} "$@" >/dev/null\n'
        "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2\nexit 1\n"
    )
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_a_job_that_sbatch_may_have_queued_is_told_of_and_taken_out_of_the_queue(
    project, slurmgpu, cluster, tmp_path, monkeypatch
):
    folder = project(16)
    with monkeypatch.context() as silence:
        lose_answers(tmp_path / "silent", silence)
        done = slurmgpu(*SUBMIT, "--gpus", "2", "--slurm", "hold=true", cwd=folder, expect=2)
    assert "Slurm did not answer sbatch: error: Batch job submission failed: Socket timed out" in done.stderr
    assert f"`slurmgpu cancel {folder / 'run'}` removes such a job" in done.stderr
    assert "still running" in slurmgpu("resubmit", "run", cwd=folder, expect=2).stderr
    slurmgpu("cancel", "run", cwd=folder, expect=0)
    slurmgpu("resubmit", "run", "--slurm", "hold=false", "--wait", cwd=folder, expect=0)
    check_rows(folder, 16)


def test_a_run_goes_on_when_the_login_session_ends(project):
    folder = project(80, held_from=8)
    process = start(*WAIT, "--gpus", "2", cwd=folder)
    wait_until_held(folder, 1, 2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    let_go(folder)
    wait_until(lambda: (folder / "run" / "report.json").exists(), "the merge job")
    check_rows(folder, 80)


@pytest.mark.nightly
@pytest.mark.model
def test_the_embed_example_runs_on_the_cluster_as_it_does_here(slurmgpu, tmp_path):
    example = Path(__file__).parents[2] / "docs" / "examples" / "embed"
    texts = (example / "glosses.jsonl").read_text().splitlines(keepends=True)[:256]
    (tmp_path / "glosses.jsonl").write_text("".join(texts))
    text = (example / "slurmgpu.toml").read_text().replace("shard_items = 320", "shard_items = 64")
    (tmp_path / "slurmgpu.toml").write_text(text)
    slurmgpu(*WAIT, "--gpus", "2", "--run-dir", "there", cwd=tmp_path, expect=0, OMP_NUM_THREADS="1")
    slurmgpu(
        "submit", "--executor", "local", "--gpus", "0", "--run-dir", "here", cwd=tmp_path, expect=0, OMP_NUM_THREADS="1"
    )
    with open_merged(tmp_path / "there" / "merged.h5") as there, open_merged(tmp_path / "here" / "merged.h5") as here:
        assert there["embedding"][:].shape == (256, 384)
        assert (there["embedding"][:] == here["embedding"][:]).all()


def test_the_notice_of_the_walltimes_end_kills_no_task_that_has_just_started(tmp_path):
    # As Submitit does it, whose `_submit` this stands for; python itself starts with the signal ignored.
    module = tmp_path / "sent.py"
    module.write_text("import os, signal; os.kill(os.getpid(), signal.SIGUSR2); print('lives')")
    command = f"{slurm_jobs.PYTHON} -u -m sent"
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert (done.returncode, done.stdout) == (0, "lives\n")


@pytest.mark.nightly
@pytest.mark.parametrize(("n_items", "n_kills"), [(480, 12), (960, 30)])
def test_chaos_changes_no_byte(project, slurmgpu, cluster, n_items, n_kills):
    """Workers and tasks are killed at random, at least so many times in one run."""
    undisturbed = project(n_items)
    slurmgpu("submit", "--executor", "local", "--gpus", "0", cwd=undisturbed, expect=0)
    before = datasets(undisturbed)
    (undisturbed / "run").rename(undisturbed / "undisturbed")
    folder = project(n_items, settings={"item_s": 0.1}, lease_s=2.0)
    slurmgpu(*SUBMIT, "--gpus", "6", cwd=folder, expect=0)
    dice = random.Random(20)
    killed_at: dict[str, int] = {}
    kills = 0
    while len(published(folder)) < n_items // 8:
        n_before = len(published(folder))
        wait_until(
            lambda n=n_before: len(published(folder)) > n or not queued_of([submissions(folder)[-1]["array_job"]]),
            "progress",
        )
        # The one that was left alone for longest: killed again and again, an item would be blamed for it.
        alive = [record for record in records(folder) if record["state"] == "running"] if kills < n_kills + 10 else []
        alive.sort(key=lambda record: killed_at.get(record["attempt"], 0))
        killed = 0
        while alive and not killed:
            record = alive.pop(0)
            killed = _kill_something(dice, record)
            killed_at[record["attempt"]] = kills = kills + killed
        ids = [submissions(folder)[-1][key] for key in ("array_job", "merge_job")]
        if not killed and not queued_of(ids):
            slurmgpu("resubmit", "run", "--gpus", "6", cwd=folder, expect=0)
    assert kills >= n_kills
    wait_for_end(folder)
    assert datasets(folder) == before
    check_rows(folder, n_items)


def _kill_something(dice, record):
    """SIGKILL a task, one time in four, or its worker; how many died."""
    try:
        if dice.random() < 0.25:
            os.kill(record["pid"], signal.SIGKILL)
            return 1
        children = subprocess.run(["pgrep", "-P", str(record["pid"])], capture_output=True, text=True).stdout.split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        return len(children)
    except ProcessLookupError:
        return 0


def test_types_of_gpus_nodes_and_setup_reach_the_script(project, slurmgpu, cluster):
    options = {"gpus": 4, "nodes_per_task": 2, "processes": "per-gpu", "gpu_type": "a100"}
    folder = project(8, resources=options, slurm={"setup": ["export SHEEP=wool", "module() { true; }"]})
    shown = slurmgpu("submit", "--dry-run", cwd=folder, expect=0).stdout
    array = shown.partition("# ---- array.sbatch ----")[2].partition("# ---- merge.sbatch")[0]
    assert "#SBATCH --gpus-per-node=a100:2" in array
    assert "#SBATCH --nodes=2" in array
    assert array.index("export SHEEP=wool") < array.index("srun")


def test_what_the_cluster_lacks_is_refused_and_nothing_stays(project, slurmgpu):
    folder = project(160)
    done = slurmgpu(*SUBMIT, "--gpus", "1", "--gpu-type", "h900", cwd=folder, expect=2)
    assert "Slurm refuses the array job" in done.stderr
    assert not (folder / "run").exists()
    done = slurmgpu(*SUBMIT, "--gpus", "4", "--tasks-per-node", "4", "--slurm", "cpus_per_task=5", cwd=folder, expect=2)
    assert "is not available. 4 tasks share a job: --tasks-per-node says how many." in done.stderr


ODD = "one\ntwo\x1e\nthree\x1ffour\x85five\u2028six"


def test_jobs_with_any_characters_in_their_arguments_are_told_apart(project, slurmgpu, cluster, tmp_path):
    script = tmp_path / "plain.sh"
    script.write_text("#!/bin/bash\n")
    command = ["sbatch", "--parsable", "--begin=now+1hour", "--job-name=slurmgpu", str(script)]
    odd = [subprocess.check_output([*command, text], text=True).strip() for text in (ODD, b"caf\xe9", "one\ntwo")]
    folder = project(8)
    try:
        assert {job.job_id: job.state for job in queued_of(odd)} == dict.fromkeys(odd, "PENDING")
        slurmgpu(*WAIT, "--gpus", "1", cwd=folder, expect=0)
        assert "complete" in slurmgpu("status", "run", cwd=folder, expect=0).stdout
    finally:
        commands.cancel(*odd)
    check_rows(folder, 8)


def test_a_refusal_names_the_nodes_that_failures_have_excluded(project, slurmgpu):
    folder = project(8, workload="Unloadable")
    slurmgpu(*WAIT, "--gpus", "1", cwd=folder, expect=3)
    last = submissions(folder)[-1]["submission"]
    with open(folder / "run" / "submissions.jsonl", "a") as file:
        file.write(json.dumps({"submission": last, "exclude": ["gpu1", "gpu2"]}) + "\n")
    done = slurmgpu("resubmit", "run", cwd=folder, expect=2)
    assert "not available. gpu1, gpu2 are excluded, because tasks failed there; `--slurm exclude=` " in done.stderr
    done = slurmgpu("resubmit", "run", "--slurm", "exclude=", "--wait", cwd=folder)
    assert "refuses" not in done.stderr
    assert done.returncode == 3
    assert submissions(folder)[-1]["exclude"] == []


@pytest.mark.parametrize("has_access_lists", [by_night(False), True])
def test_only_the_owner_reads_what_jobs_are_started_with(project, slurmgpu, has_access_lists):
    token = "a1b2c3d4e5"  # which nothing tells by its looks
    umask = os.umask(0o022)
    os.umask(umask)
    folder = project(40, slurm={"setup": [f"export KEY={token}"]}, on_end=f"test {token} && touch told")
    if has_access_lists:
        let_all_write_below(folder)
    slurmgpu(*WAIT, "--gpus", "2", cwd=folder, expect=0)
    check_rows(folder, 40)
    assert (folder / "told").exists()
    seen = [path for path in (folder / "run").rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    assert {path.name.partition("_")[2] or path.name for path in seen if not path.is_symlink()} == {
        "private.json",
        "submission.sh",
    }
    seen += (folder / "run" / "logs").glob("*_submitted.pkl")
    assert {stat.S_IMODE(path.stat().st_mode) for path in seen} == {0o600}
    others = 0o660 if has_access_lists else 0o666 & ~umask
    assert stat.S_IMODE((folder / "run" / "shards" / "00000.h5").stat().st_mode) == others
    # What is resubmitted has it, too.
    (folder / "told").unlink()
    (folder / "run" / "shards" / "00000.h5").unlink()
    slurmgpu("resubmit", "run", cwd=folder, expect=0)
    wait_for_end(folder)
    assert (folder / "told").exists()
    scripts = (folder / "run" / "logs").glob("*_submission.sh")
    assert sum(token in script.read_text() for script in scripts) == 2  # the arrays, and not the merges


@pytest.mark.nightly
def test_a_command_loses_nothing_by_kills(tmp_path, slurmgpu):
    # Each task has an item that waits: one without work would have ended before the kill.
    texts = ["held", *(f"item {i}" for i in range(1, 40)), "deadly", "held"]
    folder = make_command(tmp_path / "project", "one.py", texts=texts, executor="slurm")
    (folder / "held").touch()
    process = start(*WAIT, "--gpus", "2", cwd=folder)
    wait_until_held(folder, 4, 2)
    victim = holders(folder)[0]  # before its next worker loads
    assert kill_workers(folder / "run")
    os.kill(victim["pid"], signal.SIGKILL)
    let_go(folder)
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    assert report(folder)["errors_by_class"] == {"crash": 1}
    with open_merged(folder / "run" / "merged.h5") as merged:
        assert merged["shout"][:40] == [text.upper() for text in texts[:40]]
        assert (merged["shout"][41], list(merged.errors)) == ("HELD", [40])


@pytest.mark.nightly
def test_a_sweep_over_inputs_has_an_array_and_a_merge_for_each(project, slurmgpu):
    folder = project(8, sweep={"input": ["items.jsonl", "others.jsonl"]})
    (folder / "others.jsonl").write_text('{"text": "item 0 of many"}\n')
    done = slurmgpu(*WAIT, "--gpus", "1", cwd=folder, expect=0)
    assert done.stderr.count("submitted: array job") == 2
    assert done.stderr.index("others: input = ") < done.stderr.index("submitted: array job")
    runs = json.loads(slurmgpu("list", "run", "--json", cwd=folder, expect=0).stdout)["runs"]
    assert {(row["run"], row["state"], row["n_items"]) for row in runs} == {
        ("items", "complete", 8),
        ("others", "complete", 1),
    }
