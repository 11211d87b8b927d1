"""The job that this process runs in, and when it ends: from the environment, and by squeue while the task begins."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from slurmgpu.slurm import commands

log = logging.getLogger(__name__)

IDENTITY_S = 5.0
"""So long squeue is waited for where the environment may be another job's; a slurmctld that is busy takes longer."""
YEAR_S = 365 * 86400
"""The walltime that a job without a limit has in its environment, from Slurm 23.02 on."""


@dataclass(frozen=True)
class OwnJob:
    """The job that this process runs in: of an array, the array's id and the index in it; of a plain job, its id and 0.

    `restart` is how often it was requeued; `n_tasks` are those of the array. `end_time` tells when its walltime ends,
    in seconds since the epoch; None without a limit, and for as long as Slurm has not told it.
    """

    array_job: str
    task: int
    restart: int
    n_tasks: int = 1
    end_time: Callable[[], float | None] = lambda: None


def own_job(*, own_array: bool) -> OwnJob:
    """The job that this process is in, as the environment says; Slurm is asked only where that leaves it in doubt.

    sbatch hands an array task's variables on to what is submitted in it, and an array alone gets its own in their
    place. `own_array` is whether this job is known to be an array, or to have been submitted without such variables:
    then nothing is in doubt.
    """
    environ = os.environ
    job_id = environ["SLURM_JOB_ID"]
    is_in_array = True if own_array else _is_in_array(environ)
    asked = _Asked(job_id) if is_in_array is None or "SLURM_JOB_END_TIME" not in environ else None
    known_end = _end_time(environ)
    end_time = asked.end_time if asked and "SLURM_JOB_END_TIME" not in environ else lambda: known_end
    if is_in_array is None and asked and (told := asked.answer(IDENTITY_S)):
        array_job, index, restart = told
    else:
        array_job, index = environ.get("SLURM_ARRAY_JOB_ID", job_id), environ.get("SLURM_ARRAY_TASK_ID", "N/A")
        restart = environ.get("SLURM_RESTART_COUNT", "0")
    if is_in_array is False or not index.isdecimal():
        return OwnJob(job_id, 0, int(restart), end_time=end_time)
    n_tasks = int(environ.get("SLURM_ARRAY_TASK_COUNT", "1"))
    return OwnJob(array_job, int(index), int(restart), n_tasks, end_time)


def _is_in_array(environ: Mapping[str, str]) -> bool | None:
    """Whether this job is a task of the array that the environment names; None where that does not tell."""
    array_job = environ.get("SLURM_ARRAY_JOB_ID")
    if array_job is None:
        return False
    # Slurm gives each task of an array a job id of its own, but the last to start, which has the array's.
    if array_job == environ["SLURM_JOB_ID"]:
        return True
    return False if environ.get("SLURM_ARRAY_TASK_COUNT") == "1" else None


def _end_time(environ: Mapping[str, str]) -> float | None:
    """What Slurm says of it from 23.02 on; its own word for "never" is a number too large for a time, or a year."""
    text, begin = environ.get("SLURM_JOB_END_TIME", ""), environ.get("SLURM_JOB_START_TIME", "")
    if not text.isdecimal() or not 0 < int(text) < 0xFFFFFFF0:
        return None
    is_limited = not begin.isdecimal() or int(text) - int(begin) < YEAR_S
    return float(text) if is_limited else None


@dataclass
class _Asked:
    """What squeue says of a job, asked in a thread: no task waits for it before it computes."""

    job_id: str
    _answered: threading.Event = field(default_factory=threading.Event)
    _identity: tuple[str, str, str] | None = None
    _end: float | None = None

    def __post_init__(self) -> None:
        threading.Thread(target=self._ask, daemon=True, name="squeue").start()

    def answer(self, timeout_s: float) -> tuple[str, str, str] | None:
        """The array's id, the index in it and the restarts; None if it does not tell in time."""
        if not self._answered.wait(timeout_s):
            log.warning("squeue has not answered within %.0f s; going on with what the environment says", timeout_s)
        return self._identity

    def end_time(self) -> float | None:
        """When the walltime ends, as far as it is known by now."""
        return self._end

    def _ask(self) -> None:
        columns = ("JobID", "ArrayJobID", "ArrayTaskID", "RestartCnt", "TimeLeft")
        try:
            # Asked for the last task of an array, whose id is the array's, squeue answers with all of its tasks.
            asked = ",".join(f"{name}:24" for name in columns)
            text = commands.run("squeue", "--noheader", "--all", "--jobs", self.job_id, "--Format", asked)
            fields = next(line.split() for line in text.splitlines() if line.split()[:1] == [self.job_id])
            array_job, index, restart, left = fields[1:]
            int(restart)
        except (commands.SlurmUnavailableError, StopIteration, ValueError) as error:
            log.warning("the walltime is not known: %s", error or "squeue does not know this job")
        else:
            seconds = _seconds(left)
            self._end = None if seconds is None else time.time() + seconds
            self._identity = array_job, index, restart
        self._answered.set()


def _seconds(text: str) -> float | None:
    """Slurm's days-hours:minutes:seconds."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None  # UNLIMITED, NOT_SET, INVALID
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
