"""An attempt, one life of a task: what it was given, and what it writes of itself to tasks/."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Attempt:
    """One life of a task, and what it was given.

    `job` is the array job's id, `task` its index in the array, `restart` how often Slurm has requeued it. `end_time` is
    when the allocation ends, in seconds since the epoch by this node's clock; `memory_mb` the job's host memory on this
    node, if it is known. `n_gpus` are those of one node, of which the task has `n_nodes`; `nodes` are their names, if
    it has several and they are known.
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
        """The attempt: "1234_7.0"."""
        return f"{self.task_name}.{self.restart}"


def node_name() -> str:
    """The name of this node: Slurm's, in a job of Slurm's."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


@dataclass
class Record:
    """What an attempt writes of itself to tasks/: see docs/reference/files.md."""

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
    gpus: list[str]
    memory_mb: int | None
    started: float
    updated: float = 0.0
    ended: float | None = None
    state: str = "starting"
    reason: str | None = None
    failure: str | None = None
    message: str = ""
    traceback: str = ""
    bad_node: str | None = None
    image: str | None = None
    surroundings: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    load_s: float | None = None
    n_items: int = 0
    n_errors: int = 0
    shard: int | None = None
    progress: str | None = None
    published: list[list[float]] = field(default_factory=list)
    deaths: list[dict[str, Any]] = field(default_factory=list)
    takeovers: list[dict[str, Any]] = field(default_factory=list)
    version: int = 1
