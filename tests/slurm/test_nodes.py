"""Tasks of several nodes on a real Slurm: the same rows, and whatever dies on any of them is dealt with on all."""

import json
import os
import signal

import pytest

from slurmgpu.util.pids import parent_of
from tests.support.held_ranks import hold
from tests.support.runs import (
    check_rows,
    datasets,
    published,
    queued_of,
    records,
    report,
    start,
    wait_until,
    wait_until_held,
    workers,
)

pytest.importorskip("torch")
pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("cluster")]

# Two nodes with two stand-in GPUs each; the CPU computes.
SUBMIT = ("submit", "--device", "cpu", "--gpus", "4", "--wait")
RESOURCES = {"processes": "per-gpu", "nodes_per_task": 2}


def living(folder):
    return workers(folder, "slurmgpu.worker.group_launcher") + workers(folder)


def on_second_node(folder):
    """The launcher of the group's processes there; None while there is none."""
    found = [pid for pid, line in workers(folder, "slurmgpu.worker.group_launcher") if "--node-rank 1" in line]
    # One that is about to become a rank is called as its launcher for a moment.
    return next((pid for pid in found if parent_of(pid) not in found), None)


def children(pid):
    return [worker for worker, _ in workers("slurmgpu.worker.main") if parent_of(worker) == pid]


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
    folder = hold(project, 40, {8: "first", 24: "second"}, resources=RESOURCES)
    process = start(*SUBMIT, cwd=folder)
    wait_until_held(folder, 1)
    launcher = on_second_node(folder)
    os.kill(children(launcher)[0], signal.SIGKILL)
    wait_until(lambda: on_second_node(folder) not in (launcher, None), "a new group")
    (folder / "first").unlink()
    wait_until_held(folder, 3)
    os.kill(parent_of(on_second_node(folder)), signal.SIGKILL)
    process.communicate(timeout=250)
    assert process.returncode == 3
    [record] = records(folder)
    assert [death["message"] for death in record["deaths"]] == ["the worker died by SIGKILL"]
    assert (record["failure"], record["bad_node"]) == ("node_fail", "gpu2")
    assert "gpu2: its process died" in record["message"]
    wait_until(lambda: not living(folder), "the end of all processes")
    claims = [path.name for path in (folder / "run" / "claims").iterdir() if path.name.isdecimal()]
    assert {f"{name}.h5" for name in claims} <= set(published(folder))  # the others were given back


@pytest.mark.nightly
def test_a_requeued_task_of_two_nodes_goes_on_and_a_cancelled_one_leaves_nothing(project, slurmgpu, cluster):
    folder = hold(project, 40, {8: "first", 24: "second"}, resources=RESOURCES, slurm={"requeue": True})
    process = start(*SUBMIT, cwd=folder)
    wait_until_held(folder, 1)
    job = records(folder)[0]["job"]
    cluster.run("scontrol", "requeue", job)
    wait_until(lambda: records(folder)[0]["state"] == "ended", "the end of the first attempt")
    assert records(folder)[0]["failure"] == "preempted"
    # Slurm lets a requeued job wait for two minutes; that is not what is tested here.
    wait_until(lambda: any(job.reason == "BeginTime" for job in queued_of([job])), "the requeue")
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    (folder / "first").unlink()
    wait_until_held(folder, 3)
    assert len(living(folder)) == 6
    cluster.run("scancel", job)
    process.communicate(timeout=250)
    assert process.returncode == 3
    wait_until(lambda: not living(folder), "the end of all processes")
    assert [record["deaths"] for record in records(folder)] == [[], []]
    assert report(folder)["failures"].keys() == {"preempted", "cancelled"}
