"""An attempt, one life of a task: what it was given, and what it writes of itself to tasks/; and reading that."""

from __future__ import annotations

import enum
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict, cast

from slurmgpu.run.failures import POLICIES
from slurmgpu.util.env_info import Surroundings


@dataclass(frozen=True)
class Attempt:
    """One life of a task, and what it was given.

    `job` is the array job's id, `task` its index in the array, `restart` how often Slurm has requeued it. `end_time` is
    when the allocation ends, in seconds since the epoch by this node's clock; `memory_mb` the job's host memory on this
    node, if it is known. `n_gpus` are those of one node, of which the task has `n_nodes`; `nodes` are their names, if
    it has several and they are known. `cluster` is the name of the cluster that gave the job its id, "" where none did;
    `abroad` is that name where the run was queued on another one first, which may give the same id.
    """

    job: str
    task: int
    restart: int = 0
    submission: int = 1
    executor: str = "local"
    n_gpus: int = 0
    device: str = "auto"
    end_time: float | None = None
    memory_mb: int | None = None
    n_nodes: int = 1
    nodes: tuple[str, ...] = ()
    cluster: str = field(default_factory=lambda: os.environ.get("SLURM_CLUSTER_NAME", ""))
    abroad: str = ""

    @property
    def uses_gpus(self) -> bool:
        """Whether it computes on GPUs; not if it was told to leave them alone."""
        return self.n_gpus > 0 and self.device != "cpu"

    @property
    def task_name(self) -> str:
        """The array task, whatever its restart: "1234_7"."""
        return f"{self.job}_{self.task}"

    @property
    def name(self) -> str:
        """The attempt: "1234_7.0"; "1234_7.0@other" on another cluster than the run's first."""
        return f"{self.task_name}.{self.restart}{self.abroad and '@'}{self.abroad}"


def node_name() -> str:
    """The name of this node: Slurm's, in a job of Slurm's."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


_Death = TypedDict("_Death", {"class": str, "message": str})


class Death(_Death, total=False):
    """The end of a worker; `shard` and the first and the last of the `items` in flight, if there were any."""

    shard: int
    items: list[int]
    at: float
    state: str


Takeover = TypedDict("Takeover", {"shard": int, "from": str, "host": str})


class Usage(TypedDict, total=False):
    """Means and peaks of what an attempt used; None is unknown, and a key may lack in an older record."""

    n_samples: int
    n_samples_ready: int
    gpu_utilisation: float | None
    gpu_memory_peak_bytes: int | None
    gpu_memory_total_bytes: int | None
    temperature_max_c: int | None
    power_mean_w: float | None
    energy_j: float | None
    throttled: dict[str, float] | None
    ecc_errors: float | None
    xids: list[int]
    host_memory_peak_bytes: int | None
    cpu_cores: float | None


class _Heard(TypedDict, total=False):
    """What a record has that is looked at again and again: when it was written, by the clock of who looks."""

    heard: float


class Computed(TypedDict):
    """Which computations of shards are an attempt's: each with its start, seconds, and whether it came first."""

    attempt: str
    submission: int
    published: list[list[Any]]


class BriefRecord(Computed, _Heard):
    """What a status keeps in mind of a record, of thousands of attempts."""

    job: str
    task: int
    restart: int
    executor: str
    node: str
    pid: int
    n_gpus: int
    n_nodes: int
    device: str
    memory_mb: int | None
    started: float
    end_time: float | None
    updated: float
    ended: float | None
    state: str
    phases: list[list[Any]]
    reason: str | None
    failure: str | None
    message: str
    bad_node: str | None
    image: str | None
    load_s: float | None
    n_items: int
    n_errors: int
    failed: list[list[Any]]
    shard: int | None
    shard_started: float | None
    shard_done: int
    shard_kept: float | None
    progress: str | None
    kept_s: float
    lost_s: float
    deaths: list[Death]
    takeovers: list[Takeover]
    version: int


class Record(BriefRecord):
    """What an attempt writes of itself to tasks/: see docs/reference/files.md."""

    gpus: list[str]
    traceback: str
    surroundings: Surroundings
    usage: Usage


def new_record(attempt: Attempt, node: str, pid: int, gpus: list[str], started: float) -> Record:
    """The record of an attempt that starts, its keys in the order of the file."""
    return {
        "attempt": attempt.name,
        "job": attempt.job,
        "task": attempt.task,
        "restart": attempt.restart,
        "submission": attempt.submission,
        "executor": attempt.executor,
        "node": node,
        "pid": pid,
        "n_gpus": attempt.n_gpus,
        "n_nodes": attempt.n_nodes,
        "device": attempt.device,
        "gpus": gpus,
        "memory_mb": attempt.memory_mb,
        "started": started,
        "end_time": attempt.end_time,
        "updated": 0.0,
        "ended": None,
        "state": "starting",
        "phases": [],
        "reason": None,
        "failure": None,
        "message": "",
        "traceback": "",
        "bad_node": None,
        "image": None,
        "surroundings": {},
        "usage": {},
        "load_s": None,
        "n_items": 0,
        "n_errors": 0,
        "failed": [],
        "shard": None,
        "shard_started": None,
        "shard_done": 0,
        "shard_kept": None,
        "progress": None,
        "published": [],
        "kept_s": 0.0,
        "lost_s": 0.0,
        "deaths": [],
        "takeovers": [],
        "version": 1,
    }


class Unread(enum.Enum):
    """Why a record is left out: for good, or as long as the file system answers with errors."""

    DAMAGED = "its record is damaged"
    UNREADABLE = "its record cannot be read at present"


def read_record(content: bytes) -> Record:
    """The record in a file of tasks/, with defaults for what one of an older slurmgpu lacks.

    ValueError says what is wrong with one of which something makes no sense; the others can be used without a doubt.
    """
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    for name, makes_sense in FIELDS.items():
        if name in value and not makes_sense(value[name]):
            raise ValueError(f"its {name} is {value[name]!r:.80}")
        if name not in value and name not in ADDED:
            raise ValueError(f"it lacks {name}")
    if not value.keys() >= set(ADDED):  # it is older than these, which are as in one that begins
        value = {**new_record(Attempt("", 0), "", 0, [], 0.0), **value}
    return cast(Record, value)


ADDED = (
    *("bad_node", "image", "n_nodes", "progress", "surroundings", "usage", "end_time", "phases"),
    *("shard_started", "shard_done", "shard_kept", "kept_s", "lost_s", "failed"),
)
"""Keys that records of an older slurmgpu lack."""

Check = Callable[[Any], bool]
REAL = (int, float)
LARGEST = 65_536
"""No cluster has so many nodes, and no node so many GPUs."""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_part_of_cluster(value: Any) -> bool:
    """A number of nodes, or of GPUs: what is made for each of them must fit into memory."""
    return type(value) is int and 0 <= value <= LARGEST


def _is_number(value: Any) -> bool:
    """A time or a duration that can be computed with: clocks that were set back make negative ones."""
    return type(value) in REAL and -1e9 < value < 1e11


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_phase(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_number(value[0]) and _is_text(value[1])


def _is_published(value: Any) -> bool:
    # Without a call for each number: there are as many as the run has shards.
    if not isinstance(value, list) or len(value) < 3:
        return False
    shard, started, seconds, *won = value
    if type(shard) is not int or type(started) not in REAL or type(seconds) not in REAL:
        return False
    return 0 <= started < 1e11 and abs(seconds) < 1e9 and (not won or type(won[0]) is bool)


def _is_failed(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not _is_count(value[0]) or not isinstance(value[1], dict):
        return False
    return all(kind in POLICIES and _is_count(count) for kind, count in value[1].items())


def _object_of(checks: Mapping[str, Check], **may_lack: Check) -> Check:
    def makes_sense(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and all(name in value and check(value[name]) for name, check in checks.items())
            and all(name not in value or check(value[name]) for name, check in may_lack.items())
        )

    return makes_sense


def _is_usage(value: Any) -> bool:
    """Numbers by name, as far as they are known, but for two."""
    if not isinstance(value, dict):
        return False
    others: dict[str, Check] = {"throttled": _or_none(_is_object), "xids": _list_of(_is_count)}
    return all(others.get(name, _or_none(_is_measure))(given) for name, given in value.items())


def _is_measure(value: Any) -> bool:
    return type(value) in REAL and abs(value) < 1e18


FIELDS: Mapping[str, Check] = {
    "attempt": _is_text,
    "job": _is_text,
    "task": _is_count,
    "restart": _is_count,
    "submission": _is_count,
    "executor": _is_text,
    "node": _is_text,
    "pid": lambda value: type(value) is int,
    "n_gpus": _is_part_of_cluster,
    "n_nodes": lambda value: _is_part_of_cluster(value) and value > 0,
    "device": _is_text,
    "gpus": _list_of(_is_text),
    "memory_mb": _or_none(_is_count),
    "started": _is_number,
    "end_time": _or_none(_is_number),
    "updated": _is_number,
    "ended": _or_none(_is_number),
    "state": ("starting", "loading", "running", "ended").__contains__,
    "phases": _list_of(_is_phase),
    "reason": _or_none(_is_text),
    "failure": _or_none(lambda value: _is_text(value) and value in POLICIES),
    "message": _is_text,
    "traceback": _is_text,
    "bad_node": _or_none(_is_text),
    "image": _or_none(_is_text),
    "surroundings": _is_object,
    "usage": _is_usage,
    "load_s": _or_none(_is_number),
    "n_items": _is_count,
    "n_errors": _is_count,
    "failed": _list_of(_is_failed),
    "shard": _or_none(_is_count),
    "shard_started": _or_none(_is_number),
    "shard_done": _is_count,
    "shard_kept": _or_none(_is_number),
    "progress": _or_none(_is_text),
    "published": _list_of(_is_published),
    "kept_s": _is_number,
    "lost_s": _is_number,
    "deaths": _list_of(
        _object_of(
            {"class": lambda value: _is_text(value) and value in POLICIES, "message": _is_text, "at": _is_number},
            state=_is_text,
            shard=_is_count,
            items=_list_of(_is_count),
        )
    ),
    "takeovers": _list_of(_object_of({"shard": _is_count, "from": _is_text, "host": _is_text})),
    "version": lambda value: value == 1,
}
"""What makes sense as each field of a record."""
