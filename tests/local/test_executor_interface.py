"""An executor of another package: it computes, merges, shows, cancels and resubmits runs as any other."""

import json
import os
import subprocess
import sys
import time

import pytest

from slurmgpu.api import RunHandle
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import live_tasks
from slurmgpu.executors.registry import accounting_of, executor_named
from slurmgpu.plan.executors import EXECUTORS
from slurmgpu.run.directory import Run
from tests.support import pretend_runs
from tests.support.command_line import CommandLine
from tests.support.packages import install
from tests.support.pretend_runs import pretend_run
from tests.support.runs import check_rows, let_go, records, report, submissions, wait_until_held

SPOOL = '''
"""A queue of one job: a process that stays behind, computes one task after another, and merges."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from slurmgpu.errors import NoAnswerError, SlurmGPUError
from slurmgpu.executors.interface import Executor, Sight, Started
from slurmgpu.run.directory import Run
from slurmgpu.util import pids


class Spool(Executor):
    name, title, queues = "spool", "the spool", True

    def check(self, submission, container):
        if submission.gpus_per_task:
            raise SlurmGPUError("The spool has no GPUs: --gpus 0.")

    def describe(self, container):
        return "spool: a process that stays behind"

    def place(self, run, submission):
        if submission.round:
            be_silent(run.folder / "silent")
        return {"spool": "/var/spool"}

    def hand_over(self, line, jobs):
        be_silent(Path(line["folder"], "silent again"))

    def start(self, run, submission):
        argv = [sys.executable, "-m", "spool", run.folder, str(submission.submission), str(submission.n_tasks)]
        with open(run.logs / "spool.log", "a") as log:
            started = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        return Started({"state": "queued", "spool_job": started.pid})

    def look(self, run, lines, waiting_merge):
        living = [pid for line in lines if is_alive(pid := line.get("spool_job", 0)) and pid != os.getpid()]
        return Sight(f"the spool has job {living[0]}" if living else None)

    def queued(self, run, among=None, last=None):
        pids = [line.get("spool_job", 0) for line in run.submissions() if line["state"] == "queued"]
        facts = {"state": "RUNNING", "reason": "None", "start": None, "n_tasks": 1}
        return [{"job_id": str(pid), **facts} for pid in pids if is_alive(pid)]

    def cancel(self, run, lines, among=None):
        jobs = [line["spool_job"] for line in lines if is_alive(line["spool_job"])]
        for line in lines:
            run.record_submission({"submission": line["submission"], "cancelled": True})
        for pid in jobs:
            os.kill(pid, signal.SIGTERM)
        return [f"spool job {pid}" for pid in jobs]


def be_silent(once):
    if not once.exists():
        once.touch()
        raise NoAnswerError("The spool does not answer.", is_silent=True)


def is_alive(pid):
    seen = pids.look(pid) if pid else None
    return seen is not None and seen[0] not in pids.DEAD


def main():
    from slurmgpu.executors.job_entry import work
    from slurmgpu.executors.submission import merge_behind
    from slurmgpu.run.heartbeats import beating
    from slurmgpu.run.records import Attempt

    run, submission = Run.open(Path(sys.argv[1])), int(sys.argv[2])
    for task in range(int(sys.argv[3])):
        attempt = Attempt(f"spool{submission}", task, submission=submission, executor="spool")
        with beating(run.folder, attempt.name, attempt.job):
            if code := work(run, attempt):
                sys.exit(code)
    merge_behind(run, submission)


if __name__ == "__main__":
    main()
'''
SUBMIT = ("submit", "--executor", "spool", "--gpus", "0", "--tasks", "2")


def install_spool(folder):
    return install(folder, "spool", SPOOL, "slurmgpu.executors", "spool = spool:Spool\n")


@pytest.fixture(scope="module")
def slurmgpu(tmp_path_factory):
    """The command line of a Python that has a package which brings the executor `spool`."""
    site = install_spool(tmp_path_factory.mktemp("spool") / "site")
    calls = CommandLine(env={"PYTHONPATH": path_of(site)})
    yield calls
    calls.close()


def path_of(site):
    return os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """That package, installed for the test itself."""
    site = install_spool(tmp_path / "site")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", path_of(site))
    yield site
    executor_named.cache_clear()
    sys.modules.pop("spool", None)


def test_help_lists_the_executors_that_are_installed(site):
    argv = [sys.executable, "-m", "slurmgpu", "submit", "--help"]  # a new Python: it looks for them at its first import
    assert "slurm, local, debug, spool." in subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_a_run_by_an_executor_of_another_package_is_complete_and_shown(project, slurmgpu):
    folder = project(40)
    assert "✓ executor   spool: a process" in slurmgpu("check", cwd=with_spool(folder)).stdout
    done = slurmgpu(*SUBMIT, "--wait", cwd=folder, expect=0)
    check_rows(folder, 40)
    [line] = submissions(folder)
    assert (line["executor"], line["spool"], line["state"]) == ("spool", "/var/spool", "ended")
    assert f"submitted: spool job {line['spool_job']} (2 tasks)\n" in done.stderr
    assert {record["executor"] for record in records(folder)} == {"spool"}
    status = json.loads(slurmgpu("status", "--json", "run", cwd=folder, expect=0).stdout)
    assert (status["state"], status["complete"]) == ("complete", True)
    assert report(folder)["accounting"] is False


def with_spool(folder):
    """The project, whose run file names the executor."""
    file = folder / "slurmgpu.toml"
    file.write_text(file.read_text() + '[resources]\nexecutor = "spool"\ngpus = 0\n')
    return folder


def test_such_a_run_is_cancelled_and_resubmitted(project, slurmgpu, site, monkeypatch):
    folder = project(40, held_from=16)
    slurmgpu(*SUBMIT, cwd=folder, expect=0)
    [line] = submissions(folder)
    wait_until_held(folder, 2)
    assert json.loads(slurmgpu("status", "--json", "run", cwd=folder).stdout)["state"] == "running"
    refused = slurmgpu("resubmit", "run", cwd=folder, expect=2).stderr
    assert f"is still running: the spool has job {line['spool_job']}." in refused
    done = slurmgpu("cancel", "run", cwd=folder, expect=0).stdout
    assert f"cancelled: spool job {line['spool_job']}. To go on: slurmgpu resubmit" in done
    let_go(folder)
    run = RunHandle(Run.open(folder / "run"))
    monkeypatch.setattr(live_tasks, "ENDING_S", 250.0)
    again = run.resubmit()  # at once: it waits for the end of what was cancelled
    assert again.outcome.submission.executor == "spool"
    assert again.wait()["complete"]
    check_rows(folder, 40)
    assert [line.get("cancelled") for line in submissions(folder)] == [True, None]
    assert {record["submission"] for record in records(folder)} == {1, 2}


def test_such_a_run_resubmits_itself_also_if_the_queue_is_silent_for_a_moment(project, slurmgpu):
    folder = project(40, auto_resubmit=1)
    slurmgpu(*SUBMIT[:-1], "1", "--inject", "timeout", "--wait", cwd=folder, expect=0)
    check_rows(folder, 40)
    assert [(line["executor"], line["round"], line["state"]) for line in submissions(folder)] == [
        ("spool", 0, "ended"),
        ("spool", 1, "ended"),
    ]
    log = (folder / "run" / "logs" / "spool.log").read_text()
    assert log.count("trying again: The spool does not answer.") == 2


def test_what_it_cannot_do_is_refused_in_a_sentence(project, slurmgpu):
    folder = with_spool(project(8))
    said = slurmgpu("check", "--node", cwd=folder, expect=2).stdout
    assert said.splitlines()[-1] == "✗ node       The executor spool cannot check a node: leave out --node."
    pretend_run(folder / "other", 300, n_tasks=2)
    said = slurmgpu("submit", "--after", "other", cwd=folder, expect=2).stderr
    assert "other is not complete yet, and the executor spool cannot wait for it (--after)." in said
    assert "The spool has no GPUs: --gpus 0." in slurmgpu("submit", "--gpus", "1", cwd=folder, expect=2).stderr
    assert not (folder / "run").exists()
    said = slurmgpu("submit", "--executor", "spol", cwd=folder, expect=2).stderr
    assert "[resources] executor: should be 'slurm', 'local', 'debug' or 'spool'; found 'spol'." in said


def test_a_run_whose_executor_is_not_installed_is_shown(tmp_path, slurmgpu, monkeypatch):
    monkeypatch.setattr(pretend_runs, "BEGIN", time.time() - 300)
    run = pretend_run(tmp_path / "run", 300, n_tasks=2, executor="gone")
    status = json.loads(slurmgpu("status", "--json", run.folder, expect=0).stdout)
    assert (status["state"], len(status["attempts"])) == ("running", 2)
    assert "running" in slurmgpu("list", tmp_path, expect=0).stdout
    assert accounting_of(run) is None


def test_what_is_no_executor_is_a_sentence(site):
    entries = next(site.glob("*.dist-info")) / "entry_points.txt"
    for broken, reason in (("spool:Spoon", "cannot be loaded"), ("builtins:dict", "expected a subclass of slurmgpu")):
        entries.write_text(f"[slurmgpu.executors]\nspool = {broken}\n")
        with pytest.raises(SlurmGPUError, match=reason):
            EXECUTORS.make("spool")
    entries.write_text("[slurmgpu.executors]\nreel = spool:Spool\n")
    with pytest.raises(SlurmGPUError, match=r"spool:Spool is named 'spool', but its entry point 'reel'\."):
        EXECUTORS.make("reel")
    entries.write_text("[slurmgpu.executors]\nspool = spool:Spool\n")
    with pytest.raises(SlurmGPUError, match=r"No executor 'spol' is installed .* slurm, local, debug, spool\."):
        EXECUTORS.make("spol")
