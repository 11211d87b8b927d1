"""The types that task and worker share, without NumPy and h5py, which the task does not need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class WorkerFailedError(Exception):
    """The worker cannot continue, and a new worker could not, either; `kind` is the failure class."""

    def __init__(self, kind: str, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.trace = trace


@dataclass(frozen=True)
class Assignment:
    """The task's instructions to its worker.

    `resume` are shards that an earlier worker of this attempt claimed before it died. `end_time` is the end of the
    allocation in seconds since the epoch, by this node's clock. `inject` are faults on demand. `cluster` is the name in
    claims. `code` is the digest of the snapshot of the user's modules.
    """

    task: str
    attempt: str
    n_gpus: int = 0
    device: str = "cpu"
    end_time: float | None = None
    resume: Sequence[int] = ()
    inject: Sequence[str] = ()
    cluster: str = ""
    submission: int = 1
    code: str | None = None
