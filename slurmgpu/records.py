"""An attempt, one life of a task: what it was given, and what it writes of itself to tasks/."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Attempt:
    """One life of a task, and what it was given.

    `job` is the array job's id, `task` its index in the array, `restart` how often Slurm has requeued it. `end_time` is
    when the allocation ends, in seconds since the epoch by this node's clock; `memory_mb` the job's host memory on this
    node, if it is known.
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

    @property
    def task_name(self) -> str:
        """The array task, whatever its restart: "1234_7"."""
        return f"{self.job}_{self.task}"

    @property
    def name(self) -> str:
        """The attempt: "1234_7.0"."""
        return f"{self.task_name}.{self.restart}"


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
    load_s: float | None = None
    n_items: int = 0
    n_errors: int = 0
    shard: int | None = None
    published: list[list[float]] = field(default_factory=list)
    deaths: list[dict[str, Any]] = field(default_factory=list)
    takeovers: list[dict[str, Any]] = field(default_factory=list)
    version: int = 1
