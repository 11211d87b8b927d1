"""What Slurm's accounting knows of a run's tasks. It costs detail only when it is absent, broken or late."""

from __future__ import annotations

import logging
import time

from slurmgpu.executors import commands
from slurmgpu.report import Lives, attempts_of
from slurmgpu.runs import Run

log = logging.getLogger(__name__)

PATIENCE_S = 20.0
"""sacct lags behind a job's end; so long the merge waits for the end of attempts that wrote none themselves."""


def lives_of(run: Run) -> Lives | None:
    """What accounting knows of the run's tasks; None when it cannot be asked, which costs detail only."""
    ids = [line["array_job"] for line in run.submissions() if "array_job" in line]
    if not ids:
        return None
    try:
        return commands.accounting(ids)
    except commands.SlurmUnavailableError as error:
        log.warning("the report does without Slurm's accounting: %s", error)
        return None


def settled_lives_of(run: Run) -> Lives | None:
    """The same, once accounting knows how attempts that wrote no end have ended; or as far as it came in 20 seconds."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        lives = lives_of(run)
        unsettled = any(a["failure"] == "lost" and a["executor"] == "slurm" for a in attempts_of(run, lives))
        if lives is None or not unsettled or time.monotonic() > deadline:
            return lives
        time.sleep(1.0)
