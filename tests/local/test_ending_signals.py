"""A command that SIGTERM or SIGHUP ends: its exit code is that of the signal, and tasks give back what they hold."""

import os
import signal
import subprocess
import sys

import pytest

from slurmgpu.util.early_signals import EndedBySignalError, end_by_exception, ended_by_exception
from tests.local.test_early_signals import environment
from tests.local.test_local import LOCAL, records, start, wait_until_held
from tests.support.command_line import AS_PROGRAMS
from tests.support.nightly import by_night

CODES = {signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.fixture(autouse=True)
def _handlers():
    former = {signum: signal.getsignal(signum) for signum in CODES}
    yield
    for signum, handler in former.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("command", ["list", by_night("check"), by_night("submit")])
@pytest.mark.parametrize("signum", CODES)
def test_a_command_ends_with_the_code_of_its_signal_from_its_beginning(tmp_path, command, signum):
    env = environment(tmp_path, signum, "import typer")
    done = subprocess.run([sys.executable, "-m", "slurmgpu", command], env=env, capture_output=True, timeout=280)
    assert (done.returncode, done.stderr) == (CODES[signum], b"")


@pytest.mark.parametrize("signum", [signal.SIGHUP, by_night(signal.SIGTERM)])
def test_a_local_run_ends_with_the_code_of_its_signal_however_often_it_comes(project, signum):
    folder = project(48, held_from=24)
    process = start(*LOCAL, "--tasks", "2", cwd=folder, **AS_PROGRAMS)
    wait_until_held(folder, 3, 2)
    for _ in range(3):
        process.send_signal(signum)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == CODES[signum], output
    assert f"slurmgpu resubmit {folder / 'run'}" in output
    assert [record["state"] for record in records(folder)] == ["ended", "ended"]


def test_the_debug_executor_ends_with_the_code_of_its_signal_and_no_error_of_an_item(project):
    folder = project(8)
    source = (folder / "workloads.py").read_text()
    ends = "        import os, signal\n        os.kill(os.getpid(), signal.SIGTERM)\n"
    (folder / "workloads.py").write_text(source.replace("        rows = []\n", f"{ends}        rows = []\n"))
    process = start("submit", "--executor", "debug", "--gpus", "0", cwd=folder)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 143, output
    assert "interrupted; the tasks have ended" in output
    assert [(record["state"], record["failure"]) for record in records(folder)] == [("ended", "cancelled")]
    assert not list((folder / "run" / "claims").iterdir())


@pytest.mark.parametrize("signum", CODES)
def test_the_first_signal_raises_and_those_that_follow_do_not(signum):
    signal.signal(signum, signal.SIG_DFL)

    def work():
        with ended_by_exception():
            try:
                os.kill(os.getpid(), signum)
            finally:
                os.kill(os.getpid(), signum)

    with pytest.raises(EndedBySignalError) as raised:
        work()
    assert raised.value.code == CODES[signum]
    assert signal.getsignal(signum) == signal.SIG_DFL


def test_a_second_signal_kills_where_code_of_the_users_may_have_caught_the_first():
    end_by_exception()  # as the command line does
    later = []

    def work():
        with ended_by_exception(then_killed=True):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                later.append(signal.getsignal(signal.SIGTERM))

    with pytest.raises(EndedBySignalError):
        work()
    assert later == [signal.SIG_DFL]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda signum, frame: None])
def test_a_signal_that_is_ignored_or_has_a_handler_keeps_it(handler):
    signal.signal(signal.SIGHUP, handler)
    end_by_exception()
    with ended_by_exception():
        assert signal.getsignal(signal.SIGHUP) == handler
        os.kill(os.getpid(), signal.SIGHUP)
