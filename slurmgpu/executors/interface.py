"""`Executor`, the interface of all executors: everything in which they differ.

`slurm.py`, `local.py`, `debug.py` and `manual.py` implement it. `plan/executors.py` has the names that run files may
use; executors of other packages are found by the entry-point group `slurmgpu.executors`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from slurmgpu.containers.settings import ContainerRecord
from slurmgpu.errors import SlurmGPUError
from slurmgpu.report.attempts import Lives
from slurmgpu.report.queued import Job
from slurmgpu.run.directory import Run
from slurmgpu.run.heartbeats import ObservedTask
from slurmgpu.run.submissions import Submission, SubmissionLine

if TYPE_CHECKING:
    from slurmgpu.faults import Fault
    from slurmgpu.plan.run_file import RunFile
    from slurmgpu.slurm.facts import Trial
    from slurmgpu.slurm.limits import Limit

Lines = Sequence[SubmissionLine]
"""Submissions of a run."""


@dataclass(frozen=True)
class Started:
    """A submission that has been started.

    `line` is added to the submission in submissions.jsonl: of queued jobs the state "queued", and their ids by name.
    `wait`, for tasks of this machine, calls its argument again and again until they have ended, and returns their
    lives. `to_type` are commands for the user, if the executor starts nothing itself.
    """

    line: Mapping[str, Any] = field(default_factory=dict)
    wait: Callable[[Callable[[], None]], Lives] | None = None
    to_type: Sequence[str] = ()


@dataclass(frozen=True)
class Sight:
    """What an executor sees of a run: `at_work` is what is queued or alive, in words.

    The rest is about tasks that it does not see, and whose heartbeats are watched: `hides` if tasks may work here
    unseen, `elsewhere` the other clusters in whose queues jobs may wait. `has_ended` says whether the task of a
    heartbeat is known to have ended.
    """

    at_work: str | None = None
    hides: bool = False
    elsewhere: Sequence[str] = ()
    has_ended: Callable[[ObservedTask], bool] = lambda task: False


@dataclass
class Preview:
    """The output of a dry run: the submission, and the cluster's limits for it; `notes` are for the user."""

    submission: Submission
    notes: list[str] = field(default_factory=list)
    scripts: dict[str, str] = field(default_factory=dict)
    limits: Sequence[Limit] = ()
    walltime_s: float | None = None
    bound_gpu_hours: float | None = None
    trials: Mapping[str, Trial] = field(default_factory=dict)


class Executor(ABC):
    """An executor of tasks. It has no state: every call gets the run that it is about.

    Its tasks call `job_entry.work` and log to logs/JOB_TASK_0_log.err. An executor that `queues` also queues a job that
    calls `submission.merge_behind`; for the others the process that submits waits for the tasks and merges.
    """

    name: ClassVar[str]
    """Its name in [resources] executor, submissions.jsonl and the records of attempts."""
    title: ClassVar[str] = "this machine"
    """Its name in sentences."""
    queues: ClassVar[bool] = False
    """Whether its tasks are jobs, which have a walltime and do not need the process that submitted them."""
    detaches: ClassVar[bool] = False
    """Whether another process than the user's can submit, and wait for its tasks."""
    in_process: ClassVar[bool] = False
    """Whether the user's own process computes, whose terminal a debugger may have."""
    not_in_paths: ClassVar[str] = ""
    """Characters that the path of a run directory must not have."""

    @abstractmethod
    def check(self, submission: Submission, container: ContainerRecord | None) -> None:
        """Raise SlurmGPUError if it cannot run from here; called before anything is written."""

    @abstractmethod
    def describe(self, container: ContainerRecord | None) -> str:
        """The line of `slurmgpu check` about it; SlurmGPUError if it would not work."""

    def check_faults(self, faults: Sequence[Fault]) -> None:
        """Raise SlurmGPUError for faults on demand that would harm others."""
        return

    def learn(
        self, run: Run, last: SubmissionLine, options: Mapping[str, Any], given: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Sequence[str], list[str]]:
        """The changes of the next submission because of failures of the `last` one.

        The options of [slurm], the nodes to exclude, and a sentence for each change. `options` are those of the last
        submission, updated by those that the user has `given` now.
        """
        return options, (), []

    def fit(self, submission: Submission, container: ContainerRecord | None) -> tuple[Submission, list[str]]:
        """The submission within the cluster's limits, and a sentence for each change and each hazard."""
        return submission, []

    def preview(self, submission: Submission, run_dir: Path, container: ContainerRecord | None) -> Preview:
        """The output of a dry run; nothing is queued."""
        return Preview(submission, bound_gpu_hours=submission.bound_gpu_hours(None))

    @abstractmethod
    def place(self, run: Run, submission: Submission) -> dict[str, Any]:
        """The place of a submission, for submissions.jsonl; called, and may refuse, before `start`."""

    @abstractmethod
    def start(self, run: Run, submission: Submission) -> Started:
        """Start it. An executor that `queues` leaves nothing in the queue when it raises SlurmGPUError.

        Where that is not certain, it raises MayBeQueuedError.
        """

    def import_ahead(self, n_slots: int) -> None:
        """Import what forks by `fork_ahead` are to have, in a process that does not know yet what it submits.

        `n_slots` is how many tasks at once are asked for.
        """
        return

    def fork_ahead(self, n_slots: int) -> Callable[[], NoReturn] | None:
        """Fork processes for `start`, before this one has threads; in such a fork, what it does instead of going on.

        `n_slots` is that of `import_ahead`, and is how many tasks at once are submitted.
        """
        return None

    @abstractmethod
    def look(self, run: Run, lines: Lines, waiting_merge: str | None) -> Sight:
        """What is seen of the run, whose submissions `lines` have not ended; NoAnswerError if that is not known.

        `waiting_merge` is the Slurm job of the caller, which merges when the others have ended. It does not count, nor
        do other jobs that wait to merge; a job of another executor leaves itself out.
        """

    @abstractmethod
    def cancel(self, run: Run, lines: Lines, among: Sequence[Any] | None = None) -> list[str]:
        """Cancel what is seen of the run, and record `cancelled` for each submission; what was done, in words.

        `among` are `own_jobs`, if they are known already.
        """

    def jobs_to_cancel(self, run: Run, lines: Lines, among: Sequence[Any] | None = None) -> list[str] | None:
        """`cancel`, but for the jobs of these ids, which `cancel_jobs` ends with those of other runs by one request.

        None where `cancel` does all.
        """
        return None

    def cancel_jobs(self, jobs: Sequence[str]) -> None:
        """End jobs that `jobs_to_cancel` gave, of one run or several; SlurmGPUError if one of them is not ended."""
        return

    def drop_waiting(self, job: str) -> None:
        """Cancel the tasks of a job that have not started: no shard is left for them."""
        return

    def own_jobs(self) -> Sequence[Any]:
        """All jobs of this user in the queue, by one request, for many runs; NoAnswerError without an answer."""
        return ()

    def queued(self, run: Run, among: Sequence[Any] | None = None, last: list[Job] | None = None) -> list[Job] | None:
        """The run's jobs in the queue, for `status`; None if the queue says nothing of it, `last` without an answer.

        `among` are `own_jobs`, if they are known already.
        """
        return None

    def lives(self, run: Run, *, settled: bool = False) -> Lives | None:
        """What the executor's accounting says of the run's tasks; None without accounting or an answer.

        With `settled` it waits a while for the ends that accounting does not have yet.
        """
        return None

    def jobs_completing(self, other: Run) -> tuple[str, ...]:
        """The jobs after which an incomplete run is complete, for --after; SlurmGPUError if there are none."""
        raise SlurmGPUError(
            f"{other.folder} is not complete yet, and the executor {self.name} cannot wait for it (--after). "
            f"Submit once it is complete."
        )

    def hand_over(self, line: SubmissionLine, jobs: Mapping[str, str]) -> None:
        """Called in the merge job of a submission that has resubmitted its run as `jobs`."""
        return

    def command_on_node(self, config: RunFile, command: list[str]) -> list[str]:
        """The command that runs `command` where a task of the run file would run, for `check --node`."""
        if self.queues:
            raise SlurmGPUError(f"The executor {self.name} cannot check a node: leave out --node.")
        return command
