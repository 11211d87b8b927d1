"""Write the report as a page: a single HTML file for any browser.

May import: report, results, search, logs, run, code, util. matplotlib and jinja2, too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from slurmgpu.report.report_file import Report
from slurmgpu.run.directory import Run
from slurmgpu.util.atomic_files import write_bytes
from slurmgpu.util.logging import quiet

NEEDED = ("jinja2", "matplotlib")
"""The packages that draw the page: the extra `html`."""


def missing_packages() -> list[str]:
    """The packages for pages that are not installed."""
    return [name for name in NEEDED if find_spec(name) is None]


def page_path(run: Run) -> Path:
    """The path of the page."""
    return run.folder / "report.html"


def write_page(run: Run, report: Report, path: Path, task: str | None = None) -> int:
    """Write the page of a report to `path` atomically, and return its size in bytes.

    The curves of `task` are selected first.
    """
    with _plain_matplotlib():
        from slurmgpu.page.page import render

        content = render(run, report, task).encode("utf-8", "replace")
    write_bytes(path, content)
    return len(content)


@contextlib.contextmanager
def _plain_matplotlib() -> Iterator[None]:
    """Use matplotlib without the user's backend and without its messages on font caches."""
    backend = os.environ.pop("MPLBACKEND", None)  # an unknown one makes the import fail
    try:
        with quiet("matplotlib"):
            yield
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
