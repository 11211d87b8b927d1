"""`slurmgpu.map` in a real kernel of Jupyter: the progress of a cell, an interrupt, and a restart."""

import re

import pytest

pytest.importorskip("ipykernel")  # not for Python 3.10

from jupyter_client.manager import start_new_kernel

DEFINE = """
import os, time, slurmgpu
factor = 3
def slow(item):
    while item >= 8 and os.path.exists("held"):
        time.sleep(0.01)
    return item * factor
open("held", "w").close()
run = slurmgpu.map(slow, range(16), columns="int64", executor="local", gpus=0, tasks=1, overrides={"html": False})
run
"""


class Notebook:
    def __init__(self, folder):
        self._folder = str(folder)
        self.manager, self.client = start_new_kernel(cwd=self._folder)

    def run(self, cell, on_update=lambda text: None):
        """What a cell shows: the texts of its outputs and of their updates, and the name of its error."""
        shown, error = [], None

        def see(message):
            nonlocal error
            content = message["content"]
            if message["msg_type"] in ("display_data", "update_display_data", "execute_result"):
                shown.append((message["msg_type"], content["data"]))
                on_update(content["data"]["text/plain"])
            elif message["msg_type"] == "error":
                error = content["ename"]

        self.client.execute_interactive(cell, timeout=120, output_hook=see)
        return shown, error

    def restart(self):
        self.manager.restart_kernel(now=True)
        self.client.wait_for_ready(timeout=280)

    def stop(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook(tmp_path):
    made = Notebook(tmp_path)
    yield made
    (tmp_path / "held").unlink(missing_ok=True)
    made.stop()


def test_a_cell_shows_progress_and_neither_interrupt_nor_restart_ends_the_run(notebook, tmp_path):
    shown, error = notebook.run(DEFINE)
    assert (shown[-1][1]["text/plain"], error) == (f"<run {tmp_path}/runs/slow: 16 items>", None)

    def interrupt(text):
        if text.startswith("8 of 16 items"):
            notebook.manager.interrupt_kernel()

    shown, error = notebook.run("run.wait()", interrupt)
    assert error == "KeyboardInterrupt"
    assert shown[-1][1]["text/plain"] == "8 of 16 items; running, 1 task"
    assert {kind for kind, _ in shown[1:]} <= {"update_display_data"}  # one line, updated in place
    assert '<progress value="8" max="16"></progress>' in shown[-1][1]["text/html"]

    notebook.restart()
    (tmp_path / "held").unlink()
    shown, error = notebook.run("import slurmgpu\nrun = slurmgpu.open_run('runs/slow')\nrun['result'][:].tolist()")
    assert error is None
    assert re.sub(r"\s", "", shown[-1][1]["text/plain"]) == str([n * 3 for n in range(16)]).replace(" ", "")
