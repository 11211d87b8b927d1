"""The report as a page: one HTML file with everything in it, to read in any browser and to hand on.

May import: report, search, logs, run, code, util. matplotlib and jinja2, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from slurmgpu.report.build import Report
from slurmgpu.run.directory import Run
from slurmgpu.util.atomic_files import write_bytes

NEEDED = ("jinja2", "matplotlib")
"""What draws the page: the extra `html`."""


def missing_packages() -> list[str]:
    """The packages that a page needs and that are not installed."""
    return [name for name in NEEDED if find_spec(name) is None]


def page_path(run: Run) -> Path:
    """Where the merge writes the page."""
    return run.folder / "report.html"


def write_page(run: Run, report: Report, path: Path, task: str | None = None) -> int:
    """Write the page of a report to `path`, in one step; its size in bytes.

    Of the lines of single tasks, those of `task` are shown first, if it has any.
    """
    with _plain_matplotlib():
        from slurmgpu.page.page import render

        content = render(run, report, task).encode("utf-8", "replace")
    write_bytes(path, content)
    return len(content)


@contextlib.contextmanager
def _plain_matplotlib() -> Iterator[None]:
    """Import matplotlib, and draw, without what a user's shell asks of it, and without its words on font caches."""
    backend = os.environ.pop("MPLBACKEND", None)  # one that it does not know any more keeps it from being imported
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
