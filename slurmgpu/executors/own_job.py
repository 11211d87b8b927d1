"""The job that this process runs in."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass

from slurmgpu.executors import commands

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnJob:
    """The job that this process runs in: of an array, the array's id and the index in it; of a plain job, its id and 0.

    `restart` is how often it was requeued; `seconds_left` until its walltime ends, None without a limit. `n_tasks` are
    those of the array.
    """

    array_job: str
    task: int
    restart: int
    seconds_left: float | None
    n_tasks: int = 1


def own_job() -> OwnJob:
    """The job that this process is in, as Slurm knows it; where it does not answer, as the environment says.

    The environment alone may be another job's: sbatch hands an array task's variables on to what is submitted in it.
    """
    environ = os.environ
    job_id = environ["SLURM_JOB_ID"]
    columns = ("JobID", "ArrayJobID", "ArrayTaskID", "RestartCnt", "TimeLeft")
    try:
        # Asked for the last task of an array, whose id is the array's, squeue answers with all of its tasks.
        text = commands.run(
            "squeue", "--noheader", "--all", "--jobs", job_id, "--Format", ",".join(f"{name}:24" for name in columns)
        )
        fields = next(line.split() for line in text.splitlines() if line.split()[:1] == [job_id])
        array_job, index, restart, left = fields[1:]
    except (commands.SlurmUnavailableError, StopIteration, ValueError) as error:
        log.warning("the walltime is not known: %s", error or "squeue does not know this job")
        array_job, index = environ.get("SLURM_ARRAY_JOB_ID", job_id), environ.get("SLURM_ARRAY_TASK_ID", "N/A")
        restart, left = environ.get("SLURM_RESTART_COUNT", "0"), ""
    if not index.isdecimal():
        return OwnJob(job_id, 0, int(restart), _seconds(left))
    return OwnJob(array_job, int(index), int(restart), _seconds(left), int(environ.get("SLURM_ARRAY_TASK_COUNT", "1")))


def _seconds(text: str) -> float | None:
    """Slurm's days-hours:minutes:seconds."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None  # UNLIMITED, NOT_SET, INVALID
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
