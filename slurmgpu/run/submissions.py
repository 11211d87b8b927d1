"""Submissions and their lines in submissions.jsonl: the same for every executor."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from slurmgpu.containers.settings import ContainerRecord
from slurmgpu.util.shared_files import retried

ENDS = ("ended", "refused")
"""States of a submission that starts no more tasks."""
JOB_KEYS: tuple[Literal["array_job", "merge_job"], ...] = ("array_job", "merge_job")
"""The keys of Slurm job ids."""


class Git(TypedDict):
    """The state of a repository."""

    commit: str
    dirty: bool


class Pickled(TypedDict):
    """The digest of a pickle of functions, and the version of Python that can read it.

    `same` is a digest that identifies the functions in another process, which pickles them differently.
    """

    sha256: str
    python: str
    same: str


class _Replaced(TypedDict, total=False):
    functions: dict[str, Pickled]


class CodeAbout(_Replaced):
    """The versions with which a snapshot of the user's modules was taken.

    `functions` are those that a resubmission of a mapped run was given instead of the planned ones, by role.
    """

    python: str
    distributions: dict[str, str]
    image: str | None
    git: Git | None


class Code(CodeAbout):
    """The digest of a snapshot, and a sentence for each module that is not in it."""

    digest: str
    left_out: list[str]


class Jobs(TypedDict, total=False):
    """The ids of a submission's jobs in Slurm."""

    array_job: str
    merge_job: str


class DirectoryId(TypedDict, total=False):
    """The path and inode that distinguish a run directory from its copies."""

    folder: str
    inode: int


class _Number(TypedDict):
    submission: int


class SubmissionLine(_Number, Jobs, DirectoryId, total=False):
    """A line of submissions.jsonl, or all lines of one submission merged: see docs/reference/files.md."""

    executor: str
    device: str
    n_tasks: int
    n_concurrent: int
    gpus_per_task: int
    gpu_type: str | None
    nodes_per_task: int
    tasks_per_node: int
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
    array_name: str
    merge_name: str
    cancelled: bool
    merges_again: bool
    copied: bool
    host: str
    boot: str
    pid_namespace: str
    pids: list[int]
    ticks: list[int | None]


NO_GRES = "none"
"""`gres` of [slurm] on a cluster whose Slurm knows no GPUs: a task has the GPUs of its node."""


@dataclass(frozen=True)
class Submission:
    """One array job and its merge job, or the same on this machine.

    A job of the array has one task on `nodes_per_task` nodes, or `tasks_per_node` tasks on one node. `slurm` is what
    one task asks for. `after` are merge jobs of other runs that this one waits for. `round` counts resubmissions by
    the merge job. `container` is None if it is the plan's. `inject` are faults on demand. `code` is the snapshot of the
    user's modules that its tasks import.
    """

    submission: int
    executor: str
    device: str
    n_tasks: int
    n_concurrent: int
    gpus_per_task: int
    gpu_type: str | None = None
    nodes_per_task: int = 1
    tasks_per_node: int = 1
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
        """[slurm] for a job, as `given`: memory, gres and licenses of all its tasks, and the nodes to exclude."""
        options = given(self.slurm)
        if options.get("gres") == NO_GRES:
            del options["gres"]
            if "exclusive" not in self.slurm:
                options["exclusive"] = True  # two jobs on a node would take the same GPUs
        for name in ("mem", "gres", "licenses") if self.tasks_per_node > 1 else ():
            if name in options:
                options[name] = times(str(options[name]), self.tasks_per_node)
        if self.exclude:
            options["exclude"] = ",".join(part for part in (str(options.get("exclude") or ""), *self.exclude) if part)
        return options

    @property
    def shares_gpus(self) -> bool:
        """Whether each task gets a part of a GPU."""
        return shares_gpus(self.slurm)

    @property
    def whole_gpus_per_task(self) -> int:
        """The GPUs that Slurm is asked for: none if each task gets a part of one, or all GPUs of its node."""
        if named := gpus_in_gres(self.slurm):
            return sum(n for _, n in named) * self.nodes_per_task
        return 0 if self.shares_gpus or self.slurm.get("gres") == NO_GRES else self.gpus_per_task

    @property
    def type_of_gpus(self) -> str | None:
        """The type of GPU that Slurm is asked for, in `gres` of [slurm] or by `gpu_type`; None for any, or several."""
        if named := gpus_in_gres(self.slurm):
            return named[0][0] if len(named) == 1 else None
        return self.gpu_type

    @property
    def gpus_per_node(self) -> int:
        """The GPUs that Slurm is asked for on each node of a job; 0 as for `whole_gpus_per_task`."""
        return self.whole_gpus_per_task * self.tasks_per_node // self.nodes_per_task

    @property
    def n_jobs(self) -> int:
        """The jobs of the array."""
        return -(-self.n_tasks // self.tasks_per_node)

    @property
    def n_concurrent_jobs(self) -> int:
        """How many jobs of the array may run at once."""
        return -(-self.n_concurrent // self.tasks_per_node)

    @property
    def gpus_per_job(self) -> int:
        """The GPUs that Slurm is asked for by a job, for all of its tasks together; 0 as for `whole_gpus_per_task`."""
        return self.whole_gpus_per_task * self.tasks_per_node

    def sharing_nodes(self, most: int) -> Submission:
        """The submission with up to `most` tasks in a job: as few jobs at once as that needs, each with as many.

        It may have some tasks more than before, so that the last job has as many as the others.
        """
        n_jobs_at_once = -(-self.n_concurrent // most)
        tasks_per_node = -(-self.n_concurrent // n_jobs_at_once)
        n_tasks = -(-self.n_tasks // tasks_per_node) * tasks_per_node
        at_once = n_jobs_at_once * tasks_per_node
        return replace(self, n_tasks=n_tasks, n_concurrent=at_once, tasks_per_node=tasks_per_node)

    def filling_nodes(self, most: int) -> Submission:
        """The same, with `most` tasks in each job if it has several: the GPUs of whole nodes are charged for anyway."""
        n_at_once = -(-self.n_concurrent // most) * most if self.n_concurrent > most else self.n_concurrent
        return replace(self, n_concurrent=n_at_once).sharing_nodes(most)

    @property
    def walltime_s(self) -> float | None:
        """The walltime that [slurm] asks for; None if it asks for none, or for an unlimited one."""
        return self.seconds_asked("time")

    def seconds_asked(self, option: str) -> float | None:
        """The time that an option of [slurm] asks for; None if it asks for none, or for an unlimited one."""
        return seconds_of(str(self.slurm.get(option, ""))) or None  # 0 is no limit

    @property
    def merge_options(self) -> dict[str, Any]:
        """[merge], as `given`, with account, partition, QOS and reservation of [slurm] by default."""
        inherited = {
            key: self.slurm[key] for key in ("account", "partition", "qos", "reservation") if key in self.slurm
        }
        return given({**inherited, **self.merge})

    def bound_gpu_hours(self, walltime_s: float | None) -> float | None:
        """The most GPU-hours that all tasks can use, without automatic resubmissions; None without a walltime."""
        if self.gpus_per_task == 0:
            return 0.0
        return None if walltime_s is None else self.n_tasks * self.gpus_per_task * walltime_s / 3600


def shares_gpus(options: Mapping[str, Any]) -> bool:
    """Whether `gres` of [slurm] asks for a part of a GPU for each task, by shards or MPS, not for whole ones."""
    names = gres_names(options)
    return bool(names & {"shard", "mps"}) and "gpu" not in names


def gpus_in_gres(options: Mapping[str, Any]) -> list[tuple[str | None, int]]:
    """The type and the number of GPUs in each part of `gres` of [slurm] that names some, as in "gpu:a100:2"."""
    found = re.findall(r"(?:^|,)\s*gpu(?::([^:,]*[^\d:,][^:,]*))?(?::(\d+))?\s*(?=,|$)", str(options.get("gres") or ""))
    return [(kind or None, int(count or 1)) for kind, count in found]


def gres_names(options: Mapping[str, Any]) -> set[str]:
    """The names in `gres` of [slurm]: `gpu` and `shard`, or one of the cluster's own, such as `gpumem`."""
    return {part.strip().partition(":")[0] for part in str(options.get("gres") or "").split(",")} - {""}


def times(amounts: str, factor: int) -> str:
    """Amounts in sbatch's formats, such as "64G", or "gpu:a100:1,lscratch:50" of gres, each times `factor`."""

    def scaled(part: str) -> str:
        # Not a number of a type, as of gpu:3g.20gb or gpu:2080ti.
        found = re.fullmatch(r"(?s)(.*:|)(\d+)([KMGTP]?B?)", part, re.IGNORECASE)
        return f"{found[1]}{int(found[2]) * factor}{found[3]}" if found else f"{part}:{factor}"

    return re.sub(r"[^,;|]+", lambda part: scaled(part[0]), amounts)  # ; and | also separate licenses


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of sbatch without those that are false, which remove an option of the site file.

    `requeue = false` stays, as --no-requeue: without it the cluster's JobRequeue or a script's own line would decide.
    """
    kept = {name: value for name, value in options.items() if value is not False}
    return {**kept, "no_requeue": True} if options.get("requeue") is False else kept


def is_over(lines: Sequence[SubmissionLine]) -> bool:
    """Whether a run's last submission starts no more tasks; False if there was none."""
    return bool(lines) and lines[-1]["state"] in ENDS


def jobs_of(line: SubmissionLine) -> dict[str, str]:
    """The ids of a submission's jobs in Slurm, by their keys."""
    return {key: line[key] for key in JOB_KEYS if key in line}


def ended_jobs(lines: Sequence[SubmissionLine]) -> set[str | None]:
    """The Slurm jobs of submissions that have ended; also None, for submissions without a job."""
    return {line.get(key) for line in lines if line["state"] == "ended" for key in JOB_KEYS}


def directory_id(folder: Path) -> DirectoryId:
    """A run directory's path, which a move changes, and its inode, which a move does not change.

    Both are needed, because some file systems renumber their files at each mount.
    """
    return {"folder": str(folder.resolve()), "inode": retried(folder.stat).st_ino}


def was_written_in(directory: DirectoryId, told: Mapping[str, object]) -> bool:
    """Whether a file's content was written in this run directory, not in one that it was copied from."""
    return any(told.get(key, value) == value for key, value in directory.items())


def as_seen_in(line: SubmissionLine, directory: DirectoryId) -> SubmissionLine:
    """A submission as this run directory has it: ended, if its tasks belong to a directory that this is a copy of."""
    if line["state"] in ENDS or was_written_in(directory, line):
        return line
    return {**line, "state": "ended", "copied": True}


def abroad(lines: Sequence[SubmissionLine], cluster: str) -> str:
    """The suffix that distinguishes names of this cluster: "" on the run's first cluster, and without one."""
    first = next((line["cluster"] for line in lines if line.get("cluster")), cluster)
    return "" if first == cluster else cluster_in_names(cluster)


def cluster_in_names(cluster: str) -> str:
    """A cluster's name for use in file names."""
    return re.sub(r"[^\w-]", "-", cluster)


def is_slurms(record: Mapping[str, Any]) -> bool:
    """Whether a submission or an attempt consists of Slurm jobs, which Slurm's accounting knows."""
    return bool(record["executor"] == "slurm")


def is_of_processes(line: SubmissionLine) -> bool:
    """Whether a submission's tasks are processes of one machine, by their `pids`, rather than jobs of a queue."""
    return "pids" in line


def job_here(executor: str, submission: int) -> str:
    """The job id of a submission to this machine: "local1"."""
    return f"{executor}{submission}"


def slots_of(line: SubmissionLine) -> list[int]:
    """The processes of a local submission's slots, without the first one, which merges."""
    return list(line.get("pids", ()))[1:]


def megabytes_of(text: str) -> float | None:
    """The MB of an amount of memory in sbatch's format, such as "64G" or "1500"; None for other words."""
    found = re.fullmatch(r"(\d+)([KMGTkmgt]?)[Bb]?", text)
    return int(found[1]) * {"K": 1 / 1024, "G": 1024, "T": 1024**2}.get(found[2].upper(), 1) if found else None


def seconds_of(text: str) -> float | None:
    """The seconds of a time in the formats of sbatch(1); None for UNLIMITED and other words.

    "90" and "90:30" begin with minutes, "1:30:00" with hours, "1-12" with days.
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
