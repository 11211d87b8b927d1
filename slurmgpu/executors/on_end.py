"""`on_end`: the command that the run file has run at the end. docs/how-to/notify.md shows examples."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

from slurmgpu.report.build import Report, report_path
from slurmgpu.run import owners
from slurmgpu.run.directory import Run
from slurmgpu.util.redact import HIDDEN
from slurmgpu.util.shared_files import open_file

log = logging.getLogger(__name__)

TIMEOUT_S = 60.0
"""The command is killed after this time, with its children."""


def run_on_end(run: Run, report: Report, timeout_s: float = TIMEOUT_S) -> None:
    """Run the run file's `on_end`, if any, in its folder, with report.json on standard input; its errors are logged.

    Its output goes to stderr: a merge's stdout may be JSON.
    """
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
    environ.pop("PYTHONSAFEPATH", None)  # for this process only: a user's script may import modules beside it
    folder = Path(run.plan.search_path)
    stderr = 2  # the file descriptor, as sys.stderr may have been replaced
    try:
        sys.stderr.flush()
        with open_file(report_path(run)) as stdin:
            started = subprocess.Popen(
                command,
                shell=True,
                cwd=folder if folder.is_dir() else run.folder,
                env=environ,
                stdin=stdin,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,
            )
    except (OSError, ValueError) as error:  # ValueError: a zero byte in it
        log.warning("on_end could not be started: %s", error)
        return
    try:
        code = started.wait(timeout_s)
    except subprocess.TimeoutExpired:
        end_session(started)
        log.warning("on_end took longer than %.0f s, and was killed. The run is not affected.", timeout_s)
    except BaseException:
        end_session(started)
        raise
    else:
        if code:
            log.warning("on_end %s. The run is not affected.", _how(code))


def _how(code: int) -> str:
    if code > 0:
        return f"failed with exit code {code}"
    names = {int(number): number.name for number in signal.Signals}  # without most of the real-time ones
    return f"died of {names.get(-code, f'signal {-code}')}"


def end_session(started: subprocess.Popen[bytes]) -> None:
    """End a command and the processes of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()
