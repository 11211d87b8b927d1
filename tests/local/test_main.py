"""What the command line makes of errors: a sentence where the user can do something, a traceback where not."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmgpu import cli
from slurmgpu.cli import app
from slurmgpu.executors import live_tasks
from slurmgpu.report import completeness
from slurmgpu.util.ansi import CONTROLS
from slurmgpu.util.users import expanded
from tests.support.nightly import by_night
from tests.support.pretend_runs import pretend_run

DEBUG = ("--executor", "debug", "--gpus", "0")


@pytest.fixture
def failing(monkeypatch):
    """Runs the command line, which fails with an error: its exit code."""

    def call(error):
        def fail():
            raise error

        monkeypatch.setattr(app, "app", fail)
        monkeypatch.setattr(cli.early_signals, "end_by_exception", lambda: None)  # it would do so in later tests, too
        for name in ("stdout", "stderr"):  # which main replaces
            monkeypatch.setattr(sys, name, getattr(sys, name))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code

    return call


@pytest.mark.parametrize(
    ("number", "to_do"),
    [
        (errno.EROFS, "Do this on a machine that can write there"),
        (errno.EACCES, "Name a path that you may read"),
        (errno.EPERM, "Name a path that you may read"),
        (errno.ENOSPC, "Free space there"),
        (errno.EDQUOT, "Free space there"),
        (errno.EFBIG, "Raise your limit on the size of files"),
        (errno.ENAMETOOLONG, "Name a path that can be read"),
        (errno.ELOOP, "Name a path that can be read"),
        (errno.ENOENT, "Name a path that can be read"),
        (errno.EEXIST, "A file is where a folder is needed"),
        (errno.ENOTDIR, "A file is where a folder is needed"),
    ],
)
def test_an_error_of_a_file_that_the_user_can_put_right_is_a_sentence(failing, capsys, number, to_do):
    assert failing(OSError(number, os.strerror(number), "/runs/a/.submitting")) == 2
    assert capsys.readouterr().err.startswith(f"error: /runs/a/.submitting: {os.strerror(number)}. {to_do}")


def test_a_full_disk_is_one_also_where_the_file_is_not_known(failing, capsys):
    assert failing(OSError(errno.ENOSPC, "No space left on device")) == 2
    assert "A file that it writes: No space left on device. Free space" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), RuntimeError("can't start new thread")]
)
def test_a_limit_on_processes_and_threads_is_named(failing, capsys, error):
    assert failing(error) == 2
    assert capsys.readouterr().err.startswith("error: This machine starts no more processes for you")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EKEYEXPIRED])
def test_an_open_file_that_is_refused_later_may_need_a_new_ticket(failing, capsys, number):
    assert failing(OSError(number, os.strerror(number))) == 2
    assert f"A file: {os.strerror(number)}. Its file system refuses you now: renew" in capsys.readouterr().err


@pytest.mark.parametrize("error", [OSError(errno.EBADF, "no", "x"), OSError(errno.EPERM, "no"), OSError("h5py")])
def test_any_other_error_is_a_bug_with_its_traceback(failing, error):
    with pytest.raises(OSError, match=r"no|h5py"):
        failing(error)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["status", "~nobody-here/run"], "/~nobody-here/run is not a run directory"),
        (["status"], "`slurmgpu list` shows the runs here."),
        (["status", "."], "it has no run.json. `slurmgpu list` shows the runs here."),
        (["list", "~nobody-here"], "/~nobody-here"),
        (["submit", "~nobody-here/run.toml"], "There is no run file"),
        (["submit", "."], " is a folder. Name a run file, such as slurmgpu.toml."),
        (["submit", "--dry-run", "-s", "run_dir=~nobody-here/run", "-s", "workload.use=~nobody-here/x.py:X"], "x.py"),
        (["show", "run", "-n", f"{1 << 64}"], "less than or equal to"),
    ],
)
def test_a_home_that_there_is_not_and_a_number_that_is_too_large_get_a_sentence(project, slurmgpu, argv, said):
    folder = project(4)
    assert said in slurmgpu(*argv, cwd=folder, expect=2).stderr


@pytest.mark.parametrize("name", ["slurmgpu.toml", "config/slurmgpu/site.toml"])
def test_a_fifo_in_place_of_a_file_of_keys_is_not_waited_for(project, slurmgpu, name):
    folder = project(4)
    (folder / "config/slurmgpu").mkdir(parents=True)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    said = slurmgpu("submit", "--dry-run", cwd=folder, expect=2, XDG_CONFIG_HOME=str(folder / "config"))
    assert f"{folder / name} cannot be read: it is a FIFO, not a file. Name a file of TOML." in said.stderr


def test_a_merged_file_is_refused_with_the_run_directory_to_name(slurmgpu, tmp_path):
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "merged.h5").touch()
    (tmp_path / "a run" / "run.json").touch()
    for argv in (["show"], ["export", "-o", "x.csv"], ["status"], ["logs"], ["merge"]):
        said = slurmgpu(argv[0], "a run/merged.h5", *argv[1:], cwd=tmp_path, expect=2).stderr
        assert f"merged.h5 is a file; expected a run directory, perhaps '{tmp_path}/a run'." in said


def test_a_merged_file_without_its_run_is_refused_with_what_reads_it(slurmgpu, tmp_path):
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "merged.h5").touch()
    for argv in (["show", "found/merged.h5"], ["status", "found"], ["export", "found", "-o", "x.csv"]):
        said = slurmgpu(*argv, cwd=tmp_path, expect=2).stderr
        assert f"by `slurmgpu export {tmp_path}/found/merged.h5 -o rows.csv`" in said


def test_a_run_in_place_of_a_run_file_is_refused_with_what_completes_it(slurmgpu, tmp_path):
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "run.json").touch()
    said = slurmgpu("submit", "a run", cwd=tmp_path, expect=2).stderr
    assert f"is a run, which `slurmgpu resubmit '{tmp_path}/a run'` completes. Name a run file" in said


def test_a_home_is_put_in_place_of_its_sign_where_there_is_one(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [expanded(name) for name in ("~/run", "~", "a/~", "~nobody-here/run")] == [
        tmp_path / "run",
        tmp_path,
        Path("a/~"),
        Path("~nobody-here/run"),
    ]


@pytest.mark.parametrize(("n_published", "complete"), [(0, False), (4, False), (4, True)])
def test_cancel_names_the_command_that_goes_on(monkeypatch, capsys, tmp_path, n_published, complete):
    run = pretend_run(tmp_path / "run", 0, n_tasks=1, n_shards=4)
    for shard in range(n_published):
        run.shard_path(shard).touch()
    monkeypatch.setattr(live_tasks, "cancel", lambda _: "Slurm jobs 20")  # a task that was requeued after the end
    monkeypatch.setattr(completeness, "is_complete", lambda _: complete)
    app.cancel(run.folder)
    verb = "merge" if n_published else "resubmit"
    rest = "The run is complete." if complete else f"To go on: slurmgpu {verb} {run.folder}"
    assert capsys.readouterr().out == f"cancelled: Slurm jobs 20. {rest}\n"


@pytest.mark.parametrize("command", ["submit", "list", "init", "check"])
def test_a_working_directory_that_was_removed_is_said_to_be(tmp_path, command):
    gone = tmp_path / "gone"
    gone.mkdir()
    code = (
        f"import os, sys; os.rmdir({str(gone)!r}); sys.argv[1:] = [{command!r}]; from slurmgpu.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=gone, capture_output=True, text=True)
    said = "error: The working directory: No such file or directory. It was removed: go to one that exists.\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_a_path_that_is_too_long_is_said_to_be(slurmgpu):
    done = slurmgpu("status", "a" * 300, expect=2)
    assert done.stderr.count("\n") == 1
    assert "File name too long" in done.stderr


# Output that nobody reads


@pytest.fixture
def unread(tmp_path):
    """Runs the command line with a pipe that nobody reads as its stdout, or its stderr: what has ended."""

    def call(*argv, stream="stdout", program=("-m", "slurmgpu")):
        other = {"stdout": "stderr", "stderr": "stdout"}[stream]
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, *program, *map(str, argv)]
        try:
            return subprocess.run(
                command, **{stream: writing, other: subprocess.PIPE}, cwd=tmp_path, text=True, timeout=280
            )
        finally:
            os.close(writing)

    return call


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("--help", 0),
        by_night("list --json", 0),
        by_night("status run", 0),
        ("status run --json", 0),
        ("status run --watch", 3),  # it has not seen the run complete
        by_night("status -w run --json", 3),
        ("logs run 0 --follow", 0),
    ],
)
def test_a_command_that_shows_something_ends_when_nobody_reads_it_any_more(unread, tmp_path, command, code):
    run = pretend_run(tmp_path / "run", 600.0, n_tasks=2, executor="local")
    (run.logs / "4711_0.0.log").write_text("loading\n" * 100)
    done = unread(*command.split())
    assert (done.returncode, done.stderr) == (code, "")


def test_what_went_wrong_is_said_also_where_nobody_reads_what_came_before_it(unread, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    failing = """
import sys
from slurmgpu import cli
from slurmgpu.cli import app
from slurmgpu.errors import SlurmGPUError
def fail():
    print("a line")
    raise SlurmGPUError("it went wrong")
app.app, sys.argv[1:] = fail, ["status"]
cli.main()
"""
    done = unread(program=("-c", failing))
    assert (done.returncode, done.stderr) == (2, "error: it went wrong\n")


def test_the_exit_code_of_a_command_does_not_depend_on_who_reads_its_output(unread, project, slurmgpu):
    folder = project(8, settings={"faults": {"3": "exception"}})
    assert unread("submit", folder / "slurmgpu.toml", *DEBUG).returncode == 0
    for name in ("shards/00000.h5", "merged.h5"):
        (folder / "run" / name).unlink()
    assert unread("merge", folder / "run").returncode == 3
    assert unread("report", folder / "run").returncode == 3
    assert unread("report", folder / "nowhere", stream="stderr").returncode == 2
    assert unread("resubmit", folder / "run", *DEBUG, stream="stderr").returncode == 0


@pytest.mark.parametrize(("where", "closed", "code"), [("run", "1>&-", 0), ("nowhere", "2>&-", 2)])
def test_the_exit_code_of_a_command_does_not_depend_on_its_output_being_open(tmp_path, where, closed, code):
    pretend_run(tmp_path / "run", 600.0, n_tasks=2, executor="local")
    command = f'exec "{sys.executable}" -m slurmgpu status {where} {closed}'
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)


def test_output_that_a_full_disk_does_not_take_is_told(slurmgpu, tmp_path):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "slurmgpu", "list", "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, cwd=tmp_path, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "No space left on device. Free space there" in done.stderr


@pytest.mark.parametrize("command", ["plan", "dry run", "submit", "failed again"])
def test_what_the_users_modules_print_does_not_get_into_the_json(project, slurmgpu, command):
    folder = project(4, settings={"faults": {"2": "exception"}})
    code = (folder / "workloads.py").read_text()
    (folder / "workloads.py").write_text(f'print("imported")\n{code}')
    argv = {"plan": ("plan",), "dry run": ("submit", "--dry-run", *DEBUG)}.get(command, ("submit", *DEBUG))
    done = slurmgpu(*argv, "--json", cwd=folder, expect=0)
    if command == "failed again":
        done = slurmgpu("resubmit", "run", "--failed", *DEBUG, "--json", cwd=folder, expect=0)
    assert json.loads(done.stdout)
    assert "imported" in done.stderr


def test_json_holds_nothing_that_a_terminal_obeys(tmp_path, slurmgpu):
    name = "run \x9b31m\u202e\x7f\x1b[2J"
    pretend_run(tmp_path / name, 60)
    commands = ["status", name], ["list", "."]
    status, listed = (slurmgpu(*argv, "--json", cwd=tmp_path, expect=0).stdout for argv in commands)
    assert json.loads(status)["run"] == json.loads(listed)["runs"][0]["run"] == name
    assert not CONTROLS.search(status + listed)
