"""Trainings on a real Slurm: over tasks and nodes, preempted, killed, out of time, and on other numbers of GPUs."""

import json
import re
import shutil
from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import pytest

from slurmgpu import open as open_merged
from slurmgpu.workloads.train.rows import COLUMNS, MEASURED
from tests.support.runs import queued_of, records, report, start, submissions, wait_for_end, wait_until

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("cluster")]

# Stand-in GPUs are allocated, and the CPU computes: DDP by gloo.
SUBMIT = ("submit", "--device", "cpu")
HERE = (*SUBMIT, "--executor", "local")
SWEEP = {"lr": [0.01, 0.02, 0.05], "width": [4, 8]}
FIRST = {"lr": [0.01], "width": [4]}
N_SAMPLES, STEP_SIZE, EPOCHS = 96, 12, 8
N_STEPS = EPOCHS * N_SAMPLES // STEP_SIZE
EQUAL = sorted(COLUMNS.keys() - {*MEASURED})

RUN_FILE = """
run_dir = "run"
lease_s = 15.0
margin_s = {margin_s}
auto_resubmit = {auto_resubmit}
[workload]
use = "train"
[settings]
training = "training_projects.py:Marked"
epochs = {epochs}
global_batch_size = {step_size}
batch_size = 6
checkpoint_s = 0.5
threads = 1
seed = 3
[settings.arguments]
dull = {dull}
[sweep]
lr = {lr}
width = {width}
[slurm]
requeue = true
time = "{time}"
mem = "5G"
"""


def make(folder, sweep, *, slow_s=0.0, **given):
    """A folder with a sweep to train; while there is the file `slow`, each batch takes `slow_s` more."""
    folder.mkdir()
    values = {"margin_s": 1.0, "auto_resubmit": 0, "dull": "false", "time": "00:10:00", **given, **sweep}
    (folder / "slurmgpu.toml").write_text(RUN_FILE.format(epochs=EPOCHS, step_size=STEP_SIZE, **values))
    shutil.copy(Path(__file__).parents[1] / "support" / "training_projects.py", folder)
    if slow_s:
        (folder / "slow").write_text(str(slow_s))
    return folder


@pytest.fixture
def train(tmp_path):
    """Makes a folder with a sweep to train: `train(FIRST)`."""
    return lambda sweep, **given: make(tmp_path / "project", sweep, **given)


@pytest.fixture(scope="module")
def by_two(tmp_path_factory, slurmgpu):
    """The whole sweep, left alone, by two tasks of two processes each on this machine."""
    folder = make(tmp_path_factory.mktemp("alone") / "by-two", SWEEP)
    slurmgpu(*HERE, "--gpus", "4", "--gpus-per-task", "2", "--array", cwd=folder, expect=0)
    return folder


def rows(folder):
    """What each configuration came to, but for what is measured; and its last weights."""
    with open_merged(folder / "run" / "merged.h5") as merged:
        assert not merged.errors
        n = len(merged.index[:])
        found = [{name: plain(merged[name][index]) for name in EQUAL} for index in range(n)]
        assert [row["steps"] for row in found] == [N_STEPS] * n
    weights = [
        {name: torch.load(path / name, weights_only=True) for name in ("last.pt", "best.pt")}
        for path in sorted((folder / "run" / "checkpoints").iterdir())
    ]
    return found, weights


def plain(value):
    return value.tolist() if hasattr(value, "tolist") else value


def check_equal(folder, other, n):
    """The first `n` configurations came to the same, bit for bit."""
    (found, weights), (expected, other_weights) = rows(folder), rows(other)
    assert found == expected[:n]
    for one, another in zip(weights, other_weights, strict=False):
        for name in one:
            assert one[name].keys() == another[name].keys()
            assert all(torch.equal(value, another[name][key]) for key, value in one[name].items())


def batches(path):
    """What a process computed of a training, in order: how many samples were `after` which others, and their indices.

    Four processes compute their first batch in vain before the first step, to order DDP's buckets: that is left out.
    """
    # Killed while it wrote, a process may leave half a line.
    marks = [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]
    first = max((place for place, mark in enumerate(marks) if mark["after"] == marks[0]["after"]), default=0)
    return marks[first:]


def trainings(folder):
    """{configuration: the steps of each of its starts, as rank 0 has taken them}."""
    found = {}
    for path in sorted((folder / "marks").glob("*.0.jsonl"), key=lambda path: int(path.name.split(".")[-3])):
        steps = sorted({mark["after"] // STEP_SIZE for mark in batches(path)})
        found.setdefault(path.name.rsplit(".", 3)[0], []).append(steps)
    return found


def trained(folder):
    """How many steps of each configuration were taken at least once."""
    marks = trainings(folder) if (folder / "marks").exists() else {}
    return {name: len(set().union(*steps)) for name, steps in marks.items()}


def wait_for_steps(folder, n, name="4-0.01"):
    wait_until(lambda: trained(folder).get(name, 0) >= n, f"{n} steps of {name}", 300)


def running(folder):
    return {record["node"]: record for record in records(folder) if record["state"] == "running"}


def array_job(folder, number=0):
    return submissions(folder)[number]["array_job"]


def waiting(folder):
    """The tasks of the first submission that Slurm has in its queue, each with the reason why it waits."""
    return [(job.job_id, job.reason) for job in queued_of([array_job(folder)])]


@pytest.mark.nightly
def test_a_sweep_with_a_preemption_and_a_dead_node_ends_as_one_that_was_left_alone(train, by_two, cluster):
    folder = train(SWEEP, slow_s=1.0)  # a minute for each configuration, as long as it is so slow
    process = start(*SUBMIT, "--wait", "--gpus", "4", "--gpus-per-task", "2", "--array", cwd=folder)

    def start_now(task):
        """Slurm lets a requeued job wait for two minutes; that is not what is tested here."""
        job = f"{array_job(folder)}_{task}"
        wait_until(lambda: (job, "BeginTime") in waiting(folder), "the requeue", 300)
        cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    wait_until(lambda: len([n for n in trained(folder).values() if n > 5]) == 2, "both tasks to train", 300)
    tasks = {node: record["task"] for node, record in running(folder).items()}
    urgent = ["--qos=high", "--nodelist=gpu1", "--exclusive", "--output=/dev/null", "--wrap", "sleep 3"]
    cluster.run("sbatch", "--parsable", *urgent)
    wait_until(lambda: any(r["failure"] == "preempted" for r in records(folder)), "the preemption")
    start_now(tasks["gpu1"])
    wait_until(
        lambda: any(record["restart"] and record["progress"] for record in records(folder)), "its checkpoint", 300
    )
    try:
        cluster.kill_node("gpu2")
        start_now(tasks["gpu2"])
        (folder / "slow").unlink()
        output, _ = process.communicate(timeout=600)
    finally:
        cluster.start_node("gpu2")
    assert process.returncode == 0, output
    check_equal(folder, by_two, 6)
    found = trainings(folder)
    assert len(found) == 6
    # Each disturbance hits one configuration, which goes on from its last checkpoint; others begin once.
    assert 1 <= sum(len(attempts) - 1 for attempts in found.values()) <= 2
    for attempts in found.values():
        assert attempts[0][0] == 0
        assert all(after[0] > 0 for before, after in pairwise(attempts) if len(before) > 20)
        assert Counter(step for steps in attempts for step in steps)[N_STEPS - 1] == 1
        assert set().union(*attempts) == set(range(N_STEPS))
    # Preempted by SIGTERM, a task leaves a checkpoint of the step that it has come to.
    [told] = [record for record in records(folder) if record["failure"] == "preempted"]
    left = re.fullmatch("stopped by SIGTERM; shard (.) was given back, with its progress kept.*", told["message"])
    lr, width = list(product(SWEEP["lr"], SWEEP["width"]))[int(left[1])]
    stopped, resumed, *_ = found[f"{width}-{lr}"]
    assert resumed[0] == stopped[-1] + 1
    failures = report(folder)["failures"]
    assert failures["preempted"] == 1
    assert failures.get("node_fail", 0) + failures.get("lost", 0) >= 1


@pytest.mark.nightly
def test_two_nodes_with_two_processes_each_train_what_four_on_one_node_do(train, slurmgpu, tmp_path):
    alone = make(tmp_path / "by-four", FIRST)
    slurmgpu(*HERE, "--gpus", "4", cwd=alone, expect=0)
    folder = train(FIRST)
    slurmgpu(*SUBMIT, "--wait", "--gpus", "4", "--nodes-per-task", "2", cwd=folder, expect=0)
    [record] = records(folder)
    assert record["n_nodes"] == 2
    assert rows(folder)[0][0]["world_size"] == 4
    check_equal(folder, alone, 1)


@pytest.mark.nightly
def test_a_training_that_outlasts_its_walltime_goes_on_in_the_next_submission(train, by_two, slurmgpu):
    # A third of the way through its two minutes, a task leaves what it has in hand.
    folder = train(FIRST, slow_s=1.5, time="00:02:00", margin_s=80.0, auto_resubmit=9)
    slurmgpu(*SUBMIT, "--gpus", "2", cwd=folder, expect=0)
    wait_until(lambda: len(submissions(folder)) == 2, "the automatic resubmission", 300)
    (folder / "slow").unlink()
    wait_for_end(folder)
    [first] = [record for record in records(folder) if record["submission"] == 1]
    assert (first["failure"], first["reason"], first["deaths"]) == ("timeout", "deadline", [])
    [attempts] = trainings(folder).values()
    assert [step for steps in attempts for step in steps] == list(range(N_STEPS))  # none was lost, none repeated
    assert len(attempts) > 1
    check_equal(folder, by_two, 1)


@pytest.mark.nightly
def test_told_of_a_preemption_a_training_leaves_a_checkpoint_and_goes_on_with_twice_as_many(train, slurmgpu, cluster):
    folder = train(FIRST, slow_s=0.25, dull="true")
    process = start(*SUBMIT, "--wait", "--gpus", "2", cwd=folder)
    wait_for_steps(folder, 10)  # in the middle of an epoch, most likely
    cluster.run("scancel", "--signal=USR2", records(folder)[0]["job"])
    process.communicate(timeout=600)
    assert process.returncode == 3
    [told] = records(folder)
    assert (told["failure"], told["reason"], told["deaths"]) == ("preempted", "told to stop", [])
    (folder / "slow").unlink()
    slurmgpu("resubmit", "run", "--gpus", "4", "--wait", cwd=folder, expect=0)
    [(stopped, resumed)] = trainings(folder).values()
    assert stopped + resumed == list(range(N_STEPS))
    found, _ = rows(folder)
    assert found[0]["world_size"] == 4
    for epoch in range(EPOCHS):
        assert seen(folder, epoch) == list(range(N_SAMPLES))


def seen(folder, epoch):
    """The samples of an epoch that all processes computed together, sorted."""
    marks = [mark for path in (folder / "marks").iterdir() for mark in batches(path)]
    return sorted(index for mark in marks if mark["after"] // N_SAMPLES == epoch for index in mark["indices"])
