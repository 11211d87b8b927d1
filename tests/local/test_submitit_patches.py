"""Submitit's files on a file system that fails for a moment; and a slot of this machine that loses it for good."""

import errno
import os
import platform
import sys

import pytest
import submitit

from slurmgpu.executors.local_slots import Slot
from slurmgpu.executors.submitit_patches import patch_submitit
from tests.cluster.fixture import leave_out
from tests.pretend_nfs.client import Behaviour
from tests.pretend_nfs.nodes import REPOSITORY, Server, missing
from tests.support.failing import SLOT_CANNOT_OPEN, TASK_DIES, Failing
from tests.support.nightly import by_night
from tests.support.runs import report

JOB = """
import os, sys
from pathlib import Path
from submitit.core import utils
from slurmgpu.executors.submitit_patches import patch_submitit
from slurmgpu.util import shared_files

shared_files.FIRST_PAUSE_S = shared_files.LONGEST_PAUSE_S = 0.01
patch_submitit()
Path(sys.argv[2]).write_text(sys.argv[3])
Path(sys.argv[2]).rename(sys.argv[1])
logs = Path.cwd() / "logs"
shared_files.make_folder(logs)
paths = utils.JobPaths(logs, "7", 0)
assert not paths.submitted_pickle.exists()
utils.cloudpickle_dump({"rows": 3}, logs / "pickle")
paths.move_temporary_file(logs / "pickle", "submitted_pickle", keep_as_symlink=True)
assert paths.submitted_pickle.exists()
assert utils.pickle_load(paths.submitted_pickle) == {"rows": 3}
with utils.temporary_save_path(paths.result_pickle) as partial:
    utils.cloudpickle_dump(("success", 5), partial)
assert paths.result_pickle.exists()
assert utils.pickle_load(paths.result_pickle) == ("success", 5)
print(*sorted(path for path in shared_files.list_names(logs)))
"""
ASKING = Behaviour(ac_min_s=0, ac_max_s=0, names=False, listings=False, contents=False, tick_s=1e-9)
LOCAL = ("submit", "--executor", "local", "--gpus", "0")
IMPATIENT = """
import sys
if "slurmgpu.executors.slot" in sys.orig_argv:
    from slurmgpu.util import shared_files
    shared_files.retried.__defaults__ = (0.1,)
"""


def no_logs(number):
    """What makes a slot fail to open its log, and soon give up."""
    return IMPATIENT + SLOT_CANNOT_OPEN.format(ending="_log.out", number=number)


NO_PICKLE = TASK_DIES.format(code=74)


@pytest.mark.parametrize("order", ["EIO*1", *map(by_night, ("EIO*2", "ESTALE*1", "ETIMEDOUT*1")), "lost*1"])
def test_what_submitit_reads_writes_and_renames_is_tried_again(tmp_path, order):
    if reason := missing():
        leave_out(reason)
    with Server(tmp_path / "nfs", seed=1) as server:
        node = server.node("node", ASKING)
        given = (node.orders, node.orders.with_suffix(".partial"), order)
        env = {"PYTHONPATH": str(REPOSITORY)}
        done = node.run(sys.executable, "-c", JOB, *given, **env)
        node.order(None)
        n_faults = len(server.faults())
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["7_0_result.pkl", "7_submitted.pkl", "pickle"]
    assert n_faults > 2


def test_a_slot_that_has_ended_is_forgotten_without_a_look_at_its_files(tmp_path, monkeypatch):
    """Else each would wait for a file system that is gone, and print a traceback."""
    failing = Failing(monkeypatch)
    failing("stat", errno.ENOENT, of="result.pkl")
    slot = Slot(folder=tmp_path, job_id="12", process=None, tasks=[0])
    del slot
    assert failing.n_failed == 0


@pytest.mark.parametrize("site", [no_logs(errno.EIO), NO_PICKLE])
def test_a_slot_that_loses_the_file_system_is_said_to_have_lost_it(project, slurmgpu, tmp_path, site):
    folder = project(8)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(site)
    path = f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}"
    done = slurmgpu(*LOCAL, cwd=folder, expect=3, PYTHONPATH=path)
    [attempt] = report(folder)["attempts"]
    node = platform.node()
    assert (attempt["failure"], attempt["node"], attempt["bad_node"]) == ("file_system", node, node)
    assert f"{node} has lost a file system" in attempt["message"]
    if site != NO_PICKLE:
        assert f"file_system: {node} has lost a file system: " in done.stderr
        assert "Traceback" not in done.stderr
    slurmgpu("resubmit", "run", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)


def test_a_slot_whose_log_finds_the_disk_full_says_so(project, slurmgpu, tmp_path):
    folder = project(8)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(no_logs(errno.ENOSPC))
    path = f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}"
    done = slurmgpu(*LOCAL, cwd=folder, expect=3, PYTHONPATH=path)
    [attempt] = report(folder)["attempts"]
    assert (attempt["failure"], attempt["bad_node"]) == ("disk_full", None)
    assert f"disk_full: {platform.node()} has no room for a file: " in done.stderr
    assert "Traceback" not in done.stderr


def test_what_sbatch_says_when_it_takes_a_job_is_told_once(caplog):
    patch_submitit()
    line = "sbatch: warning: the account is nearly used up"
    command = ["sh", "-c", f"echo '{line}' >&2; echo Submitted batch job 7"]
    call = submitit.core.utils.CommandFunction(command, verbose=False)
    assert [call(), call()] == ["Submitted batch job 7"] * 2
    assert caplog.messages == [line]
