"""Leader and followers of a task of several nodes, as two processes without Slurm: what is found before any work."""

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys

import pytest

from slurmgpu.plan.planner import draft_run
from slurmgpu.run import rendezvous
from slurmgpu.run.creation import create_run
from slurmgpu.run.rendezvous import Rendezvous, join_rendezvous
from tests.support.images import NOBODY
from tests.support.runs import records, wait_until

NODE = """
import sys
from pathlib import Path
from slurmgpu.task import node_agent as following, nodes; from slurmgpu.run import rendezvous as meetings
from slurmgpu.executors import job_entry as entry
from slurmgpu.run.records import Attempt
from slurmgpu.run.directory import Run
nodes.MEETING_S = following.MEETING_S = float(sys.argv[1])
nodes.FAREWELL_S = meetings.GREETING_S = 120.0  # nobody is late on a busy machine
attempt = Attempt("7", 0, n_gpus=1, device=sys.argv[2], n_nodes=2, nodes=("first", "second"))
sys.exit(entry.work(Run.open(Path("run")), attempt))
"""


@pytest.fixture
def run_folder(project):
    """A folder with a run that was planned, and not submitted."""
    folder = project(16, resources={"processes": "per-gpu", "nodes_per_task": 2, "gpus": 2})
    with draft_run(folder / "slurmgpu.toml") as draft:
        create_run(draft.run_dir, draft.plan, draft.items.files)
    return folder


def start_node(folder, rank, meeting_s=120, device="cpu", gpus="0", changed=""):
    env = {**os.environ, "SLURM_PROCID": str(rank), "SLURMD_NODENAME": ("first", "second")[rank]}
    env |= {"CUDA_VISIBLE_DEVICES": gpus}
    *before, works = NODE.strip().splitlines()
    code = "\n".join([*before, changed, works])
    return subprocess.Popen([sys.executable, "-c", code, str(meeting_s), device], cwd=folder, env=env)


def test_a_fault_that_another_node_finds_names_that_node_and_nothing_is_claimed(run_folder):
    nodes = [start_node(run_folder, 0, device="auto"), start_node(run_folder, 1, device="auto", gpus="")]
    assert [node.wait(240) for node in nodes] == [1, 0]
    [record] = records(run_folder)
    assert (record["failure"], record["bad_node"]) == ("gpu_fault", "second")
    assert record["message"] == "second: asked for 1 GPU, CUDA_VISIBLE_DEVICES has 0 (none)"
    assert not list((run_folder / "run" / "claims").iterdir())


@pytest.mark.parametrize(
    ("number", "failure", "bad_node", "message"),
    [
        ("ESTALE", "file_system", "second", "second has lost a file system: [Errno 116] Stale file handle"),
        ("ENOSPC", "disk_full", None, "second: [Errno 28] No space left on device"),
        ("ENOENT", "crash", None, "second: [Errno 2] No such file or directory"),
    ],
)
def test_an_error_of_files_on_another_node_has_the_class_that_it_has_on_the_first(
    run_folder, number, failure, bad_node, message
):
    fail = f"import os, errno\ndef fail(self): raise OSError(errno.{number}, os.strerror(errno.{number}))\n"
    nodes = [start_node(run_folder, 0), start_node(run_folder, 1, changed=f"{fail}following.Launcher.prepare = fail")]
    assert nodes[0].wait(240) != 0
    assert nodes[1].wait(240) == 0
    [record] = records(run_folder)
    assert (record["failure"], record["bad_node"], record["message"]) == (failure, bad_node, message)


def test_a_fault_that_the_first_node_finds_ends_the_others(run_folder):
    nodes = [start_node(run_folder, 0, device="auto", gpus=""), start_node(run_folder, 1, device="auto")]
    assert [node.wait(240) for node in nodes] == [1, 0]
    assert records(run_folder)[0]["failure"] == "gpu_fault"


def test_a_node_that_does_not_come_is_named(run_folder):
    assert start_node(run_folder, 0, meeting_s=0.2).wait(240) == 1
    [record] = records(run_folder)
    assert (record["failure"], record["bad_node"]) == ("node_fail", "second")
    assert "second did not start its process, or could not reach" in record["message"]
    assert not list((run_folder / "run" / "claims").iterdir())


def test_a_follower_without_a_leader_ends(run_folder):
    assert start_node(run_folder, 1, meeting_s=0.2).wait(240) == 75


@pytest.mark.parametrize(
    ("raised", "failure", "message"),
    [
        ("SlurmGPUError('no more processes')", "crash", "second: no more processes"),
        ("OSError(errno.ESTALE, 'Stale file handle')", "file_system", "second has lost a file system: "),
    ],
)
def test_a_worker_that_another_node_cannot_start_is_no_death_of_the_node(run_folder, raised, failure, message):
    pytest.importorskip("torch")
    fail = f"def fail(*given): raise {raised}\nfollowing.start_program = fail"
    changed = f"import errno; from slurmgpu.errors import SlurmGPUError\n{fail}"
    nodes = [start_node(run_folder, 0), start_node(run_folder, 1, changed=changed)]
    assert nodes[0].wait(240) != 0
    assert nodes[1].wait(240) == 0
    [record] = records(run_folder)
    assert record["failure"] == failure
    assert record["message"].startswith(message)


SLOW_TO_START = """
import time
begin = nodes.start_program
nodes.start_program = lambda *given: time.sleep(0.3) or begin(*given)  # the folder of its log is slow
"""


@pytest.mark.parametrize(
    ("end", "failure", "bad_node", "message"),
    [
        ("begin(['false'], env, log)", "crash", None, "the worker exited with code 1 before its work was done"),
        ("os._exit(1)", "node_fail", "second", "second: its process died or stopped answering"),
    ],
)
def test_what_ends_on_another_node_before_this_one_has_started_its_part_is_noticed(
    run_folder, end, failure, bad_node, message
):
    pytest.importorskip("torch")
    changed = f"import os; begin = following.start_program\nfollowing.start_program = lambda words, env, log: {end}\n"
    nodes = [start_node(run_folder, 0, changed=SLOW_TO_START), start_node(run_folder, 1, changed=changed)]
    assert nodes[0].wait(240) == 1
    nodes[1].wait(240)
    [record] = records(run_folder)
    assert (record["failure"], record["bad_node"]) == (failure, bad_node)
    assert record["message"].startswith(message)


def test_only_who_read_the_secret_is_let_in(tmp_path):
    path, came = tmp_path / "meeting", []
    meeting = Rendezvous(path, ["localhost"], lambda line, hello: came.append(hello["rank"]) or line.tell({"ok": True}))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    told = json.loads(path.read_text())
    line = join_rendezvous(path, {"rank": 1})
    assert line.hear() == {"ok": True}
    line.close()
    # What comes from a stranger is read up to the length of a greeting, and nothing of it is believed.
    for words in (b'{"rank": 2, "secret": "guessed"}\n'.ljust(64), b"GET / HTTP/1.1\r\n\r\n".ljust(64), bytes(1 << 24)):
        with socket.create_connection(("localhost", told["port"])) as stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(words)
            heard = b""
            while chunk := stranger.recv(100):
                heard += chunk
            assert len(heard) == rendezvous.NONCE_BYTES  # which says nothing of the secret
    # Where something else listens, it is not taken for the leader.
    (tmp_path / "other").write_text(json.dumps({**told, "secret": "another"}))
    (tmp_path / "other").chmod(0o600)
    assert join_rendezvous(tmp_path / "other", {"rank": 3}) is None
    meeting.close()
    assert not path.exists()
    assert join_rendezvous(path, {"rank": 4}) is None
    assert came[0] == 1
    assert 2 not in came


def test_strangers_who_say_nothing_keep_nobody_out(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "MOST_GREETINGS", 4)
    path = tmp_path / "meeting"
    meeting = Rendezvous(path, ["localhost"], lambda line, hello: line.tell({"ok": True}))
    told = json.loads(path.read_text())
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(("localhost", told["port"]))) for _ in range(5)]
        # All but four are sent away at once, unread.
        assert min(len(stranger.recv(100)) for stranger in strangers) == 0
        monkeypatch.setattr(rendezvous, "GREETING_S", 0.05)
        strangers[0].close()
        wait_until(lambda: join_rendezvous(path, {"rank": 1}), "a place")
    meeting.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_a_meeting_that_another_user_has_written_is_none(tmp_path):
    path = tmp_path / "meeting"
    meeting = Rendezvous(path, ["localhost"], lambda line, hello: line.tell({"ok": True}))
    os.chown(path, NOBODY, NOBODY)
    assert join_rendezvous(path, {"rank": 1}) is None
    os.chown(path, 0, 0)
    assert join_rendezvous(path, {"rank": 1}) is not None
    meeting.close()
