"""`report --html`: the report as a page, for those who do not have the run directory."""

from __future__ import annotations

from pathlib import Path

from slurmgpu import page
from slurmgpu.cli.console import say
from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.report.build import Report
from slurmgpu.run.directory import Run
from slurmgpu.util.amounts import size_of


def write_html(run: Run, report: Report, path: Path, task: str | None) -> None:
    """Write the page of a report, with the lines of one task first; a sentence where that cannot be."""
    if missing := page.missing_packages():
        raise SlurmGPUError(f"The page needs {' and '.join(missing)}: pip install 'slurmgpu[html]'.")
    tasks = sorted({str(attempt["attempt"]).rpartition(".")[0] for attempt in report["attempts"]})
    if task is not None and task not in tasks:
        raise SlurmGPUError(f"{run.folder} has no task {task!r}.{did_you_mean(task, tasks)}")
    if path.exists() and not path.is_file():
        raise SlurmGPUError(f"{path} is no regular file; name the file to write with --html.")
    if not path.parent.is_dir():
        raise SlurmGPUError(
            f"There is no folder {path.parent} to write {path.name} into. Make it, or name another file."
        )
    size = page.write_page(run, report, path, task)
    say(f"{path}: {size_of(size)}")
