"""`Executor`, the interface of an executor: all that differs from one to the next.

`slurm.py`, `local.py`, `debug.py` and `manual.py` implement it. `plan/executors.py` has the names of those that run
files may name; those of other packages are found by the entry-point group `slurmgpu.executors`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slurmgpu.containers.settings import ContainerRecord
from slurmgpu.report.attempts import Lives
from slurmgpu.run.directory import Run
from slurmgpu.run.heartbeats import Sign
from slurmgpu.run.submissions import Submission, SubmissionLine
from slurmgpu.slurm.limits import Limit, bound_gpu_hours

if TYPE_CHECKING:
    from slurmgpu.faults import Fault
    from slurmgpu.slurm.facts import Trial

Lines = Sequence[SubmissionLine]
"""Submissions of a run."""


@dataclass(frozen=True)
class Started:
    """What has begun.

    `line` is what submissions.jsonl is to say of the submission from now on: of queued jobs the state "queued", and
    their ids, each by a word for it. `wait` is of tasks of this machine: it calls what it is given until they have
    ended, and tells what is known of their lives. `to_type` is for the user, where nothing begins by itself.
    """

    line: Mapping[str, Any] = field(default_factory=dict)
    wait: Callable[[Callable[[], None]], Lives] | None = None
    to_type: Sequence[str] = ()


@dataclass(frozen=True)
class Sight:
    """What an executor sees of a run: `at_work` is what waits or works, in words.

    The rest is for what it does not see, and whose heartbeats are watched: `hides` if tasks may work here unseen,
    `is_old` if an older slurmgpu may have submitted them, `elsewhere` the clusters in whose queues jobs may wait.
    `has_ended` tells of a heartbeat whose task is known to be over.
    """

    at_work: str | None = None
    hides: bool = False
    is_old: bool = False
    elsewhere: Sequence[str] = ()
    has_ended: Callable[[Sign], bool] = lambda sign: False


@dataclass
class Preview:
    """What would be submitted, for a dry run, and what the cluster says of it; `notes` are for the user."""

    submission: Submission
    notes: list[str] = field(default_factory=list)
    scripts: dict[str, str] = field(default_factory=dict)
    limits: Sequence[Limit] = ()
    walltime_s: float | None = None
    bound_gpu_hours: float | None = None
    trials: Mapping[str, Trial] = field(default_factory=dict)


class Executor(ABC):
    """Where tasks run. It has no state; what it needs of a run comes with each call.

    Its tasks are attempts of `job_entry.work`, and log to logs/JOB_TASK_0_log.err. Of one that `queues` a job merges
    behind them, such as `slurmgpu merge --wait RUN`; of another the process that submits waits for them and merges.
    """

    name: ClassVar[str]
    """What [resources] executor says, and submissions.jsonl and records of attempts have."""
    title: ClassVar[str] = "this machine"
    """Who works on the run, in sentences."""
    queues: ClassVar[bool] = False
    """Whether its tasks are jobs, which have a walltime and go on without the process that submits them."""
    can_wait: ClassVar[bool] = False
    """Whether its jobs can wait for those of another run (--after)."""
    not_in_paths: ClassVar[str] = ""
    """Characters that the path of a run directory must not have."""

    @abstractmethod
    def check(self, submission: Submission, container: ContainerRecord | None) -> None:
        """Refuse, with a SlurmGPUError, what cannot run from here, before anything is written."""

    @abstractmethod
    def describe(self, container: ContainerRecord | None) -> str:
        """What `check` prints of it; SlurmGPUError where it would not work."""

    def check_faults(self, faults: Sequence[Fault]) -> None:
        """Refuse faults on demand that would harm others."""
        return

    def learn(
        self, run: Run, last: SubmissionLine, options: Mapping[str, Any], given: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Sequence[str], list[str]]:
        """What the next submission changes because of how the `last` one failed.

        The options of [slurm], the nodes to leave out, and a sentence for each change. `options` are those of the last
        submission, with those that the user has `given` now.
        """
        return options, (), []

    def fit(self, submission: Submission, container: ContainerRecord | None) -> tuple[Submission, list[str]]:
        """The submission within the cluster's limits, and a sentence for each change and each hazard."""
        return submission, []

    def preview(self, submission: Submission, run_dir: Path, container: ContainerRecord | None) -> Preview:
        """What a dry run shows; nothing is queued for it."""
        return Preview(submission, bound_gpu_hours=bound_gpu_hours(submission, None))

    @abstractmethod
    def place(self, run: Run, submission: Submission) -> dict[str, Any]:
        """What submissions.jsonl says of where a submission is made, before anything begins; the last checks."""

    @abstractmethod
    def start(self, run: Run, submission: Submission) -> Started:
        """Begin it. Of what `queues`, nothing stays queued when it raises a SlurmGPUError."""

    @abstractmethod
    def look(self, run: Run, lines: Lines, waiting_merge: str | None) -> Sight:
        """What is seen of the run, of whose submissions `lines` have not ended; raises where that cannot be asked.

        `waiting_merge` is Slurm's job that asks, to merge when the others have ended; it and its like do not count, nor
        does another executor's job that asks.
        """

    @abstractmethod
    def cancel(self, run: Run, lines: Lines) -> list[str]:
        """Stop what is seen of the run, and write `cancelled` down for each submission; what was done, in words."""

    def drop_waiting(self, job: str) -> None:
        """Take tasks of a job out of the queue that have not started: nothing is left for them."""
        return
