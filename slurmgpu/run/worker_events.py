"""The events that a worker reports to its task: each is a line of JSON on a pipe, unless both are one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypedDict

from slurmgpu.run.metric_log import Point
from slurmgpu.util.env_info import Surroundings

_Takeover = TypedDict("_Takeover", {"event": Literal["takeover"], "shard": int, "from": str, "host": str})
_Failed = TypedDict("_Failed", {"event": Literal["failed"], "class": str, "message": str, "traceback": str})


class Found(Surroundings):
    """The first event: what the worker finds around it."""

    event: Literal["surroundings"]


class Loading(TypedDict):
    """The worker is about to load the workload."""

    event: Literal["loading"]


class UsesGPUs(TypedDict):
    """The GPUs work, and the worker uses them."""

    event: Literal["gpus"]
    names: list[str]
    uuids: list[str]


class Ready(TypedDict):
    """The workload is loaded. If it `resumes`, it continues an item from the progress that it has kept."""

    event: Literal["ready"]
    load_s: float
    resumes: bool


class Used(TypedDict):
    """The worker has imported packages, of these versions."""

    event: Literal["used"]
    packages: dict[str, str]


class Claimed(TypedDict):
    """The worker begins a shard, after it has waited `idle_s` for other tasks."""

    event: Literal["claim"]
    shard: int
    idle_s: float


class OfShard(TypedDict):
    """A shard was claimed `ahead` of its turn, `left` for later, or `skipped`: another task may compute it."""

    event: Literal["ahead", "left", "skipped"]
    shard: int


class Takeover(_Takeover):
    """The worker has taken over the claim of an attempt whose lease was stale."""


class Batch(TypedDict):
    """A call of the workload begins; `ahead` are shard and first item of the batch that is prepared meanwhile."""

    event: Literal["batch"]
    items: list[int]
    isolated: bool
    ahead: tuple[int, int] | None


class Told(TypedDict):
    """What `status` shows about the worker; with `progress` the workload has kept the progress of its item."""

    event: Literal["tell", "progress"]
    text: str


class Waiting(TypedDict):
    """The worker waits before it retries items."""

    event: Literal["waiting"]
    seconds: float
    items: int


class Logged(TypedDict):
    """The workload has logged values."""

    event: Literal["log"]
    points: list[Point]


class Published(TypedDict):
    """A shard was published; `won` is false if another task was faster.

    `errors` counts failed items by class; `last_failed` says which was the last, and why; None without any.
    """

    event: Literal["published"]
    shard: int
    items: int
    errors: dict[str, int]
    last_failed: str | None
    started: float
    seconds: float
    won: bool
    revision: int


class Joined(TypedDict):
    """The worker has computed parts of an item whose shard another task publishes."""

    event: Literal["joined"]
    seconds: float
    idle_s: float


class Done(TypedDict):
    """The worker takes no more shards."""

    event: Literal["done"]
    reason: str
    idle_s: float


class Failed(_Failed, total=False):
    """The worker ends, and another one would fail as well; `node` is the node at fault, if it is another one."""

    node: str


class Broken(TypedDict):
    """The worker's process cannot go on, but another one can; items in flight are to blame if it `blames_items`.

    `is_sure`: only these can be.
    """

    event: Literal["broken"]
    message: str
    blames_items: bool
    is_sure: bool


class Preempt(TypedDict):
    """A fault on demand: preempt the task."""

    event: Literal["preempt"]


class Timeout(TypedDict):
    """A fault on demand: the walltime ends at this time."""

    event: Literal["timeout"]
    end_time: float


WorkerEvent = (
    Found
    | Loading
    | UsesGPUs
    | Ready
    | Used
    | Claimed
    | OfShard
    | Takeover
    | Batch
    | Told
    | Waiting
    | Logged
    | Published
    | Joined
    | Done
    | Failed
    | Broken
    | Preempt
    | Timeout
)
Report = Callable[[WorkerEvent], None]
"""Receives a worker's events: see `Task.handle`."""
