"""What is told of a run's end: the run file's `on_end`, once, and the mail of Slurm's that the merge job asks for."""

import dataclasses
import errno
import http.server
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slurmgpu.executors import on_end, run_merge, submission
from slurmgpu.report.report_file import report_path
from slurmgpu.run.directory import Run
from slurmgpu.util.atomic_files import write_json
from tests.cluster.fixture import leave_out
from tests.support.pretend_runs import pretend_run
from tests.support.runs import has_ended, report, submissions, wait_for_end, wait_until

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOCAL = ("submit", "--executor", "local", "--gpus", "0")
DEBUG = ("submit", "--executor", "debug", "--gpus", "0")

# Kills its task, as a dying node would, but only once in the life of the run.
KILLS_ITS_TASK = """

class KillsItsTask(Rows):
    def __call__(self, items):
        if not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        return super().__call__(items)
"""
HOOK = "https://hooks.example.org/T/B/x"
TELL = 'echo "$SLURMGPU_STATE" >> told.txt'


@pytest.fixture
def listener():
    """A web server of this machine: its address, and the requests that it got, (path, body)."""
    if shutil.which("curl") is None:
        leave_out("there is no curl")
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", requests
        server.shutdown()


def posting(address):
    """The run file's line: the report to a web server, with what the environment says in the path."""
    path = "$SLURMGPU_NAME/$SLURMGPU_STATE/$SLURMGPU_N_ITEMS/$SLURMGPU_N_ERRORS/$SLURMGPU_N_MISSING"
    return f"curl --silent --show-error --noproxy '*' --data-binary @- {address}/{path}"


def ended(folder, report_says=None):
    """A run directory with a report, in this process, and a run file's folder to work in."""
    run = pretend_run(folder / "run", 600, n_tasks=2, n_shards=4)
    value = {"complete": True, "n_items": 4, "n_errors": 0, "n_missing_items": 0, **(report_says or {})}
    write_json(report_path(run), value)
    return run, value


def with_command(run, command):
    plan = json.loads((run.folder / "run.json").read_text())
    write_json(run.folder / "run.json", {**plan, "on_end": command, "search_path": str(run.folder.parent)})
    return Run.open(run.folder)


def test_the_end_of_a_local_run_is_posted_with_its_report(project, slurmgpu, listener):
    address, requests = listener
    folder = project(40, settings={"faults": {"3": "item_error"}}, on_end=posting(address))
    shown = slurmgpu(*LOCAL, "--dry-run", cwd=folder, expect=0).stdout
    assert posting(address) in shown
    slurmgpu(*LOCAL, cwd=folder, expect=0)
    [(path, body)] = requests
    assert path == "/run/complete/40/1/0"
    assert body == (folder / "run" / "report.json").read_bytes()


def test_a_command_that_fails_changes_neither_the_result_nor_the_exit_code_nor_stdout(project, slurmgpu):
    folder = project(8, on_end="echo noise; cat > got.json; exit 7")
    done = slurmgpu(*DEBUG, "--json", cwd=folder, expect=0)
    assert json.loads(done.stdout) == report(folder) == json.loads((folder / "got.json").read_text())
    assert "noise" in done.stderr
    assert "on_end failed with exit code 7" in done.stderr


def test_a_run_that_is_submitted_again_automatically_is_told_of_once_at_its_end(project, slurmgpu):
    folder = project(16, workload="KillsItsTask", auto_resubmit=2, on_end=TELL)
    with open(folder / "workloads.py", "a") as file:
        file.write(KILLS_ITS_TASK)
    slurmgpu(*LOCAL, cwd=folder, expect=0)
    assert len(submissions(folder)) == 2
    assert (folder / "told.txt").read_text() == "complete\n"

    # A merge by hand of a run that has ended tells nobody again; one that ends a submission does.
    run = Run.open(folder / "run")
    run_merge.merge_by_hand(run)
    assert (folder / "told.txt").read_text() == "complete\n"
    run.record_submission({**run.last_submission(), "submission": 3, "state": "running", "pids": []})
    run_merge.merge_by_hand(run)
    assert (folder / "told.txt").read_text() == "complete\n" * 2


def test_a_merge_job_that_slurm_runs_again_behind_its_end_tells_nobody_again(project, slurmgpu, monkeypatch):
    folder = project(8, on_end=TELL)
    slurmgpu(*DEBUG, cwd=folder, expect=0)
    run = Run.open(folder / "run")
    assert (folder / "told.txt").read_text() == "complete\n"
    marks, merge = [], submission.merge.merge
    with monkeypatch.context() as patch:

        def watched(*given):
            marks.append(run.last_submission()["merges_again"])
            return merge(*given)

        patch.setattr(submission.merge, "merge", watched)
        patch.setattr(on_end, "track", lambda run: marks.append(run.last_submission()["merges_again"]))
        assert submission.merge_behind(run, 1) == 0
    assert marks == [True, False]  # until it tells of the end, `slurmgpu cancel` ends it
    assert (folder / "told.txt").read_text() == "complete\n"
    # One that was killed before it recorded the end tells.
    run.record_submission({**run.last_submission(), "state": "queued"})
    assert submission.merge_behind(run, 1) == 0
    assert (folder / "told.txt").read_text() == "complete\n" * 2


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path, caplog, monkeypatch):
    run, value = ended(tmp_path)
    told = tmp_path / "child"

    class Popen(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout is not None:
                wait_until(lambda: told.exists() and told.read_text().endswith("\n"), "the child")
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    run = with_command(run, "sleep 600 & echo $! > child; wait")
    monkeypatch.setattr(on_end, "ON_END_S", 1.0)
    on_end.run_on_end(run, value)
    assert "on_end took longer than 1 s" in caplog.text
    wait_until(lambda: has_ended(told.read_text()), "the end of the child")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/does/not/exist", "on_end failed with exit code 127"),
        ("kill -9 $$", "on_end was killed by SIGKILL"),
        ("kill -40 $$", "on_end was killed by signal 40"),
        ("echo \0", "on_end could not be started"),
        ("head -c 1 > /dev/null", ""),
    ],
)
def test_whatever_the_command_does_the_merge_goes_on(tmp_path, caplog, command, said):
    run, value = ended(tmp_path, {"complete": False, "padding": "x" * 1_000_000})
    with caplog.at_level(logging.WARNING):
        on_end.run_on_end(with_command(run, command), value)
    assert said in caplog.text
    assert said or not caplog.text


def test_neither_the_command_nor_trackers_need_a_process_that_cannot_be_started(tmp_path, caplog, monkeypatch):
    run, value = ended(tmp_path)
    run = dataclasses.replace(run, plan=dataclasses.replace(run.plan, on_end="true", track=("tensorboard:board",)))

    def no_more(*_, **__):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", no_more)
    run_merge.tell_end(run, value)
    assert "on_end could not be started" in caplog.text
    assert f"nothing is sent to trackers: Resource temporarily unavailable. To send it: slurmgpu track {run.typed}" in (
        caplog.text
    )


def test_the_log_does_not_tell_the_command_which_may_hold_a_token(tmp_path, caplog):
    run, value = ended(tmp_path)
    with caplog.at_level(logging.DEBUG):
        on_end.run_on_end(with_command(run, "echo s3cret > told"), value)
    assert (tmp_path / "told").exists()
    assert "on_end starts" in caplog.text
    assert "s3cret" not in caplog.text


def test_a_script_of_the_users_finds_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    run, value = ended(tmp_path, {"complete": False})
    (tmp_path / "words.py").write_text("WORD = 'mine'\n")
    (tmp_path / "tell.py").write_text(
        "import os, pathlib, words\n"
        "pathlib.Path('told').write_text(words.WORD + os.environ['SLURMGPU_RUN'] + os.environ['SLURMGPU_STATE'])\n"
    )
    on_end.run_on_end(with_command(run, "python3 tell.py"), value)
    assert (tmp_path / "told").read_text() == f"mine{run.folder}incomplete"


def lines_of_the_docs():
    page = Path(__file__).parents[2] / "docs" / "how-to" / "notify.md"
    return [line for line in page.read_text().splitlines() if line.startswith("on_end = ")]


@pytest.mark.parametrize("line", lines_of_the_docs())
def test_the_lines_of_the_docs_say_what_they_promise(tmp_path, line, monkeypatch):
    stand_in = tmp_path / "bin" / "curl"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\nfor word; do echo "$word"; done > curled\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".slack-webhook").write_text(f"{HOOK}\n")
    run, value = ended(tmp_path, {"n_errors": 3})
    (tmp_path / "tell.py").write_text("open('curled', 'w').write('tell.py')")
    on_end.run_on_end(with_command(run, tomllib.loads(line)["on_end"]), value)
    assert (tmp_path / "curled").read_text().splitlines() in (
        ["-s", "-d", "run is complete, 3 items failed", "https://ntfy.sh/my-runs"],
        ["-s", "-H", "Content-Type: application/json", "-d", '{"text": "run: complete"}', HOOK],
        ["-s", "--data-binary", "@-", "https://runs.example.org/reports"],
        ["tell.py"],
    )


@pytest.mark.slurm
def test_on_slurm_the_last_merge_job_posts_and_alone_sends_mail(project, slurmgpu, cluster, listener):
    address, requests = listener
    tables = {"on_end": posting(address), "auto_resubmit": 1, "slurm": {"time": "00:05:00"}}
    folder = project(16, workload="KillsItsTask", **tables)
    with open(folder / "workloads.py", "a") as file:
        file.write(KILLS_ITS_TASK)
    argv = ("submit", "--device", "cpu", "--gpus", "1", "--mail-user", "ada@example.org")
    assert "--mail-user=ada@example.org" in slurmgpu(*argv, "--dry-run", cwd=folder, expect=0).stdout
    slurmgpu(*argv, cwd=folder, expect=0)
    [first] = submissions(folder)
    asked = cluster.run("scontrol", "show", "job", first["merge_job"])
    assert "MailUser=ada@example.org MailType=END,FAIL" in asked
    wait_until(lambda: len(submissions(folder)) == 2, "the automatic resubmission")
    wait_for_end(folder)
    second = submissions(folder)[1]
    [(path, body)] = requests
    assert path == "/run/complete/16/0/0"
    assert json.loads(body)["submissions"][-1]["submission"] == 2
    mails = cluster.folder / "log" / "mail.log"
    wait_until(lambda: mails.exists() and f"Job_id={second['merge_job']} " in mails.read_text(), "the mail")
    assert [line for line in mails.read_text().splitlines() if "ada@example.org" in line] == [
        line for line in mails.read_text().splitlines() if f"Job_id={second['merge_job']} " in line
    ]
