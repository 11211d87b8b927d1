"""Errors on tasks, attempts and runs without logs: whether a log may still come, and what to do."""

from __future__ import annotations

import re

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.logs.files import attempts_with_logs
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import ENDS, is_over, job_here


def known_tasks(run: Run) -> dict[str, bool]:
    """The submitted and started tasks, and whether their submission is still active."""
    names = {name.rpartition(".")[0]: False for name in attempts_there(run)}
    for line in run.submissions():
        here = "pids" in line
        job = job_here(line["executor"], line["submission"]) if here else line.get("array_job")
        goes_on = line["state"] not in ENDS
        names |= {f"{job}_{number}": goes_on for number in range(line["n_tasks"]) if job}
    return names


def attempts_there(run: Run) -> list[str]:
    """The names of the attempts that there are."""
    return [record["attempt"] for record in attempts_with_logs(run)]


def refuse_unstarted(run: Run, task: str, *, waits: bool) -> None:
    """Raise SlurmGPUError on an unknown task or attempt; not if the command `waits` and it may still come."""
    known, there = known_tasks(run), attempts_there(run)
    base = re.sub(r"\.\d+$", "", task)
    meant = [name for name in known if base in (name, name.rpartition("_")[2])]
    if not meant:
        raise SlurmGPUError(f"{run.folder} has no task {task!r}." + did_you_mean(task, {*known, *there}))
    goes_on = any(known[name] for name in meant)
    if goes_on and waits:
        return
    yet, hint = (" yet", " --follow waits for it.") if goes_on else ("", "")
    if others := [name for name in there if name.rpartition(".")[0] in meant]:
        are = "is" if len(others) == 1 else "are"
        raise SlurmGPUError(f"{run.folder} has no attempt {task}{yet}: there {are} {', '.join(others)}.{hint}")
    if goes_on:
        raise SlurmGPUError(f"Task {task} of {run.folder} has not started yet.{hint}")
    raise SlurmGPUError(
        f"Task {task} of {run.folder} never started, and its submission is over. "
        f"`slurmgpu report {run.typed}` shows what came of it."
    )


def refuse_unsubmitted(run: Run, *, waits: bool) -> None:
    """Raise SlurmGPUError on a run without submissions; not if the command `waits` and Slurm has its jobs."""
    from slurmgpu.executors import liveness

    if run.submissions() or run.attempts():
        return
    queued = liveness.alive(run)
    if queued is None:
        raise SlurmGPUError(
            f"{run.folder} is planned, and nothing of it was submitted: `slurmgpu resubmit {run.typed}` does so, "
            f"or the two lines that `slurmgpu plan` printed."
        )
    if not waits:
        raise SlurmGPUError(f"No task of {run.folder} has started yet: {queued}. --follow waits for it.")


def is_at_rest(run: Run) -> bool:
    """Whether the last submission has ended, or there was none."""
    from slurmgpu.executors import liveness

    lines = run.submissions()
    return is_over(lines) if lines else liveness.alive(run) is None
