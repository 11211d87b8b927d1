"""Several processes for one task, on this machine: they compute what one would, and none outlives another."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest

from slurmgpu.util.pipes import EXIT_ABANDONED
from tests.support.held_ranks import hold
from tests.support.nightly import by_night
from tests.support.runs import (
    check_rows,
    datasets,
    published,
    records,
    report,
    start,
    wait_until,
    wait_until_held,
    workers,
)

pytest.importorskip("torch")

LOCAL = ("submit", "--executor", "local", "--device", "cpu")
PER_GPU = {"processes": "per-gpu"}


def living(folder):
    """All processes of a run: launchers, ranks, and what ranks started."""
    return workers(folder, "slurmgpu.worker.group_launcher") + workers(folder) + workers(folder, "child")


def wait_for_silence(folder):
    wait_until(lambda: not living(folder), "the end of all processes")


def test_several_processes_compute_what_one_does(project, slurmgpu):
    settings = {"faults": {"17": "exception", "30": "item_error"}, "max_batch": 2}
    merged = []
    for processes, n_gpus in (("one", 1), ("per-gpu", 3)):  # 2 in the tests below
        folder = project(40, "Ranks", settings=settings, resources={"processes": processes})
        slurmgpu(*LOCAL, "--gpus", n_gpus, cwd=folder, expect=0)
        check_rows(folder, 40, errors={17, 30})
        assert len(records(folder)) == 1
        merged.append(datasets(folder))
        log = (folder / "run" / "logs" / "local1_0.0.log").read_text()
        assert "torch" not in log  # which has much to say
        assert "not in the snapshot" not in log
        (folder / "run").rename(folder / f"run{n_gpus}")
    assert merged[0] == merged[1]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        # The other rank waits for it in a collective.
        ("exception", r"ValueError: cannot do item 10 \(workloads.py, line \d+\); other ranks did not"),
        by_night("segfault", "the worker died by SIGSEGV"),
    ],
)
def test_an_item_that_fails_on_one_rank_alone_is_found(project, slurmgpu, fault, said):
    folder = project(16, "Ranks", settings={"faults": {"10": fault}, "fault_rank": 1}, resources=PER_GPU)
    slurmgpu(*LOCAL, "--gpus", "2", cwd=folder, expect=0)
    check_rows(folder, 16, errors={10})
    [error] = report(folder)["errors"]
    assert error["class"] == "crash"
    assert re.search(said, error["message"])
    [record] = records(folder)
    assert [death["items"] for death in record["deaths"]] == [[8, 11], [10]]


def test_a_rank_that_cannot_load_ends_the_task_with_its_reason(project, slurmgpu):
    folder = project(16, "Ranks", settings={"faults": {"0": "load"}, "fault_rank": 1}, resources=PER_GPU)
    slurmgpu(*LOCAL, "--gpus", "2", cwd=folder, expect=3)
    [record] = records(folder)
    assert (record["failure"], record["message"]) == ("workload_error", "rank 1: RuntimeError: no such model")
    assert "in load" in record["traceback"]
    wait_for_silence(folder)


DIES_LOADING = """

class DiesLoading(Ranks):
    def load(self, task):
        super().load(task)
        if task.rank == 1 and not (task.run_dir / "died").exists():
            (task.run_dir / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.torch.distributed.barrier()  # fails where another rank has died
"""


def test_a_rank_that_dies_while_others_load_with_it_is_a_crash_and_a_new_group_is_started(project, slurmgpu):
    folder = project(16, "DiesLoading", resources=PER_GPU)
    with open(folder / "workloads.py", "a") as file:
        file.write(DIES_LOADING)
    slurmgpu(*LOCAL, "--gpus", "2", cwd=folder, expect=0)
    check_rows(folder, 16)
    [record] = records(folder)
    assert [death["message"] for death in record["deaths"]] == ["the worker died by SIGKILL"]


def test_without_pytorch_a_sentence_says_that_it_is_needed(project, slurmgpu):
    folder = project(16, resources=PER_GPU)
    (folder / "site").mkdir()
    (folder / "site" / "torch.py").write_text("raise ImportError('there is no torch')\n")
    slurmgpu(*LOCAL, "--gpus", "2", cwd=folder, expect=3, PYTHONPATH=str(folder / "site"))
    [record] = records(folder)
    assert record["failure"] == "workload_error"
    assert 'processes = "per-gpu" needs PyTorch' in record["message"]


def test_whatever_of_a_group_is_killed_the_rest_goes_with_it_and_a_new_one_loses_nothing(project):
    folder = hold(project, 40, {8: "first", 24: "second"}, settings={"child": True}, resources=PER_GPU)
    process = start(*LOCAL, "--gpus", "2", cwd=folder)
    for module, n_shards, held in (
        ("slurmgpu.worker.main", 1, "first"),
        ("slurmgpu.worker.group_launcher", 3, "second"),
    ):
        wait_until_held(folder, n_shards)
        former = living(folder)
        victim = workers(folder, module)[-1][0]
        os.kill(victim, signal.SIGKILL)
        if module == "slurmgpu.worker.main":
            wait_until(lambda former=former: not set(former) & set(living(folder)), "the group to follow its rank")
        else:  # which cannot clean up any more
            ranks = [rank for rank in former if "child" not in rank[1]]
            wait_until(lambda ranks=ranks: not set(ranks) & set(living(folder)), "the ranks to follow their launcher")
            for pid, _ in set(former) - set(ranks):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        (folder / held).unlink()
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    check_rows(folder, 40)
    assert len(records(folder)[0]["deaths"]) == 2


def test_of_two_groups_a_killed_one_leaves_no_process_and_one_that_is_told_to_takes_no_more_shards(project):
    folder = hold(project, 40, {0: "held", 8: "held"}, settings={"child": True}, resources=PER_GPU)
    process = start(*LOCAL, "--gpus", "4", "--gpus-per-task", "2", "--array", cwd=folder)
    wait_until_held(folder, 0, n_tasks=2)
    n_living = len(living(folder))
    killed, told = records(folder)
    os.kill(killed["pid"], signal.SIGKILL)
    wait_until(lambda: len(living(folder)) == n_living // 2, "the end of the processes of a group")
    os.kill(told["pid"], signal.SIGUSR2)  # the notice of a preemption
    wait_until(lambda: records(folder)[1]["state"] == "ended", "the end of the task")
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 3, output
    wait_for_silence(folder)
    assert len(published(folder)) == 1
    assert report(folder)["failures"] == {"lost": 1, "preempted": 1}
    assert records(folder)[1]["reason"] == "told to stop"
    assert records(folder)[1]["deaths"] == []


def test_ctrl_c_ends_a_group_that_hangs_and_gives_its_shards_back(project):
    folder = project(
        40, "Ranks", settings={"faults": {"17": "hang"}, "fault_rank": 1, "child": True}, resources=PER_GPU
    )
    process = start(*LOCAL, "--gpus", "2", cwd=folder)
    wait_until_held(folder, 2)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 130, output
    wait_for_silence(folder)
    assert [record["failure"] for record in records(folder)] == ["cancelled"]
    assert {path.name for path in (folder / "run" / "claims").glob("[0-9]*")} <= {"00000", "00001"}


STAND_IN = """
import os, sys, time
told = os.environ["TOLD"]
open(told, "w").close()
while os.path.exists(told):
    time.sleep(0.01)
"""


def launcher_with_a_stand_in(tmp_path, slow):
    """The launcher of two ranks, whose PyTorch waits in its import, or when the store is opened."""
    site = tmp_path / "site" / "torch"
    site.mkdir(parents=True)
    body = "class TCPStore:\n    def __init__(self, *args, **more):\n" + textwrap.indent(STAND_IN, "        ")
    (site / "__init__.py").write_text(STAND_IN if slow == "import" else "")
    (site / "distributed.py").write_text("" if slow == "import" else f"{body}\n    port = 0\n")
    told = tmp_path / "told"
    process = subprocess.Popen(
        [sys.executable, "-m", "slurmgpu.worker.group_launcher", str(tmp_path / "run"), '{"n_gpus": 2}'],
        env={**os.environ, "PYTHONPATH": str(site.parent), "TOLD": str(told)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(told.exists, "PyTorch's import" if slow == "import" else "the store")
    return process, told


def test_a_launcher_that_still_imports_pytorch_ends_with_its_task(tmp_path):
    process, _ = launcher_with_a_stand_in(tmp_path, "import")
    process.stdin.close()  # the task is gone
    assert process.wait(timeout=280) == EXIT_ABANDONED


def test_a_rank_that_dies_before_it_knows_the_store_is_named_with_its_signal(tmp_path):
    process, told = launcher_with_a_stand_in(tmp_path, "store")

    def ranks():
        return sorted(pid for pid, _ in workers(tmp_path, "slurmgpu.worker.group_launcher") if pid != process.pid)

    one, _ = ranks()
    os.kill(one, signal.SIGKILL)
    wait_until(lambda: one not in ranks(), "the end of a rank")
    told.unlink()
    said = process.stderr.read()  # its standard input stays open, as that of a task which is there
    assert process.wait(timeout=280) == 128 + signal.SIGKILL, said
    assert re.search("rank [01] died by SIGKILL", said)
    assert not ranks()
