"""The lock of a run: one holds it, the silent lose it, and whoever lost it neither acts nor removes its successor's."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from slurmgpu.errors import SlurmGPUError
from slurmgpu.merge import join, merge
from slurmgpu.run import claims
from slurmgpu.run import lock as locks
from slurmgpu.run.directory import Run
from slurmgpu.run.heartbeats import Observer
from slurmgpu.run.lock import LockLostError, hold, run_lock
from slurmgpu.util import pids
from tests.cluster.fixture import leave_out
from tests.support.failing import Failing
from tests.support.pretend_runs import pretend_run
from tests.support.runs import wait_until


def holder(**changes):
    """A lock as another process has it."""
    value = {"token": "another", "beat": 3, "doing": "merging", "user": "ada", "since": 0.0, **pids.own_id(), **changes}
    return json.dumps(value).ljust(locks.SIZE)


def content(folder):
    return json.loads((folder / ".submitting").read_bytes())


def test_the_patient_wait_for_the_lock_and_the_others_are_refused(tmp_path):
    entered = threading.Event()

    def wait():
        with run_lock(tmp_path, "merging", patient=True):
            entered.set()

    thread = threading.Thread(target=wait)
    with run_lock(tmp_path, "submitting"):
        thread.start()
        with (
            pytest.raises(SlurmGPUError, match=f"right now, by process {os.getpid()} of .* which began submitting it"),
            run_lock(tmp_path, "merging"),
        ):
            pass
        assert not entered.is_set()
    thread.join()
    assert entered.is_set()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("patient", [True, False])
@pytest.mark.parametrize(
    ("held", "patience_s"),
    [
        (lambda: holder(pid=4194304), 3600.0),
        (lambda: holder(ticks=1), 3600.0),
        (lambda: holder(boot="another machine of this name", pid=4194304), 0.2),
        (lambda: holder(pid_namespace="pid:[1]"), 0.2),
        (lambda: "no lock's content", 0.2),
        (lambda: "", 0.2),
        (lambda: holder(pid="x", since="yesterday"), 0.2),
        (lambda: holder(pid=4194304, since=1e300), 3600.0),
    ],
    ids=["dead", "its number given again", "another machine", "another namespace", "damaged", "empty", "odd", "late"],
)
def test_the_lock_of_a_process_that_is_dead_or_silent_is_taken_away(tmp_path, monkeypatch, held, patience_s, patient):
    monkeypatch.setattr(locks, "PATIENCE_S", patience_s)
    (tmp_path / ".submitting").write_text(held())
    with run_lock(tmp_path, "merging", patient=patient) as lock:
        assert content(tmp_path)["token"] == lock.token
        lock.check()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "elsewhere", [{"boot": "another"}, {"pid_namespace": "pid:[1]"}, {"pid": 4194304, "boot": "x"}]
)
def test_a_holder_elsewhere_that_beats_is_alive_whatever_proc_says_here(tmp_path, elsewhere):
    path, over = tmp_path / ".submitting", threading.Event()
    path.write_text(holder(**elsewhere))

    def beat():
        n_beats = 3
        while not over.wait(0.05):
            path.write_text(holder(**elsewhere, beat=(n_beats := n_beats + 1)))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(SlurmGPUError, match="This run is being submitted"), run_lock(tmp_path, "merging"):
            pass
    finally:
        over.set()
        thread.join()


class Clock:
    """Time as an observer has it: most of its patience passes between two beats of the holder."""

    def __init__(self, lock):
        self.lock, self.now, self.n_pauses = lock, 0.0, 0
        self.has_waited = threading.Event()

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        with contextlib.suppress(FileNotFoundError):  # it was released
            seen = self.lock.read_bytes()
            while self.lock.read_bytes() == seen:
                time.sleep(0.01)
        self.now += 0.8 * locks.PATIENCE_S
        self.n_pauses += 1
        if self.n_pauses == 5:
            self.has_waited.set()

    def __getattr__(self, name):
        return getattr(time, name)


def test_a_lock_that_is_held_for_long_is_not_taken_away(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "RENEW_S", 0.05)
    monkeypatch.setattr(locks, "LONGEST_GAP_S", 1e9)
    order = []

    def wait():
        with run_lock(tmp_path, "merging", patient=True):
            order.append("second")

    thread = threading.Thread(target=wait)
    with run_lock(tmp_path, "merging"):
        clock = Clock(tmp_path / ".submitting")
        monkeypatch.setattr(locks, "time", clock)
        thread.start()
        assert clock.has_waited.wait(250)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


@pytest.mark.parametrize("has_links", [True, False])
def test_of_many_that_come_at_once_one_holds_the_lock(tmp_path, monkeypatch, has_links):
    if not has_links:

        def link(*args, **kwargs):
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", link)
    inside, most = [], []

    def work():
        with run_lock(tmp_path, "merging", patient=True):
            inside.append(1)
            time.sleep(0.02)  # others that hold it as well come in now
            most.append(len(inside))
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 10
    assert list(tmp_path.iterdir()) == []


def test_a_lost_reply_to_the_link_costs_nothing(tmp_path, monkeypatch):
    def link(*args, **kwargs):
        real(*args, **kwargs)
        raise FileExistsError(17, "File exists")  # the request was sent again

    real = os.link
    monkeypatch.setattr(os, "link", link)
    with run_lock(tmp_path, "merging") as lock:
        lock.check()
    assert list(tmp_path.iterdir()) == []


HOLDER = """
import sys
from pathlib import Path
from slurmgpu.run import lock as locks
locks.RENEW_S, locks.PATIENCE_S = 0.1, 1.0
try:
    with locks.run_lock(Path(sys.argv[1]), "merging") as lock:
        print("holds it", flush=True)
        input()
        lock.check()
        Path(sys.argv[1], "acted").touch()
except locks.LockLostError as error:
    print("lost:", error)
"""


def start_holder(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "holds it\n"
    return process


def test_a_holder_that_was_stopped_past_its_lease_neither_acts_nor_removes_its_successors_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE_S", 1.0)
    with start_holder(tmp_path) as process:
        os.kill(process.pid, signal.SIGSTOP)
        with run_lock(tmp_path, "merging", patient=True) as lock:
            os.kill(process.pid, signal.SIGCONT)
            said, _ = process.communicate("\n")
            assert content(tmp_path)["token"] == lock.token
            lock.check()
            assert f"process {os.getpid()} of " in said
        assert said.startswith("lost: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("has_successor", [False, True])
def test_a_lock_that_was_renewed_while_it_was_taken_away_is_put_back(tmp_path, monkeypatch, has_links, has_successor):
    path = tmp_path / ".submitting"
    renewed, successor = holder(beat=4), holder(token="a third")

    def link(source, target, **options):
        if has_successor:
            path.write_text(successor)  # a process that saw no lock
        if not has_links:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return real(source, target, **options)

    real = os.link
    monkeypatch.setattr(os, "link", link)
    path.write_text(renewed)
    inode = path.stat().st_ino
    assert not locks._take_away(path, json.loads(holder(beat=3)))
    assert path.read_text() == (successor if has_successor else renewed)
    assert has_successor or path.stat().st_ino == inode
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EMLINK, errno.EXDEV])
def test_a_lock_is_taken_by_one_on_a_file_system_without_hard_links(tmp_path, monkeypatch, code):
    Failing(monkeypatch)("link", code, times=9)
    with (
        run_lock(tmp_path, "merging"),
        pytest.raises(SlurmGPUError, match="being submitted or merged right now"),
        run_lock(tmp_path, "submitting"),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_lock_that_sshfs_refuses_without_saying_why_is_anothers_if_it_is_there(tmp_path, monkeypatch):
    """SFTP has one error for a file that exists and one that may not be made, and sshfs makes it EPERM."""
    other = json.dumps({"token": "another's", "beat": 0, "doing": "merging", "user": "ada", **pids.own_id()})

    def refuse(path, flags, *more, **named):
        if flags & os.O_EXCL:
            if other:  # it was faster
                (tmp_path / locks.RUN_LOCK).write_text(other)
            raise PermissionError(errno.EPERM, "Operation not permitted", os.fspath(path))
        return opened(path, flags, *more, **named)

    opened = os.open
    Failing(monkeypatch)("link", errno.EPERM, times=9)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SlurmGPUError, match=r"by process .* of ada"), run_lock(tmp_path, "submitting"):
        pass
    (tmp_path / locks.RUN_LOCK).unlink()
    other = ""
    with pytest.raises(PermissionError), run_lock(tmp_path, "submitting"):
        pass


def test_a_holder_that_was_stopped_for_less_goes_on(tmp_path):
    with start_holder(tmp_path) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.kill(process.pid, signal.SIGCONT)
        said, _ = process.communicate("\n")
    assert (said, process.returncode) == ("", 0)
    assert (tmp_path / "acted").exists()


def test_a_lock_that_was_removed_by_hand_is_lost(tmp_path):
    with run_lock(tmp_path, "merging") as lock:
        lock.check()
        (tmp_path / ".submitting").unlink()
        with pytest.raises(LockLostError, match="its lock is now held by nobody"):
            lock.check()


def test_what_is_put_in_the_locks_place_is_refused_in_a_sentence(tmp_path):
    os.mkfifo(tmp_path / ".submitting")
    with pytest.raises(SlurmGPUError, match="it is a FIFO, not a file"), run_lock(tmp_path, "merging"):
        pass
    (tmp_path / ".submitting").unlink()
    (tmp_path / ".submitting").symlink_to("/dev/zero")
    with pytest.raises(SlurmGPUError, match="it is a symbolic link"), run_lock(tmp_path, "merging"):
        pass


def test_a_living_process_that_proc_hides_is_not_dead(tmp_path):
    """Under hidepid=2, as another user: the lock's holder, this process, counts as alive or unknown, never as dead."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None:
        leave_out("only root can hide processes")
    code = "import json, sys; from slurmgpu.util import pids; print(pids.lives(json.loads(sys.argv[1])))"
    hide = "mount -t proc -o hidepid=2 proc /proc && exec setpriv --reuid=65534 --regid=65534 --clear-groups "
    probe = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
    if subprocess.run([*probe, f"{hide} true"], capture_output=True).returncode:
        leave_out("proc cannot be mounted here")
    # Read by root and given on by -c: that user may not be able to read where the package lies.
    source = (locks.Path(pids.__file__)).read_text()
    code = f"{source}\nimport json, sys\nprint(lives(json.loads(sys.argv[1])), lives(json.loads(sys.argv[2])))"
    words = [json.dumps({**pids.own_id(), "pid": pid}) for pid in (os.getpid(), 4194304)]
    python = "/usr/bin/python3"
    done = subprocess.run(
        [*probe, hide + '"$@"', "sh", python, "-I", "-c", code, *words], capture_output=True, text=True
    )
    assert done.stdout.split() == ["None", "False"], done.stderr


# What takes it


def test_two_merges_at_once_are_one_after_the_other_and_the_second_is_refused_in_a_sentence(tmp_path, monkeypatch):
    run = pretend_run(tmp_path / "a run", 300, n_tasks=1)
    with run_lock(run.folder, "merging") as lock:
        partial = run.folder / ".merged.h5.1.partial"
        partial.touch()
        done = subprocess.run(
            [sys.executable, "-m", "slurmgpu", "merge", str(run.folder)], capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 2
        assert "This run is being submitted or merged right now" in done.stderr
        assert f"`slurmgpu status '{run.folder}'`" in done.stderr
        assert partial.exists()
        lock.check()


def test_a_merge_that_has_lost_its_lock_replaces_and_clears_nothing(tmp_path):
    run = pretend_run(tmp_path / "run", 300, n_tasks=1)
    (run.claims.folder / "00001").write_text("{}")

    def lost():
        raise LockLostError("lost")

    with pytest.raises(LockLostError):
        merge.merge(run, None, lost)
    assert (run.claims.folder / "00001").exists()
    assert not (run.folder / "report.json").exists()


class Sleeper:
    """A holder that is stopped when a file is removed, and has lost its lock when it wakes."""

    def __init__(self, monkeypatch, module):
        self.slept = 0.0
        real = module.remove
        monkeypatch.setattr(module, "remove", lambda *given: (self.sleep(), real(*given))[1])
        monkeypatch.setattr(locks, "time", self)

    def sleep(self, seconds=200.0):
        self.slept += seconds

    def monotonic(self):
        return time.monotonic() + self.slept

    def check(self):
        if self.slept:
            raise LockLostError("lost")


def test_a_holder_that_is_stopped_while_it_clears_claims_leaves_its_successors(tmp_path, monkeypatch):
    run = pretend_run(tmp_path / "run", 300, n_tasks=1)
    run.claims.clear()
    for shard in range(3):
        (run.claims.folder / f"{shard:05d}").touch()
    holder = Sleeper(monkeypatch, claims)
    with pytest.raises(LockLostError):
        run.claims.clear(holder.check)
    assert len(list(run.claims.folder.iterdir())) == 2


def test_a_merge_that_is_stopped_before_it_removes_what_dead_ones_left_leaves_its_successors(tmp_path, monkeypatch):
    target, listed = tmp_path / "merged.h5", join.list_fresh

    def look(*given):
        (tmp_path / ".merged.h5.successor.partial").touch()
        holder.sleep()
        return listed(*given)

    holder = Sleeper(monkeypatch, join)
    monkeypatch.setattr(join, "list_fresh", look)
    with pytest.raises(LockLostError):
        join._remove_stale(target, 1.0, holder.check)
    assert os.listdir(tmp_path) == [".merged.h5.successor.partial"]


def test_a_heartbeat_that_has_gone_on_since_it_was_looked_at_is_not_removed(tmp_path):
    path = tmp_path / "tasks" / "7_0.0.alive"
    path.parent.mkdir()
    path.write_text(json.dumps({"token": "t", "beat": 1, **pids.own_id(), "pid": 4194304}))
    observer = Observer(tmp_path, 1.0)
    dead = observer.look()
    path.write_text(path.read_text().replace('"beat": 1', '"beat": 2'))
    observer.forget(dead)
    assert path.exists()
    observer.forget(observer.look())
    assert not path.exists()


def test_lines_that_many_append_at_once_are_all_there(tmp_path):
    run = Run(tmp_path, None)
    code = (
        "import sys; from pathlib import Path; from slurmgpu.run.directory import Run\n"
        "for i in range(20): Run(Path(sys.argv[1]), None).record_submission({'submission': int(sys.argv[2]) + i})"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(100 * n)]) for n in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    lines = (tmp_path / "submissions.jsonl").read_text().splitlines()
    expected = [100 * n + i for n in range(4) for i in range(20)]
    assert sorted(json.loads(line)["submission"] for line in lines) == expected
    assert not (run.folder / ".recording").exists()


def test_a_line_waits_for_the_process_that_appends_one(tmp_path):
    run, written = Run(tmp_path, None), threading.Event()

    def append():
        run.record_submission({"submission": 1})
        written.set()

    thread = threading.Thread(target=append)
    with hold(tmp_path / ".recording", "recording", patient=True):
        thread.start()
        wait_until(lambda: thread.is_alive(), "the thread")
        assert not written.is_set()
        assert not (tmp_path / "submissions.jsonl").exists()
    thread.join()
    assert written.is_set()
