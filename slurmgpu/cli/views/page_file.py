"""`report --html`: write the report as a page."""

from __future__ import annotations

from pathlib import Path

from slurmgpu import page
from slurmgpu.cli.console import say
from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.report.build import Report
from slurmgpu.run.directory import Run
from slurmgpu.util.amounts import size_of


def write_html(run: Run, report: Report, path: Path, task: str | None) -> None:
    """Write the page of a report, with the curves of one task first. SlurmGPUError if it cannot be written."""
    if missing := page.missing_packages():
        raise SlurmGPUError(f"The page needs {' and '.join(missing)}: pip install 'slurmgpu[html]'.")
    tasks = sorted({str(attempt["attempt"]).rpartition(".")[0] for attempt in report["attempts"]})
    if task is not None and task not in tasks:
        raise SlurmGPUError(f"{run.folder} has no task {task!r}.{did_you_mean(task, tasks)}")
    if path.exists() and not path.is_file():
        raise SlurmGPUError(f"{path} is not a regular file; name the file to write with --html.")
    if not path.parent.is_dir():
        raise SlurmGPUError(f"The folder {path.parent} does not exist. Create it, or name another file.")
    size = page.write_page(run, report, path, task)
    say(f"{path}: {size_of(size)}")
