"""Items whose workload keeps their progress: left for later, taken up again, and no item blamed for what befell it."""

import json
import os
import signal
import threading
import time

import pytest

from slurmgpu import open as open_merged
from slurmgpu.errors import Interrupted
from slurmgpu.loader.adapted import adapt
from slurmgpu.plan.placement import place
from slurmgpu.plan.run_file import Resources
from slurmgpu.report.status import read_status
from slurmgpu.run.crash_history import History
from slurmgpu.run.directory import Run
from slurmgpu.run.records import Attempt
from slurmgpu.task.supervisor import Task
from slurmgpu.worker.call_failures import INTERRUPTED, NOT_ASKED, Failure, settle
from slurmgpu.worker.computer import Computer
from slurmgpu.workload import Item, Placement
from tests.support.nightly import by_night
from tests.support.runs import check_rows, let_go, published, records, report, start, wait_until, workers

LOCAL = ("submit", "--executor", "local", "--device", "cpu")
RAISED = Failure("item_error", "ValueError: no", ("ValueError", "x.py", "1"))
LONG = {"workload": "Long", "batch_size": 1, "shard_items": 1}


def counts(folder):
    """For each item the numbers that were counted, in order."""
    files = (folder / "run" / "counts").glob("*[0-9]")
    return {int(path.name): [int(line.split()[0]) for line in path.read_text().splitlines()] for path in files}


def check_counts(folder, n_items, n):
    """Every item was counted to the end, no number of it twice, and its row says so."""
    check_rows(folder, n_items)
    assert counts(folder) == {index: list(range(1, n + 1)) for index in range(n_items)}
    with open_merged(folder / "run" / "merged.h5") as merged:
        assert merged["counted"][:].tolist() == [n] * n_items


def change(folder, old, new):
    """Write another text in place of a part of the project's workload."""
    path = folder / "workloads.py"
    source = path.read_text()
    assert source.count(old) == 1
    path.write_text(source.replace(old, new))


LOOP = "        while count < self.n:\n"
HOLD = """\
            while self.task.rank == 0 and count >= 3 and not self.task.stopping() and Path("held").exists():
                time.sleep(0.02)
"""


@pytest.fixture
def holding(project):
    """Makes a project whose items count to 3, and wait there until they shall be left, or are let go (see `let_go`)."""

    def make(n_items, settings=None, **tables):
        folder = project(n_items, settings={"n": 6, **(settings or {})}, **tables, **LONG)
        (folder / "held").touch()
        change(folder, LOOP, LOOP + HOLD)
        return folder

    return make


def wait_for_items(folder, *indices):
    """Until these items wait at 3, and as many tasks know that their workers can keep progress."""

    def all_wait():
        n_ready = sum(record["state"] == "running" for record in records(folder))
        return n_ready >= len(indices) and all(counts(folder).get(index) == [1, 2, 3] for index in indices)

    wait_until(all_wait, f"items {indices}", 200)


@pytest.mark.parametrize(
    ("ways", "is_asked", "expected"),
    [
        ([None, None], True, None),
        ([INTERRUPTED, INTERRUPTED], True, INTERRUPTED),
        ([None, INTERRUPTED], True, INTERRUPTED),
        ([RAISED, INTERRUPTED], True, INTERRUPTED),
        ([None, RAISED], True, RAISED),
        ([INTERRUPTED, RAISED], False, RAISED),
        ([None, INTERRUPTED], False, NOT_ASKED),
    ],
)
def test_ranks_that_were_asked_to_stop_leave_the_item_if_one_does(ways, is_asked, expected):
    assert settle(ways, is_asked=is_asked) == expected


def test_an_item_that_is_left_for_later_is_not_called_again_and_has_no_row():
    calls = []

    def leave(items):
        calls.append([item.index for item in items])
        raise Interrupted

    computer = Computer(adapt(leave, "leave"), "leave", {}, 4)
    with pytest.raises(Interrupted):
        computer.compute(computer.take_in([Item(i, {}) for i in range(4)]), History())
    assert calls == [[0, 1, 2, 3]]


@pytest.mark.parametrize(("gpus", "device", "slots"), [(4, "auto", 4), (4, "cpu", 4), (0, "auto", 1)])
def test_a_share_tells_how_many_processes_there_could_be_also_on_cpus(gpus, device, slots):
    class Asking:
        def place(self, share):
            self.share = share
            return Placement()

    asking = Asking()
    place(adapt(asking, "Asking"), Resources(gpus=gpus, device=device), gpus)
    assert (asking.share.slots, asking.share.gpus) == (slots, 0 if device == "cpu" else gpus)


def test_a_batch_size_is_refused_where_items_are_computed_one_by_one(project, slurmgpu):
    folder = project(3, **{**LONG, "batch_size": 2})
    said = slurmgpu(*LOCAL, "--gpus", "0", cwd=folder, expect=2).stderr
    assert "[workload] batch_size = 2, but workload" in said
    assert "one by one. Remove the key.\n" in said
    source = (folder / "workloads.py").read_text()
    (folder / "workloads.py").write_text(source.replace("n: int = 20,", "n: int = 20, batch_size: int = 8,"))
    said = slurmgpu(*LOCAL, "--gpus", "0", cwd=folder, expect=2).stderr
    assert "Its own batch_size is set in [settings]." in said


def test_a_walltime_that_the_margin_takes_whole_is_refused(project, slurmgpu):
    folder, gpus = project(8, slurm={"time": "1"}, margin_s=60.0), ("--gpus", "1", "--device", "cpu")
    said = "[slurm] time = 1 is 1 min, but tasks take no shard in the last 60 s"
    assert said in slurmgpu("plan", *gpus, cwd=folder, expect=2).stderr
    slurmgpu("plan", *gpus, "--slurm", "time=2", cwd=folder, expect=0)
    slurmgpu("plan", *gpus, "--slurm", "time=0", "--run-dir", "unlimited", cwd=folder, expect=0)
    assert said in slurmgpu("resubmit", "run", "--slurm", "time=1", cwd=folder, expect=2).stderr
    least = slurmgpu("resubmit", "run", "--slurm", "time=9", "--slurm", "time_min=0:60", cwd=folder, expect=2)
    assert "[slurm] time_min = 0:60 is 1 min, but tasks take no shard in the last 60 s" in least.stderr
    slurmgpu(*LOCAL, "--gpus", "0", "--run-dir", "other", cwd=folder, expect=0)


def test_a_walltime_that_ends_with_the_last_shard_has_cut_nothing_short(project, slurmgpu):
    folder = project(8)
    words = "            words = text.split()\n"
    leap = "            if item.index == 7:\n                real = time.monotonic\n"
    change(folder, words, words + leap + "                time.monotonic = lambda: real() + 86400\n")
    slurmgpu("plan", "--gpus", "1", "--device", "cpu", cwd=folder, expect=0)
    run = Run.open(folder / "run")
    task = Task(run, Attempt("job", 0, end_time=time.time() + 3600))
    assert task.run_worker() == 0
    assert run.published() == set(range(run.plan.n_shards))
    assert (task.record["reason"], task.record["failure"]) == ("complete", None)


def test_at_the_walltimes_end_the_item_in_hand_is_left_and_goes_on_later(project, slurmgpu, caplog):
    folder = project(3, settings={"n": 10, "step_s": 0.02}, **LONG)
    slurmgpu("plan", "--gpus", "1", "--device", "cpu", cwd=folder, expect=0)
    run = Run.open(folder / "run")
    late = Task(run, Attempt("job", 0, end_time=time.time() + 0.5))
    assert late.run_worker() == 0
    assert (
        late.record["message"]
        == "it took no shard: too little of the walltime was left; ask for more with --slurm time=…"
    )
    assert caplog.messages[-1] == f"timeout: {late.record['message']}"
    # While item 1 is counted the walltime ends, by the clock of its worker that nobody sets; the other one is set by
    # half a day before, which ends nothing.
    text, end = (folder / "workloads.py").read_text(), time.time() + 86400
    leap = f"            if item.index == 1 and count == 1:\n                time.time = lambda: {end - 43200}\n"
    leap += "            if item.index == 1 and count == 3:\n                real = time.monotonic\n"
    leap += "                time.monotonic = lambda: real() + 86400\n"
    change(folder, LOOP, LOOP + leap)
    timed = Task(run, Attempt("job", 1, end_time=end))
    assert timed.run_worker() == 0
    assert (timed.record["reason"], timed.record["failure"]) == ("deadline", "timeout")
    assert timed.record["message"] == (
        "shard 1 was given back, with its progress kept: too little of the walltime was left"
    )
    assert published(folder) == ["00000.h5"]
    assert counts(folder)[1] == [1, 2, 3]
    assert run.claims.read(1) is None
    (folder / "workloads.py").write_text(text)
    slurmgpu("resubmit", "run", "--executor", "local", "--gpus", "0", cwd=folder, expect=0)
    check_counts(folder, 3, 10)


def test_told_of_a_preemption_a_task_leaves_its_item_to_a_living_task(holding, slurmgpu):
    folder = holding(2)
    process = start(*LOCAL, "--gpus", "0", "--tasks", "2", cwd=folder)
    wait_for_items(folder, 0, 1)
    wait_until(lambda: {record["progress"] for record in records(folder)} == {"3 of 6"}, "progress in the records")
    status = json.loads(slurmgpu("status", "run", "--json", cwd=folder, expect=0).stdout)
    assert [attempt["progress"] for attempt in status["attempts"]] == ["3 of 6"] * 2
    assert " of 6 " in slurmgpu("status", "run", cwd=folder, expect=0).stdout
    os.kill(records(folder)[0]["pid"], signal.SIGUSR2)
    wait_until(lambda: records(folder)[0]["state"] == "ended", "the end of the task")
    let_go(folder)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    check_counts(folder, 2, 6)
    told, other = records(folder)
    assert (told["failure"], told["reason"], told["progress"]) == ("preempted", "told to stop", None)
    assert "was given back, with its progress kept: Slurm announced" in told["message"]
    assert (other["failure"], other["deaths"], told["deaths"]) == (None, [], [])
    assert not list((folder / "run" / "claims").iterdir())


@pytest.mark.nightly  # by a signal, as the next test of groups; by a notice, as the task without one above
def test_two_ranks_leave_an_item_together_and_another_number_goes_on(holding, slurmgpu):
    pytest.importorskip("torch")
    folder = holding(1, resources={"processes": "per-gpu"})
    process = start(*LOCAL, "--gpus", "2", cwd=folder)
    wait_for_items(folder, 0)
    os.kill(records(folder)[0]["pid"], signal.SIGUSR2)
    process.communicate(timeout=200)
    assert process.returncode == 3
    [record] = records(folder)
    assert (record["failure"], record["deaths"], record["n_errors"]) == ("preempted", [], 0)
    assert counts(folder) == {0: [1, 2, 3]}
    let_go(folder)
    slurmgpu("resubmit", "run", "--gpus", "1", cwd=folder, expect=0)
    check_counts(folder, 1, 6)


def test_workers_that_are_killed_between_progress_cost_no_item(project, slurmgpu):
    folder = project(1, settings={"n": 8, "deadly": [1, 3, 4, 5, 7, 8]}, **LONG)
    slurmgpu(*LOCAL, "--gpus", "0", cwd=folder, expect=0)
    check_counts(folder, 1, 8)
    [record] = records(folder)
    assert [death["class"] for death in record["deaths"]] == ["crash"] * 6


def test_without_progress_an_item_that_kills_its_worker_is_quarantined_as_ever(project, slurmgpu):
    folder = project(1, settings={"n": 8, "deadly": [1, 3, 5], "tells": False}, **LONG)
    slurmgpu(*LOCAL, "--gpus", "0", cwd=folder, expect=0)
    check_rows(folder, 1, errors={0})
    assert report(folder)["errors_by_class"] == {"crash": 1}


def test_progress_that_finds_no_room_ends_the_task_and_is_the_fault_of_no_item(project, slurmgpu):
    folder = project(2, settings={"n": 12, "also": "also"}, **LONG)
    (folder / "also").symlink_to("/dev/full")
    slurmgpu(*LOCAL, "--gpus", "0", cwd=folder, expect=3)
    [record] = records(folder)
    assert (record["failure"], record["n_errors"], record["deaths"]) == ("disk_full", 0, [])
    assert record["message"].startswith("item 0: OSError: [Errno 28] No space left")
    assert not list((folder / "run" / "claims").glob("[0-9]*[0-9]"))
    assert counts(folder) == {0: [1, 2, 3, 4, 5, 6]}
    (folder / "also").unlink()
    slurmgpu("resubmit", "run", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)
    check_counts(folder, 2, 12)


def test_an_item_that_nobody_asked_to_leave_is_in_error_and_not_tried_for_ever(project, slurmgpu):
    folder = project(2, settings={"quits": True}, **LONG)
    slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)
    check_rows(folder, 2, errors={0, 1})
    [first, _] = report(folder)["errors"]
    assert first["class"] == "item_error"
    assert "raised Interrupted although it was not asked to stop" in first["message"]


def test_a_worker_that_starts_after_the_notice_takes_no_item_up(holding):
    folder = holding(2)
    process = start(*LOCAL, "--gpus", "0", cwd=folder)
    wait_for_items(folder, 0)
    [(worker, _)] = workers(folder)
    os.kill(worker, signal.SIGSTOP)  # too busy to hear it
    os.kill(records(folder)[0]["pid"], signal.SIGUSR2)
    os.kill(worker, signal.SIGKILL)
    process.communicate(timeout=200)
    [record] = records(folder)
    assert (record["failure"], record["reason"], len(record["deaths"])) == ("preempted", "told to stop", 1)
    assert counts(folder) == {0: [1, 2, 3]}
    assert not list((folder / "run" / "claims").glob("[0-9]*[0-9]"))


def test_a_worker_whose_item_another_task_has_taken_over_leaves_it_there(holding):
    folder = holding(2, lease_s=1.0)
    process = start(*LOCAL, "--gpus", "0", "--tasks", "2", cwd=folder)
    wait_for_items(folder, 0)
    path = folder / "run" / "counts" / "0"
    owner = path.read_text().split()[1]
    [task] = [record["pid"] for record in records(folder) if record["attempt"] == owner]
    [worker] = [pid for pid, line in workers(folder) if f'"{owner}"' in line]
    for pid in (task, worker):
        os.kill(pid, signal.SIGSTOP)
    let_go(folder)
    wait_until(lambda: len(published(folder)) == 2, "the other task to take it over, and to finish it")
    for pid in (worker, task):
        os.kill(pid, signal.SIGCONT)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    check_counts(folder, 2, 6)
    owners = [line.split()[1] for line in path.read_text().splitlines()]
    assert [name == owner for name in owners] == [True] * 3 + [False] * 3
    [former] = [record for record in records(folder) if record["attempt"] == owner]
    assert (former["failure"], former["published"], former["reason"]) == (None, [], "complete")


def check_left(folder, failure, signame):
    """The one task was stopped by a signal, and its item was left by a worker that had time to keep what there is."""
    [record] = records(folder)
    assert (record["failure"], record["deaths"], record["n_errors"]) == (failure, [], 0)
    left = "shard 0 was given back, with its progress kept"
    assert record["message"] == f"stopped by {signame}; {left}"
    assert counts(folder) == {0: [1, 2, 3]}
    assert (folder / "run" / "counts" / "0.kept").exists()
    assert not workers(folder) + workers(folder, "slurmgpu.worker.group_launcher")
    assert not list((folder / "run" / "claims").glob("[0-9]*[0-9]"))


@pytest.mark.parametrize("to_all", [by_night(False), True])
def test_sigterm_leaves_the_item_in_hand_to_a_later_task(holding, to_all):
    folder = holding(2, {"keeping_s": 0.5})
    process = start(*LOCAL, "--gpus", "0", cwd=folder)
    wait_for_items(folder, 0)
    pids = [records(folder)[0]["pid"], *(pid for pid, _ in workers(folder) if to_all)]
    for pid in (*pids, pids[0]):  # which hears it twice, as when a grace time is over
        os.kill(pid, signal.SIGTERM)
    process.communicate(timeout=200)
    check_left(folder, "preempted", "SIGTERM")


@pytest.mark.parametrize("to_all", [by_night(False), True])
def test_a_group_leaves_its_item_however_many_of_it_sigterm_reaches_and_another_number_goes_on(
    holding, slurmgpu, to_all
):
    pytest.importorskip("torch")
    folder = holding(1, {"keeping_s": 0.5}, resources={"processes": "per-gpu"})
    process = start(*LOCAL, "--gpus", "2", cwd=folder)
    wait_for_items(folder, 0)
    group = workers(folder) + workers(folder, "slurmgpu.worker.group_launcher")
    assert len(group) == 3
    for pid in (*(pid for pid, _ in group if to_all), records(folder)[0]["pid"]):
        os.kill(pid, signal.SIGTERM)
    process.communicate(timeout=200)
    check_left(folder, "preempted", "SIGTERM")
    log = (folder / "run" / "logs" / "local1_0.0.log").read_text()
    assert "torch" not in log
    assert "Traceback" not in log
    let_go(folder)
    slurmgpu("resubmit", "run", "--gpus", "1", cwd=folder, expect=0)
    check_counts(folder, 1, 6)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_local_run_whose_command_is_ended_ends_with_its_progress_kept(holding, signum):
    folder = holding(1, {"keeping_s": 0.5})
    process = start(*LOCAL, "--gpus", "0", cwd=folder)
    wait_for_items(folder, 0)
    if signum == signal.SIGINT:
        os.killpg(process.pid, signum)  # as the terminal does; the task has SIGTERM as well, from its controller
    else:
        process.send_signal(signum)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 128 + signum, output
    assert "interrupted; the tasks have ended" in output
    check_left(folder, *{signal.SIGINT: ("cancelled", "SIGINT"), signal.SIGTERM: ("preempted", "SIGTERM")}[signum])
    assert read_status(Run.open(folder / "run"))["failures"] == {"cancelled": 1}


@pytest.mark.parametrize("again", [False, True])
def test_a_worker_that_keeps_its_progress_for_too_long_is_killed(project, slurmgpu, monkeypatch, caplog, again):
    monkeypatch.setattr("slurmgpu.task.supervisor.PARTING_S", 600.0 if again else 0.5)
    folder = project(1, settings={"n": 2, "step_s": 600, "keeping_s": 600}, **LONG)
    slurmgpu("plan", "--gpus", "1", "--device", "cpu", cwd=folder, expect=0)
    run = Run.open(folder / "run")
    slow = Task(run, Attempt("job", 0))

    def interrupt():
        wait_until(lambda: slow.record["shard"] is not None, "the item")
        os.kill(os.getpid(), signal.SIGINT)
        if again:  # once the first is heard: before, the two are one
            wait_until(lambda: "SIGINT: the worker saves its progress and ends" in caplog.messages, "the first")
            os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=interrupt)
    other.start()
    assert slow.run_worker() == 75
    other.join()
    late = "" if again else ". Its worker did not end within 0.5 s"
    assert slow.record["message"] == f"stopped by SIGINT; its shards were given back{late}"
    assert (slow.record["failure"], slow.record["deaths"]) == ("cancelled", [])
    assert not workers(folder)
    assert run.claims.read(0) is None
