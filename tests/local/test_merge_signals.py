"""A merge that a signal ends, wherever it is: soon, with the run as it was, and nobody waits for its lock."""

import os
import signal
import subprocess
import sys

import pytest
from submitit.core.utils import DelayedSubmission

from slurmgpu.executors import job_entry
from slurmgpu.merge.merge import merge
from slurmgpu.run.heartbeats import beating
from slurmgpu.run.lock import run_lock
from slurmgpu.util import early_signals
from slurmgpu.util.early_signals import EndedBySignalError, deferred, heeded
from tests.files import test_merge
from tests.files.test_merge import merged_rows, publish_all
from tests.local.test_early_signals import JOB, environment
from tests.support.nightly import by_night
from tests.support.runs import wait_until

run = test_merge.run
MOMENTS = [
    "open .submitting",
    "open 00002.h5",
    "open .merged.h5",
    "os.rename .merged.h5",
    "os.remove 00004",  # a claim, once all is written
]
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}


def check_that_nothing_is_left(run):
    left = [path.name for path in run.folder.rglob("*") if path.name.endswith((".partial", ".taken"))]
    assert left == []
    assert not (run.folder / ".submitting").exists()


@pytest.mark.parametrize(
    ("signum", "moment"),
    [
        (signal.SIGTERM, MOMENTS[0]),
        (signal.SIGINT, MOMENTS[1]),
        (signal.SIGHUP, MOMENTS[2]),
        (signal.SIGTERM, MOMENTS[3]),
        (signal.SIGTERM, MOMENTS[4]),
        by_night(signal.SIGTERM, MOMENTS[1]),
        by_night(signal.SIGTERM, MOMENTS[2]),
    ],
)
def test_a_signal_in_the_middle_of_a_merge_ends_it_with_all_as_it_was(run, slurmgpu, tmp_path, signum, moment):
    publish_all(run, sign=-1)
    merge(run)
    before = run.merged.read_bytes()
    for path in run.shards.iterdir():
        path.unlink()
    publish_all(run)
    (run.claims.folder / "00004").touch()
    command = [sys.executable, "-m", "slurmgpu", "merge", str(run.folder)]
    env = environment(tmp_path, signum, moment)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == CODES[signum], done.stderr
    assert "Traceback" not in done.stderr
    check_that_nothing_is_left(run)
    assert (run.merged.read_bytes() == before) is (moment != MOMENTS[-1])
    slurmgpu("merge", run.folder, expect=0)
    assert merged_rows(run)[3] == 6


SUBMITIT = [sys.executable, *job_entry.BEGIN.split(), "-u", "-m", "submitit.core._submit"]


@pytest.mark.parametrize("moment", [by_night("import numpy"), by_night("open run.json"), "open 00002.h5"])
@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGTERM, 143), by_night(signal.SIGINT, 130), (signal.SIGUSR2, 0)],
    ids=["TERM", "INT", "USR2"],
)
def test_a_merge_job_heeds_what_ends_it_and_passes_the_notice_over(run, tmp_path, moment, signum, code):
    publish_all(run)
    run.record_submission({"submission": 1, "round": 0})
    DelayedSubmission(job_entry.run_merge, run.folder, 1).dump(run.logs / "1_submitted.pkl")
    (scontrol := tmp_path / "bin" / "scontrol").parent.mkdir()
    preempted = "JobId=7 JobState=RUNNING Requeue=1 PreemptTime=2026-11-28T10:07:33"
    scontrol.write_text(f"#!/bin/sh\necho {preempted}\necho $1 >> {tmp_path}/asked\n")
    scontrol.chmod(0o755)
    env = environment(tmp_path, signum, moment, **JOB) | {"PATH": str(scontrol.parent)}
    done = subprocess.run([*SUBMITIT, str(run.logs)], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == code, done.stderr
    if signum == signal.SIGTERM:
        assert "requeue" in (tmp_path / "asked").read_text()
    assert run.merged.exists() is not bool(code)
    check_that_nothing_is_left(run)


@pytest.mark.parametrize("waits_for", ["a task that lives", "the lock"])
def test_a_signal_ends_a_merge_that_waits(run, waits_for):
    publish_all(run)
    command = [sys.executable, "-m", "slurmgpu", "merge", "--wait", str(run.folder)]
    held = beating(run.folder, "7_0.0", "7") if waits_for != "the lock" else run_lock(run.folder, "merging")
    with held, subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "waiting" in line:
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait(280) == 143
    check_that_nothing_is_left(run)
    assert not run.merged.exists()


def test_what_comes_while_it_is_deferred_raises_behind_it_and_once():
    former, passed = signal.getsignal(signal.SIGTERM), []

    def work():
        with heeded(), deferred() as allowed:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(early_signals.is_asked_to_end, "the signal")
            passed.append("while it is deferred")
            try:
                with allowed():
                    passed.append("while it is not")
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGUSR2)
                passed.append("while it gives back")

    with pytest.raises(EndedBySignalError) as raised:
        work()
    assert passed == ["while it is deferred", "while it gives back"]
    assert raised.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == former
    assert early_signals.recall() == []


def test_a_summary_of_the_users_that_catches_all_does_not_keep_a_merge_from_its_end(run, tmp_path):
    (tmp_path / "workloads.py").write_text(SUMMARY)
    publish_all(run)
    with pytest.raises(EndedBySignalError), heeded():
        merge(type(run)(run.folder, _that_summarizes(run.plan)))
    del sys.modules["workloads"]  # a module of this name is another in tests after this one
    assert not (run.folder / "report.json").exists()


def _that_summarizes(plan):
    return type(plan)(**{name: getattr(plan, name) for name in plan.__dataclass_fields__} | {"summarizes": True})


SUMMARY = """
import os, signal
class Twice:
    columns, batch_size = {}, 1
    def load(self):
        pass
    def summarize(self, merged):
        os.kill(os.getpid(), signal.SIGTERM)
        return {}
    def __call__(self, batch):
        return []
"""
