"""Whatever lies where a file of a run should be, every command answers: no FIFO is waited for, no device is read."""

import contextlib
import io
import json
import multiprocessing
import os
import resource
import shutil
import signal
import stat
import sys
import traceback

import pytest

import slurmgpu.api
import slurmgpu.cli.app
import slurmgpu.cli.commands.logs
import slurmgpu.cli.views.watch
import slurmgpu.executors.submission
import slurmgpu.merge.export
import slurmgpu.page.page  # noqa: F401  (imported once, and not in each fork)
from slurmgpu.cli import main
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import run_merge
from slurmgpu.run.directory import FOLDERS, Run
from tests.support.nightly import by_night
from tests.support.runs import make_project

PATIENCE_S = 120
"""A command that is still at work is waiting for something that never comes, or reads without end."""
MEMORY_BYTES = 2 << 30
EXIT_CODES = {0, 1, 2, 3}

KINDS = {
    "fifo": os.mkfifo,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "huge": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
    "empty": lambda path: path.touch(),
    "folder": lambda path: path.mkdir(),
}
OTHER_KINDS = {
    "link to a file": lambda path: path.symlink_to(sys.executable),
    "dangling link": lambda path: path.symlink_to("/no/such/file"),
}

FILES = (
    "run.json",
    "submissions.jsonl",
    "report.json",
    "report.html",
    "input.idx",
    "tasks/local1_0.0.json",
    "telemetry/local1_0.0.jsonl",
    "logs/local1_0.0.log",
    "logs/*_0_log.out",
    "logs/*_0_log.err",
)
"""Files of a run that has been merged, as they lie in its directory."""
BY_DAY = ("run.json", "submissions.jsonl", "report.json", "tasks/local1_0.0.json", "logs/*_0_log.err")
"""One of each format."""

COMMANDS = (
    ("status", "--json"),
    ("status", "--watch"),
    ("report", "--html", "page.html"),
    ("logs", "--item", "3"),
    ("merge",),
    ("export", "-o", "rows.jsonl"),
    ("resubmit", "--dry-run"),
    ("cancel",),
    ("list",),
)
"""One of those that read the same files."""
ALSO = (
    ("status",),
    ("report",),
    ("logs",),
    ("logs", "0"),
    ("logs", "--class", "item_error"),
    ("status", "--metrics", "run.prom"),
    ("merge", "--verify"),
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, slurmgpu):
    folder = make_project(tmp_path_factory.mktemp("finished") / "project", 24, settings={"faults": {"3": "item_error"}})
    slurmgpu("submit", "--executor", "local", "--device", "cpu", cwd=folder, expect=0)
    return folder


def in_a_process_of_its_own(argv, cwd):
    """Exit code, the signal that it died of or 0, and what was printed: a fork, for a new Python takes a second."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code, said = 99, io.StringIO()
        try:
            os.close(reader)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(PATIENCE_S)
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
            os.chdir(cwd)
            sys.argv = ["slurmgpu", *argv]
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                try:
                    main()
                except SystemExit as error:
                    code = error.code or 0
                except BaseException:
                    traceback.print_exc()
        finally:
            os.write(writer, said.getvalue().encode(errors="replace")[:60_000])
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        said = file.read().decode(errors="replace")
    status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status), said


@pytest.fixture(scope="module")
def small_process():
    """A process that has loaded the command line alone, to fork: that of the tests may hold gigabytes, and threads."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


@pytest.mark.parametrize("name", [each if each in BY_DAY else by_night(each) for each in FILES])
@pytest.mark.parametrize(
    ("kinds", "commands"),
    [pytest.param(KINDS, COMMANDS, id="some"), by_night({**KINDS, **OTHER_KINDS}, (*COMMANDS, *ALSO))],
)
def test_every_command_answers_whatever_lies_where_a_file_should_be(
    name, kinds, commands, finished, small_process, tmp_path
):
    for kind, make in kinds.items():
        folder = tmp_path / kind.replace(" ", "-")
        shutil.copytree(finished, folder)
        for path in list((folder / "run").glob(name)):
            path.unlink()
            make(path)
        for command in commands:
            if (name, kind, command[-1]) == ("submissions.jsonl", "empty", "--watch"):
                continue  # which says that the run is only planned: that is what it waits for
            target = [] if command == ("list",) else ["run"]
            argv = [command[0], *target, *command[1:]]
            code, said = small_process.apply(in_a_process_of_its_own, (argv, folder))
            where = f"{' '.join(command)} with {name}: {kind}: exit code {code}\n{said[-3000:]}"
            assert code in EXIT_CODES, where
            assert "Traceback" not in said, where
        shutil.rmtree(folder)


@pytest.mark.parametrize("names", [("tasks",), FOLDERS], ids=["tasks", "all"])
def test_a_run_without_its_folders_is_shown_and_computed_again(names, finished, slurmgpu, tmp_path):
    folder = tmp_path / "project"
    shutil.copytree(finished, folder)
    for name in names:
        shutil.rmtree(folder / "run" / name)
    files = {path.name for path in (folder / "run").iterdir()}
    for command, *options in (*COMMANDS, *ALSO, ("show", "--failed"), ("logs", "--failed")):
        if command != "merge":
            said = slurmgpu(command, *(["run"] if command != "list" else []), *options, cwd=folder)
            assert "No such file" not in said.stderr, command
            assert said.returncode in EXIT_CODES
    assert "24 of 24" in slurmgpu("status", "run", cwd=folder).stdout
    assert {path.name for path in (folder / "run").iterdir()} == files  # looking changes nothing
    slurmgpu("merge", "run", cwd=folder, expect=0)
    again = slurmgpu("resubmit", "run", "--failed", cwd=folder, expect=0)
    assert "24 of 24 rows, 1 of them failed" in again.stdout


def test_logs_of_a_run_is_made_again_for_its_owner_alone_to_write(finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "logs")
    former = os.umask(0)
    try:
        Run.open(tmp_path / "run").make_folders()
    finally:
        os.umask(former)
    assert stat.S_IMODE((tmp_path / "run" / "logs").stat().st_mode) == 0o755


def test_logs_says_that_a_run_has_none_left(finished, slurmgpu, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "logs")
    assert "Task 0 of " in (said := slurmgpu("logs", "run", "0", cwd=tmp_path, expect=2).stderr)
    assert " has no log in " in said
    shutil.rmtree(tmp_path / "run" / "tasks")
    assert " has no logs and no records of tasks any more. " in slurmgpu("logs", "run", cwd=tmp_path, expect=2).stderr
    shutil.rmtree(tmp_path / "run" / "shards")  # merged.h5 has the rows
    assert " has no logs and no records of tasks any more. " in slurmgpu("logs", "run", cwd=tmp_path, expect=2).stderr


def test_a_complete_run_whose_submissions_are_lost_stays_complete(finished, slurmgpu, tmp_path):
    folder = tmp_path / "project"
    shutil.copytree(finished, folder)
    (folder / "run" / "submissions.jsonl").unlink()
    assert json.loads(slurmgpu("status", "run", "--json", cwd=folder, expect=0).stdout)["state"] == "complete"
    said = slurmgpu("resubmit", "run", cwd=folder, expect=2).stderr
    assert "has every shard: there is nothing to compute. `slurmgpu resubmit --failed" in said
    again = slurmgpu("resubmit", "run", "--failed", cwd=folder, expect=0)
    assert "24 of 24 rows, 1 of them failed" in again.stdout


def test_a_run_whose_submissions_are_lost_while_it_computes_ends_as_it_is(project, slurmgpu):
    folder = project(8)
    (folder / "losing.py").write_text(
        "from pathlib import Path\nfrom workloads import Rows\n\n\nclass Losing(Rows):\n"
        '    def __call__(self, items):\n        Path("run/submissions.jsonl").unlink(missing_ok=True)\n'
        "        return super().__call__(items)\n"
    )
    done = slurmgpu(
        "submit", "--executor", "local", "--device", "cpu", "-s", "workload.use=losing.py:Losing", cwd=folder
    )
    assert (done.returncode, done.stderr.count("error:")) == (0, 0), done.stderr
    assert "8 of 8 rows, 0 of them failed" in done.stdout


def test_jobs_by_hand_make_the_folders_again_that_a_purge_has_removed_while_they_were_queued(
    project, slurmgpu, monkeypatch
):
    folder, job = project(8), {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "4e9"}
    slurmgpu("plan", "--gpus", "0", cwd=folder, expect=0)
    for name in FOLDERS:
        shutil.rmtree(folder / "run" / name)
    slurmgpu("task", "run", cwd=folder, expect=0, **job)
    assert (folder / "run" / "logs" / "7_0_0_log.err").exists()
    shutil.rmtree(folder / "run" / "logs")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setattr(run_merge, "_record_merge_job", raise_stopped)
    with pytest.raises(SlurmGPUError, match="stopped"):
        run_merge.merge_when_over(Run.open(folder / "run"))
    assert (folder / "run" / "logs" / "8_0_log.err").exists()


def raise_stopped(*_):
    raise SlurmGPUError("stopped")
