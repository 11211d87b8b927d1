"""A request of the file system that fails once is made again: whatever command makes it, nothing else comes of it."""

import errno
import json
import logging
import os
import platform
import subprocess
import sys

import pytest

from slurmgpu.executors import job_entry
from tests.chaos.singly import WHOLE
from tests.cluster.fixture import leave_out
from tests.pretend_nfs.client import Behaviour
from tests.pretend_nfs.nodes import REPOSITORY, Server, missing
from tests.support.runs import make_project

WORKLOAD = """
from pathlib import Path
from slurmgpu import Array, ItemError, Text

class Rows:
    columns = {"double": Array("float64"), "shout": Text()}

    def __init__(self, *, mended=""):
        self.mended = Path(mended)

    def load(self, task):
        pass

    def __call__(self, items):
        return [self.row(item) for item in items]

    def row(self, item):
        if item.index == 5 and not self.mended.exists():
            return ItemError("not mended")
        return {"double": 2.0 * item.index, "shout": item.data["text"].upper()}

    def summarize(self, merged):
        return {"rows": len(merged)}
"""
ASKING = Behaviour(ac_min_s=0, ac_max_s=0, names=False, listings=False, contents=False, tick_s=1e-9, maps=True)
COMMANDS = ("status", "report", "list", "logs", "export", "verify", "merge", "submit", "resubmit")
KINDS: dict[str, tuple[str, ...]] = {
    "EIO*1": ("report", "list", "export", "merge", "resubmit"),
    "EIO*2": ("logs",),
    "ESTALE*1": ("verify",),
    "EINTR*1": ("merge",),
    "ETIMEDOUT*3": ("status",),
    "lost*1": ("submit",),
}
"""Each command, and each kind of fault, at least once; "EIO*2" is one at the second request of a kind for a file."""
EVERYTHING = "SINGLE_FAILURES" in os.environ
"""So that `make chaos` tries every kind with every command."""
if EVERYTHING:
    KINDS = dict.fromkeys(KINDS, COMMANDS)


def tried(folder, trials):
    """What comes of commands on a pretended node, each with an order to its file system."""
    with Server(folder / "nfs", seed=1) as server:
        mended = {"mended": str(server.local / "mended")}
        here = {"executor": "local", "gpus": 0, "tasks": 1}
        project = server.exported / "planned"
        make_project(project, n_items=12, shard_items=4, settings=mended, resources=here)
        (project / "workloads.py").write_text(WORKLOAD)
        node = server.node("node", ASKING)
        given = {"exported": server.exported, "shared": server.shared, "orders": node.orders, "local": server.local}
        done = subprocess.run(
            node.command(sys.executable, "-m", "tests.chaos.singly", cwd=REPOSITORY, OMP_NUM_THREADS="1"),
            input=json.dumps({**{name: str(path) for name, path in given.items()}, "trials": trials}) + "\n",
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()], len(server.faults())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if reason := missing():
        leave_out(reason)
    trials = [(name, WHOLE) for name in COMMANDS]
    trials += [(name, order) for order, names in KINDS.items() for name in names]
    found, n_faults = tried(tmp_path_factory.mktemp("singly"), trials)
    assert n_faults > 20 * len(trials)
    return {(each["command"], each["order"]): each for each in found}


@pytest.mark.parametrize(("order", "name"), [(order, name) for order, names in KINDS.items() for name in names])
def test_a_request_that_fails_once_changes_nothing_of_what_a_command_does(found, order, name):
    whole, disturbed = found[name, WHOLE], found[name, order]
    assert "Traceback" not in disturbed["said"], disturbed["said"]
    assert disturbed["code"] == whole["code"], disturbed["said"]
    assert disturbed["left"] == whole["left"]


def test_a_task_that_cannot_open_its_run_says_which_node_has_lost_the_file_system(tmp_path, monkeypatch, caplog):
    def fail(folder):
        raise OSError(errno.EIO, "Input/output error", str(folder / "run.json"))

    monkeypatch.setattr(job_entry.Run, "open", fail)
    monkeypatch.setattr(job_entry, "_log_like_ours", lambda: None)
    monkeypatch.setattr(job_entry.early_signals, "remember", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # which the task sets, and this puts back
    with caplog.at_level(logging.ERROR), pytest.raises(SystemExit) as ended:
        job_entry.run_local_task(tmp_path, "local1", 0, 1, [], "cpu", 1)
    assert ended.value.code == 74
    assert f"file_system: {platform.node()} has lost a file system" in caplog.text
    assert str(tmp_path / "run.json") in caplog.text
