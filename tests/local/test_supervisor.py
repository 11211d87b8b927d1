"""What a task makes of its worker's events and end, and of signals: with workers that say what a test has them say."""

import errno
import os
import shutil
import signal
import sys
import time

import pytest

from slurmgpu.containers.settings import ContainerError
from slurmgpu.errors import GPUFaultError
from slurmgpu.report.outcomes import CUT_FINER, TOO_LARGE
from slurmgpu.run.directory import FOLDERS
from slurmgpu.run.failures import POLICIES
from slurmgpu.run.metric_log import MetricReader
from slurmgpu.run.records import Attempt, node_name
from slurmgpu.task import supervisor, worker_process
from slurmgpu.task.launcher import Launcher
from slurmgpu.task.nodes import NodeFaultError
from slurmgpu.task.supervisor import Task
from slurmgpu.task.worker_process import StopSignals
from slurmgpu.util import cgroups
from slurmgpu.worker.assignment import WorkerFailedError
from tests.support.runs import planned_run

SAYS = """
import json, os, signal, sys, time

def tell(event, **more):
    os.write(1, json.dumps({"event": event, **more}).encode() + b"\\n")

def begin(resumes=False):  # until the task has heard of it
    tell("loading")
    tell("ready", load_s=0.0, resumes=resumes)
    wait_until('"state": "running"', sys.argv[1])
    tell("claim", shard=0, idle_s=0.0)
    tell("batch", items=[0, 1], isolated=False, ahead=None)

def publish():
    tell("published", shard=0, items=40, errors={}, started=time.time(), seconds=0.0, won=True, revision=0)

def logs():
    tell("log", points=[[time.time(), 0, 7, {"loss": 0.5}]])

def done(reason="complete"):
    tell("done", reason=reason, idle_s=0.0)

def wait_until(text, path):
    until = time.monotonic() + 60
    while text not in open(path).read():
        assert time.monotonic() < until
        time.sleep(0.01)

def to_task(signum):
    os.kill(os.getppid(), signum)

def hears():
    return sys.stdin.readline().strip()

"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """`work(*workers, …)`: the exit code and the record of a task whose workers, one after another, run this code.

    The attempt has claimed the run's only shard. Each worker gets what the test has changed of its `attempt`; `told` is
    when its walltime ends, as Slurm says later.
    """
    run = planned_run(tmp_path / "run", lease_s=0.6)

    def work(*workers, told=None, **attempt):
        left = list(workers)

        def worker(self, assignment):
            # Isolated, so that it starts at once.
            return [sys.executable, "-I", "-S", "-c", SAYS + left.pop(0), str(run.tasks / "7_0.0.json")], {}

        monkeypatch.setattr(Launcher, "worker", worker)
        task = Task(run, Attempt("7", 0, **attempt), lambda: told)
        run.claims.take(0, task._leases.claim)
        code = task.run_worker()
        assert left == []
        news = MetricReader(run.folder).news()
        return code, {**task.record, "claims": run.claims.numbers(), "logged": [point.step for point in news]}

    return work


ENDS = "begin(); publish(); done()"
DIES = "os.kill(os.getpid(), signal.SIGKILL)"


def test_a_worker_has_done_its_work_once_it_says_so_and_holds_no_shard(work):
    assert work(ENDS)[0] == 0
    for end in ("sys.exit(3)", DIES):
        code, record = work(f"{ENDS}; {end}")
        assert (code, record["reason"], record["failure"], record["deaths"]) == (0, "complete", None, [])
    for too_early in ("begin(); publish()", "begin(); done(); sys.exit(3)", f"begin(); done(); {DIES}"):
        code, record = work(too_early, ENDS)
        assert (code, record["failure"], len(record["deaths"])) == (0, None, 1)


@pytest.mark.parametrize(
    ("error", "failure", "bad_node"),
    [
        (GPUFaultError("no card"), "gpu_fault", node_name()),
        (ContainerError("no runtime", node_at_fault=True), "container", node_name()),
        (ContainerError("no image"), "container", None),
        (NodeFaultError("node_fail", "it does not answer", "gpu07"), "node_fail", "gpu07"),
        (WorkerFailedError("workload_error", "it is broken"), "workload_error", None),
        (OSError(errno.ENOSPC, "no room"), "disk_full", None),
        (RuntimeError("a bug"), "crash", None),
    ],
)
def test_what_keeps_a_task_from_working_is_recorded_and_its_claims_are_given_back(
    work, monkeypatch, error, failure, bad_node
):
    def prepare(*_):
        raise error

    monkeypatch.setattr(Launcher, "prepare", prepare)
    code, record = work()
    assert (record["failure"], record["bad_node"], record["state"]) == (failure, bad_node, "ended")
    assert (code, record["claims"]) == (POLICIES[failure].exit_code or 1, set())
    assert str(error) in record["message"]
    assert bool(record["traceback"]) == (failure == "crash")


def test_a_task_makes_the_folders_again_that_a_purge_has_removed_while_it_was_queued(work, tmp_path):
    for name in FOLDERS:
        shutil.rmtree(tmp_path / "run" / name)
    code, record = work(ENDS)
    assert (code, record["reason"]) == (0, "complete")
    assert all((tmp_path / "run" / name).is_dir() for name in FOLDERS)


def test_whatever_is_printed_before_the_worker_has_the_pipe_its_task_hears_of_its_end(work):
    for printed in ("hello", '{"event": 1}', "[" * 100_000):
        code, record = work(f"print({printed!r}, flush=True); {ENDS}")
        assert (code, record["reason"], record["deaths"]) == (0, "complete", [])


def test_a_lease_is_renewed_while_a_worker_says_nothing(work, tmp_path):
    claim = str(tmp_path / "run" / "claims" / "00000")
    code, record = work(f"begin(); wait_until('\"renewals\": 3', {claim!r}); publish(); done()")
    assert (code, record["deaths"]) == (0, [])


def test_a_worker_that_says_why_it_fails_is_the_last_one(work):
    failed = 'tell("failed", **{"class": "workload_error", "message": "it is broken", "traceback": "line 1"})'
    for end in ("sys.exit(1)", DIES, "done(); sys.exit(1)"):
        code, record = work(f"begin(); {failed}; {failed.replace('broken', 'late')}; {end}")
        assert (code, record["failure"], record["message"]) == (1, "workload_error", "it is broken")
        assert (record["traceback"], record["deaths"], record["claims"]) == ("line 1", [], set())
    code, record = work(f"{ENDS}; {failed}; sys.exit(1)")
    assert (code, record["failure"]) == (1, "workload_error")


@pytest.mark.parametrize(("seconds", "expected"), [(4.0, "host_oom"), (60.0, "crash")])
def test_a_death_is_for_lack_of_memory_if_the_kernel_has_killed_since_the_items_were_begun(
    work, monkeypatch, seconds, expected
):
    monkeypatch.setattr(cgroups.KillWatch, "age_s", seconds)  # a kill and a worker's word may be read 5 s late
    code, record = work(f"begin(); {DIES}", ENDS)
    assert (code, [death["class"] for death in record["deaths"]]) == (0, [expected])


def test_a_pipe_that_a_daemon_of_the_last_worker_closes_is_not_the_next_ones(work, monkeypatch, tmp_path):
    monkeypatch.setattr(worker_process, "GRACE_S", 0.2)
    there = f"while not os.path.exists({str(tmp_path / 'begun')!r}): time.sleep(0.01)"
    daemon = f"""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {there}
    os._exit(0)
os.wait()
"""
    code, record = work(
        f"{daemon}begin(); {DIES}", f"begin(); open({str(tmp_path / 'begun')!r}, 'w'); time.sleep(0.5); {ENDS}"
    )
    assert (code, len(record["deaths"])) == (0, 1)


def test_a_worker_that_failed_at_its_end_has_not_done_its_work_when_a_signal_stops_it(work):
    failed = 'tell("failed", **{"class": "disk_full", "message": "no room", "traceback": ""})'
    heard = "tell('ready', load_s=0.0, resumes=False)\nwhile 'no room' not in open(sys.argv[1]).read():\n    pass\n"
    code, record = work(f"{ENDS}; {failed}; {heard}to_task(signal.SIGTERM); time.sleep(600)")
    assert (code, record["failure"]) == (75, "preempted")


def test_a_signal_ends_a_worker_that_keeps_no_progress_at_once_and_its_shard_is_given_back(work):
    code, record = work("begin(); to_task(signal.SIGTERM); time.sleep(600)")
    assert (code, record["failure"], record["message"]) == (
        75,
        "preempted",
        "stopped by SIGTERM; its shards were given back",
    )
    assert (record["deaths"], record["claims"]) == ([], set())
    code, record = work("begin(); to_task(signal.SIGHUP); time.sleep(600)")
    assert (code, record["failure"]) == (75, "cancelled")
    code, record = work("begin(); to_task(signal.SIGTERM); time.sleep(600)", end_time=time.time() + 3600)
    assert (code, record["failure"]) == (75, "preempted")  # its walltime is not nearly over


def test_a_signal_near_the_end_of_the_walltime_is_its_end_and_the_shard_was_too_large(work):
    code, record = work("begin(); to_task(signal.SIGTERM); time.sleep(600)", end_time=time.time() + 60)
    assert (code, record["failure"]) == (75, "timeout")
    assert record["message"] == f"stopped by SIGTERM; its shards were given back. Shard 0 {TOO_LARGE}{CUT_FINER}"
    code, record = work("begin(); to_task(signal.SIGINT); time.sleep(600)", end_time=time.time() + 60)
    assert (record["failure"], record["message"]) == ("cancelled", "stopped by SIGINT; its shards were given back")
    code, record = work("tell('loading'); to_task(signal.SIGTERM); time.sleep(600)", end_time=time.time() + 60)
    assert (record["failure"], record["message"]) == ("timeout", "stopped by SIGTERM; its shards were given back")


def test_a_task_that_is_stopped_before_its_first_worker_knows_the_end_of_its_walltime(work, monkeypatch):
    def prepare(self, pause):
        os.kill(os.getpid(), signal.SIGUSR2)
        pause(60.0)

    monkeypatch.setattr(Launcher, "prepare", prepare)
    for told, failure in ((time.time() + 60, "timeout"), (time.time() + 3600, "preempted"), (None, "preempted")):
        code, record = work(told=told)
        assert (code, record["failure"], record["end_time"]) == (75, failure, told)
        assert record["message"] == "stopped by SIGUSR2; its shards were given back"


LEAVES = "tell('left', shard=0); done('told to stop')"


def test_a_worker_that_keeps_progress_is_told_and_ends_by_itself(work):
    code, record = work(f"begin(resumes=True); to_task(signal.SIGTERM); assert hears() == 'stop'; {LEAVES}")
    assert (code, record["failure"], record["deaths"], record["claims"]) == (75, "preempted", [], set())
    assert record["message"] == "stopped by SIGTERM; shard 0 was given back, with its progress kept"
    # Slurm sends SIGTERM twice.
    twice = "to_task(signal.SIGTERM); assert hears() == 'stop'; to_task(signal.SIGTERM); time.sleep(0.3)"
    code, record = work(f"begin(resumes=True); {twice}; {LEAVES}")
    assert (code, record["message"]) == (75, "stopped by SIGTERM; shard 0 was given back, with its progress kept")


def test_a_worker_that_loads_again_has_no_progress_to_keep(work):
    code, record = work(f"begin(resumes=True); {DIES}", "to_task(signal.SIGTERM); time.sleep(600)")
    assert (code, record["failure"], record["message"]) == (
        75,
        "preempted",
        "stopped by SIGTERM; its shards were given back",
    )


def test_a_worker_that_ends_its_work_after_a_signal_was_not_stopped(work):
    code, record = work("begin(resumes=True); to_task(signal.SIGTERM); hears(); publish(); done()")
    assert (code, record["reason"], record["failure"]) == (0, "complete", None)


def test_a_worker_that_keeps_progress_and_dies_after_a_signal_was_stopped(work):
    code, record = work(f"begin(resumes=True); to_task(signal.SIGTERM); hears(); {DIES}")
    assert (code, record["failure"], record["deaths"]) == (75, "preempted", [])
    failed = 'tell("failed", **{"class": "disk_full", "message": "no room", "traceback": ""})'
    code, record = work(f"begin(resumes=True); to_task(signal.SIGTERM); hears(); {failed}; sys.exit(1)")
    assert (code, record["failure"], record["message"]) == (73, "disk_full", "no room")


def test_what_a_worker_had_done_when_it_was_stopped_is_recorded(work):
    """A shard may be published, and not be reported yet, when the task is told to end."""
    ends = "signal.signal(signal.SIGTERM, lambda *_: (logs(), publish(), os._exit(0)))"
    code, record = work(f"{ends}; begin(); to_task(signal.SIGTERM); time.sleep(600)")
    assert (code, record["failure"], record["n_items"], record["logged"]) == (75, "preempted", 40, [7])
    assert [shard for shard, *_ in record["published"]] == [0]


def test_a_worker_that_is_stopped_after_its_work_has_done_it(work):
    code, record = work(f"{ENDS}; to_task(signal.SIGTERM); time.sleep(600)")
    assert (code, record["reason"], record["failure"]) == (0, "complete", None)
    code, record = work("begin(); done(); to_task(signal.SIGTERM); time.sleep(600)")  # its shard is not written yet
    assert (code, record["reason"], record["failure"]) == (75, "complete", "preempted")


def test_the_notice_of_a_preemption_is_told_to_each_worker_and_the_walltimes_to_none(work, caplog):
    notice = "begin(); to_task(signal.SIGUSR2); assert hears() == 'stop'; "
    code, record = work(f"{notice}publish(); done('told to stop')")
    assert (code, record["failure"]) == (0, "preempted")
    assert record["message"] == "it took no more shards: Slurm announced the end with SIGUSR2"
    # The next worker is told before it begins.
    code, record = work(f"{notice}{DIES}", "assert hears() == 'stop'; done('told to stop')")
    assert (code, record["failure"], len(record["deaths"])) == (0, "preempted", 1)
    assert record["message"] == "it took no shard: Slurm announced the end with SIGUSR2"
    caplog.clear()
    code, record = work("begin(); to_task(signal.SIGUSR2); publish(); done()", end_time=time.time() + 60)
    assert (code, record["failure"], caplog.messages) == (0, None, [])


def test_a_signal_that_reaches_the_worker_before_its_task_is_no_crash(work, monkeypatch):
    def pause(self, seconds):
        if seconds:  # once the worker is dead
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, seconds)

    original = StopSignals.pause
    monkeypatch.setattr(StopSignals, "pause", pause)
    code, record = work(f"begin(); {DIES.replace('SIGKILL', 'SIGTERM')}")
    assert (code, record["failure"], record["deaths"]) == (75, "preempted", [])


def test_too_little_walltime_is_told_with_what_to_do_about_it(work):
    code, record = work("done('deadline')")
    assert (code, record["failure"], record["message"]) == (
        0,
        "timeout",
        "it took no shard: too little of the walltime was left; ask for more with --slurm time=…",
    )
    code, record = work("begin(); publish(); done('deadline')")
    assert record["message"] == "it took no more shards: too little of the walltime was left"
    code, record = work("begin(); tell('left', shard=0); done('deadline')")
    assert record["message"] == "shard 0 was given back: too little of the walltime was left"
    assert record["claims"] == set()


def test_a_worker_that_hangs_after_its_work_is_killed_and_a_working_one_is_not(work, monkeypatch):
    monkeypatch.setattr(supervisor, "EXIT_S", 0.3)
    code, record = work(f"{ENDS}; time.sleep(600)")
    assert (code, record["failure"], record["deaths"]) == (0, None, [])
    code, record = work("begin(); done(); time.sleep(1.5); publish()")
    assert (code, record["failure"], record["deaths"]) == (0, None, [])
