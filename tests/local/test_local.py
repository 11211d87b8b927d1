"""Whole runs on this machine, through the command line: what goes wrong in a worker, and what becomes of it."""

import contextlib
import errno
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import weakref

import pytest

import slurmgpu as package
from slurmgpu.cli.views.dry_run import show_scripts
from slurmgpu.report.status import read_status
from slurmgpu.run.claims import Claim
from slurmgpu.run.directory import Run
from slurmgpu.run.frozen_plan import PROMISED
from slurmgpu.run.lock import run_lock
from slurmgpu.run.records import Attempt
from slurmgpu.shards.shard_file import read_directory
from slurmgpu.task.attempt_writer import AttemptWriter
from slurmgpu.task.supervisor import Task
from slurmgpu.util.pids import is_there
from slurmgpu.worker.computer import Computer
from tests.support import failing
from tests.support.command_line import AS_PROGRAMS
from tests.support.nightly import by_night
from tests.support.runs import (
    check_rows,
    copy_run,
    datasets,
    holders,
    let_go,
    make_project,
    planned_run,
    published,
    records,
    report,
    shard_times,
    start,
    submissions,
    wait_until,
    wait_until_held,
    workers,
)
from tests.support.terminals import Terminal

LOCAL = ("submit", "--executor", "local", "--gpus", "0")
DEBUG = ("submit", "--executor", "debug", "--gpus", "0")


@pytest.fixture(scope="module")
def complete(tmp_path_factory, slurmgpu):
    """A project with a complete run of 100 items, which three tasks computed; what was said is in `said`."""
    folder = make_project(tmp_path_factory.mktemp("complete") / "project", 100)
    (folder / "said").write_text(slurmgpu(*LOCAL, "--tasks", "3", cwd=folder, expect=0).stdout)
    return folder


@pytest.fixture
def copied(complete, tmp_path):
    """A folder with a copy of the complete run, for a test that damages it."""
    (tmp_path / "copied").mkdir()
    copy_run(complete / "run", tmp_path / "copied" / "run")
    return tmp_path / "copied"


@pytest.fixture(scope="module")
def faulty(tmp_path_factory, slurmgpu):
    """A project with a complete run of 40 items, four of which failed, each in its way."""
    faults = {"3": "item_error", "17": "exception", "25": "segfault", "33": "hard_exit"}
    folder = make_project(tmp_path_factory.mktemp("faulty") / "project", 40, settings={"faults": faults})
    slurmgpu(*LOCAL, cwd=folder, expect=0)
    return folder


def test_a_run_ends_with_every_row_in_input_order(complete):
    check_rows(complete, 100)
    assert "complete" in (complete / "said").read_text()
    assert report(complete)["complete"] is True
    assert len(records(complete)) == 3
    assert not workers(complete)


def test_the_number_of_tasks_does_not_change_a_byte_of_the_results(project, slurmgpu, complete):
    folder = project(100)
    slurmgpu(*LOCAL, "--tasks", "1", cwd=folder, expect=0)
    assert datasets(folder) == datasets(complete)


def test_a_small_input_is_work_for_all_tasks_that_it_is_planned_for_whoever_computes_it(project, tmp_path, slurmgpu):
    folder, alone = project(10, held_from=0, batch_size=128), make_project(tmp_path / "alone", 10, batch_size=128)
    for each in (folder, alone):
        text = (each / "slurmgpu.toml").read_text()
        (each / "slurmgpu.toml").write_text(text.replace("shard_items = 8\n", ""))
    process = start(*LOCAL, "--tasks", "4", cwd=folder)
    wait_until_held(folder, 0, n_tasks=4)
    let_go(folder)
    output, _ = process.communicate(timeout=200)
    assert "10 items are cut into 4 shards of 3 (instead of 1 of 128), so that 4 tasks have one each" in output
    check_rows(folder, 10)
    slurmgpu("plan", "--gpus", "0", "--tasks", "4", cwd=alone, expect=0)
    slurmgpu("resubmit", "run", "--executor", "debug", "--tasks", "1", cwd=alone, expect=0)
    assert datasets(alone) == datasets(folder)


@pytest.mark.parametrize(("number", "failure"), [(errno.EDQUOT, "disk_full"), (errno.EIO, "file_system")])
def test_a_worker_that_cannot_claim_a_shard_for_its_disk_says_so_in_a_sentence(
    project, slurmgpu, tmp_path, number, failure
):
    folder = project(40, lease_s=1.0)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        failing.SLOT_CANNOT_OPEN.format(ending="/claims/00003", number=number)
    )
    path = f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}"
    slurmgpu(*LOCAL, "--tasks", "1", cwd=folder, expect=3, PYTHONPATH=path)
    [attempt] = report(folder)["attempts"]
    assert attempt["failure"] == failure
    logs = "".join(path.read_text() for path in (folder / "run/logs").glob("*.log"))
    assert f"slurmgpu.worker: {failure}: [Errno {number}] {os.strerror(number)}: " in logs
    assert "Traceback" not in logs
    assert not records(folder)[0]["traceback"]
    assert len(published(folder)) >= 3
    slurmgpu("resubmit", "run", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)
    check_rows(folder, 40)


def test_the_debug_executor_runs_the_same_in_one_process(project, slurmgpu):
    folder = project(20)
    slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)
    check_rows(folder, 20)


def test_a_run_of_the_debug_executor_is_not_cancelled_from_a_second_shell_which_says_where_it_is(project, slurmgpu):
    folder = project(16, held_from=8)
    process = start(*DEBUG, cwd=folder)
    wait_until_held(folder, 1)
    [pid] = submissions(folder)[-1]["pids"]
    assert (
        f"Process {pid} computes this run with the executor debug"
        in slurmgpu("cancel", "run", cwd=folder, expect=2).stderr
    )
    let_go(folder)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    check_rows(folder, 16)


def test_a_breakpoint_stops_the_debug_executor(project):
    folder = project(8)
    source = (folder / "workloads.py").read_text()
    (folder / "workloads.py").write_text(
        source.replace("        rows = []\n", "        rows = []\n        breakpoint()\n")
    )
    process = start(
        "submit", "--executor", "debug", "--gpus", "0", cwd=folder, PYTHONBREAKPOINT="builtins.breakpointed"
    )
    output, _ = process.communicate(timeout=200)
    assert "builtins.breakpointed" in output  # Python tried to call it, in the process that the user started


def test_the_bar_of_planning_is_gone_when_a_run_of_a_folder_has_begun(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    run = ("run", "--each", "files:*.txt", "--col", "n:int32", "--executor", "local", "--gpus", "0", "--", "bash")
    with Terminal(*run, "-c", "sleep 2; echo 1", "{path}", cwd=tmp_path) as terminal:
        terminal.see(lambda it: any("1 of 2 items" in line for line in it.display))
        assert terminal.end() == 0
    assert b"reading the input" not in terminal.written.partition(b"0 of 2 items")[2]


def test_the_debug_executor_leaves_the_terminal_to_a_debugger_and_tells_of_published_shards(project):
    folder = project(24)
    source = (folder / "workloads.py").read_text()
    (folder / "workloads.py").write_text(source.replace(IN_A_CALL, f"{IN_A_CALL}        breakpoint()\n", 1))
    with Terminal(*DEBUG, cwd=folder) as terminal:
        terminal.see(lambda it: any(line.startswith("(Pdb)") for line in it.display))
        terminal.send(b"p 6 * 7")
        terminal.see(lambda it: it.display[it.screen.cursor.y] == "(Pdb) p 6 * 7")
        terminal.send(b"\n")
        terminal.see(lambda it: "42" in it.display)
        terminal.send(b"import pdb; pdb.Pdb.set_trace = lambda *_: None\nc\n")
        assert terminal.end() == 0
    assert b" of 24 items" in terminal.written, terminal.written.decode()


def test_exceptions_and_item_errors_cost_their_item_alone(faulty):
    check_rows(faulty, 40, errors={3, 17, 25, 33})
    source = (faulty / "workloads.py").read_text()
    line = source[: source.index("raise ValueError")].count("\n") + 1
    messages = {item["index"]: (item["class"], item["message"]) for item in report(faulty)["errors"]}
    assert messages[3] == ("item_error", "not this one")
    assert messages[17] == ("item_error", f"ValueError: cannot do item 17 (workloads.py, line {line})")


def test_an_item_that_kills_its_worker_is_quarantined(faulty):
    check_rows(faulty, 40, errors={3, 17, 25, 33})
    found = {item["index"]: item for item in report(faulty)["errors"]}
    for index, said in ((25, "died by SIGSEGV"), (33, "exited with code 3")):
        assert found[index]["class"] == "crash"
        assert said in found[index]["message"]
    [record] = records(faulty)
    assert [death["items"] for death in record["deaths"]] == [[24, 27], [25], [32, 35], [33]]


USED_UP = """
import os, resource, signal
from concurrent.futures import ProcessPoolExecutor
from slurmgpu import Array

def square(number):
    if number == 13:
        os.kill(os.getpid(), signal.SIGSEGV)
    return number**2

class Rows:
    columns = {"square": Array("int64")}

    def load(self, task):
        self.pool, self.files = ProcessPoolExecutor(1), []
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    def __call__(self, items):
        self.files += [open(os.devnull) for _ in items]
        return [{"square": square} for square in self.pool.map(square, [item.index for item in items])]
"""


def test_what_a_worker_has_used_up_costs_the_worker_and_no_item_that_did_not_do_it(project, slurmgpu):
    folder = project(100)
    (folder / "workloads.py").write_text(USED_UP)
    slurmgpu(*LOCAL, "--tasks", "1", cwd=folder, expect=0)
    [failed] = report(folder)["errors"]
    assert (failed["index"], failed["class"]) == (13, "crash")
    assert failed["message"].startswith("BrokenProcessPool: ")
    said = [death["message"] for death in records(folder)[0]["deaths"]]
    assert [each.partition(":")[0] for each in said[:2]] == ["BrokenProcessPool"] * 2
    assert said[2:]
    assert all("Too many open files" in each for each in said[2:])


def test_a_killed_worker_is_started_again_and_changes_nothing(project, slurmgpu, tmp_path, complete):
    marks = tmp_path / "marks"
    marks.mkdir()
    folder = project(100, settings={"faults": {"17": "kill_once"}, "marks": str(marks)})
    slurmgpu(*LOCAL, cwd=folder, expect=0)
    assert datasets(folder) == datasets(complete)
    assert [death["class"] for death in records(folder)[0]["deaths"]] == ["crash"]


AT_ITS_END = """
import atexit, os, signal, threading, time
from slurmgpu import Array

class Rows:
    columns = {"double": Array("float64")}

    def __init__(self, *, how):
        self.how = how

    def load(self, task):
        getattr(self, self.how)()

    def hangs(self):
        threading.Thread(target=time.sleep, args=(600,), name="uploads").start()

    def dies(self):
        atexit.register(os.kill, os.getpid(), signal.SIGSEGV)

    def fails(self):
        atexit.register(os._exit, 3)

    def __call__(self, items):
        return [{"double": 2.0 * item.index} for item in items]
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("hangs", "the worker has done its work but did not end within 4 s; killing it"),
        ("dies", "the worker died by SIGSEGV after it had done its work"),
        ("fails", "the worker exited with code 3 after it had done its work"),
    ],
)
def test_a_worker_that_hangs_or_dies_when_its_work_is_done_has_done_it(
    project, slurmgpu, monkeypatch, caplog, how, said
):
    if how == "hangs":
        monkeypatch.setattr("slurmgpu.task.supervisor.EXIT_S", 4.0)  # time for its log
    folder = project(20, settings={"how": how})
    (folder / "workloads.py").write_text(AT_ITS_END)
    slurmgpu("plan", "--gpus", "0", cwd=folder, expect=0)
    task = Task(Run.open(folder / "run"), Attempt("job", 0))
    assert task.run_worker() == 0
    assert (task.record["reason"], task.record["failure"], task.record["deaths"]) == ("complete", None, [])
    assert len(published(folder)) == 3
    assert said in caplog.messages
    assert not workers(folder)
    if how == "hangs":
        [log] = (folder / "run" / "logs").glob("job_0.0.log")
        assert "Python waits for threads that the workload started: uploads" in log.read_text()


DEAF = """
import os, time
from slurmgpu import Array

class Rows:
    columns = {"double": Array("float64")}

    def __call__(self, items):
        if 9 in [item.index for item in items]:
            os.closerange(3, 100)
            time.sleep(600)
        return [{"double": 2.0 * item.index} for item in items]
"""


def test_a_worker_that_closes_its_pipe_is_ended_as_by_a_crash(project, slurmgpu, monkeypatch):
    monkeypatch.setattr("slurmgpu.task.supervisor.GRACE_S", 0.2)
    folder = project(16)
    (folder / "workloads.py").write_text(DEAF)
    slurmgpu("plan", "--gpus", "0", cwd=folder, expect=0)
    task = Task(Run.open(folder / "run"), Attempt("job", 0))
    assert task.run_worker() == 0
    said = "the worker closed the pipe through which it reports to its task"
    assert [(death["items"], death["message"]) for death in task.record["deaths"]] == [([8, 11], said), ([9], said)]
    assert task.record["failed"] == [[1, {"crash": 1}]]
    assert not workers(folder)


CLOSING = """
import sys
import numpy as np
from slurmgpu import Array

class Rows:
    columns = {"double": Array("float64")}

    def load(self, task):
        self.task = task
        sys.stderr.close()

    def __call__(self, items):
        self.task.note("n_items", np.int32(len(items)))
        self.task.note("share", np.float32(0.5) if items[0].index else "half")
        return [{"double": 2.0 * item.index} for item in items]
"""


def test_a_worker_logs_and_notes_numbers_of_numpys_where_its_workload_closes_standard_error(project, slurmgpu):
    folder = project(24)
    (folder / "workloads.py").write_text(CLOSING)
    slurmgpu("plan", "--gpus", "0", cwd=folder, expect=0)
    run = Run.open(folder / "run")
    assert Task(run, Attempt("job", 0)).run_worker() == 0
    notes = [read_directory(run.shard_path(shard)).notes for shard in range(3)]
    assert [(each["n_items"], each.get("share")) for each in notes] == [(4, 0.5)] * 3
    text = (run.logs / "job_0.0.log").read_text()
    assert "TypeError: task.note: share is a str, 'half'; expected a finite number, such as 16." in text
    assert "shard 2: published" in text


def test_a_killed_task_loses_nothing(project):
    folder = project(48, held_from=24)
    process = start(*LOCAL, "--tasks", "2", cwd=folder)
    wait_until_held(folder, 3, 2)
    victim = holders(folder)[0]
    os.kill(victim["pid"], signal.SIGKILL)
    let_go(folder)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    check_rows(folder, 48)
    outcome = report(folder)
    assert outcome["failures"] == {"lost": 1}
    assert [taken["from"] for attempt in outcome["attempts"] for taken in attempt["takeovers"]] == [victim["attempt"]]
    assert not workers(folder)


def test_a_task_whose_shards_were_taken_over_while_it_lived_does_no_harm(project, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    folder = project(64, held_from=24, settings={"marks": str(marks)})
    process = start(*LOCAL, "--tasks", "2", cwd=folder)
    wait_until_held(folder, 3, 2)
    frozen = holders(folder)[0]
    its_worker = [pid for pid, line in workers(folder) if f'"{frozen["attempt"]}"' in line]
    for pid in (frozen["pid"], *its_worker):
        os.kill(pid, signal.SIGSTOP)
    let_go(folder)
    try:
        wait_until(lambda: len(published(folder)) == 8, "the other task to finish the run")
    finally:
        for pid in (*its_worker, frozen["pid"]):
            os.kill(pid, signal.SIGCONT)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    check_rows(folder, 64)
    assert sum(len(record["takeovers"]) for record in records(folder)) == 1
    assert max(path.read_text().count("\n") for path in marks.iterdir()) == 2  # the shard in hand was computed twice
    assert not list((folder / "run" / "shards").glob("*.partial"))


def test_a_killed_run_leaves_no_worker_and_resubmit_computes_only_what_is_missing(project, slurmgpu, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    folder = project(56, held_from=32, settings={"marks": str(marks)})
    process = start(*LOCAL, "--tasks", "2", cwd=folder)
    wait_until_held(folder, 4, 2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not workers(folder), "the workers to follow their tasks")
    let_go(folder)
    kept = shard_times(folder)
    assert slurmgpu("report", "run", cwd=folder).returncode == 2  # there is none yet, says a sentence
    slurmgpu("resubmit", "run", cwd=folder, expect=0)
    check_rows(folder, 56)
    assert kept.items() <= shard_times(folder).items()
    computed = {int(path.name): path.read_text().count("\n") for path in marks.iterdir()}
    done_before = {item for name in kept for item in range(int(name[:5]) * 8, int(name[:5]) * 8 + 8)}
    assert all(computed[item] == 1 for item in done_before)


def test_resubmit_says_which_keys_of_the_run_file_have_been_edited_and_computes_by_the_plan(project, slurmgpu):
    folder = project(24, settings={"item_s": 0.0})
    slurmgpu("plan", "--gpus", "0", cwd=folder, expect=0)
    run_file = folder / "slurmgpu.toml"
    text = run_file.read_text()
    run_file.write_text(text.replace("item_s = 0.0", "item_s = 0.001") + "\n[slurm]\ncomment = 'new'\n")
    told = slurmgpu("resubmit", "run", "--executor", "debug", cwd=folder, expect=0).stderr
    assert "slurmgpu.toml has changed since the run was planned: settings.item_s. The run keeps the values" in told
    assert Run.open(folder / "run").plan.settings["item_s"] == 0.0
    (folder / "run" / "shards" / "00000.h5").unlink()
    run_file.write_text(text)
    again = slurmgpu("resubmit", "run", "--executor", "debug", cwd=folder, expect=0)
    assert "has changed" not in again.stderr


def logs_of(folder):
    return b"".join(path.read_bytes() for path in (folder / "run" / "logs").iterdir())


@pytest.mark.parametrize("has_slots", [True, False])
def test_a_run_whose_submit_was_killed_is_merged_by_its_last_task(project, has_slots):
    folder = project(48, held_from=24, on_end="echo $SLURMGPU_STATE >> told.txt")
    process = start(*LOCAL, "--tasks", "2", cwd=folder, **AS_PROGRAMS)
    wait_until_held(folder, 3, 2)
    process.kill()
    process.wait()
    with run_lock(folder / "run", "merging"):
        let_go(folder)
        wait_until(lambda: logs_of(folder).count(b"its last task merges") == 2, "the tasks to wait for the lock")
        for slot in submissions(folder)[-1]["pids"][1:] if not has_slots else ():
            os.kill(slot, signal.SIGKILL)  # it takes no merge along
    wait_until(lambda: submissions(folder)[-1]["state"] == "ended", "the merge")
    check_rows(folder, 48)
    assert report(folder)["complete"]
    wait_until((folder / "told.txt").exists, "on_end")
    wait_until(lambda: not workers(folder) and not list((folder / "run" / "tasks").glob("*.alive")), "the tasks")
    assert (folder / "told.txt").read_text() == "complete\n"


def test_a_run_that_is_merged_by_force_while_it_is_at_work_goes_on_and_is_merged_at_its_end(project, slurmgpu):
    folder = project(48, held_from=24)
    process = start(*LOCAL, cwd=folder)
    wait_until_held(folder, 3)
    process.kill()
    process.wait()
    said = slurmgpu("merge", "--force", "run", cwd=folder, expect=3).stdout
    assert re.search(r"^local1_0.0 .* at work$", said, re.MULTILINE)
    assert (report(folder)["complete"], report(folder)["failures"]) == (False, {})
    status = read_status(Run.open(folder / "run"))
    assert (status["state"], status["failures"]) == ("running", {})
    let_go(folder)
    wait_until(lambda: report(folder)["complete"], "its own merge")
    check_rows(folder, 48)


def test_a_slot_that_is_killed_takes_its_task_along_before_the_run_is_submitted_again(project):
    folder = project(48, held_from=24, auto_resubmit=1, on_end="echo $SLURMGPU_STATE >> told.txt")
    process = start(*LOCAL, cwd=folder, **AS_PROGRAMS)
    wait_until_held(folder, 3)
    [slot] = submissions(folder)[-1]["pids"][1:]
    os.kill(slot, signal.SIGKILL)
    wait_until(lambda: len(submissions(folder)) == 2, "the next submission")
    assert records(folder)[0]["state"] == "ended"
    let_go(folder)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    check_rows(folder, 48)
    assert (folder / "told.txt").read_text() == "complete\n"
    assert (report(folder)["failures"], records(folder)[0]["deaths"]) == ({"preempted": 1}, [])
    assert "WARNING: incomplete; resubmitting, 1 of 1 times" in output
    assert len(published(folder)) == 6
    assert not workers(folder)


def test_a_task_that_outlives_its_slot_is_cancelled_and_waited_for(project, slurmgpu):
    folder = project(48, held_from=24)
    process = start(*LOCAL, cwd=folder, **AS_PROGRAMS)
    wait_until_held(folder, 3)
    [task], [slot] = holders(folder), submissions(folder)[-1]["pids"][1:]
    os.kill(task["pid"], signal.SIGSTOP)  # it does not heed signals for now
    os.kill(slot, signal.SIGKILL)
    wait_until(lambda: not is_there(slot), "the process that submitted to wait for the slot")
    assert "still running" in slurmgpu("resubmit", "run", "--json", cwd=folder, expect=2).stderr
    assert f"cancelled: processes {task['pid']}" in slurmgpu("cancel", "run", cwd=folder, expect=0).stdout
    assert not (folder / "run" / "merged.h5").exists()
    os.kill(task["pid"], signal.SIGCONT)
    output, _ = process.communicate(timeout=200)
    assert (process.returncode, report(folder)["failures"]) == (3, {"cancelled": 1}), output
    assert "WARNING: waiting up to 30 s for the end of 1 task whose slot" in output
    assert slurmgpu("cancel", "run", cwd=folder, expect=0).stdout == "no task of this run is alive.\n"
    assert not workers(folder)


@pytest.mark.nightly
def test_a_task_whose_slot_and_whose_submit_were_killed_merges_before_it_ends(project):
    folder = project(48, held_from=24)
    process = start(*LOCAL, cwd=folder)
    wait_until_held(folder, 3)
    [slot] = submissions(folder)[-1]["pids"][1:]
    process.kill()
    process.wait()
    os.kill(slot, signal.SIGKILL)
    wait_until(lambda: submissions(folder)[-1]["state"] == "ended", "the merge")
    assert (report(folder)["n_rows"], report(folder)["failures"]) == (24, {"preempted": 1})
    wait_until(lambda: not workers(folder), "the worker")


def test_ctrl_c_gives_the_shards_back_and_says_how_to_go_on(project, slurmgpu):
    folder = project(48, held_from=24)
    process = start(*LOCAL, "--tasks", "2", cwd=folder, **AS_PROGRAMS)
    wait_until_held(folder, 3, 2)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=200)
    let_go(folder)
    assert process.returncode == 130
    assert f"slurmgpu resubmit {folder / 'run'}" in output
    assert {record["failure"] for record in records(folder)} == {"cancelled"}
    done = {int(name[:5]) for name in published(folder)}
    assert {int(path.name) for path in (folder / "run" / "claims").glob("[0-9]*")} <= done  # none but of what is done
    slurmgpu("resubmit", "run", cwd=folder, expect=0)
    check_rows(folder, 48)


def test_a_local_run_is_cancelled_from_a_second_shell_and_a_second_submission_is_refused(project, slurmgpu):
    folder = project(40, held_from=16)
    process = start(*LOCAL, cwd=folder)
    wait_until_held(folder, 2)
    assert "already holds a run" in slurmgpu(*LOCAL, cwd=folder, expect=2).stderr
    assert "still running" in slurmgpu("resubmit", "run", cwd=folder, expect=2).stderr
    assert "still running" in slurmgpu("merge", "run", cwd=folder, expect=2).stderr
    status = json.loads(slurmgpu("status", "run", "--json", cwd=folder, expect=0).stdout)
    assert status["state"] == "running"
    assert status["n_items_done"] == 16
    path = folder / "run" / "submissions.jsonl"  # as if the clock had been set forward since
    path.write_text(re.sub(r'"time": [\d.]+', '"time": 1.0', path.read_text()))
    assert "cancelled" in slurmgpu("cancel", "run", cwd=folder, expect=0).stdout
    process.communicate(timeout=200)
    assert process.returncode == 3
    assert report(folder)["failures"] == {"cancelled": 1}
    assert records(folder)[0]["failure"] == "cancelled"


def test_a_copy_of_a_run_at_work_is_none_of_its_tasks_business(project, slurmgpu):
    folder = project(40, held_from=16)
    process = start(*LOCAL, cwd=folder)
    wait_until_held(folder, 2)
    # Not checked: a file that is renamed meanwhile is not there.
    subprocess.run(["cp", "-r", "run", "copy"], cwd=folder, check=False)
    assert "no task of this run is alive" in slurmgpu("cancel", "copy", cwd=folder, expect=0).stdout
    status = json.loads(slurmgpu("status", "copy", "--json", cwd=folder, expect=0).stdout)
    assert (status["state"], status["at_work"]) == ("ended", False)
    let_go(folder)
    assert "complete" in slurmgpu("resubmit", "copy", cwd=folder, expect=0).stdout
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    check_rows(folder, 40)
    (folder / "copy").rename(folder / "moved")
    status = json.loads(slurmgpu("status", "moved", "--json", cwd=folder, expect=0).stdout)
    assert status["state"] == "complete"


def test_a_workload_that_fails_for_every_item_ends_the_run_with_its_traceback(project, slurmgpu):
    folder = project(24, workload="Broken")
    done = slurmgpu(*LOCAL, cwd=folder, expect=3)
    outcome = report(folder)
    assert set(outcome["failures"]) == {"workload_error"}
    assert "KeyError: 'no such key'" in done.stdout
    assert published(folder) == []
    assert f"slurmgpu resubmit {folder / 'run'}" in done.stdout
    # The user mends the workload and goes on with the same run.
    source = (folder / "workloads.py").read_text().replace('item.data["no such key"]', "1.0")
    (folder / "workloads.py").write_text(source)
    slurmgpu("resubmit", "run", cwd=folder, expect=0)
    assert report(folder)["complete"]


def test_a_shard_that_waits_for_another_one_took_no_longer_for_that(project, slurmgpu):
    folder = project(24, workload="Broken")
    source = (folder / "workloads.py").read_text()
    works = 'time.sleep(0.1)\n        return [{"x": [1.0][item.index < 8]}'  # IndexError
    (folder / "workloads.py").write_text(source.replace('return [{"x": item.data["no such key"]}', works))
    slurmgpu(*LOCAL, cwd=folder, expect=0)
    published = sorted(entry[1:3] for entry in records(folder)[0]["published"])
    assert len(published) == 3
    for (started, seconds), (later, _) in itertools.pairwise(published):
        assert round(started + seconds, 2) <= round(later, 2)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is Python 3.11's")
def test_a_module_of_pythons_name_beside_the_run_file_does_no_harm(project, slurmgpu):
    folder = project(20)
    (folder / "numbers.py").write_text("raise RuntimeError('this is not the module that NumPy wants')\n")
    slurmgpu(*LOCAL, cwd=folder, expect=0, PYTHONSAFEPATH="1")
    check_rows(folder, 20)


def test_a_task_that_dies_before_its_first_word_is_in_the_report(project, slurmgpu, tmp_path):
    folder = project(20)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(failing.TASK_DIES.format(code=9))
    slurmgpu(*LOCAL, cwd=folder, expect=3, PYTHONPATH=f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}")
    [attempt] = report(folder)["attempts"]
    assert attempt["failure"] == "lost"
    assert "before it could write a record" in attempt["message"]


QUIT_OF_3_14 = """
import pdb
exec("def do_quit(self, arg):\\n    sys.exit(1)", vars(pdb))
pdb.Pdb.do_quit = pdb.Pdb.do_q = pdb.do_quit
"""


IN_A_CALL, IN_LOAD = "        rows = []\n", "        time.sleep(self.load_s)\n"


@pytest.mark.parametrize(
    ("where", "quitting"),
    [(IN_A_CALL, ""), (IN_LOAD, QUIT_OF_3_14), by_night(IN_A_CALL, QUIT_OF_3_14), by_night(IN_LOAD, "")],
)
def test_leaving_the_debugger_ends_the_run(project, where, quitting):
    folder = project(20)
    source = (folder / "workloads.py").read_text()
    (folder / "workloads.py").write_text(source.replace(where, f"{where}        breakpoint()\n") + quitting)
    process = start("submit", "--executor", "debug", "--gpus", "0", cwd=folder, stdin="q\n")
    output, _ = process.communicate("q\n", timeout=280)
    assert process.returncode == 130, output
    assert "slurmgpu resubmit" in output
    assert records(folder)[0]["failure"] == "cancelled"
    assert not list((folder / "run" / "claims").iterdir())


@pytest.mark.parametrize("typed", ["q\n", by_night("")])
def test_leaving_the_debugger_in_the_summary_is_no_error_of_the_workload(project, typed):
    folder = project(20)
    summary = "\n\ndef _look(self, merged):\n    breakpoint()\n    return {}\n\n\nRows.summarize = _look\n"
    (folder / "workloads.py").write_text((folder / "workloads.py").read_text() + summary)
    process = start("submit", "--executor", "debug", "--gpus", "0", cwd=folder, stdin=typed)
    output, _ = process.communicate(typed, timeout=280)
    assert process.returncode == 130, output
    assert "cannot summarize" not in output


def test_two_shells_that_resubmit_at_once_start_one_submission(project, slurmgpu):
    folder = project(16, held_from=0)
    slurmgpu("plan", "--gpus", "0", cwd=folder, expect=0)
    shells = [start("resubmit", "run", "--executor", "local", cwd=folder) for _ in range(3)]
    wait_until(lambda: sum(shell.poll() is not None for shell in shells) == 2, "two of them to be refused")
    let_go(folder)
    outputs = [shell.communicate(timeout=200)[0] for shell in shells]
    codes = [shell.returncode for shell in shells]
    assert sorted(codes) == [0, 2, 2], outputs
    assert [line["submission"] for line in submissions(folder)] == [1]
    assert {record["submission"] for record in records(folder)} == {1}


def test_a_fault_of_slurmgpus_own_is_blamed_on_no_item(project, slurmgpu):
    folder = project(20, workload="Unloadable")
    source = (folder / "workloads.py").read_text()
    fault = "import slurmgpu.worker.shard_claimer; slurmgpu.worker.shard_claimer.Claimer.next = None"
    (folder / "workloads.py").write_text(source.replace("raise ImportError(\"No module named 'torch'\")", fault))
    done = slurmgpu(*LOCAL, cwd=folder, expect=3)
    [record] = records(folder)
    assert (record["failure"], record["deaths"]) == ("crash", [])
    assert "'NoneType' object is not callable" in done.stdout
    assert published(folder) == []


def test_a_damaged_history_costs_no_row(project, slurmgpu):
    folder = project(20)
    slurmgpu("plan", "--gpus", "0", cwd=folder, expect=0)
    (folder / "run" / "claims" / "00000.history").write_text("{")
    slurmgpu("resubmit", "run", "--executor", "local", cwd=folder, expect=0)
    check_rows(folder, 20)
    assert "00000.history is damaged" in (folder / "run" / "logs" / "local1_0.0.log").read_text()


def test_a_workload_that_cannot_load_is_not_tried_again(project, slurmgpu):
    folder = project(20, workload="Unloadable", auto_resubmit=3)
    done = slurmgpu(*LOCAL, cwd=folder, expect=3)
    assert "No module named 'torch'" in done.stdout
    assert len(records(folder)) == 1
    assert records(folder)[0]["failure"] == "workload_error"


def test_a_workload_that_asks_for_a_gpu_where_none_was_asked_for_blames_no_node(project, slurmgpu):
    folder = project(20, workload="Unloadable")
    source = (folder / "workloads.py").read_text()
    raised = 'raise RuntimeError("Found no NVIDIA driver on your system.")'
    (folder / "workloads.py").write_text(source.replace("raise ImportError(\"No module named 'torch'\")", raised))
    slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=3)
    [record] = records(folder)
    assert (record["failure"], record["bad_node"]) == ("workload_error", None)


def test_a_sentence_that_loading_refuses_with_is_reported_without_a_traceback(project, slurmgpu):
    folder = project(20, workload="Unloadable")
    source = (folder / "workloads.py").read_text()
    raised = 'from slurmgpu.errors import SlurmGPUError; raise SlurmGPUError("mend the model") from KeyError("why")'
    (folder / "workloads.py").write_text(source.replace("raise ImportError(\"No module named 'torch'\")", raised))
    done = slurmgpu(*LOCAL, cwd=folder, expect=3)
    [record] = records(folder)
    assert (record["failure"], record["message"], record["traceback"]) == ("workload_error", "mend the model", "")
    assert "Traceback" not in done.stdout
    logs = [path.read_bytes() for path in (folder / "run" / "logs").iterdir()]
    assert b"KeyError: 'why'" in b"".join(logs)


def test_a_shard_of_bad_items_does_not_hold_up_the_others(project, slurmgpu):
    # The first shard fails as a broken workload would; the second one shows that it is the items.
    folder = project(40, settings={"faults": {str(index): "exception" for index in range(8)}})
    slurmgpu(*DEBUG, cwd=folder, expect=0)
    check_rows(folder, 40, errors=set(range(8)))


def test_a_large_shard_of_bad_items_is_left_until_another_has_rows_and_is_computed_then(project, slurmgpu):
    folder = project(240, settings={"faults": {str(index): "exception" for index in range(120)}}, shard_items=120)
    done = slurmgpu(*DEBUG, cwd=folder, expect=0)
    check_rows(folder, 240, errors=set(range(120)))
    assert "shard 0: its other items wait until another shard shows whether all items fail" in done.stderr


def test_bad_items_at_the_beginning_of_small_shards_do_not_end_the_run(project, slurmgpu):
    folder = project(200, settings={"faults": {str(index): "exception" for index in range(12)}}, shard_items=1)
    slurmgpu(*DEBUG, cwd=folder, expect=0)
    check_rows(folder, 200, errors=set(range(12)))


def test_a_few_items_that_all_fail_have_their_errors(project, slurmgpu):
    folder = project(3, workload="Broken")
    slurmgpu(*DEBUG, cwd=folder, expect=0)
    assert [error["index"] for error in report(folder)["errors"]] == [0, 1, 2]


def test_failed_items_alone_are_computed_again_when_they_are_asked_for(project, slurmgpu):
    folder = project(40, settings={"faults": {"17": "exception", "33": "segfault"}})
    slurmgpu(*LOCAL, cwd=folder, expect=0)
    assert "recomputes 2 failed items" in slurmgpu("resubmit", "run", cwd=folder, expect=2).stderr
    failed = sorted(each for record in records(folder) for each in record["failed"])
    assert failed == [[2, {"item_error": 1}], [4, {"crash": 1}]]
    said = "item 33: crash: the worker died by SIGSEGV"
    assert said in [record["last_failed"] for record in records(folder)]
    kept = shard_times(folder)
    source = (
        (folder / "workloads.py").read_text().replace("if fault := self.faults.get(item.index)", "if fault := None")
    )
    (folder / "workloads.py").write_text(source)
    slurmgpu("resubmit", "--failed", "run", cwd=folder, expect=0)
    check_rows(folder, 40)
    again = shard_times(folder)
    assert {name for name in again if kept.get(name) != again[name]} == {"00002.r1.h5", "00004.r1.h5"}
    assert sum(record["n_items"] for record in records(folder) if record["submission"] == 2) == 2
    assert report(folder)["ledger"]["repeated"] == 0
    refused = slurmgpu("resubmit", "--failed", "run", cwd=folder, expect=2).stderr
    assert "has every shard, and no item failed" in refused
    assert f"submit again with --extend {folder / 'run'}" in refused
    assert slurmgpu("resubmit", "run", cwd=folder, expect=2).stderr == refused
    assert read_status(Run.open(folder / "run"))["n_errors"] == 0


def test_a_damaged_shard_whose_failed_items_are_computed_again_is_computed_whole(project, slurmgpu):
    folder = project(24, settings={"faults": {"3": "exception", "17": "exception"}})
    slurmgpu(*DEBUG, cwd=folder, expect=0)
    path = folder / "run" / "shards" / "00000.h5"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (folder / "run" / "merged.h5").unlink()
    source = (folder / "workloads.py").read_text()
    (folder / "workloads.py").write_text(source.replace("if fault := self.faults.get(item.index)", "if fault := None"))
    slurmgpu("resubmit", "--failed", "run", cwd=folder, expect=0)
    check_rows(folder, 24)
    assert sum(record["n_items"] for record in records(folder) if record["submission"] == 2) == 8 + 1


def test_malformed_lines_are_their_items_errors(project, slurmgpu):
    folder = project(1000)
    lines = (folder / "items.jsonl").read_text().splitlines()
    lines[531] = '{"text": '
    (folder / "items.jsonl").write_text("\n".join(lines) + "\n")
    done = slurmgpu(*DEBUG, cwd=folder)
    if done.returncode == 2:  # the sample may meet the line at planning
        assert "line 532" in done.stderr
    else:
        check_rows(folder, 1000, errors={531})
        assert "line 532" in report(folder)["errors"][0]["message"]


def test_an_input_that_changed_since_planning_is_refused(project, slurmgpu):
    folder = project(40)
    slurmgpu("plan", "--gpus", "0", cwd=folder, expect=0)
    with open(folder / "items.jsonl", "a") as file:
        file.write('{"text": "one more"}\n')
    refused = slurmgpu("resubmit", "run", "--executor", "local", cwd=folder, expect=2).stderr
    assert "The input has changed since the run was planned" in refused  # before anything is queued
    assert not (folder / "run" / "submissions.jsonl").exists()
    alone = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "4e9"}
    slurmgpu("task", "run", cwd=folder, expect=1, **alone)  # a task that was queued before
    assert [record["failure"] for record in records(folder)] == ["input_error"]


@pytest.mark.parametrize("damage", ["flip", by_night("truncate")])
def test_a_damaged_shard_is_reported_and_computed_again(copied, slurmgpu, damage):
    folder, before = copied, datasets(copied)
    path = folder / "run" / "shards" / "00002.h5"
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    else:
        del content[-100:]
    path.write_bytes(content)
    (folder / "run" / "merged.h5").unlink()  # which would give its rows
    done = slurmgpu("merge", "run", cwd=folder, expect=3)
    assert "damaged" in done.stdout
    [hole] = report(folder)["missing"]
    assert (hole["shard"], hole["start"], hole["stop"]) == (2, 16, 24)
    kept = shard_times(folder)
    slurmgpu("resubmit", "run", cwd=folder, expect=0)
    assert datasets(folder) == before
    assert kept.items() <= shard_times(folder).items()


def test_a_shard_of_another_plan_is_not_merged(project, copied, slurmgpu):
    other = project(100, seed=1)
    slurmgpu(*DEBUG, cwd=other, expect=0)
    (other / "run" / "shards" / "00001.h5").replace(copied / "run" / "shards" / "00001.h5")
    (copied / "run" / "merged.h5").unlink()
    slurmgpu("merge", "run", cwd=copied, expect=3)
    assert "plan" in report(copied)["missing"][0]["damaged"]


def test_a_flipped_bit_in_the_merged_file_is_found_and_mended_by_a_merge(copied, slurmgpu):
    folder = copied
    slurmgpu("merge", "run", "--verify", cwd=folder, expect=0)
    path = folder / "run" / "merged.h5"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert slurmgpu("merge", "run", "--verify", cwd=folder, expect=1).stderr
    for target in ("out.csv", "-"):
        done = slurmgpu("export", "run", "--format", "csv", "-o", target, cwd=folder, expect=2)
        assert done.stdout == ""
        assert "merged.h5 has changed since it was written: the checksum of" in done.stderr
        assert f"`slurmgpu merge {folder}/run` rewrites merged.h5" in done.stderr
    assert not list(folder.glob("*out.csv*"))
    slurmgpu("merge", "run", cwd=folder, expect=0)
    slurmgpu("export", "run", "-o", "out.csv", cwd=folder, expect=0)


def test_random_kills_of_workers_and_tasks_change_no_byte(project, slurmgpu, complete, tmp_path):
    # In a shard each: an item whose worker is killed twice would be blamed for it.
    faults = {"3": "task_killed_soon", **{str(index): "killed_soon" for index in range(14, 90, 11)}}
    (tmp_path / "marks").mkdir()
    folder = project(100, settings={"item_s": 0.02, "marks": str(tmp_path / "marks"), "faults": faults})
    slurmgpu(*LOCAL, "--tasks", "2", cwd=folder, expect=0)
    assert {path.name for path in (tmp_path / "marks").glob("killed*")} == {f"killed{index}" for index in faults}
    assert report(folder)["failures"] == {"lost": 1}
    assert sum(len(record["deaths"]) for record in records(folder)) > 3
    assert datasets(folder) == datasets(complete)


def test_a_dry_run_shows_no_secret_and_says_so_and_the_run_has_it(project, slurmgpu, capsys):
    key, token = "sk-proj-" + "a1" * 16, "hf_" + "b" * 34
    folder = project(8, settings={"marks": key}, on_end=f"HF_TOKEN={token} true")
    (folder / key).mkdir()
    argv = ("submit", "--executor", "debug", "--gpus", "0")
    shown = slurmgpu(*argv, "--dry-run", cwd=folder, expect=0).stdout
    assert key not in shown
    assert token not in shown
    assert "values that look like secrets are shown as •••" in shown
    show_scripts({"array": f"export HF_TOKEN={token}\n"})
    assert "export HF_TOKEN=•••" in capsys.readouterr().out
    slurmgpu(*argv, cwd=folder, expect=0)
    plan = json.loads((folder / "run" / "run.json").read_text())
    private = json.loads((folder / "run" / "private.json").read_text())
    assert (plan["settings"]["marks"], private["plan"]["on_end"]) == (key, f"HF_TOKEN={token} true")
    assert "shown as" not in slurmgpu(*argv, "--dry-run", cwd=project(8, run_dir="other"), expect=0).stdout


def test_gpus_that_this_machine_lacks_are_refused_before_anything_is_written(project, slurmgpu):
    folder = project(20)
    done = slurmgpu(
        "submit", "--executor", "local", "--gpus", "2", "--array", cwd=folder, expect=2, CUDA_VISIBLE_DEVICES="0"
    )
    assert "--gpus" in done.stderr
    assert not (folder / "run").exists()


def test_an_allocated_gpu_that_cuda_cannot_use_is_a_fault_and_never_the_cpu(project, slurmgpu):
    folder = project(20)
    done = slurmgpu("submit", "--executor", "local", "--gpus", "1", cwd=folder, CUDA_VISIBLE_DEVICES="0")
    if done.returncode == 0:
        pytest.skip("this machine has a GPU that works")
    assert report(folder)["failures"] == {"gpu_fault": 1}
    assert not list((folder / "run" / "claims").iterdir())


def test_without_slurm_a_dry_run_shows_the_plan_and_a_submission_says_what_is_missing(project, slurmgpu):
    folder = project(20)
    done = slurmgpu("submit", "--dry-run", cwd=folder, expect=0, PATH="/nowhere")
    assert "20 items" in done.stdout
    assert "--executor local" in done.stdout
    done = slurmgpu("submit", cwd=folder, expect=2, PATH="/nowhere")
    assert "This machine has no sbatch" in done.stderr
    assert not (folder / "run").exists()


def test_each_slot_gets_gpus_of_its_own(project, slurmgpu):
    folder = project(16)
    argv = ("submit", "--executor", "local", "--gpus", "4", "--gpus-per-task", "2", "--array", "--device", "cpu")
    slurmgpu(*argv, cwd=folder, expect=0, CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert [record["gpus"] for record in records(folder)] == [["0", "1"], ["2", "3"]]


def test_export_writes_every_row(slurmgpu, faulty):
    folder = faulty
    said = slurmgpu("export", "run", "-o", "rows.jsonl", cwd=folder, expect=0).stderr
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(40))
    n_failed = sum(row["error"] is not None for row in rows)
    assert f"{n_failed} of the rows belong to failed items: the column error says why.\n" in said
    assert rows[4]["shout"] == "ITEM 4 OF MANY"
    assert rows[3]["error"] == "item_error: not this one"
    assert "csv" in slurmgpu("export", "run", "-o", "rows.xls", cwd=folder, expect=2).stderr
    streamed = slurmgpu("export", "run", "--format", "jsonl", "-o", "-", cwd=folder, expect=0)
    assert streamed.stdout == (folder / "rows.jsonl").read_text()
    assert slurmgpu("export", "run", "--format", "csv", "-o", "-", cwd=folder, expect=0).stdout.startswith("index,")
    assert not (folder / "-").exists()
    said = slurmgpu("export", "run", "--format", "parquet", "-o", "-", cwd=folder, expect=2).stderr
    assert "Format 'parquet' cannot be written to a stream, only to a file; a stream takes jsonl, csv or tsv." in said


def test_the_merged_file_of_a_run_is_the_input_of_the_next(project, slurmgpu, complete):
    folder = project(0)
    text = (folder / "slurmgpu.toml").read_text().replace("items.jsonl", str(complete / "run" / "merged.h5"))
    (folder / "next.toml").write_text(text.replace("workloads.py:Rows", "next.py:Again"))
    (folder / "next.py").write_text(
        "from slurmgpu import Text\n\n\nclass Again:\n    columns = {'text': Text()}\n    batch_size = 4\n\n"
        "    def load(self, task):\n        pass\n\n"
        "    def __call__(self, items):\n        return [{'text': item.data['shout'].lower()} for item in items]\n"
    )
    slurmgpu("submit", "next.toml", *DEBUG[1:], cwd=folder, expect=0)
    slurmgpu("export", "run", "-o", "rows.jsonl", cwd=folder, expect=0)
    texts = [json.loads(line)["text"] for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert texts == [f"item {i} of many" for i in range(100)]


def test_rows_that_failed_in_an_earlier_run_fail_in_the_next(project, slurmgpu):
    """Their values are blanks, which would give plausible rows."""
    folder = project(8, settings={"faults": {"3": "item_error"}})
    slurmgpu(*DEBUG, cwd=folder, expect=0)
    text = (folder / "slurmgpu.toml").read_text().partition("[settings]")[0].replace("items.jsonl", "run/merged.h5")
    text = text.replace("workloads.py:Rows", "next.py:Again").replace('"run"', '"next"')
    (folder / "next.toml").write_text(f'keep = ["shout"]\n{text}')
    (folder / "next.py").write_text(
        "from slurmgpu import Array\n\n\nclass Again:\n    columns = {'n': Array('int64')}\n    batch_size = 4\n\n"
        "    def __call__(self, items):\n        return [{'n': len(item.data['shout'])} for item in items]\n"
    )
    done = slurmgpu("submit", "next.toml", *DEBUG[1:], cwd=folder, expect=0)
    with package.open(folder / "next" / "merged.h5") as merged:
        assert merged.errors == {3: "input_error: it is a failed row of an earlier run: item_error: not this one"}
        assert merged["n"][:].tolist() == [0 if i == 3 else len(f"item {i} of many") for i in range(8)]
        assert [text is None for text in merged["shout"]] == [i == 3 for i in range(8)]
    assert "\nthe same input fails again: correct it, or recompute" in done.stdout
    assert "resubmit" not in done.stdout
    plan = json.loads((folder / "next" / "run.json").read_text())
    plan["input"]["files"][0]["size_bytes"] = PROMISED
    (folder / "next" / "run.json").write_text(json.dumps(plan))
    told = slurmgpu("report", "next", cwd=folder, expect=0).stdout
    assert f"(--after), recompute those of this one with: slurmgpu resubmit {folder}/next --failed" in told


def test_text_in_brackets_and_colons_is_shown_as_it_is(project, slurmgpu):
    folder = project(20, settings={"faults": {"3": "item_error"}})
    source = (folder / "workloads.py").read_text().replace('"not this one"', '"[INST] 3:100:7 [/INST]"')
    (folder / "workloads.py").write_text(source)
    done = slurmgpu("submit", "--dry-run", "--executor", "debug", "--set", "marks=a [/b] c", cwd=folder, expect=0)
    assert "a [/b] c" in done.stdout
    done = slurmgpu(*DEBUG, cwd=folder, expect=0)
    assert re.search(r"item 3 \(.*\): item_error: \[INST\] 3:100:7 \[/INST\]", done.stdout)


def test_paths_that_cannot_be_written_get_a_sentence(project, slurmgpu, complete):
    folder = project(20)
    copy_run(complete / "run", folder / "run")
    for argv in (
        ("export", "run", "-o", "nowhere/rows.csv"),
        ("export", "run", "-o", "run", "--format", "csv"),
        ("submit", "--run-dir", "items.jsonl/run"),
        ("init", "-o", "nowhere/slurmgpu.toml"),
    ):
        done = slurmgpu(*argv, cwd=folder, expect=2)
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr
        if "nowhere/rows.csv" in argv:
            assert done.stderr.startswith("error: nowhere/rows.csv: No such file")


def test_a_submission_that_came_to_nothing_leaves_nothing_and_a_run_never_submitted_is_resumed(copied, slurmgpu):
    folder = copied
    (folder / "run" / "submissions.jsonl").unlink()
    for path in (folder / "run" / "shards").glob("0000[01].h5"):
        path.unlink()
    argv = ("resubmit", "run", "--executor", "local", "--gpus", "0")
    slurmgpu(*argv, cwd=folder, expect=0)
    check_rows(folder, 100)


def test_torn_lines_and_records_cost_detail_only(copied, slurmgpu):
    folder = copied
    with open(folder / "run" / "submissions.jsonl", "a") as file:
        file.write('{"submission": 1, "st')
    (folder / "run" / "tasks" / "local1_9.0.json").touch()
    (folder / "run" / "shards" / "00001.h5").unlink()
    slurmgpu("status", "run", cwd=folder, expect=0)
    slurmgpu("resubmit", "run", cwd=folder, expect=0)
    check_rows(folder, 100)


def test_what_is_printed_before_the_worker_takes_its_pipe_does_no_harm(project, slurmgpu, tmp_path):
    folder = project(20)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('hello')\nprint('{\"a\": 1}')\n")
    slurmgpu(*LOCAL, cwd=folder, expect=0, PYTHONPATH=f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}")
    check_rows(folder, 20)


def test_a_claim_that_its_worker_did_not_live_to_report_is_no_hole(copied):
    run = Run.open(copied / "run")
    run.shard_path(2).unlink()
    attempt = Attempt("local2", 0, submission=2)
    run.claims.take(2, Claim(attempt.task_name, attempt.name, "here", 1))
    assert Task(run, attempt).run_worker() == 0
    assert len(published(copied)) == 13
    assert not run.claims.numbers() - run.published()


def test_a_shard_that_a_worker_claimed_and_did_not_live_to_report_is_given_back(tmp_path, monkeypatch):
    run = planned_run(tmp_path / "run", n_items=500, batch_size=1, shard_items=1)
    for shard in range(500):
        name = "7_0" if shard in (250, 251) else f"7_{shard + 1}"
        run.claims.take(shard, Claim(name, f"{name}.0", "here", 1))
    task = Task(run, Attempt("7", 0))
    monkeypatch.setattr(task, "_guarded", lambda work: task._stopped(signal.SIGTERM))
    task.record["shard"] = 249
    task._leases.add(251)  # of 250 its worker has not told
    assert task.run_worker() == 75
    assert set(range(500)) - run.claims.numbers() == {250, 251}


def test_a_requeued_task_drops_what_it_held_before_among_many_claims(tmp_path):
    run = planned_run(tmp_path / "run", n_items=500, batch_size=1, shard_items=1)
    for shard in range(500):
        name = "7_0" if shard in (250, 251) else f"7_{shard + 1}"
        run.claims.take(shard, Claim(name, f"{name}.0", "here", 1))
    before = AttemptWriter(run, Attempt("7", 0))
    before.record["shard"] = 248  # written before the last ones were claimed
    before.write()
    Task(run, Attempt("7", 0))._leases.drop_earlier()
    assert len(run.claims.numbers()) == 500
    Task(run, Attempt("7", 0, restart=1))._leases.drop_earlier()
    assert set(range(500)) - run.claims.numbers() == {250, 251}


def test_a_disk_that_was_full_for_a_moment_ends_no_task(project, slurmgpu, tmp_path):
    (tmp_path / "site").mkdir()
    once = "once = {'link': 1, 'open': 1}\nERRORS = [errno.EDQUOT]\n"
    site = failing.SITE.replace("chance = random", once + "chance = random")
    site = site.replace("if chance.random() < CHANCE:", "if once.pop(real.__name__, 0):")
    (tmp_path / "site" / "sitecustomize.py").write_text(site.replace("chance.random() < 0.5", "False"))
    folder = project(20)
    path = f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}"
    slurmgpu(*LOCAL, cwd=folder, expect=0, PYTHONPATH=path)
    check_rows(folder, 20)
    assert "injected: link" in (folder / "run" / "logs" / "local1_0.0.log").read_text()


def test_no_task_dies_of_operations_that_fail_or_whose_replies_are_lost(project, slurmgpu, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(failing.SITE)
    (tmp_path / "marks").mkdir()
    folder = project(200, settings={"marks": str(tmp_path / "marks"), "faults": {"100": "segfault"}})
    path = f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}"
    slurmgpu(*LOCAL, "--tasks", "2", cwd=folder, PYTHONPATH=path)
    check_rows(folder, 200, errors=[100])
    assert [(record["failure"], record["message"]) for record in records(folder)] == [(None, "")] * 2
    # Leases are four seconds here, which a busy machine may let pass: then some items are computed twice.
    once = [len(mark.read_text().splitlines()) for mark in (tmp_path / "marks").iterdir()]
    assert sum(once) - len(once) <= 100
    logs = "".join(path.read_text() for path in (folder / "run" / "logs").glob("local*.log"))
    assert logs.count("injected") > 3


def test_a_node_that_has_lost_the_file_system_for_good_is_named_and_its_shards_are_computed_elsewhere(
    project, slurmgpu, tmp_path, monkeypatch
):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(failing.SITE)
    folder = project(20, lease_s=1.0)
    slurmgpu("plan", "--gpus", "1", "--device", "cpu", cwd=folder, expect=0)
    run = Run.open(folder / "run")
    with monkeypatch.context() as patched:  # in its worker
        patched.setenv("PYTHONPATH", str(tmp_path / "site"))
        patched.setenv("CHANCE", "1")
        patched.setattr(Attempt, "uses_gpus", False)
        task = Task(run, Attempt("local1", 0))
        assert task.run_worker() == 74
    [record] = records(folder)
    assert (record["failure"], record["bad_node"]) == ("file_system", record["node"])
    assert record["message"].startswith(f"{record['node']} has lost a file system: ")
    slurmgpu("resubmit", "run", "--executor", "local", "--gpus", "0", cwd=folder, expect=0)
    check_rows(folder, 20)


def test_input_that_cannot_be_read_for_a_moment_is_read_again(project, slurmgpu, tmp_path):
    (tmp_path / "site").mkdir()
    site = failing.SITE.replace("/run/shards/", "/items.jsonl")
    site = site.replace("random.Random(os.getpid())", "random.Random(0)")  # the fourth call is the first to fail
    (tmp_path / "site" / "sitecustomize.py").write_text(site)
    folder = project(80)
    path = f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}"
    slurmgpu(*LOCAL, cwd=folder, expect=0, PYTHONPATH=path, CHANCE="0.3")
    check_rows(folder, 80)
    assert "items.jsonl" in (folder / "run" / "logs" / "local1_0.0.log").read_text()


def test_the_python_interface_does_what_the_command_line_does(project, monkeypatch):
    import slurmgpu

    folder = project(20, settings={"faults": {"3": "item_error"}})
    monkeypatch.chdir(folder)
    run = slurmgpu.submit("slurmgpu.toml", gpus=0, executor="debug", settings={"faults": {}})
    assert run.report()["complete"]
    assert run.status()["state"] == "complete"
    with slurmgpu.open(run.folder / "merged.h5") as merged:
        assert len(merged["shout"][:]) == 20
        assert not merged.errors


def test_a_daemon_that_the_workload_starts_does_not_hold_up_the_task(project, slurmgpu):
    folder = project(8)
    source = (folder / "workloads.py").read_text()
    daemon = (
        "        if os.fork() == 0:\n            os.setsid()\n"
        "            if os.fork() == 0:\n                open('daemon', 'w').write(str(os.getpid()))\n"
        "                time.sleep(600)\n            os._exit(0)\n"
        "        while not Path('daemon').exists(): time.sleep(0.01)\n"
    )
    (folder / "workloads.py").write_text(
        source.replace("        self.task = task\n", f"        self.task = task\n{daemon}")
    )
    try:
        slurmgpu(*LOCAL, cwd=folder, expect=0)
        check_rows(folder, 8)
        assert is_there(int((folder / "daemon").read_text()))  # it has neither held the task nor ended with it
    finally:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((folder / "daemon").read_text()), signal.SIGKILL)


def contents(folder):
    """The files of a folder by their paths."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_dry_run_of_a_resubmission_says_what_it_computes_and_changes_no_file(project, slurmgpu):
    folder = project(40, settings={"faults": {"17": "exception"}})
    slurmgpu(*LOCAL, cwd=folder, expect=0)
    (folder / "run" / "shards" / "00004.h5").unlink()
    (folder / "run" / "merged.h5").unlink()
    (folder / "workloads.py").write_text((folder / "workloads.py").read_text() + "\nEDITED = 1\n")
    before = contents(folder / "run")
    said = slurmgpu("resubmit", "run", "--failed", "--dry-run", cwd=folder, expect=0).stdout
    assert re.search(r"computes +8 missing items in 1 shard and 1 item again in 1 shard\s", said)
    assert "1 failed item is recomputed, in 1 shard" in said
    assert "The code has changed since submission 1" in said
    value = json.loads(slurmgpu("resubmit", "run", "--dry-run", "--json", cwd=folder, expect=0).stdout)
    assert (value["n_missing_items"], value["n_items_again"], value["submission"]["submission"]) == (8, 0, 2)
    assert contents(folder / "run") == before


def test_no_rows_of_a_shard_are_in_memory_while_the_next_is_computed(project, monkeypatch):
    compute, computed, alive = Computer.compute, [], []

    def remembering(self, *args):
        alive.append([each() for each in computed if each() is not None])
        done = compute(self, *args)
        computed.append(weakref.ref(done))
        return done

    monkeypatch.setattr(Computer, "compute", remembering)
    package.submit(project(24) / "slurmgpu.toml", executor="debug", gpus=0)
    assert alive == [[], [], []]
