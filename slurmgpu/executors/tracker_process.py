"""`[track]`: the merge job replays what tasks logged, in a process of its own."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

from slurmgpu.executors.on_end import end_session
from slurmgpu.run import owners
from slurmgpu.run.directory import Run

log = logging.getLogger(__name__)

TIMEOUT_S = 1800.0
"""A tracker that cannot be reached must not keep the merge job for ever."""


def track(run: Run) -> None:
    """Send what was logged to the trackers of the run file, if it names any; a failure costs a warning.

    Relative paths are relative to the run file. Its output goes to stderr: a merge's stdout may be JSON.
    """
    if not run.plan.track:
        return
    typed = f"slurmgpu track {run.typed}"
    if why := owners.why_foreign(run):
        log.warning("nothing is sent to trackers: %s. To do it: %s", why, typed)
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "slurmgpu", "track", str(run.folder)],
        cwd=folder_of(run),
        stdin=subprocess.DEVNULL,
        stdout=2,  # the file descriptor, as sys.stderr may have been replaced
        stderr=2,
        start_new_session=True,
    )
    try:
        code = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        end_session(process)
        log.warning("sending to trackers took longer than %.0f s, and was ended. To go on: %s", TIMEOUT_S, typed)
    except BaseException:
        end_session(process)
        raise
    else:
        if code:
            log.warning("not everything was sent to trackers (exit code %d). To go on: %s", code, typed)


def folder_of(run: Run) -> Path:
    """The folder that relative paths of [track] start at: the run file's, or the run directory if that is gone."""
    folder = Path(run.plan.search_path)
    return folder if folder.is_dir() else run.folder
