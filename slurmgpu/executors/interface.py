"""`Executor`, the interface of all executors, with everything in which they differ.

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
from slurmgpu.report.outcomes import Accounting
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

    `line` is added to the submission in submissions.jsonl: for queued jobs the state "queued" and their ids by name.
    `wait`, for tasks on this machine, calls its argument repeatedly until they have ended, and returns how they ended.
    `to_type` are commands for the user, if the executor starts nothing itself.
    """

    line: Mapping[str, Any] = field(default_factory=dict)
    wait: Callable[[Callable[[], None]], Accounting] | None = None
    to_type: Sequence[str] = ()


@dataclass(frozen=True)
class Sight:
    """What an executor sees of a run: `at_work` says in words what is queued or alive.

    The rest is about tasks that it cannot see, whose heartbeats are watched: `hides` is true if tasks may run here
    unseen; `elsewhere` are other clusters whose queues may have jobs. `has_ended` says whether the task of a heartbeat
    is known to have ended.
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
    """An executor of tasks. It has no state: every call gets its run.

    Its tasks call `job_entry.work` and log to logs/JOB_TASK_0_log.err. An executor that `queues` also queues a job that
    calls `submission.merge_behind`; for others the process that submits waits for the tasks and merges.
    """

    name: ClassVar[str]
    """Its name in [resources] executor, submissions.jsonl and the records of attempts."""
    title: ClassVar[str] = "this machine"
    """Its name in messages."""
    queues: ClassVar[bool] = False
    """Whether its tasks are jobs, which have a walltime and do not need the process that submitted them."""
    detaches: ClassVar[bool] = False
    """Whether a process other than the user's can submit and wait for its tasks."""
    in_process: ClassVar[bool] = False
    """Whether the user's own process computes, whose terminal a debugger may have."""
    not_in_paths: ClassVar[str] = ""
    """Characters that the path of a run directory must not have."""

    @abstractmethod
    def check(self, submission: Submission, container: ContainerRecord | None) -> None:
        """Raise SlurmGPUError if it cannot run the submission from here; called before anything is written."""

    @abstractmethod
    def describe(self, container: ContainerRecord | None) -> str:
        """The line of `slurmgpu check` about it; SlurmGPUError if it would not work."""

    def check_faults(self, faults: Sequence[Fault]) -> None:
        """Raise SlurmGPUError for faults on demand that would harm others."""
        return

    def learn(
        self, run: Run, last: SubmissionLine, options: Mapping[str, Any], given: Mapping[str, Any], asked: Submission
    ) -> tuple[Mapping[str, Any], Sequence[str], list[str]]:
        """Changes for the next submission, `asked` for without options, because of failures of the `last` one.

        Returns the options of [slurm], the nodes to exclude, and a sentence for each change. `options` are those of the
        last submission, updated by those that the user has `given` now.
        """
        return options, (), []

    def fit(self, submission: Submission, container: ContainerRecord | None) -> tuple[Submission, list[str]]:
        """The submission, reduced to the cluster's limits, and a sentence for each change and each hazard."""
        return submission, []

    def preview(self, submission: Submission, run_dir: Path, container: ContainerRecord | None) -> Preview:
        """The output of a dry run; nothing is queued."""
        return Preview(submission, bound_gpu_hours=submission.bound_gpu_hours(None))

    @abstractmethod
    def place(self, run: Run, submission: Submission) -> dict[str, Any]:
        """Where the submission runs, for submissions.jsonl; called before `start`, and may raise SlurmGPUError."""

    @abstractmethod
    def start(self, run: Run, submission: Submission) -> Started:
        """Start it. An executor that `queues` leaves nothing in the queue when it raises SlurmGPUError.

        Where that is not certain, it raises MayBeQueuedError.
        """

    def import_ahead(self, n_slots: int) -> None:
        """Import what forks of `fork_ahead` need, in a process that does not know yet what it will submit.

        `n_slots` is the requested number of tasks at once.
        """
        return

    def fork_ahead(self, n_slots: int) -> Callable[[], NoReturn] | None:
        """Fork processes for `start`, before this process has threads. In a fork, returns the function to run there.

        `n_slots` is that of `import_ahead`: the number of tasks at once.
        """
        return None

    @abstractmethod
    def look(self, run: Run, lines: Lines, waiting_merge: str | None) -> Sight:
        """What the executor sees of the run's submissions `lines`, which have not ended. NoAnswerError if unknown.

        `waiting_merge` is the caller's own Slurm job, which merges when the others have ended. It does not count, nor
        do other jobs that wait to merge.
        """

    @abstractmethod
    def cancel(self, run: Run, lines: Lines, among: Sequence[Any] | None = None) -> list[str]:
        """Cancel what is seen of the run, and record `cancelled` for each submission; return what was done, in words.

        `among` are `own_jobs`, if they are known already.
        """

    def jobs_to_cancel(self, run: Run, lines: Lines, among: Sequence[Any] | None = None) -> list[str] | None:
        """Like `cancel`, but leave jobs to `cancel_jobs`, which ends jobs of several runs with one request; their ids.

        None if `cancel` must do all.
        """
        return None

    def cancel_jobs(self, jobs: Sequence[str]) -> None:
        """End jobs that `jobs_to_cancel` returned, of one or several runs; SlurmGPUError if one cannot be ended."""
        return

    def drop_waiting(self, job: str) -> None:
        """Cancel the tasks of a job that have not started: no shard is left for them."""
        return

    def requeue_preempted(self) -> None:
        """Let the task of this process start again later, if it ends because the queue takes its allocation back."""
        return

    def own_jobs(self) -> Sequence[Any]:
        """All queued jobs of this user, with one request for many runs; NoAnswerError without an answer."""
        return ()

    def queued(self, run: Run, among: Sequence[Any] | None = None, last: list[Job] | None = None) -> list[Job] | None:
        """The run's jobs in the queue, for `status`; None if there is no queue for it, `last` without an answer.

        `among` are `own_jobs`, if they are known already.
        """
        return None

    def accounting(self, run: Run, *, settled: bool = False) -> Accounting | None:
        """What the executor's accounting says about the run's tasks; None without accounting or an answer.

        With `settled` it waits a while for ends that accounting does not have yet.
        """
        return None

    def jobs_completing(self, other: Run) -> tuple[str, ...]:
        """The jobs that complete an incomplete run, for --after; SlurmGPUError if there are none."""
        raise SlurmGPUError(
            f"{other.folder} is not complete yet, and the executor {self.name} cannot wait for it (--after). "
            f"Submit again once it is complete."
        )

    def wait_for(self, run: Run, others: Sequence[Run]) -> None:
        """Called once a run is queued that waits for `others`, in which a merge may have resubmitted meanwhile."""
        return

    def hand_over(self, line: SubmissionLine, jobs: Mapping[str, str]) -> None:
        """Called in the merge job of a submission that has resubmitted its run as `jobs`."""
        return

    def command_on_node(self, config: RunFile, command: list[str]) -> list[str]:
        """The command that runs `command` where a task of the run file would run, for `check --node`."""
        if self.queues:
            raise SlurmGPUError(f"The executor {self.name} cannot check a node: leave out --node.")
        return command
