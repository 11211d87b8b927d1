"""What a command does while single requests of its file system fail, begun at once in a process that has imported all.

`python -m tests.chaos.singly` is started on a pretended node, and reads on standard input what to try: pairs of a
command and of an order to the file system. It prints a line of JSON for each: what came of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import h5py

from slurmgpu.util import shared_files
from tests.chaos import steps

MOST_S = 60
COMMANDS: dict[str, tuple[str, ...]] = {
    "submit": ("submit", "slurmgpu.toml", "--executor", "debug"),
    "local": ("submit", "slurmgpu.toml", "--executor", "local"),
    "resubmit": ("resubmit", "run", "--failed", "--executor", "debug"),
    "merge": ("merge", "run"),
    "verify": ("merge", "run", "--verify"),
    "status": ("status", "run", "--json"),
    "report": ("report", "run"),
    "list": ("list", "."),
    "logs": ("logs", "run"),
    "export": ("export", "run", "-o", "rows.jsonl"),
}
BEFORE = {"submit": "planned", "local": "planned", "begin": "planned", "task": "begun"}
"""What is there before each command; for the others, a run with a failed item that is over."""
WHOLE = "EIO@0"
"""The order after which nothing fails."""


def preload() -> None:
    """Import what the commands will."""
    import slurmgpu.api
    import slurmgpu.cli.app
    import slurmgpu.cli.commands.submit
    import slurmgpu.cli.views.log_lines
    import slurmgpu.cli.views.run_list
    import slurmgpu.executors.job_entry
    import slurmgpu.executors.local
    import slurmgpu.executors.submission
    import slurmgpu.merge.export
    import slurmgpu.worker.main  # noqa: F401


class Trials:
    """The trials of one node: `exported` is the folder as the server has it, `shared` as the node sees it."""

    def __init__(self, given: dict[str, str]) -> None:
        self.exported, self.shared = Path(given["exported"]), Path(given["shared"])
        self.orders, self.local = Path(given["orders"]), Path(given["local"])
        self.number = 0
        for name, state in (("submit", "over"), ("begin", "begun")):
            found = self.trial(name, WHOLE)
            assert found["code"] in (0, 3), found["said"]
            (self.exported / "trial").rename(self.exported / state)

    def trial(self, name: str, order: str) -> dict[str, Any]:
        """The exit code of a command with this order given, what it said, and what it has left."""
        self.number += 1
        kept, out = self.exported / "trial", self.local / "out"
        if kept.exists():
            shutil.rmtree(kept)
        shutil.copytree(self.exported / BEFORE.get(name, "over"), kept)
        mended = self.local / "mended"
        if name == "resubmit":
            mended.touch()
        pid = os.fork()
        if not pid:
            self._be(name, order, out)
        try:
            code = self._wait(pid)
        finally:
            self.orders.unlink(missing_ok=True)
            mended.unlink(missing_ok=True)
        return {"command": name, "order": order, "code": code, "said": out.read_text(), "left": left(kept)}

    def _be(self, name: str, order: str, out: Path) -> None:
        """Be the command."""
        code = 99
        try:
            os.setsid()
            fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
            for number in (1, 2):
                os.dup2(fd, number)
            os.chdir(self.shared / "trial")
            shared_files.FIRST_PAUSE_S = shared_files.LONGEST_PAUSE_S = 0.01
            partial = self.orders.with_suffix(".partial")
            partial.write_text(f"{order}#{self.number}")
            partial.rename(self.orders)
            code = _code_of(name)
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
        finally:
            os._exit(code)

    def _wait(self, pid: int) -> int:
        until = time.monotonic() + MOST_S
        while time.monotonic() < until:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return -99


def _code_of(name: str) -> int:
    try:
        if name == "begin":
            steps.plan("slurmgpu.toml")
        elif name == "task":
            steps.task("run", "0")
        else:
            steps.type_command(*COMMANDS[name])
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def left(kept: Path) -> dict[str, Any]:
    """What a command has left: which shards are there, the rows of merged.h5, what the report says."""
    run = kept / "run"
    found: dict[str, Any] = {"shards": sorted(path.name for path in (run / "shards").glob("*.h5"))}
    with contextlib.suppress(OSError), h5py.File(run / "merged.h5", "r") as file:
        found["rows"], found["complete"] = file["index"].shape[0], bool(file.attrs["complete"])
        found["double"] = file["double"][:].tolist()
    with contextlib.suppress(OSError):
        report = json.loads((run / "report.json").read_text())
        found["report"] = [report[key] for key in ("complete", "n_rows", "n_errors", "failures", "damaged_records")]
        found["summary"] = report["summary"]
    with contextlib.suppress(OSError):
        found["exported"] = len((kept / "rows.jsonl").read_text().splitlines())
    return found


def main() -> None:
    """Try what standard input says."""
    preload()
    given = json.loads(sys.stdin.readline())
    trials = Trials(given)
    for name, order in given["trials"]:
        print(json.dumps(trials.trial(name, order)), flush=True)


if __name__ == "__main__":
    main()
