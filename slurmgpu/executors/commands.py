"""Slurm's own commands and what they answer. No other module runs them; a failure of one costs detail, never data."""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurmgpu.errors import SlurmGPUError
from slurmgpu.report import Life
from slurmgpu.runs import Run

log = logging.getLogger(__name__)

TIMEOUT_S = 30
NOT_HERE = "There is no {} here. Submit from a node of the cluster, or use this machine: --executor local."

INHERITED = ("SLURM_", "SBATCH_", "SRUN_", "PMI_", "PMIX_", "SUBMITIT_")
KEPT = {"SLURM_CONF"}

ENDED_STATES = {
    "BOOT_FAIL": "node_fail",
    "CANCELLED": "cancelled",
    "COMPLETED": None,
    "DEADLINE": "timeout",
    "FAILED": "crash",
    "NODE_FAIL": "node_fail",
    "OUT_OF_MEMORY": "host_oom",
    "PREEMPTED": "preempted",
    "REQUEUED": "preempted",
    "REVOKED": "cancelled",
    "TIMEOUT": "timeout",
}
"""Slurm's states of a job that has ended, and the failure class of each. Every other state, known or not, is alive."""


class SlurmUnavailableError(SlurmGPUError):
    """A Slurm command is missing, failed or did not answer."""


@dataclass(frozen=True)
class QueuedJob:
    """A line of squeue: an array task, or the not yet started rest of an array."""

    job_id: str
    state: str
    reason: str
    command: str

    @property
    def array_job(self) -> str:
        """The id before the underscore."""
        return self.job_id.split("_")[0]


def run(*command: str) -> str:
    """Standard output of a Slurm command; SlurmUnavailableError says what it complained of."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except FileNotFoundError:
        raise SlurmUnavailableError(NOT_HERE.format(command[0])) from None
    except subprocess.TimeoutExpired as error:
        raise SlurmUnavailableError(f"{command[0]} did not answer within {TIMEOUT_S} s. Try again later.") from error
    except subprocess.CalledProcessError as error:
        raise SlurmUnavailableError(f"{' '.join(command[:2])} failed: {error.stderr.strip()}") from error
    return done.stdout


@contextlib.contextmanager
def outside_job() -> Iterator[None]:
    """Forget the enclosing job, if there is one: its SLURM_* and SBATCH_* variables change what sbatch and srun do."""
    hidden = {
        name: os.environ.pop(name) for name in list(os.environ) if name.startswith(INHERITED) and name not in KEPT
    }
    try:
        yield
    finally:
        os.environ.update(hidden)


def queue(job_ids: Sequence[str], scripts: Path | None = None) -> list[QueuedJob]:
    """What squeue says of these jobs, and of those whose script lies in `scripts`; not of jobs that have ended."""
    if not job_ids and scripts is None:
        return []
    # Named with --jobs, one job that Slurm has forgotten makes squeue fail for all; so all of the user's are asked for.
    text = run("squeue", "--noheader", "--user", getpass.getuser(), "--format", "%i|%T|%r|%o")
    wanted = set(job_ids)
    jobs = [QueuedJob(*(part.strip() for part in line.split("|", 3))) for line in text.splitlines() if line.strip()]
    return [
        job
        for job in jobs
        if job.state not in ENDED_STATES and (job.array_job in wanted or Path(job.command).parent == scripts)
    ]


def queued_jobs(run: Run) -> list[dict[str, str]] | None:
    """A run's jobs in the queue, by one call of squeue; None where Slurm has none of it, or does not answer."""
    open_lines = [line for line in run.submissions() if line["state"] == "queued"]
    ids = [line[key] for line in open_lines for key in ("array_job", "merge_job")]
    if not ids:
        return None
    try:
        return [{"job_id": job.job_id, "state": job.state, "reason": job.reason} for job in queue(ids)]
    except SlurmUnavailableError as error:
        log.warning("%s", error)
        return None


def dependents(job_id: str) -> list[tuple[str, str]]:
    """Jobs of this user that wait for `job_id`, with their dependency as `scontrol update` takes it."""
    found = []
    for line in run(
        "squeue", "--noheader", "--user", getpass.getuser(), "--states", "PENDING", "--format", "%i|%E"
    ).splitlines():
        waiting, _, dependency = line.strip().partition("|")
        plain = re.sub(r"\([^)]*\)", "", dependency)  # afterok:12(unfulfilled)
        if re.search(rf"(?<!\d){job_id}(?!\d)", plain):
            found.append((waiting.split("_")[0], plain))
    return sorted(set(found))


def accounting(job_ids: Sequence[str]) -> dict[str, list[Life]]:
    """What sacct knows: for each array task ("1234_7") its lives in order, one for each restart."""
    fields = "JobID,State,ElapsedRaw,AllocTRES,NodeList"
    command = [
        "sacct",
        "--noheader",
        "--parsable2",
        "--duplicates",
        "--format",
        fields,
        "--jobs",
        ",".join(job_ids),
    ]
    lives: dict[str, list[Life]] = {}
    for line in run(*command).splitlines():
        job_id, state, elapsed, tres, node = line.split("|")
        state = state.split(" ")[0].rstrip("+")  # "CANCELLED by 1000"
        task, is_step, _ = job_id.partition(".")
        task = task if "_" in task else f"{task}_0"  # Submitit submits an array of one as a plain job
        if not is_step:
            gpus = re.search(r"gres/gpu=(\d+)", tres)
            n_gpus = int(gpus[1]) if gpus else 0
            life = Life(state, ENDED_STATES.get(state), state in ENDED_STATES, int(elapsed or 0), n_gpus, node)
            lives.setdefault(task, []).append(life)
        elif state == "OUT_OF_MEMORY" and task in lives and lives[task][-1].state != "COMPLETED":
            # The job itself may only say FAILED.
            lives[task][-1] = replace(lives[task][-1], failure="host_oom")
    return lives


def cancel(*arguments: str) -> None:
    """Run scancel; jobs that have ended by now are no error."""
    try:
        run("scancel", "--quiet", *arguments)
    except SlurmUnavailableError as error:
        if "Invalid job id" not in str(error):
            raise


def cancel_pending(array_job: str) -> None:
    """Take the tasks that have not started out of the queue, so that what waits for the array goes on."""
    cancel("--state=PENDING", array_job)


def seconds_left(job_id: str) -> float | None:
    """Seconds until the walltime of a running job ends; None when it has no limit or Slurm does not say."""
    try:
        text = run("squeue", "--noheader", "--jobs", job_id, "--format", "%L").strip()
    except SlurmUnavailableError as error:
        log.warning("the walltime is not known: %s", error)
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.splitlines()[0] if text else "")
    if match is None:
        return None  # UNLIMITED, NOT_SET, INVALID
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def max_array_size() -> int:
    """MaxArraySize of the cluster; indices run to one less."""
    found = re.search(r"MaxArraySize\s*=\s*(\d+)", run("scontrol", "show", "config"))
    return int(found[1]) if found else 1001  # Slurm's default


def max_submit_jobs() -> int | None:
    """The smallest limit on submitted jobs of this user's associations; None where there is none, or no accounting."""
    try:
        text = run(
            "sacctmgr",
            "--noheader",
            "--parsable2",
            "show",
            "assoc",
            f"user={getpass.getuser()}",
            "format=MaxSubmitJobs,GrpSubmitJobs",
        )
    except SlurmUnavailableError as error:
        log.info("job limits are not known: %s", error)
        return None
    limits = [int(line) for line in re.split(r"[|\s]", text) if line.isdecimal()]
    return min(limits) if limits else None
