"""What a process that lives long submits: in threads at the same time, and from several folders one after the other."""

import contextlib
import importlib
import os
import sys
import threading
from pathlib import Path

import pytest

import slurmgpu
from slurmgpu.code import imported_modules
from slurmgpu.code.namesakes import namesakes_hidden
from slurmgpu.plan.planner import draft_run
from slurmgpu.slurm import commands
from slurmgpu.util import process_wide

HERE = {"executor": "local", "gpus": 0, "overrides": {"html": False}}
OVERLAP_S = 0.3
"""How long a thread is given to enter a block that is to be closed for it."""


def state():
    environ = os.environ.get("PYTHONSAFEPATH"), os.environ.get("SLURM_NTASKS")
    return Path.cwd(), *sys.path, environ


@pytest.mark.parametrize(
    "block",
    [process_wide.safe_path, commands.outside_job, lambda: namesakes_hidden(Path("a"))],
    ids=["safe_path", "outside_job", "namesakes_hidden"],
)
def test_threads_leave_the_process_as_it_was(monkeypatch, block):
    """The second would put back what the first had changed."""
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    before, entered, left = state(), threading.Event(), threading.Event()

    def other():
        with block():
            entered.set()
            left.wait()
            inside.append(os.environ.get("SLURM_NTASKS"))

    inside = []
    thread = threading.Thread(target=other)
    with block():
        thread.start()
        overlapped = entered.wait(OVERLAP_S)
        inside.append(os.environ.get("SLURM_NTASKS"))
    left.set()
    thread.join()
    assert state() == before
    assert inside[0] == inside[1]
    assert not overlapped


WORKLOAD = """
import threading
from slurmgpu import Array

class Waits:
    columns = {"v": Array("float32")}
    batch_size = 1

    def __init__(self):
        threading.current_thread().at_planning()

    def __call__(self, items):
        return [{"v": 1.0} for item in items]
"""


class Plans(threading.Thread):
    def __init__(self, folder, at_planning):
        super().__init__()
        self.folder, self.at_planning, self.error = folder, at_planning, None

    def run(self):
        try:
            with draft_run(self.folder / "run.toml", {}):
                pass
        except BaseException as error:
            self.error = error


def test_run_files_in_two_folders_are_planned_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "waits.py").write_text(WORKLOAD)
        (tmp_path / name / "items.txt").write_text("one\n")
        (tmp_path / name / "run.toml").write_text('input = "items.txt"\n[workload]\nuse = "waits.py:Waits"\n')
    entered, left = threading.Event(), threading.Event()
    second = Plans(tmp_path / "b", lambda: (entered.set(), left.wait(3 * OVERLAP_S)))

    def in_first():
        second.start()
        entered.wait(OVERLAP_S)

    first = Plans(tmp_path / "a", in_first)
    first.start()
    first.join()
    left.set()
    second.join()
    assert (first.error, second.error) == (None, None)
    assert Path.cwd() == tmp_path


def test_a_thread_looks_for_changed_modules_while_another_one_plans(monkeypatch):
    known = {"/a.py": "1", "/b.py": "2"}

    def read(path, digest):
        known[f"{path} of the other"] = digest  # which has imported it meanwhile
        return False

    monkeypatch.setattr(imported_modules, "DIGESTS", known)
    monkeypatch.setattr(imported_modules, "_has_changed", read)
    imported_modules.forget_changed()
    assert len(known) == 4


def test_maps_of_one_name_take_a_run_directory_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, together = {}, threading.Barrier(2)

    def same(item):
        return item * 2

    def items(number):
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(30)
        yield number

    def map_it(number):
        run = slurmgpu.map(same, items(number), columns="int64", wait=True, **HERE)
        found[run] = run.folder.name, int(run["result"][0])

    threads = [threading.Thread(target=map_it, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for name, _ in found.values()) == ["same", "same-2"]
    assert sorted(value for _, value in found.values()) == [0, 2]


def test_a_refused_map_leaves_no_folder_that_was_reserved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(slurmgpu.SlurmGPUError, match="has the type 'int7'"):
        slurmgpu.map(lambda item: item, [1], columns="int7", **HERE)
    assert list(tmp_path.iterdir()) == []
    for name in ("", ".", 3):
        with pytest.raises(slurmgpu.SlurmGPUError, match=f"name is {name!r}; expected the name of a folder"):
            slurmgpu.map(lambda item: item, [1], columns="int64", name=name, **HERE)


OF_A_FOLDER = """
import namesake

class Workload:
    columns = namesake.COLUMNS
    batch_size = 1

    def __call__(self, items):
        return [namesake.row(item) for item in items]
"""


@pytest.mark.parametrize("executor", ["local", "debug"])
def test_each_folder_is_planned_and_computed_with_its_own_modules_of_one_name(tmp_path, monkeypatch, executor):
    """Python imports a name once: the second run had the columns of the first, and by debug its rows."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "namesake.py").write_text("mine = True\n")
    mine, path = importlib.import_module("namesake"), list(sys.path)
    for column in ("a", "b"):
        (folder := tmp_path / column).mkdir()
        (folder / "items.txt").write_text("one\n")
        (folder / "workload.py").write_text(OF_A_FOLDER)
        row = f"def row(item):\n    return {{'{column}': '{column}'}}\n"
        (folder / "namesake.py").write_text(f"import slurmgpu\nCOLUMNS = {{'{column}': slurmgpu.Text()}}\n{row}")
        (folder / "run.toml").write_text(
            f'input = "items.txt"\nhtml = false\n[workload]\nuse = "workload:Workload"\n'
            f'[resources]\ngpus = 0\nexecutor = "{executor}"\n'
        )
    for number, column in enumerate("aba"):
        run = slurmgpu.submit(tmp_path / column / "run.toml", run_dir=tmp_path / f"run-{number}")
        assert [row.values for row in run.rows()] == [{column: column}]
    assert sys.modules["namesake"] is mine
    if executor == "local":  # the debug executor's worker adds the folders, as it does in a process of its own
        assert sys.path == path
