"""What Slurm's accounting knows of a run's tasks. It costs detail only when it is absent, broken or late."""

from __future__ import annotations

import logging
import time

from slurmgpu.report.attempts import AttemptRow, Lives, attempts_of
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import abroad, is_slurms
from slurmgpu.slurm import commands, queue

log = logging.getLogger(__name__)

PATIENCE_S = 20.0
"""sacct lags behind a job's end; so long the merge waits for the end of attempts that wrote none themselves."""


def lives_of(run: Run) -> Lives | None:
    """What accounting knows of the run's tasks; None when it cannot be asked, which costs detail only."""
    lines = [line for line in run.submissions() if "array_job" in line and not line.get("copied")]
    here = queue.own_cluster() if any(line.get("cluster") for line in lines) else None
    ids = [line["array_job"] for line in lines if here is None or line.get("cluster", here) == here]
    if not ids:
        return None
    suffix = f"@{name}" if (name := abroad(lines, here or "")) else ""
    try:
        return {f"{task}{suffix}": told for task, told in commands.accounting(ids).items()}
    except commands.SlurmUnavailableError as error:
        log.warning("the report does without Slurm's accounting: %s", error)
        return None


def settled_lives_of(run: Run) -> Lives | None:
    """The same, once accounting knows how attempts that wrote no end have ended; or as far as it came in 20 seconds."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        lives = lives_of(run)
        unsettled = any(map(_is_unsettled, attempts_of(run, lives)))
        if lives is None or not unsettled or time.monotonic() > deadline:
            return lives
        time.sleep(1.0)


def _is_unsettled(attempt: AttemptRow) -> bool:
    """Whether accounting has yet to say how an attempt ended: of a SIGTERM only it knows who sent it."""
    if not is_slurms(attempt):
        return False
    alive = attempt["slurm_state"] is None or not commands.has_ended(attempt["slurm_state"])
    return attempt["failure"] == "lost" or (attempt["failure"] == "preempted" and alive)
