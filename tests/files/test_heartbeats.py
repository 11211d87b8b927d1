"""Who is alive: a task shows it from its first second, and no command that assumes silence acts while one beats."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from slurmgpu.cli.commands.logs import is_at_rest
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import job_entry, live_tasks, run_merge, slurm
from slurmgpu.executors.slurm import Slurm
from slurmgpu.operations.resubmit import Request, resubmit
from slurmgpu.run import heartbeats
from slurmgpu.run.claims import Claim
from slurmgpu.run.directory import Run
from slurmgpu.run.heartbeats import ObservedTask, Observer, beating
from slurmgpu.run.records import Attempt
from slurmgpu.run.submissions import directory_id
from slurmgpu.slurm import commands, queue
from slurmgpu.util import shared_files
from slurmgpu.util.pids import own_id, processes
from tests.cluster.fixture import leave_out
from tests.support.failing import Failing
from tests.support.images import NOBODY
from tests.support.pretend_runs import pretend_run
from tests.support.runs import let_go, records, start, wait_until, wait_until_held

ELSEWHERE = {"boot": "another machine"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose last submission has ended, as far as is written."""
    run = pretend_run(tmp_path / "run", 0, n_tasks=1, executor="local")
    run.record_submission({"submission": 1, "state": "ended"})
    monkeypatch.setattr(live_tasks, "patience", lambda lease_s: 0.4)
    live_tasks._OBSERVERS.clear()
    return run


@pytest.fixture
def task(run, monkeypatch):
    """A task of the job 7 by hand, without what it sets for its whole process: handlers of signals, and the log."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(job_entry.early_signals, "remember", lambda: None)
    monkeypatch.setattr(job_entry, "log_to_stderr", lambda force: None)
    return lambda: job_entry.run_task_by_hand(run.folder, None, trust=False, own_array=False)


def while_waiting(monkeypatch, module, sleep):
    """Let this module sleep so; `time` itself is also that of the process's other threads."""
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))


def beat(run, number, **changes):
    """The heartbeat of a task as another process has written it."""
    told = {"token": "t", "beat": number, "attempt": "7_0.0", "job": "7", "uid": 4242, "user": "bob", "cluster": None}
    told |= {**own_id(), **directory_id(run.folder), **ELSEWHERE, **changes}
    (run.tasks / "7_0.0.alive").write_text(json.dumps(told).ljust(heartbeats.SIZE))


def test_a_heartbeat_is_there_from_the_first_second_goes_on_and_ends_with_its_process(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeats, "BEAT_S", 0.02)
    (tmp_path / "tasks").mkdir()
    path = tmp_path / "tasks" / "7_0.0.alive"
    with beating(tmp_path, "7_0.0", "7"):
        first = json.loads(path.read_text())
        assert first["attempt"] == "7_0.0"
        wait_until(lambda: json.loads(path.read_text())["beat"] > first["beat"] + 2, "beats")
        path.unlink()
        wait_until(path.exists, "a file made again")
        [task] = Observer(tmp_path, 30.0).look()
        assert task.lives
    assert not path.exists()


def test_a_second_task_of_a_job_is_refused_while_the_first_computes(run, task, monkeypatch):
    """Two steps of a job, or of the parts of a hetjob, have one job id, and so had one attempt and one record."""
    monkeypatch.setattr(job_entry, "patience", lambda lease_s: 0.4)
    with beating(run.folder, "7_0.0", "7"), pytest.raises(SlurmGPUError, match=r"task 7_0\.0 of .* one task in a job"):
        task()
    assert len(run.submissions()) == 1


def test_a_task_starts_where_a_former_one_of_its_job_was_killed(run):
    for changes in ({}, {"boot": own_id()["boot"], "pid": 1 << 22}):
        beat(run, 1, **changes)
        heartbeats.refuse_twin(run.folder, "7_0.0", "7", 0, 0.4)
    (run.tasks / "7_0.0.alive").unlink()
    heartbeats.refuse_twin(run.folder, "7_0.0", "7", 0, 0.4)
    assert (run.tasks / "7_0.0.alive").read_text() == ""  # of two that begin at once, one makes it


def test_a_task_that_waits_for_a_former_one_of_its_job_ends_when_it_is_asked_to(run, task, monkeypatch):
    monkeypatch.setattr(job_entry.early_signals, "is_asked_to_end", lambda: True)
    beat(run, 1)
    before = (run.tasks / "7_0.0.alive").read_bytes()
    with pytest.raises(SystemExit) as raised:
        task()
    assert raised.value.code == 75
    assert (run.tasks / "7_0.0.alive").read_bytes() == before  # it did not wait until that is silent for a lease


def test_a_requeue_waits_for_the_jobs_other_tasks_and_not_for_one_that_was_killed(tmp_path, monkeypatch):
    run = pretend_run(tmp_path / "run", 60, n_tasks=3, job="7", executor="slurm")
    run.record_submission({"submission": 1, "tasks_per_node": 3})
    ours, other, killed = (Attempt("7", task, submission=1) for task in range(3))
    beat(run, 1, **{**own_id(), "pid": 1 << 22})  # a process that is gone
    (run.tasks / "7_0.0.alive").rename(run.tasks / "7_2.0.alive")
    waits = []

    def end(_):
        waits.append(run.attempt(killed.name)["ended"])
        path = run.tasks / f"{other.name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "ended": 1e9}))

    while_waiting(monkeypatch, job_entry, end)
    with beating(run.folder, "7_1.0", "7"):
        job_entry._wait_for_job(run, ours)
    assert waits == [None]


def test_two_clusters_that_give_the_same_id_have_a_heartbeat_each(tmp_path, monkeypatch):
    (tmp_path / "tasks").mkdir()
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "here")
    with beating(tmp_path, "7_0.0", "7"):
        monkeypatch.setenv("SLURM_CLUSTER_NAME", "the/re")
        with beating(tmp_path, "7_0.0", "7"):
            assert [task.name for task in Observer(tmp_path, 30.0).look()] == ["7_0.0@here", "7_0.0@the-re"]
        assert [task.name for task in Observer(tmp_path, 30.0).look()] == ["7_0.0@here"]


def test_what_cannot_be_written_costs_the_sign_alone(tmp_path):
    with beating(tmp_path / "gone", "7_0.0", "7"):
        pass


def test_a_task_elsewhere_that_beats_is_alive_and_one_that_is_silent_is_not(run, monkeypatch):
    beat(run, 1)
    monkeypatch.setattr(live_tasks, "patience", lambda lease_s: 60.0)
    with subprocess.Popen([sys.executable, "-c", BEATS, str(run.tasks / "7_0.0.alive")]) as process:
        try:
            what = live_tasks.alive(run)
        finally:
            process.kill()
    assert what.startswith("task 7_0.0 of bob on ")
    assert what.endswith(" is alive")
    live_tasks._OBSERVERS.clear()
    monkeypatch.setattr(live_tasks, "patience", lambda lease_s: 0.4)
    wait_until(lambda: live_tasks.alive(run) is None, "its silence")
    with monkeypatch.context() as waiting:
        while_waiting(waiting, live_tasks, lambda seconds: pytest.fail("who was silent for long is watched again"))
        assert live_tasks.alive(run) is None
    live_tasks.forget_dead_tasks(run)
    assert not (run.tasks / "7_0.0.alive").exists()


def test_a_merge_job_waits_until_a_task_of_another_job_is_known_to_be_silent(run, monkeypatch):
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    while_waiting(monkeypatch, live_tasks, lambda seconds: beat(run, 2))
    beat(run, 1)
    assert live_tasks.others_alive(run, "7") is None  # its own array has ended, as Slurm knows
    assert live_tasks.others_alive(run, "8").startswith("task 7_0.0 of bob on ")


BEATS = """
import json, sys, time
from pathlib import Path
path = Path(sys.argv[1])
told = json.loads(path.read_text())
with path.open("r+") as file:
    for told["beat"] in range(10, 10**6):
        file.seek(0)
        file.write(json.dumps(told).ljust(1024))
        file.flush()
        time.sleep(0.02)
"""


def test_a_heartbeat_that_is_empty_for_a_moment_is_still_its_tasks(run):
    observer = Observer(run.folder, 30.0)
    beat(run, 1)
    observer.look()
    (run.tasks / "7_0.0.alive").write_bytes(b"")
    [task] = observer.look()
    assert task.lives
    assert task.in_words.startswith("task 7_0.0 of bob on ")


@pytest.mark.parametrize("is_known", [True, False])
def test_a_heartbeat_that_cannot_be_read_is_silent_in_the_end(run, monkeypatch, is_known):
    clock = [1000.0]
    pretended = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda s: clock.__setitem__(0, clock[0] + s))
    monkeypatch.setattr(heartbeats, "time", pretended)
    monkeypatch.setattr(shared_files, "time", pretended)
    observer, failing = Observer(run.folder, 60.0), Failing(monkeypatch)
    beat(run, 1)
    if is_known:
        observer.look()
    failing("open", errno.ESTALE, of=".alive", times=10**6)
    found = []
    while clock[0] < 1000.0 + 600.0 and False not in found:
        pretended.sleep(5.0)
        found += [task.lives for task in observer.look()]
    assert found == [*[None] * (len(found) - 1), False]
    assert len(found) > 60 / 5


def test_a_task_is_not_dead_because_the_file_server_hung_while_it_was_listed(run, monkeypatch):
    clock, listed = [1000.0], heartbeats.list_fresh
    monkeypatch.setattr(heartbeats, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    observer = Observer(run.folder, 60.0)
    beat(run, 1)
    observer.look()

    def hang(folder):
        clock[0] += 90.0
        return listed(folder)

    with monkeypatch.context() as hanging:
        hanging.setattr(heartbeats, "list_fresh", hang)
        assert [task.lives for task in observer.look()] == [None]
    beat(run, 2)  # the task goes on as well
    assert [task.lives for task in observer.look()] == [True]


def test_a_heartbeat_that_is_read_for_the_first_time_after_errors_is_no_sign_of_life(run, monkeypatch):
    observer, failing = Observer(run.folder, 60.0), Failing(monkeypatch)
    beat(run, 1)
    failing("open", errno.EIO, of=".alive")
    assert [task.lives for _ in range(3) for task in observer.look()] == [None] * 3
    beat(run, 2)
    assert [task.lives for task in observer.look()] == [True]


def test_what_a_dead_process_of_this_machine_left_and_a_copys_files_are_not_watched(run, tmp_path, monkeypatch):
    monkeypatch.setattr(live_tasks, "patience", lambda lease_s: 3600.0)
    beat(run, 1, **{**own_id(), "pid": 4194304})
    assert live_tasks.alive(run) is None
    beat(run, 1, **own_id())
    assert "is alive" in live_tasks.alive(run)  # also if it is stopped
    live_tasks._OBSERVERS.clear()
    beat(run, 1, folder="/elsewhere", inode=1)
    assert live_tasks.alive(run) is None


def test_of_ones_own_cluster_the_queue_tells_and_nothing_is_watched(run, monkeypatch):
    monkeypatch.setattr(live_tasks, "patience", lambda lease_s: 3600.0)
    first = run.submissions()[0]
    run.record_submission({**first, "executor": "slurm", "state": "queued", "array_job": "7", "cluster": "here"})
    monkeypatch.setattr(queue, "own_cluster", lambda: "here")
    monkeypatch.setattr(queue, "own_jobs", lambda and_of=(): [])
    beat(run, 1, cluster="here", uid=os.getuid())
    assert live_tasks.alive(run) is None
    monkeypatch.setattr(live_tasks, "patience", lambda lease_s: 0.4)
    live_tasks._OBSERVERS.clear()
    beat(run, 1, cluster="there", uid=os.getuid())
    assert live_tasks.alive(run) is None


@pytest.mark.parametrize(
    ("told", "is_over"),
    [
        ({}, True),
        ({"job": "8"}, False),
        ({"job": "local7"}, False),  # of the local executor, within an allocation
        ({"cluster": "there"}, False),
        ({"cluster": None}, False),
        ({"uid": os.getuid() + 1}, False),
    ],
)
def test_a_queue_tells_the_end_of_its_own_cluster_and_users_tasks_alone(told, is_over):
    told = {"job": "7", "cluster": "here", "uid": os.getuid(), **told}
    queued = [queue.QueuedJob("8_0", "RUNNING", "None", "slurmgpu:run", "/", "")]
    assert slurm._is_over(ObservedTask("7_0.0", told, None), "here", queued) is is_over
    assert not slurm._is_over(ObservedTask("7_0.0", told, None), None, queued)


def test_a_task_that_was_requeued_after_the_end_of_its_submission_is_alive(run, monkeypatch):
    run.record_submission({**run.submissions()[0], "executor": "slurm", "array_job": "7", "cluster": "here"})
    job = queue.QueuedJob("7_0", "RUNNING", "None", "slurmgpu:run", "/", str(run.logs / "submission_file_7.sh"))
    monkeypatch.setattr(queue, "own_cluster", lambda: "here")
    monkeypatch.setattr(queue, "own_jobs", lambda and_of=(): [job])
    beat(run, 1, **own_id(), cluster="here", uid=os.getuid())
    assert live_tasks.alive(run).endswith(" is alive")


def queued_on(run, monkeypatch, **line):
    """A submission of Slurm's of which the queue here has nothing."""
    first = {key: value for key, value in run.submissions()[0].items() if key not in ("uid", "pids")}
    changes = {"submission": 2, "executor": "slurm", "state": "queued", "array_job": "7"}
    run.record_submission({**first, **changes, **line})
    monkeypatch.setattr(queue, "own_cluster", lambda: "here")
    monkeypatch.setattr(queue, "own_jobs", lambda and_of=(): [])


def test_a_run_of_a_sweep_that_cannot_be_cancelled_keeps_no_other_from_it(run, tmp_path, monkeypatch):
    queued_on(run, monkeypatch, executor="gone")
    other = pretend_run(tmp_path / "other", 10, n_tasks=1)
    other.record_submission({"submission": 1, "state": "ended"})
    found = [(name.name, done) for name, done in live_tasks.cancel_all([run, other])]
    assert [name for name, _ in found] == [run.name, "other"]
    assert "'gone'" in str(found[0][1])
    assert found[1][1] == ""


def test_jobs_of_another_user_are_found_and_not_cancelled(run, monkeypatch):
    queued_on(run, monkeypatch, cluster="here", uid=4242)
    monkeypatch.setattr(os, "getuid", lambda: 4243)  # root cancels them
    job = queue.QueuedJob("7_0", "RUNNING", "None", "slurmgpu:run", "/", str(run.logs / "submission_file_7.sh"))
    monkeypatch.setattr(queue, "own_jobs", lambda and_of=(): [job] if 4242 in and_of else [])
    monkeypatch.setattr(Slurm, "cancel_jobs", lambda executor, jobs: pytest.fail("they are another user's"))
    [(_, told)] = live_tasks.cancel_all([run])
    assert isinstance(told, SlurmGPUError)
    assert not run.last_submission().get("cancelled")


def test_where_slurm_hides_jobs_of_others_their_run_is_neither_at_rest_nor_cancelled(run, monkeypatch):
    """With PrivateData=jobs squeue shows none of them; without it, only those that are asked for."""
    queued_on(run, monkeypatch, cluster="here", uid=4242)
    monkeypatch.setattr(os, "getuid", lambda: 4243)
    monkeypatch.setattr(commands, "cluster_name", lambda: "here")
    assert queue.queued_jobs(run) == []
    assert not is_at_rest(run)
    with pytest.raises(SlurmGPUError, match="belong to the user with the number 4242"):
        live_tasks.cancel(run)
    run.record_submission({"submission": 2, "state": "ended"})
    assert live_tasks.cancel(run) == ""


def test_a_run_may_wait_for_the_merge_of_another_users_run(run, monkeypatch):
    queued_on(run, monkeypatch, cluster="here", uid=4242, merge_job="8")
    merge = queue.QueuedJob("8", "PENDING", "Dependency", "slurmgpu-merge:run", "/", f"{run.logs}/8_submission.sh")
    monkeypatch.setattr(queue, "own_jobs", lambda and_of=(): [merge] if 4242 in and_of else [])
    assert Slurm().jobs_completing(run) == ("8",)
    monkeypatch.setattr(queue, "own_jobs", lambda and_of=(): [])  # as PrivateData of slurm.conf has it
    with pytest.raises(SlurmGPUError, match="shows no job of the user with the number 4242"):
        Slurm().jobs_completing(run)


def job_of(run, number, name="slurmgpu:run", folder=None):
    """A job in the queue, with its script in a folder, by default that of the run's logs."""
    return queue.QueuedJob(number, "RUNNING", "None", name, "/", f"{folder or run.logs}/submission_file_7.sh")


def test_only_submissions_whose_jobs_are_in_the_queue_are_recorded_as_cancelled(run, monkeypatch):
    queued_on(run, monkeypatch, submission=2, state="ended", cluster="here")
    for number, more in enumerate(({"array_job": "8", "merge_job": "10"}, {}, {"array_job": "8"}), 3):
        first = {key: value for key, value in run.submission(2).items() if not key.endswith("_job")}
        where = {"cluster": "there" if number == 5 else "here", "state": "queued"}
        run.record_submission({**first, **where, **more, "submission": number})
    jobs = [job_of(run, "10", "slurmgpu-merge:run"), job_of(run, "8_1"), job_of(run, "8_0")]
    monkeypatch.setattr(queue, "own_jobs", lambda and_of=(): jobs)
    lines = run.submissions()[1:]
    assert Slurm().jobs_to_cancel(run, lines) == ["8", "10"]
    # Number 4 may have queued jobs without recording them; of number 5, on another cluster, nothing is seen here.
    assert [line.get("cancelled", False) for line in run.submissions()[1:]] == [False, True, True, False]
    with pytest.raises(SlurmGPUError, match="may be in the queue of the cluster there"):
        Slurm().jobs_to_cancel(run, lines, among=())


def test_jobs_whose_ids_others_may_have_written_are_cancelled_only_if_their_scripts_are_the_runs(
    run, tmp_path, monkeypatch, caplog
):
    mine, others = job_of(run, "7_0"), job_of(run, "8_0", folder=tmp_path)
    assert slurm._surely_of(run, [mine, others]) == [mine, others]
    monkeypatch.setattr(slurm, "why_forgeable", lambda run: "colleagues may write it")
    assert slurm._surely_of(run, [mine, others]) == [mine]
    assert "job 8_0" in caplog.text
    assert "job 7_0" not in caplog.text


def test_of_several_runs_those_of_this_machine_are_cancelled_as_well(run):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        ids = {**own_id(), **processes([os.getpid(), process.pid]), "time": time.time()}
        run.record_submission({**run.submissions()[0], "submission": 2, "state": "running", **ids})
        assert list(live_tasks.cancel_all([run])) == [(run, f"processes {process.pid}")]
        assert process.wait(200) == -signal.SIGTERM


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_job_that_cannot_be_cancelled_keeps_no_other_from_it(run, tmp_path, monkeypatch, is_silent):
    """The request for all jobs fails, so each run has its own, unless Slurm does not answer at all."""
    other = pretend_run(tmp_path / "other", 10, n_tasks=1)
    asked = []

    def cancel_jobs(executor, jobs):
        asked.append(list(jobs))
        if "7" in jobs:
            raise commands.SlurmUnavailableError("scancel failed", is_silent=is_silent)

    for each in (run, other):
        queued_on(each, monkeypatch, cluster="here", uid=os.getuid())
    monkeypatch.setattr(Slurm, "jobs_to_cancel", lambda executor, each, *_: ["7" if each.folder == run.folder else "8"])
    monkeypatch.setattr(Slurm, "cancel_jobs", cancel_jobs)
    found = [done for _, done in live_tasks.cancel_all([run, other])]
    assert "scancel failed" in str(found[0])
    assert asked == ([["7", "8"]] if is_silent else [["7", "8"], ["7"], ["8"]])
    assert ("scancel failed" in str(found[1])) if is_silent else (found[1] == "Slurm jobs 8")


def test_an_unexpected_error_at_one_run_leaves_no_job_of_an_earlier_one_behind(run, tmp_path, monkeypatch):
    """Its submission says by then that it is cancelled."""
    other = pretend_run(tmp_path / "other", 10, n_tasks=1)
    ended = []

    def looked_at(executor, asked, lines, among=None):
        if asked.name == "other":
            raise OSError(errno.ESTALE, "Stale file handle")
        return ["7"]

    queued_on(run, monkeypatch, cluster="here", uid=os.getuid())
    queued_on(other, monkeypatch, cluster="here", uid=os.getuid())
    monkeypatch.setattr(Slurm, "jobs_to_cancel", looked_at)
    monkeypatch.setattr(Slurm, "cancel_jobs", lambda executor, jobs: ended.extend(jobs))
    with pytest.raises(OSError, match="Stale"):
        list(live_tasks.cancel_all([run, other]))
    assert ended == ["7"]


def test_a_queue_that_is_not_seen_here_is_no_silence_but_a_merge_that_waits_goes_on(run, monkeypatch):
    queued_on(run, monkeypatch, cluster="there", uid=os.getuid())
    with pytest.raises(SlurmGPUError, match=r"may have jobs in the queue of the cluster there, .* --force"):
        live_tasks.refuse_alive(run, "resubmit")
    live_tasks.refuse_alive(run, "resubmit", force=True)
    assert live_tasks.alive(run, "8") is None
    run.record_submission({"submission": 2, "cancelled": True})
    live_tasks.refuse_alive(run, "resubmit")


def test_the_end_of_what_was_cancelled_is_waited_for_but_nothing_else_is(run, monkeypatch, caplog):
    """`slurmgpu cancel` returns at once, and tasks then have 20 s to give their shards back."""
    looks = ["Slurm has 2 of its jobs, such as 7_0 (COMPLETING)"] * 3
    monkeypatch.setattr(live_tasks, "alive", lambda run: looks[0] if looks else None)
    while_waiting(monkeypatch, live_tasks, lambda seconds: looks.pop())
    for by_itself in (True, False):  # every submission has ended, by itself; one is queued
        if not by_itself:
            queued_on(run, monkeypatch, cluster="here", uid=os.getuid())
        with pytest.raises(SlurmGPUError, match=r"still running: Slurm has 2 of its jobs, such as 7_0 \(COMPLETING\)"):
            live_tasks.refuse_alive(run, "resubmit")
        live_tasks.wait_for_cancelled(run)
    run.record_submission({"submission": 2, "cancelled": True})
    assert live_tasks.refuse_alive(run, "resubmit", force=True)
    assert len(looks) == 3
    assert not live_tasks.refuse_alive(run, "resubmit")
    assert "waiting up to 60 s for the end of the cancelled jobs: Slurm has 2 of its jobs" in caplog.text
    looks = ["Slurm has 2 of its jobs"] * 2
    live_tasks.wait_for_cancelled(run)
    assert not looks
    looks = ["a task that does not end"]
    monkeypatch.setattr(live_tasks, "ENDING_S", 0.1)
    while_waiting(monkeypatch, live_tasks, lambda seconds: None)
    with pytest.raises(SlurmGPUError, match="still running: a task that does not end"):
        live_tasks.refuse_alive(run, "resubmit")


def test_a_merge_by_hand_waits_once_for_what_was_cancelled_and_without_the_lock(run, monkeypatch):
    queued_on(run, monkeypatch, cluster="here", uid=os.getuid())
    run.record_submission({"submission": 2, "cancelled": True})
    monkeypatch.setattr(live_tasks, "alive", lambda run: "a task that does not end")
    monkeypatch.setattr(live_tasks, "ENDING_S", 0.1)
    monkeypatch.setattr(run_merge, "accounting_of", lambda run: None)
    locked = []
    while_waiting(monkeypatch, live_tasks, lambda seconds: locked.append((run.folder / ".submitting").exists()))
    with pytest.raises(SlurmGPUError, match="still running: a task that does not end"):
        run_merge.merge_by_hand(run)
    assert set(locked) == {False}


def test_where_processes_are_hidden_a_lease_that_is_renewed_is_a_sign_of_life(run, monkeypatch):
    """Of a task whose heartbeat could not be written. A parked claim has no owner."""
    run.record_submission({**run.submissions()[0], **ELSEWHERE, "submission": 2, "state": "running", "pids": [1]})
    claim = Claim("7_0", "7_0.0", "gpu1", 1)
    assert run.claims.take(3, claim)
    while_waiting(monkeypatch, live_tasks, lambda seconds: run.claims.renew(3, claim))
    assert live_tasks.alive(run) == "tasks renew their leases"
    run.claims.park(3, claim)
    while_waiting(monkeypatch, live_tasks, lambda seconds: pytest.fail("nobody is waited for"))
    assert live_tasks.alive(run) is None


def test_a_merge_job_waits_for_tasks_elsewhere_and_not_for_its_own_array(run, monkeypatch):
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "here")
    beat(run, 1, cluster="here", **own_id())  # of its own array, which is over: Slurm has started the merge
    assert live_tasks.others_alive(run, "7") is None
    # The same number on another cluster is another job.
    beat(run, 1, cluster="there")
    with subprocess.Popen([sys.executable, "-c", BEATS, str(run.tasks / "7_0.0.alive")]) as process:
        assert live_tasks.others_alive(run, "7").startswith("task 7_0.0 of bob on ")
        process.kill()
    wait_until(lambda: live_tasks.others_alive(run, "7") is None, "the heartbeat to stand still")


def test_a_silent_task_is_waited_for_once_by_a_resubmission_that_merges_as_well(run):
    beat(run, 1)
    with pytest.raises(SlurmGPUError, match="no-such-code"):  # as far as this test needs it
        resubmit(run, Request(code="no-such-code"))
    assert not list(run.tasks.glob("*.alive"))


def test_where_squeue_does_not_answer_it_is_refused_and_force_goes_on(run, monkeypatch):
    def silent(and_of):
        raise commands.SlurmUnavailableError("squeue did not answer within 30 s.")

    first = run.submissions()[0]
    run.record_submission({**first, "executor": "slurm", "state": "queued", "array_job": "7", "cluster": "here"})
    monkeypatch.setattr(queue, "own_jobs", silent)
    with pytest.raises(SlurmGPUError, match=r"The run's jobs in the queue are unknown.* --force"):
        live_tasks.refuse_alive(run, "merge")
    live_tasks.refuse_alive(run, "merge", force=True)


def test_a_merge_asks_again_if_a_task_or_a_submission_came_while_it_asked(run, monkeypatch):
    while_waiting(monkeypatch, run_merge, lambda seconds: None)
    first, seen, lives = run.submissions()[0], [], [None, "a task is alive", "a task is alive", None]

    def asks():
        seen.append(len(run.submissions()))
        if len(seen) == 2:
            run.record_submission({**first, "submission": 2})

    with run_merge.locked_when_over(run, lambda: lives.pop(0) if lives else None, asks):
        pass
    assert seen == [1, 1, 2]


def test_a_forced_merge_ends_submissions_whose_jobs_are_not_seen_here(run, monkeypatch):
    queued_on(run, monkeypatch, cluster="there", uid=os.getuid())
    run_merge.merge_by_hand(run, force=True)
    assert [line["state"] for line in run.submissions()] == ["ended", "ended"]


def test_force_merges_under_a_task_that_beats(run, slurmgpu):
    beat(run, 1, **own_id())  # this process lives
    assert "--force" in slurmgpu("merge", run.folder, expect=2).stderr
    slurmgpu("merge", "--force", run.folder, expect=3)
    assert "leave out --verify and --wait" in slurmgpu("merge", "--force", "--wait", run.folder, expect=2).stderr


# Whole runs


def in_another_namespace(argv, **options):
    """A command in PID and mount namespaces of its own, as on another machine: its processes are not numbered here."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        leave_out("only root can make namespaces")
    words = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
    if subprocess.run([*words, "true"], capture_output=True).returncode:
        leave_out("namespaces cannot be made here")
    return subprocess.Popen([*words, *argv], start_new_session=True, **options)


def test_a_local_run_is_not_merged_while_a_task_elsewhere_has_joined_it(project):
    folder = project(16, held_from=8)
    process = start("submit", "--executor", "debug", "--gpus", "0", cwd=folder)
    wait_until_held(folder, 1)
    run = Run.open(folder / "run")
    beat(run, 1)
    path = run.tasks / "7_0.0.alive"
    with subprocess.Popen([sys.executable, "-c", BEATS, str(path)]) as task:
        let_go(folder)
        wait_until(lambda: not list(run.tasks.glob("debug*.alive")), "the end of the own task")
        wait_until(
            lambda: "WARNING: waiting: task 7_0.0 of bob on " in process.stdout.readline(), "the merge to wait", 60
        )
        assert not run.merged.exists()
        task.kill()
    path.unlink()  # as a task that ends does
    process.communicate(timeout=200)
    assert process.returncode == 0
    assert run.merged.exists()


@pytest.mark.nightly  # as of another user's
def test_a_task_that_loads_for_long_elsewhere_keeps_merge_and_resubmit_away(project, slurmgpu, tmp_path):
    """Of another user, too, nothing more is known than its heartbeat: no claim is held, no process is numbered here."""
    folder = project(16, "LoadsLong", settings={"until": str(tmp_path / "loaded")})
    (folder / "run").parent.mkdir(exist_ok=True)
    argv = [sys.executable, "-m", "slurmgpu", "submit", "--executor", "local", "--gpus", "0", "--tasks", "1"]
    with in_another_namespace(argv, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: any(r["state"] == "loading" for r in _records(folder)), "a task that loads")
            assert list((folder / "run" / "claims").iterdir()) == []
            for command in ("merge", "resubmit"):
                done = slurmgpu(command, "run", cwd=folder, expect=2)
                assert "waiting up to 30 s to see whether task local1_0.0" in done.stderr
                assert "still running: task local1_0.0 of " in done.stderr
            assert not (folder / "run" / "report.json").exists()
            (tmp_path / "loaded").touch()
            assert process.wait(280) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    slurmgpu("merge", "run", cwd=folder, expect=0)


def test_a_task_of_another_user_that_loads_keeps_merge_and_resubmit_from_clearing_claims(somebody, project, slurmgpu):
    """Started on what is another machine to us; not even its claims are, before it has loaded."""
    own = project(16, "LoadsLong", settings={"until": str(somebody.folder / "loaded")})
    folder = somebody.folder / "project"
    shutil.copytree(own, folder)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    argv = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", somebody.python, "-m", "slurmgpu"]
    argv += ["submit", "--executor", "local", "--gpus", "0", "--tasks", "1"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with in_another_namespace(argv, cwd=folder, env={**os.environ, **somebody.env}, **quiet) as process:
        try:
            wait_until(lambda: any(r["state"] == "loading" for r in _records(folder)), "a task that loads")
            (folder / "run" / "claims" / "00001").touch()
            for command in (("merge", "run"), ("resubmit", "run", "--trust")):
                done = slurmgpu(*command, cwd=folder, expect=2)
                assert "waiting up to 30 s to see whether task local1_0.0" in done.stderr
                assert "still running: task local1_0.0 of " in done.stderr
            assert not (folder / "run" / "report.json").exists()
            assert (folder / "run" / "claims" / "00001").exists()
            (folder / "run" / "claims" / "00001").unlink()
            (somebody.folder / "loaded").touch()
            assert process.wait(280) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _records(folder):
    return records(folder) if (folder / "run").exists() else []
