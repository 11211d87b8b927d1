"""Slots, tasks and their first workers are forks: they find what programs find, and none outlives its purpose."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission

import slurmgpu
from slurmgpu.executors import job_entry
from slurmgpu.plan.planner import draft_run
from slurmgpu.run.creation import create_run
from slurmgpu.run.records import Attempt
from slurmgpu.task.spare_worker import fork_worker
from slurmgpu.task.worker_process import EXIT_STOPPED
from slurmgpu.util.forks import Fork
from slurmgpu.util.pids import is_there
from slurmgpu.util.pipes import EXIT_ABANDONED
from slurmgpu.util.process_tree import living
from tests.support.runs import has_ended, planned_run, records, wait_until, workers

HERE = {"executor": "local", "gpus": 0, "overrides": {"html": False}}


def test_a_worker_that_is_a_fork_finds_what_one_that_was_started_finds(tmp_path):
    """The first worker of a map is a fork of a fork of a fork; the one after a crash is a program."""
    mark = tmp_path / "died"

    def surroundings(item) -> dict:
        import logging
        import os
        import resource
        import signal
        import sys
        import threading
        from pathlib import Path

        import numpy as np

        if item == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines())
        files = [str(path.readlink()).split(":")[0] for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        found = {
            "environ": {name: value for name, value in os.environ.items() if name != "_"},
            "path": sys.path,
            "argv": sys.argv[:2],
            "flags": [getattr(sys.flags, "safe_path", None), sys.flags.no_user_site],
            "main": sys.modules["__main__"].__spec__.name,
            "signals": {str(number): str(signal.getsignal(number)).split(" at ")[0] for number in range(1, 32)},
            "masks": [status[name] for name in ("SigIgn", "SigBlk", "ShdPnd", "SigPnd", "Umask")],
            "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
            "folder": str(Path.cwd()),
            "files": sorted(files),
            "streams": [[each.encoding, each.errors, each.write_through] for each in (sys.stdout, sys.stderr)],
            "limits": [resource.getrlimit(limit) for limit in (resource.RLIMIT_AS, resource.RLIMIT_CORE)],
            "levels": [logging.getLogger().level, len(logging.getLogger().handlers)],
            "threads": threading.active_count(),  # of OpenBLAS there are some once a fork needs them
        }
        modules = sorted({name.partition(".")[0] for name in sys.modules})
        return {"seen": found, "own": [os.getpid(), np.random.random()], "modules": modules}

    run = slurmgpu.map(
        surroundings,
        range(3),
        columns=dict.fromkeys(("seen", "own", "modules"), "json"),
        run_dir=tmp_path / "run",
        **HERE,
    )
    rows = list(run.rows())
    run.wait()
    assert [row.error for row in rows] == [None] * 3
    assert [len(record["deaths"]) for record in run.run.attempts()] == [1]
    by_fork, by_program = rows[0], rows[2]
    assert by_fork["seen"] == by_program["seen"]
    assert by_fork["seen"]["main"] == "slurmgpu.worker.main"
    assert not set(by_fork["own"]) & set(by_program["own"])
    stay = {"_asyncio", "_socket", "_ssl", "asyncio", "socket", "ssl"}
    assert {*by_fork["modules"]} - {*by_program["modules"]} - stay == set()


def test_a_function_catches_the_exceptions_of_asyncio(tmp_path):
    def wait_for(timeout_s) -> str:
        import asyncio

        async def wait():
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            with contextlib.suppress(asyncio.InvalidStateError):
                future.set_result(None)
            try:
                await asyncio.wait_for(asyncio.sleep(60), timeout_s)
            except asyncio.TimeoutError:
                return "timed out"

        return asyncio.run(wait())

    run = slurmgpu.map(wait_for, [0.01], run_dir=tmp_path / "run", wait=True, **HERE)
    assert list(run["result"]) == ["timed out"]


SCRIPT = """
import mine, slurmgpu
run = slurmgpu.map(mine.triple, [1, 2], executor="local", gpus=0, overrides={"html": False}, wait=True)
print([row["result"] for row in run.rows()])
"""


MINE = """
import importlib, random, resource
def triple(n) -> int:
    assert 0 <= random.random() < 1
    return resource.FACTOR * importlib.import_module("calen" + "dar").ONE * n
"""


def test_a_module_of_the_users_goes_before_one_of_pythons_that_only_a_fork_has_imported(tmp_path):
    (tmp_path / "resource.py").write_text("FACTOR = 3\n")
    (tmp_path / "calendar.py").write_text("ONE = 1\n")
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "[3, 6]\n", done.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is Python 3.11's")
def test_a_module_that_every_worker_has_imported_goes_before_one_of_the_users(project, slurmgpu):
    folder = project(16)
    (folder / "random.py").write_text("no = 'uniform'\n")
    source = (folder / "workloads.py").read_text()
    (folder / "workloads.py").write_text(f"import random\nassert random.uniform\n{source}")
    slurmgpu("submit", "--executor", "local", "--gpus", "0", cwd=folder, expect=0)
    assert json.loads((folder / "run" / "report.json").read_text())["complete"]


def test_a_run_that_is_started_without_standard_streams_is_computed(project):
    folder = project(16)
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "slurmgpu"]
    done = subprocess.run([*closed, "submit", "--executor", "local", "--gpus", "0"], cwd=folder)
    report = json.loads((folder / "run" / "report.json").read_text())
    assert (done.returncode, report["complete"], report["worker_deaths"]) == (0, True, {})
    assert (folder / "run" / "logs" / "local1_0.0.log").read_text()


SPARE = """
import os, sys, time
from pathlib import Path
from slurmgpu.run.directory import Run
from slurmgpu.run.records import Attempt
from slurmgpu.task.spare_worker import fork_worker

spare = fork_worker(Run.open(Path(sys.argv[1])), Attempt("7", 0))
print(spare._started.process.pid, flush=True)
sys.stdin.readline()
spare.drop()
print(spare._started.process.returncode, flush=True)
"""


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_worker_without_work_ends_with_its_task_and_before_it(tmp_path, is_killed):
    run = planned_run(tmp_path / "run")
    command = [sys.executable, "-c", SPARE, str(run.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as task:
        pid = int(task.stdout.readline())
        if is_killed:
            task.kill()
        else:
            task.stdin.write("\n")
            task.stdin.flush()
            assert task.stdout.readline() == f"{-signal.SIGKILL}\n"
        wait_until(lambda: not is_there(pid), "the end of the worker")


ABANDONED = """
import subprocess, sys, threading, time
from slurmgpu.util.pipes import listen_on_stdin

tidies = "import sys, time; print(flush=True); sys.stdin.read(); time.sleep(0.3); open(sys.argv[1], 'w')"
started = [
    subprocess.Popen([sys.executable, "-c", tidies, sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE),
    subprocess.Popen(["sh", "-c", "while true; do sleep 600; done"]),
    subprocess.Popen(["sleep", "600"], start_new_session=True),
]
listen_on_stdin(threading.Event(), print)
started[0].stdout.readline()  # until it listens
print(*(each.pid for each in started), flush=True)
time.sleep(600)
"""


def test_what_a_worker_has_started_ends_with_it_when_its_task_is_killed(tmp_path):
    command = [sys.executable, "-c", ABANDONED, str(tmp_path / "tidied")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as worker:
        pids = [int(pid) for pid in worker.stdout.readline().split()]
        assert all(map(is_there, pids))
        worker.stdin.close()  # as the kernel does where the task is killed
        assert worker.wait(200) == EXIT_ABANDONED
        wait_until(lambda: all(map(has_ended, pids)) and not living(worker.pid), "the end of what it has started")
    assert (tmp_path / "tidied").exists()  # what ends by itself had the time for it


SLOTS = """
import sys
from slurmgpu.executors import slot

if (work := slot.fork_slots(2)) is not None:
    work()
print(*(each.pid for each in slot._waiting), flush=True)
sys.stdin.readline()
"""


def test_a_slot_that_waits_does_not_end_by_an_interrupt_of_its_group():
    with subprocess.Popen(
        [sys.executable, "-c", SLOTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        wait_until(lambda: all(map(ignores_sigint, pids)), "the slots to be ready")
        assert [is_there(pid) for pid in pids] == [True, True]
        process.communicate("\n")


def ignores_sigint(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [mask] = [int(line.split()[1], 16) for line in lines if line.startswith("SigIgn")]
    return mask >> (signal.SIGINT - 1) & 1


def test_slots_that_were_forked_for_nothing_end_with_the_process_that_submits():
    with subprocess.Popen(
        [sys.executable, "-c", SLOTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert [is_there(pid) for pid in pids] == [True, True]
        process.kill()
        wait_until(lambda: not any(map(is_there, pids)), "the end of the slots")


# Ends a slot before it has a task: it is remembered, and passed on.
HOOK = """
import os, signal, sys
def hook(event, arguments):
    if event == "import" and arguments[0] == "submitit" and "AT" not in os.environ:
        os.environ["AT"] = "sent"
        os.kill(os.getpid(), signal.SIGTERM)
sys.addaudithook(hook)
"""


def test_a_signal_to_a_slot_that_has_no_task_yet_reaches_its_task(project, tmp_path):
    with draft_run(project(16) / "slurmgpu.toml") as draft:
        run = create_run(draft.run_dir, draft.plan, draft.items.files)
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    names = {"LOCAL_NTASKS": "1", "LOCAL_NODEID": "0", "LOCAL_JOB_NUM_NODES": "1", "EXECUTOR": "local"}
    env = {**os.environ, **{f"SUBMITIT_{name}": value for name, value in names.items()}}
    env["PYTHONPATH"] = f"{tmp_path / 'hook'}:{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-u", "-m", "slurmgpu.executors.slot", str(run.logs)]
    with subprocess.Popen(command, env=env) as slot:
        job = DelayedSubmission(job_entry.run_local_task, run.folder, "local1", 0, 1, [], "cpu", 1)
        job.dump(run.logs / f"{slot.pid}_submitted.pkl")
        assert slot.wait(200) == EXIT_STOPPED
    [record] = run.attempts()
    assert (record["failure"], record["published"]) == ("preempted", [])


def test_a_fork_is_waited_for_as_a_program_is():
    pid = os.fork()
    if pid == 0:
        signal.pause()
    fork = Fork(pid)
    assert fork.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        fork.wait(0.01)
    fork.terminate()
    assert fork.wait(200) == fork.wait() == fork.poll() == -signal.SIGTERM
    fork.terminate()  # it has ended: no other process gets the signal


@pytest.mark.parametrize("plan", [{"processes": "per-gpu"}, {"environ": {"MALLOC_ARENA_MAX": "1"}}])
def test_ranks_and_workers_with_variables_of_their_own_are_programs(tmp_path, plan):
    assert fork_worker(planned_run(tmp_path / "run", **plan), Attempt("7", 0)) is None


def test_without_room_for_a_fork_the_worker_is_a_program(tmp_path, monkeypatch):
    def refuse():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    n_open = len(os.listdir("/proc/self/fd"))
    assert fork_worker(planned_run(tmp_path / "run"), Attempt("7", 0)) is None
    assert len(os.listdir("/proc/self/fd")) == n_open
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


FORKING = """
import os, sys
from slurmgpu import Array

class Forking:
    columns = {"double": Array("float64")}

    def load(self, task):
        self.fork(lambda: None, 0)

    def __call__(self, items):
        self.fork(lambda: sys.exit(3), 3)
        self.fork(lambda: sys.exit("done"), 1)
        self.fork(lambda: 1 // 0, 1)
        return [{"double": 2.0 * item.index} for item in items]

    def fork(self, does, code):
        sys.stdout.flush()
        if not (pid := os.fork()):
            print("a fork of", os.getppid())
            return does()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
"""


def test_a_fork_that_a_workload_makes_does_not_become_a_second_worker(project, slurmgpu):
    folder = project(16, "Forking")
    (folder / "workloads.py").write_text(FORKING)
    slurmgpu("submit", "--executor", "local", "--gpus", "0", "--tasks", "1", cwd=folder, expect=0)
    [record] = records(folder)
    assert (record["n_items"], record["n_errors"], record["deaths"]) == (16, 0, [])
    log = (folder / "run" / "logs" / f"{record['attempt']}.log").read_text()
    assert log.count("a fork of") == 1 + 3 * 4
    assert log.count("\nZeroDivisionError") == log.count("\ndone\n") == 4
    assert not workers(folder)
