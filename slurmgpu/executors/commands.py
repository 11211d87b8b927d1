"""Slurm's own commands and what they answer. No other module runs them; a failure of one costs detail, never data."""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.report import Life
from slurmgpu.runs import Run

log = logging.getLogger(__name__)

TIMEOUT_S = 30
NOT_HERE = "There is no {} here. Submit from a node of the cluster, or use this machine: --executor local."

INHERITED = ("SLURM_", "SBATCH_", "SRUN_", "PMI_", "PMIX_", "SUBMITIT_")
KEPT = {"SLURM_CONF"}

JOB_NAME = "slurmgpu"
MERGE_NAME = "slurmgpu-merge"
"""What names of jobs begin with: Submitit's, and those of sbatch/*.sbatch."""

JOB_KEYS = ("array_job", "merge_job")

PREFERENCES = ("SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_", "SCANCEL_", "SLURM_CLUSTERS")
"""Variables that begin so are a user's options for commands: they would hide jobs, say, or ask other clusters."""
ENVIRON = {"SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "standard"}
"""Arrays are named whole, not cut at 64 characters, and times are as `_epoch` reads them, whatever the user prefers."""

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
    """A line of squeue: an array task, or the not yet started rest of an array.

    `start` is when it started, or will by Slurm's own estimate, in seconds since the epoch; None if that is not known.
    """

    job_id: str
    state: str
    reason: str
    name: str
    folder: str
    command: str
    start: float | None = None

    def to_json(self, is_merge: bool) -> dict[str, Any]:
        """The job in the JSON of status."""
        n_tasks = 0 if is_merge else self.n_tasks
        named = {key: getattr(self, key) for key in ("job_id", "state", "reason", "start")}
        return {**named, "n_tasks": n_tasks}

    @property
    def n_tasks(self) -> int:
        """Tasks that this line stands for: of "1234_[5-9,12%4]" six."""
        return count_indices(self.job_id.partition("_")[2])

    @property
    def array_job(self) -> str:
        """The id before the underscore."""
        return self.job_id.split("_")[0]

    @property
    def is_merge(self) -> bool:
        """Whether it merges, rather than computes."""
        return self.name.startswith(MERGE_NAME)

    def is_submitits(self, run: Run) -> bool:
        """Whether Submitit wrote its script, into the run directory."""
        return Path(self.command).parent == run.logs

    def is_of(self, run: Run) -> bool:
        """Whether it belongs to a run by its script: Submitit's lies in the run directory.

        One that was submitted by hand bears a name that begins with "slurmgpu", and the run among its arguments.
        """
        if self.is_submitits(run):
            return True
        if not self.name.startswith(JOB_NAME) or run.folder.name not in self.command:
            return False
        # squeue shows the arguments joined by blanks, which a path may hold as well.
        words = self.command.split(" ")[1:]
        spans = (" ".join(words[a:b]) for a in range(len(words)) for b in range(a + 1, len(words) + 1))
        folder = run.folder.resolve()
        return any(Path(self.folder, span).resolve() == folder for span in spans if Path(span).name == folder.name)


def run(*command: str) -> str:
    """Standard output of a Slurm command; SlurmUnavailableError says what it complained of.

    It answers what is asked, whatever a user prefers to see.
    """
    try:
        # replace: names and arguments of jobs are any bytes.
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=True,
            env=_environ(),
        )
    except FileNotFoundError:
        raise SlurmUnavailableError(NOT_HERE.format(command[0])) from None
    except subprocess.TimeoutExpired as error:
        raise SlurmUnavailableError(f"{command[0]} did not answer within {TIMEOUT_S} s. Try again later.") from error
    except subprocess.CalledProcessError as error:
        raise SlurmUnavailableError(f"{' '.join(command[:2])} failed: {error.stderr.strip()}") from error
    return done.stdout


def try_script(path: str) -> tuple[bool, str]:
    """Whether sbatch would take the script at `path`, and what it says of it; nothing is queued."""
    command = ["sbatch", "--test-only", path]
    try:
        with outside_job():
            # replace: it may quote the script, which holds names of any bytes.
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, env=_environ()
            )
    except FileNotFoundError:
        raise SlurmUnavailableError(NOT_HERE.format("sbatch")) from None
    except subprocess.TimeoutExpired as error:
        raise SlurmUnavailableError(f"sbatch did not answer within {TIMEOUT_S} s. Try again later.") from error
    lines = [" ".join(line.removeprefix("sbatch: ").split()) for line in done.stderr.splitlines()]
    return done.returncode == 0, "; ".join(line for line in lines if line)


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFERENCES)} | ENVIRON


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


def queue(job_ids: Sequence[str], of: Run | None = None, among: Sequence[QueuedJob] | None = None) -> list[QueuedJob]:
    """What squeue says of these jobs, and of those whose script tells that they are of a run; not of ended ones.

    `among` are all of the user's jobs, where one call of squeue is for many runs.
    """
    if not job_ids and of is None:
        return []
    wanted = set(job_ids)
    return [
        job
        for job in (own_queue() if among is None else among)
        if job.array_job in wanted or (of is not None and job.is_of(of))
    ]


def own_queue() -> list[QueuedJob]:
    """All of the user's jobs in the queue, by one call of squeue; not the ended ones."""
    # Named with --jobs, one job that Slurm has forgotten makes squeue fail for all; so all of the user's are asked for.
    # Arguments hold any character, also newlines. A job whose name or arguments hold these two is no run's.
    # The arguments come last: of those that do hold them a part is left, and the job is known.
    fields = "\x1f".join(("%i", "%T", "%r", "%j", "%S", "%Z", "%o")) + "\x1e"
    text = run("squeue", "--noheader", "--all", "--user", getpass.getuser(), "--format", fields)
    records = [[part.strip() for part in record.split("\x1f")] for record in text.split("\x1e\n")]
    jobs = [
        QueuedJob(job_id, state, reason, name, folder, command, _epoch(start))
        for job_id, state, reason, name, start, folder, command in (record for record in records if len(record) == 7)
    ]
    return [job for job in jobs if job.state not in ENDED_STATES]


def jobs_of(run: Run, among: Sequence[QueuedJob] | None = None) -> list[QueuedJob]:
    """A run's jobs in the queue, of all submissions that have not ended, and those that have not joined it yet."""
    lines = run.submissions()
    over = {line.get(key) for line in lines if line["state"] == "ended" for key in JOB_KEYS}
    ids = [line[key] for line in lines for key in JOB_KEYS if key in line and line["state"] != "ended"]
    return [job for job in queue(ids, run, among) if job.array_job not in over]


def may_be_queued(run: Run) -> bool:
    """Whether Slurm may have jobs of a run: not of one that was only ever computed on this machine."""
    lines = run.submissions()
    return not lines or any(line["executor"] == "slurm" for line in lines)


def count_indices(expression: str) -> int:
    """How many tasks an array's expression such as "[5-9,12%4]" or "[0-198:3]" names; 1 for anything else."""
    if not re.fullmatch(r"\[[\d,:-]+(%\d+)?\]", expression):
        return 1
    parts = re.findall(r"(\d+)(?:-(\d+))?(?::(\d+))?", expression.partition("%")[0])
    return sum((int(last or first) - int(first)) // int(step or 1) + 1 for first, last, step in parts)


def _epoch(text: str) -> float | None:
    """Slurm's "2026-11-22T06:17:00", a time of this machine's zone, in seconds since the epoch; None for "N/A"."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def queued_jobs(run: Run, among: Sequence[QueuedJob] | None = None) -> list[dict[str, Any]] | None:
    """A run's jobs in the queue, by one call of squeue; None where Slurm has none of it, or does not answer.

    `among` are all of the user's jobs, where they are known already.
    """
    if not may_be_queued(run):
        return None
    lines = run.submissions()
    expected = any(line["state"] == "queued" for line in lines)
    merges = {line.get("merge_job") for line in lines}
    try:
        jobs = [job.to_json(job.is_merge or job.array_job in merges) for job in jobs_of(run, among)]
    except SlurmUnavailableError as error:
        log.log(logging.WARNING if expected else logging.DEBUG, "%s", error)
        return None
    return jobs if jobs or expected else None


def dependents(job_id: str) -> list[tuple[str, str]]:
    """Jobs of this user that wait for `job_id`, with their dependency as `scontrol update` takes it."""
    found = []
    for line in run(
        "squeue", "--noheader", "--all", "--user", getpass.getuser(), "--states", "PENDING", "--format", "%i|%E"
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
        text = run(
            "squeue", "--noheader", "--all", "--jobs", job_id, "--Format", ",".join(f"{name}:24" for name in columns)
        )
        fields = next(line.split() for line in text.splitlines() if line.split()[:1] == [job_id])
        array_job, index, restart, left = fields[1:]
    except (SlurmUnavailableError, StopIteration, ValueError) as error:
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


def hostnames(expression: str) -> tuple[str, ...]:
    """The nodes of a list such as `gpu[1-2]`; none when Slurm does not answer."""
    try:
        return tuple(run("scontrol", "show", "hostnames", expression).split())
    except SlurmUnavailableError as error:
        log.warning("%s", error)
        return ()


def configuration() -> dict[str, str]:
    """The cluster's slurm.conf and cgroup.conf, as `scontrol show config` gives them."""
    return dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", run("scontrol", "show", "config"), re.MULTILINE))


def max_array_size() -> int:
    """MaxArraySize of the cluster; indices run to one less."""
    return int(configuration().get("MaxArraySize", "1001"))  # Slurm's default


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
