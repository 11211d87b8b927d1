"""`logs RUN`: a line for each attempt with its state and its log files."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from slurmgpu.cli.console import say
from slurmgpu.errors import SlurmGPUError
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import is_over
from slurmgpu.search.index import FileRecord, LoggedAttempt, read_index
from slurmgpu.util.amounts import size_of


def show_index(run: Run) -> None:
    """Print each attempt in task order with its state and its non-empty log files."""
    index = read_index(run)
    if not index["attempts"]:
        if is_over(run.submissions()):
            raise SlurmGPUError(
                f"No task of {run.folder} started, and its last submission is over. "
                f"`slurmgpu resubmit {run.typed}` submits it again."
            )
        raise SlurmGPUError(f"No task of {run.folder} has started yet. `slurmgpu status {run.typed}` says why.")
    rows = [
        (about["attempt"], about["failure"] or ("ok" if about["state"] == "ended" else about["state"]), about["files"])
        for about in sorted(index["attempts"], key=_in_task_order)
    ]
    rows += [("merge", "", index["merge"])] if index["merge"] else []
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, end, files in rows:
        line = f"{name:<{widths[0]}}  {end:<{widths[1]}}  {_files(files)}"
        sys.stdout.write(f"{line.rstrip()}\n")
    say(f"files in {run.logs}\nnext: slurmgpu logs {run.typed} TASK, or --item N, or --class NAME")


def _in_task_order(attempt: LoggedAttempt) -> tuple[int, list[int]]:
    return attempt["submission"] or 0, [int(number) for number in re.findall(r"\d+", attempt["attempt"])]


def _files(files: Sequence[FileRecord]) -> str:
    """Names and sizes, worker logs first: they are needed most."""
    written = sorted((file for file in files if file["size_bytes"]), key=_by_writer)
    return "  ".join(f"{Path(file['path']).name} ({size_of(file['size_bytes'])})" for file in written)


def _by_writer(file: FileRecord) -> tuple[bool, bool]:
    return not file["source"].startswith("worker"), file["source"].endswith(".out")
