"""The attempts of a run's tasks from Slurm's accounting, or from slurmctld if that is absent, broken or late."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from slurmgpu.report.attempts import AttemptRow, attempts_of
from slurmgpu.report.outcomes import Accounted, Accounting
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import policy_of
from slurmgpu.run.submissions import SubmissionLine, abroad, is_slurms
from slurmgpu.slurm import commands, queue
from slurmgpu.util.array_ids import array_of, indices_of
from slurmgpu.util.shared_files import retried

log = logging.getLogger(__name__)

PATIENCE_S = 20.0
"""sacct lags behind a job's end. The merge waits this long for the ends that attempts did not record themselves."""
MIN_ROUNDS = 3
"""How often a merge asks at least, as a command of Slurm's that does not answer takes as long."""

DAY_S = 86_400.0
DISABLED = "accounting storage is disabled"
"""The message of sacct on a cluster without accounting."""


def accounting_of(run: Run, *, settled: bool = False) -> Accounting | None:
    """The attempts of the run's tasks from accounting; None without an answer, which costs only detail.

    If accounting lacks an end, slurmctld is asked: otherwise a cancelled run would look like a preempted one, which is
    resubmitted. With `settled` both are asked repeatedly, for up to 20 s and at least three times, until they have the
    end of each attempt that recorded none, or does not know who ended it.
    """
    deadline, n_rounds = time.monotonic() + PATIENCE_S, 0
    while True:
        n_rounds += 1
        accounting, failure = None, None
        try:
            accounting = _ask(run, commands.accounting)
        except commands.SlurmUnavailableError as error:
            failure = error
        if (jobs := _unsettled(run, accounting)) and (told := _ask(run, commands.remembered, jobs)):
            accounting = _filled(accounting or {}, told)
            jobs = _unsettled(run, accounting)
        is_there = failure is None or not (failure.is_absent or DISABLED in str(failure))
        may_settle = n_rounds < MIN_ROUNDS or time.monotonic() < deadline
        if not (settled and is_there and jobs and may_settle):
            if failure is not None:
                log.warning("the report is made without Slurm's accounting: %s", failure)
            return accounting
        time.sleep(1.0)


Asked = Callable[[Sequence[str], Mapping[str, float]], Mapping[str, Sequence[Accounted]]]


def _ask(run: Run, ask: Asked, among: Collection[str] | None = None) -> Accounting | None:
    """The answer on the run's array jobs of this cluster, or on those `among` them; None if there are none.

    A job's state is that of each of its tasks. Slurm makes an array of one job a plain job. A larger array may be a
    plain job until Slurm splits it: left out.
    """
    lines = [line for line in run.submissions() if is_slurms(line) and "array_job" in line and not line.get("copied")]
    here = queue.own_cluster() if any(line.get("cluster") for line in lines) else None
    of_here = [line for line in lines if here is None or line.get("cluster", here) == here]
    asked = {line["array_job"]: line for line in of_here if among is None or line["array_job"] in among}
    if not asked:
        return None
    suffix = f"@{name}" if (name := abroad(lines, here or "")) else ""
    found: dict[str, Sequence[Accounted]] = {}
    for job, told in ask(list(asked), _begins(run, lines)).items():
        array, is_in_array, _ = job.partition("_")
        if array not in asked:  # another part of a hetjob
            continue
        per_node = asked[array].get("tasks_per_node", 1)
        if "[" in job:  # jobs that have not started
            found[f"{job}{suffix}"] = told
        elif is_in_array or asked[array]["n_tasks"] == per_node:
            shares = [replace(each, n_gpus=each.n_gpus // per_node) for each in told]
            found |= {f"{array}_{task}{suffix}": shares for task in indices_of(job, per_node)}
    return found


def _filled(accounting: Accounting, told: Accounting) -> Accounting:
    """The accounting, with the last attempt of each task from `told` if it or its end is missing."""
    filled = {**accounting}
    for task, of_task in told.items():
        restart, known = len(of_task) - 1, list(accounting.get(task, ()))
        if not any(each.ended for each in known[restart:]):
            filled[task] = [*known[:restart], *of_task[len(known[:restart]) :]]
    return filled


def _begins(run: Run, lines: Sequence[SubmissionLine]) -> dict[str, float]:
    """When each array had not ended yet, by clocks that may differ by a day."""
    planned = retried((run.folder / "run.json").stat).st_mtime
    # A job by hand is recorded by the first of its tasks that can, perhaps days after another one has started.
    times = {line["array_job"]: min(line["time"], planned) if line.get("by_hand") else line["time"] for line in lines}
    return {job: begun - DAY_S for job, begun in times.items()}


def _unsettled(run: Run, accounting: Accounting | None) -> set[str]:
    """The array jobs of attempts whose end is unknown, but may still come from Slurm or from their records."""
    return {array_of(attempt["attempt"]) for attempt in attempts_of(run, accounting) if _is_unsettled(attempt)}


def _is_unsettled(attempt: AttemptRow) -> bool:
    policy, state = policy_of(attempt["failure"]), attempt["slurm_state"]
    is_known = policy is not None and policy.is_stop and state is not None and commands.has_ended(state)
    return is_slurms(attempt) and policy is not None and policy.is_guess and not is_known
