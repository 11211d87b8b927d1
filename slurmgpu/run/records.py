"""An attempt (one life of a task): what it was given, and its record in tasks/."""

from __future__ import annotations

import enum
import json
import os
import platform
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, TypedDict, cast, get_type_hints

from slurmgpu.run.failures import POLICIES
from slurmgpu.util.env_info import Surroundings


@dataclass(frozen=True)
class Attempt:
    """One life of a task, and what it was given.

    `job` is the array job's id, `task` its number among the tasks of the array, `restart` how often Slurm has requeued
    it. `end_time` is when the allocation ends, in seconds since the epoch by this node's clock; `memory_mb` the task's
    host memory on this node, if known. The task has `n_nodes` nodes with `n_gpus` GPUs each; `nodes` are their names,
    if it has several and they are known. `cluster` is the cluster that gave the job its id, "" without one; `abroad` is
    its name if the run was queued on another cluster first, which may give the same id.
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
        """Whether it computes on GPUs."""
        return self.n_gpus > 0 and self.device != "cpu"

    @property
    def task_name(self) -> str:
        """The array task without its restart: "1234_7"."""
        return f"{self.job}_{self.task}"

    @property
    def name_here(self) -> str:
        """The attempt among those of its own cluster: "1234_7.0"."""
        return f"{self.task_name}.{self.restart}"

    @property
    def name(self) -> str:
        """The attempt: "1234_7.0"; "1234_7.0@other" on another cluster than the run's first."""
        return f"{self.name_here}{self.abroad and '@'}{self.abroad}"


def node_name() -> str:
    """The name of this node; Slurm's name in a Slurm job."""
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
    """Means and peaks of what an attempt used; None is unknown. Empty before the first sample."""

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
    """When a record was written, by the clock of a reader that looks again and again."""

    heard: float


class Computed(TypedDict):
    """The shards that an attempt computed, each with its start, seconds, and whether it was published first."""

    attempt: str
    submission: int
    published: list[list[Any]]


ATTEMPT_STATES = ("starting", "loading", "running", "ended")
"""After a task has recorded its end, it holds its GPUs until Slurm releases them."""
ALL_FAIL = "each call failed so far"
"""The progress of a task begins with this until one of its calls has worked."""


class BriefRecord(_Heard):
    """The fields of a record that `status` keeps in memory, of thousands of attempts: also those of `Computed`."""

    attempt: str
    job: str
    task: int
    restart: int
    submission: int
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
    last_failed: str | None
    shard: int | None
    shard_started: float | None
    shard_done: int
    shard_kept: float | None
    progress: str | None
    published: list[list[Any]]
    kept_s: float
    lost_s: float
    n_retried: int
    waited_s: float
    idle_s: float
    deaths: list[Death]
    takeovers: list[Takeover]
    version: int


class Record(BriefRecord):
    """An attempt's record in tasks/: see docs/reference/files.md."""

    gpus: list[str]
    traceback: str
    surroundings: Surroundings
    usage: Usage


def task_of(record: BriefRecord) -> str:
    """The array task of an attempt, as `Attempt.task_name`."""
    return f"{record['job']}_{record['task']}"


def new_record(attempt: Attempt, node: str, pid: int, gpus: list[str], started: float) -> Record:
    """The record of an attempt that starts, its keys in the order of the file."""
    given = {
        "attempt": attempt.name,
        **{name: getattr(attempt, name) for name in FIELDS if hasattr(attempt, name)},
        "node": node,
        "pid": pid,
        "gpus": gpus,
        "started": started,
    }
    begun = {name: given.get(name, copy(field.begin)) for name, field in FIELDS.items()}
    return cast(Record, {**begun, "phases": [[round(started, 3), begun["state"]]]})


class Unread(enum.Enum):
    """Why a record is left out: for good, or while the file system answers with errors."""

    DAMAGED = "its record is damaged"
    UNREADABLE = "its record cannot be read at present"


def read_record(content: bytes) -> Record:
    """The record in a file of tasks/.

    ValueError says which field holds what it cannot hold; the fields of a record that is returned need no more checks.
    """
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    for name, rule in FIELDS.items():
        if name not in value and rule.new:
            value[name] = copy(rule.begin)
        if name not in value:
            raise ValueError(f"it lacks {name}")
        if not rule.check(value[name]):
            raise ValueError(f"its {name} is {value[name]!r:.80}")
    return cast(Record, value)


Check = Callable[[Any], bool]
REAL = (int, float)
LARGEST = 65_536
"""More than the nodes of any cluster, and the GPUs of any node."""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_part_of_cluster(value: Any) -> bool:
    """A number of nodes, or of GPUs: lists with an entry for each must fit into memory."""
    return type(value) is int and 0 <= value <= LARGEST


def _is_number(value: Any) -> bool:
    """A time or a duration; clocks that were set back make negative ones."""
    return type(value) in REAL and -1e9 < value < 1e11


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _are_phases(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_phase, value))


def _is_phase(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_number(value[0]) and _is_text(value[1])


def _is_published(value: Any) -> bool:
    # No function call per number: there are as many as the run has shards.
    if not isinstance(value, list) or len(value) < 4:
        return False
    shard, started, seconds, won, *_ = value
    if type(shard) is not int or type(started) not in REAL or type(seconds) not in REAL:
        return False
    return 0 <= started < 1e11 and abs(seconds) < 1e9 and type(won) is bool


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
    if not isinstance(value, dict):
        return False
    others: dict[str, Check] = {"throttled": _or_none(_is_object_of_measures), "xids": _list_of(_is_count)}
    for name, given in value.items():
        is_whole = name.startswith("n_") or name.endswith(("_bytes", "_c"))
        if not others.get(name, _or_none(_is_whole if is_whole else _is_measure))(given):
            return False
    return True


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 63


def _is_object_of_measures(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_measure, value.values()))


def _is_measure(value: Any) -> bool:
    return type(value) in REAL and abs(value) < 1e18


def _is_class(value: Any) -> bool:
    return isinstance(value, str) and value in POLICIES


@dataclass(frozen=True)
class Field:
    """A field of a record: what it may hold, and its initial value. Records of former versions may lack a `new` one."""

    check: Check
    begin: Any = None
    new: bool = False


_IS_DEATH = _object_of(
    {"class": _is_class, "message": _is_text, "at": _is_number},
    state=_is_text,
    shard=_is_count,
    items=_list_of(_is_count),
)
_OF_KIND: Mapping[Any, Field] = {
    str: Field(_is_text, ""),
    int: Field(_is_count, 0),
    float: Field(_is_number, 0.0),
    str | None: Field(_or_none(_is_text)),
    int | None: Field(_or_none(_is_count)),
    float | None: Field(_or_none(_is_number)),
    list[str]: Field(_list_of(_is_text), []),
}
"""The fields by their annotations in `Record`, unless `_OF_NAME` has them."""
_OF_NAME: Mapping[str, Field] = {
    "pid": Field(lambda value: type(value) is int),
    "n_gpus": Field(_is_part_of_cluster),
    "n_nodes": Field(lambda value: _is_part_of_cluster(value) and value > 0),
    "state": Field(ATTEMPT_STATES.__contains__, "starting"),
    "phases": Field(_are_phases, []),
    "failure": Field(_or_none(_is_class)),
    "surroundings": Field(_is_object, {}),
    "usage": Field(_is_usage, {}),
    "failed": Field(_list_of(_is_failed), []),
    "last_failed": Field(_or_none(_is_text), new=True),
    "published": Field(_list_of(_is_published), []),
    "deaths": Field(_list_of(_IS_DEATH), []),
    "takeovers": Field(_list_of(_object_of({"shard": _is_count, "from": _is_text, "host": _is_text})), []),
    "version": Field(lambda value: value == 1, 1),
}
FIELDS: Mapping[str, Field] = {
    name: _OF_NAME.get(name) or _OF_KIND[kind]
    for name, kind in get_type_hints(Record).items()
    if name in Record.__required_keys__
}
