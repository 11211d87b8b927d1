"""The end of a worker or a command, which skips Python's last collections of garbage without code of the user's."""

import gc
import hashlib
import os
import pickle
import subprocess
import sys

import pytest

from slurmgpu import cli
from slurmgpu.code import functions, imported_modules
from slurmgpu.loader import modules
from slurmgpu.loader.names import BUILT_IN
from slurmgpu.worker import main

MODULE = """
class Log:
    file = open("log.txt", "w")
"""
PROGRAM = """
import sys
from slurmgpu.loader.modules import import_named
from slurmgpu.worker import main

import_named(sys.argv[1]).Log.file.write("kept")
main.main = lambda: 0
main.run_process()
"""


@pytest.fixture
def frozen(monkeypatch):
    """How often objects were frozen since, in a process that has imported nothing of the user's."""
    calls = []
    monkeypatch.setattr(imported_modules, "_named", set())
    monkeypatch.setattr(imported_modules, "DIGESTS", {})
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(1))
    return calls


def end_worker(monkeypatch):
    monkeypatch.setattr(main, "main", lambda: 0)
    main.run_process()


def end_command(monkeypatch):
    monkeypatch.setattr(cli.early_signals, "end_by_exception", lambda: None)  # it would do so in later tests, too
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # Typer sets one of its own
    monkeypatch.setattr(sys, "argv", ["slurmgpu", "--version"])
    with pytest.raises(SystemExit):
        cli.main()


@pytest.mark.parametrize("end", [end_worker, end_command])
def test_a_process_without_code_of_the_users_ends_without_collections(frozen, monkeypatch, end):
    modules.import_named(BUILT_IN["command"].partition(":")[0])
    end(monkeypatch)
    assert frozen


def unpickle(folder):
    content = pickle.dumps({"function": None}) + pickle.dumps({})
    (folder / functions.PICKLE).write_bytes(content)
    planned = {"python": functions.minor_version(), "sha256": hashlib.sha256(content).hexdigest()}
    functions.unpack(folder / functions.PICKLE, planned)


@pytest.mark.parametrize("end", [end_worker, end_command])
@pytest.mark.parametrize(
    "imports",
    [
        lambda _: modules.import_named("json"),
        lambda _: functions.import_named("json:dumps"),
        lambda _: imported_modules.DIGESTS.update({"/home/ada/sheep.py": ""}),
        unpickle,
    ],
)
def test_a_process_with_code_of_the_users_ends_as_python_ends_it(frozen, monkeypatch, tmp_path, end, imports):
    imports(tmp_path)
    end(monkeypatch)
    assert not frozen


def test_what_was_written_to_a_file_that_is_left_open_reaches_it(tmp_path):
    (tmp_path / "theirs.py").write_text(MODULE)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", PROGRAM, "theirs"], cwd=tmp_path, env=env, check=True)
    assert (tmp_path / "log.txt").read_text() == "kept"
