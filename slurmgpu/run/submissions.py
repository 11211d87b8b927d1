"""What a submission asks for: the same for every executor; kept in submissions.jsonl, before and after it is queued."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from slurmgpu.containers.settings import ContainerRecord
from slurmgpu.util.shared_files import retried

ENDS = ("ended", "refused")
"""States of a submission of which nothing will start any more."""
JOB_KEYS: tuple[Literal["array_job", "merge_job"], ...] = ("array_job", "merge_job")
"""What has the ids of its jobs in Slurm."""


class Git(TypedDict):
    """The state of a repository."""

    commit: str
    dirty: bool


class CodeAbout(TypedDict):
    """What a snapshot of the user's modules was taken with."""

    python: str
    distributions: dict[str, str]
    image: str | None
    git: Git | None


class Code(CodeAbout):
    """What names a snapshot, and a sentence for what of it could not be taken."""

    digest: str
    left_out: list[str]


class Jobs(TypedDict, total=False):
    """The ids of a submission's jobs in Slurm."""

    array_job: str
    merge_job: str


class Place(TypedDict, total=False):
    """What tells a run directory from its copies."""

    folder: str
    inode: int


class _Number(TypedDict):
    submission: int


class SubmissionLine(_Number, Jobs, Place, total=False):
    """A line of submissions.jsonl, or what all lines of one submission say: see docs/reference/files.md."""

    executor: str
    device: str
    n_tasks: int
    n_concurrent: int
    gpus_per_task: int
    gpu_type: str | None
    nodes_per_task: int
    slurm: Mapping[str, Any]
    merge: Mapping[str, Any]
    after: Sequence[str]
    exclude: Sequence[str]
    round: int
    resources: Mapping[str, Any]
    container: ContainerRecord | None
    inject: Sequence[str]
    code: Code | None
    state: str
    time: float
    uid: int
    message: str
    cluster: str | None
    by_hand: bool
    cancelled: bool
    copied: bool
    host: str
    boot: str
    pid_namespace: str
    pids: list[int]


@dataclass(frozen=True)
class Submission:
    """One array job and its merge job, or their like on this machine.

    `after` are merge jobs of other runs that this one waits for. `round` counts the merge job's own resubmissions.
    `container` is None where it is the plan's. `inject` are faults on demand. `code` is what names the snapshot of the
    user's modules that its tasks import: its digest, and the versions that were there.
    """

    submission: int
    executor: str
    device: str
    n_tasks: int
    n_concurrent: int
    gpus_per_task: int
    gpu_type: str | None = None
    nodes_per_task: int = 1
    slurm: Mapping[str, Any] = field(default_factory=dict)
    merge: Mapping[str, Any] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    round: int = 0
    resources: Mapping[str, Any] = field(default_factory=dict)
    container: ContainerRecord | None = None
    inject: tuple[str, ...] = ()
    code: Code | None = None

    def to_json(self) -> SubmissionLine:
        """The line that is written before anything is queued."""
        return {**cast(SubmissionLine, asdict(self)), "state": "submitting", "time": time.time(), "uid": os.getuid()}

    @property
    def sbatch_options(self) -> dict[str, Any]:
        """[slurm], with the nodes to leave out."""
        options = dict(self.slurm)
        if self.exclude:
            options["exclude"] = ",".join(part for part in (str(options.get("exclude") or ""), *self.exclude) if part)
        return options

    @property
    def walltime_s(self) -> float | None:
        """The walltime that [slurm] asks for; None where it does not, or asks for one without end."""
        return seconds_of(str(self.slurm.get("time", "")))

    @property
    def merge_options(self) -> dict[str, Any]:
        """[merge], which has account, partition, QOS and reservation from [slurm] unless it says otherwise."""
        inherited = {
            key: self.slurm[key] for key in ("account", "partition", "qos", "reservation") if key in self.slurm
        }
        return {**inherited, **self.merge}


def is_over(lines: Sequence[SubmissionLine]) -> bool:
    """Whether nothing of a run's last submission will start any more; False if there was none."""
    return bool(lines) and lines[-1]["state"] in ENDS


def ended_jobs(lines: Sequence[SubmissionLine]) -> set[str | None]:
    """The jobs in Slurm of submissions that have ended; None stands for those that never had one."""
    return {line.get(key) for line in lines if line["state"] == "ended" for key in JOB_KEYS}


def place_of(folder: Path) -> Place:
    """A run directory's path, which it has not after a move, and its inode, which it has.

    Both, as some file systems number their files again whenever they are mounted.
    """
    return {"folder": str(folder.resolve()), "inode": retried(folder.stat).st_ino}


def is_at(place: Place, told: Mapping[str, object]) -> bool:
    """Whether what a file of a run directory tells is of the directory at this place, not of one that it copies."""
    return any(told.get(key, value) == value for key, value in place.items())


def as_seen_at(line: SubmissionLine, place: Place) -> SubmissionLine:
    """A submission as the run directory at this place has it: ended, if another folder's tasks are at work for it."""
    if line["state"] in ENDS or is_at(place, line):
        return line
    return {**line, "state": "ended", "copied": True}


def abroad(lines: Sequence[SubmissionLine], cluster: str) -> str:
    """What tells names of this cluster from equal ones of another: "" on the first that the run was queued on.

    Also "" where there is none. Old names stay as they are.
    """
    first = next((line["cluster"] for line in lines if line.get("cluster")), cluster)
    return "" if first == cluster else cluster_in_names(cluster)


def cluster_in_names(cluster: str) -> str:
    """A cluster's name, as names of files have it."""
    return re.sub(r"[^\w-]", "-", cluster)


def is_slurms(record: Mapping[str, Any]) -> bool:
    """Whether a submission, or an attempt, is of Slurm's jobs, which Slurm's accounting knows."""
    return bool(record["executor"] == "slurm")


def is_of_processes(line: SubmissionLine) -> bool:
    """Whether a submission's tasks are processes of one machine, by their `pids`, rather than jobs of a queue."""
    return "pids" in line


def job_here(executor: str, submission: int) -> str:
    """What stands in place of a job id for a submission to this machine: "local1"."""
    return f"{executor}{submission}"


def slots_of(line: SubmissionLine) -> list[int]:
    """The processes of a local submission's slots; the first of all its processes is that which merges."""
    return list(line.get("pids", ()))[1:]


def seconds_of(text: str) -> float | None:
    """The seconds of a time as sbatch(1) takes it, and as Slurm shows it; None for UNLIMITED and its like.

    "90" and "90:30" are minutes, "1:30:00" and "1-12" begin with hours and days.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if found is None:
        return None
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is None and len(numbers) < 3:
        numbers.insert(0, 0)  # minutes come first
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)
