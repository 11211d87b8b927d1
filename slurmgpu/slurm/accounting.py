"""The lives of a run's tasks by Slurm's accounting. It costs detail only when it is absent, broken or late."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from slurmgpu.report.attempts import AttemptRow, Lives, attempts_of
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import POLICIES
from slurmgpu.run.submissions import SubmissionLine, abroad, is_slurms
from slurmgpu.slurm import commands, queue
from slurmgpu.util.shared_files import retried

log = logging.getLogger(__name__)

PATIENCE_S = 20.0
"""sacct lags behind a job's end. The merge waits this long for the ends that attempts did not record themselves."""

DAY_S = 86_400.0
DISABLED = "accounting storage is disabled"
"""The message of sacct on a cluster without accounting."""


def lives_of(run: Run, *, settled: bool = False) -> Lives | None:
    """The lives of the run's tasks by accounting; None without an answer, which costs detail only.

    With `settled` it is asked again, for up to 20 s, until it has the end of each attempt that recorded none: a
    database that is away for a moment would make a cancelled run look like a preempted one, which is submitted again.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        lives, failure = None, None
        try:
            lives = _ask(run)
        except commands.SlurmUnavailableError as error:
            failure = error
        is_there = failure is None or not (failure.is_absent or DISABLED in str(failure))
        waits = settled and is_there and time.monotonic() < deadline
        if not waits or not any(map(_is_unsettled, attempts_of(run, lives))):
            if failure is not None:
                log.warning("the report does without Slurm's accounting: %s", failure)
            return lives
        time.sleep(1.0)


def _ask(run: Run) -> Lives | None:
    lines = [line for line in run.submissions() if is_slurms(line) and "array_job" in line and not line.get("copied")]
    here = queue.own_cluster() if any(line.get("cluster") for line in lines) else None
    ids = [line["array_job"] for line in lines if here is None or line.get("cluster", here) == here]
    if not ids:
        return None
    suffix = f"@{name}" if (name := abroad(lines, here or "")) else ""
    return {f"{task}{suffix}": told for task, told in commands.accounting(ids, _begins(run, lines)).items()}


def _begins(run: Run, lines: Sequence[SubmissionLine]) -> dict[str, float]:
    """When each array had not ended yet, by clocks that may differ by a day."""
    planned = retried((run.folder / "run.json").stat).st_mtime
    # A job by hand is recorded by the first of its tasks that can, perhaps days after another one has started.
    times = {line["array_job"]: min(line["time"], planned) if line.get("by_hand") else line["time"] for line in lines}
    return {job: begun - DAY_S for job, begun in times.items()}


def _is_unsettled(attempt: AttemptRow) -> bool:
    """Whether accounting, or a record that is read again, may still say how an attempt ended."""
    policy, state = POLICIES.get(attempt["failure"] or ""), attempt["slurm_state"]
    is_known = policy is not None and policy.is_stop and state is not None and commands.has_ended(state)
    return is_slurms(attempt) and policy is not None and policy.is_guess and not is_known
