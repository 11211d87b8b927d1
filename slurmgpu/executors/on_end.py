"""Run the command `on_end` of the run file and send to the trackers of `[track]` at the end, in separate processes.

Neither changes the run: a failure gives a warning. docs/how-to/notify.md has examples of `on_end`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurmgpu.report.report_file import Report, report_path
from slurmgpu.run import owners
from slurmgpu.run.directory import Run
from slurmgpu.util.redact import HIDDEN
from slurmgpu.util.regular_files import open_file
from slurmgpu.util.signals import name_of_signal

log = logging.getLogger(__name__)

ON_END_S, TRACKING_S = 60.0, 1800.0
"""After these times the command, or the process that sends to trackers, is killed with its children."""


def run_on_end(run: Run, report: Report) -> None:
    """Run the run file's `on_end`, if any, in its folder, with report.json on standard input."""
    command = run.plan.on_end
    if not command:
        return
    if command == HIDDEN:
        log.warning("on_end is not run: only the owner of the run may read it")
        return
    if why := owners.why_foreign(run):
        log.warning("on_end is not run: %s", why)
        return
    log.info("on_end starts")  # the command may hold a token
    environ = {
        **os.environ,
        "SLURMGPU_RUN": str(run.folder),
        "SLURMGPU_NAME": run.name,
        "SLURMGPU_STATE": "complete" if report["complete"] else "incomplete",
        "SLURMGPU_N_ITEMS": str(report["n_items"]),
        "SLURMGPU_N_ERRORS": str(report["n_errors"]),
        "SLURMGPU_N_MISSING": str(report["n_missing_items"]),
    }
    environ.pop("PYTHONSAFEPATH", None)  # set for this process only: a user's script may import modules next to it
    try:
        sys.stderr.flush()
        with open_file(report_path(run)) as stdin:
            code = _run_to_end(run, command, ON_END_S, shell=True, env=environ, stdin=stdin)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in it
        log.warning("on_end could not be started: %s", error)
        return
    if code is None:
        log.warning("on_end took longer than %.0f s and was killed. The run is not affected.", ON_END_S)
    elif code:
        how = f"failed with exit code {code}" if code > 0 else f"was killed by {name_of_signal(-code)}"
        log.warning("on_end %s. The run is not affected.", how)


def track(run: Run) -> None:
    """Send what tasks logged to the trackers of the run file, if it names any."""
    if not run.plan.track:
        return
    typed = f"slurmgpu track {run.typed}"
    if why := owners.why_foreign(run):
        log.warning("nothing is sent to trackers: %s. To send it: %s", why, typed)
        return
    command = [sys.executable, "-m", "slurmgpu", "track", str(run.folder)]
    try:
        code = _run_to_end(run, command, TRACKING_S, stdin=subprocess.DEVNULL)
    except OSError as error:
        log.warning("nothing is sent to trackers: %s. To send it: %s", error.strerror, typed)
        return
    if code is None:
        log.warning("sending to trackers took longer than %.0f s and was stopped. To go on: %s", TRACKING_S, typed)
    elif code:
        log.warning("not everything was sent to trackers (exit code %d). To go on: %s", code, typed)


def folder_of(run: Run) -> Path:
    """The folder to which paths in `on_end` and [track] are relative: the run file's or, if that is gone, the run's."""
    folder = Path(run.plan.search_path)
    return folder if folder.is_dir() else run.folder


def _run_to_end(run: Run, command: str | Sequence[str], timeout_s: float, **options: Any) -> int | None:
    """The exit code of a command; None if it was killed after `timeout_s`, with the processes of its session.

    Its output goes to stderr: a merge's stdout may be JSON.
    """
    stderr = 2  # the file descriptor, as sys.stderr may have been replaced
    process = subprocess.Popen(
        command, cwd=folder_of(run), stdout=stderr, stderr=stderr, start_new_session=True, **options
    )
    try:
        return process.wait(timeout_s)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return None
        raise
