"""Tasks of several nodes on a real Slurm: the same rows, and whatever dies on any of them is dealt with on all."""

import json
import os
import signal
from pathlib import Path

import pytest

from slurmgpu.executors import queue
from tests.runs import check_rows, datasets, published, records, report, start, wait_until, workers

pytest.importorskip("torch")
pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("cluster")]

# Two nodes with two stand-in GPUs each; the CPU computes.
SUBMIT = ("submit", "--device", "cpu", "--gpus", "4", "--wait")
RESOURCES = {"processes": "per-gpu", "nodes_per_task": 2}


def living(folder):
    return workers(folder, "slurmgpu.groups") + workers(folder)


def on_second_node(folder):
    """The launcher of the group's processes there; None while there is none."""
    return next((pid for pid, line in workers(folder, "slurmgpu.groups") if "--node-rank 1" in line), None)


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children(pid):
    return [worker for worker, _ in workers("slurmgpu.worker") if parent(worker) == pid]


def wait_for_shards(folder, n_shards=1):
    wait_until(lambda: (folder / "run" / "shards").exists() and len(published(folder)) >= n_shards, "the first shards")


def test_two_nodes_compute_what_one_process_does(project, slurmgpu):
    folder = project(40, "Ranks", settings={"faults": {"17": "exception"}})
    slurmgpu("submit", "--executor", "local", "--device", "cpu", cwd=folder, expect=0)
    alone = datasets(folder)
    (folder / "run").rename(folder / "alone")
    folder = project(40, "Ranks", settings={"faults": {"17": "exception"}}, resources=RESOURCES)
    slurmgpu(*SUBMIT, cwd=folder, expect=0)
    check_rows(folder, 40, errors={17})
    assert datasets(folder) == alone
    [record] = records(folder)
    assert record["n_nodes"] == 2
    assert {path.name for path in (folder / "run" / "logs").glob("*.node*")} == {f"{record['attempt']}.node1.log"}
    assert not list((folder / "run" / "tasks").glob(".*"))  # the secret is gone
    samples = (folder / "run" / "telemetry" / f"{record['attempt']}.node1.jsonl").read_text().splitlines()
    assert any(json.loads(line).get("host") for line in samples[1:])


def test_a_rank_that_dies_on_the_second_node_is_started_again_and_a_task_that_dies_there_is_a_node_failure(project):
    folder = project(200, "Ranks", settings={"item_s": 0.05}, resources=RESOURCES)
    process = start(*SUBMIT, cwd=folder)
    wait_for_shards(folder)
    launcher = on_second_node(folder)
    os.kill(children(launcher)[0], signal.SIGKILL)
    wait_until(lambda: on_second_node(folder) not in (launcher, None), "a new group")
    wait_for_shards(folder, len(published(folder)) + 1)
    os.kill(parent(on_second_node(folder)), signal.SIGKILL)
    process.communicate(timeout=100)
    assert process.returncode == 3
    [record] = records(folder)
    assert [death["message"] for death in record["deaths"]] == ["the worker died by SIGKILL"]
    assert (record["failure"], record["bad_node"]) == ("node_fail", "gpu2")
    assert "gpu2: its process died" in record["message"]
    assert not living(folder)
    claims = [path.name for path in (folder / "run" / "claims").iterdir() if path.name.isdecimal()]
    assert {f"{name}.h5" for name in claims} <= set(published(folder))  # the others were given back


def test_a_requeued_task_of_two_nodes_goes_on_and_a_cancelled_one_leaves_nothing(project, slurmgpu, cluster):
    folder = project(400, "Ranks", settings={"item_s": 0.05}, resources=RESOURCES, slurm={"requeue": True})
    process = start(*SUBMIT, cwd=folder)
    wait_for_shards(folder)
    job = records(folder)[0]["job"]
    cluster.run("scontrol", "requeue", job)
    wait_until(lambda: records(folder)[0]["state"] == "ended", "the end of the first attempt")
    assert records(folder)[0]["failure"] == "preempted"
    # Slurm lets a requeued job wait for two minutes; that is not what is tested here.
    wait_until(lambda: any(job.reason == "BeginTime" for job in queue.find_jobs([job])), "the requeue")
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    n_before = len(published(folder))
    wait_for_shards(folder, n_before + 1)
    assert len(living(folder)) == 6
    cluster.run("scancel", job)
    process.communicate(timeout=100)
    assert process.returncode == 3
    assert not living(folder)
    assert [record["deaths"] for record in records(folder)] == [[], []]
    assert report(folder)["failures"].keys() == {"preempted", "cancelled"}
