"""The Slurm executor: an array job, submitted with Submitit, and a merge job that depends on it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmgpu.containers.settings import ContainerRecord
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import slurm_adjustments
from slurmgpu.executors.interface import Executor, Lines, Preview, Sight, Started
from slurmgpu.report.completeness import is_complete
from slurmgpu.report.outcomes import Accounting
from slurmgpu.report.queued import Job
from slurmgpu.run import private
from slurmgpu.run.directory import Run
from slurmgpu.run.heartbeats import ObservedTask
from slurmgpu.run.lock import run_lock
from slurmgpu.run.owners import LEFT_ALONE, refuse_other_users, why_forgeable
from slurmgpu.run.submissions import ENDS, JOB_KEYS, Submission, SubmissionLine
from slurmgpu.slurm import accounting, commands, queue
from slurmgpu.util.amounts import count_of
from slurmgpu.util.users import name_in_words

if TYPE_CHECKING:
    from slurmgpu.faults import Fault
    from slurmgpu.plan.run_file import RunFile

log = logging.getLogger(__name__)


class Slurm(Executor):
    """Slurm jobs, also those that were submitted by hand."""

    name = "slurm"
    title = "Slurm"
    queues = True
    not_in_paths = "'\"\\"

    def check(self, submission: Submission, container: ContainerRecord | None) -> None:
        """Refuse a machine without Slurm, an environment that submits to another cluster, and options not in UTF-8."""
        for name, value in [("gpu_type", submission.gpu_type), *submission.slurm.items(), *submission.merge.items()]:
            try:
                "\n".join(value if isinstance(value, list) else [str(value)]).encode()
            except UnicodeEncodeError as error:
                raise SlurmGPUError(
                    f"{name} is {value!a}, which is not UTF-8, as sbatch's scripts are. It comes from the command "
                    f"line, or from a variable such as SBATCH_ACCOUNT."
                ) from error
        if submission.shares_gpus and submission.gpus_per_task != 1:
            raise SlurmGPUError(
                f'gres = "{submission.slurm["gres"]}" gives each task a part of one GPU, but a task of this run asks '
                f"for {count_of(submission.gpus_per_task, 'GPU')}. Give the number of tasks: --gpus N --array."
            )
        if submission.shares_gpus and (submission.resources.get("tasks_per_node") or 1) > 1:
            raise SlurmGPUError(
                f'gres = "{submission.slurm["gres"]}" gives a job a part of one GPU, which its tasks cannot share: '
                f"without tasks_per_node each task has a job, and a part of its own."
            )
        commands.run("sbatch", "--version")
        refuse_other_cluster()

    def describe(self, container: ContainerRecord | None) -> str:
        """Its version and the limits of arrays."""
        from slurmgpu.executors.slurm_preview import hazards

        version = commands.run("sbatch", "--version").strip()
        if found := hazards(container):
            raise SlurmGPUError(found[0])
        limits_of_arrays = commands.array_limits(commands.configuration())
        return ", ".join([version, *(f"{name} {n_tasks}" for name, n_tasks in limits_of_arrays.items())])

    def check_faults(self, faults: Sequence[Fault]) -> None:
        """Refuse all."""
        if faults:
            raise SlurmGPUError(
                "--inject makes tasks fail on purpose, and on Slurm they would hold GPUs that others wait for. "
                "Inject the same faults on this machine: --executor local."
            )

    def learn(
        self, run: Run, last: SubmissionLine, options: Mapping[str, Any], given: Mapping[str, Any], asked: Submission
    ) -> tuple[Mapping[str, Any], Sequence[str], list[str]]:
        """Exclude nodes that failed, and ask for more memory if it ran out."""
        return slurm_adjustments.learn(run, last, options, given, asked)

    def fit(self, submission: Submission, container: ContainerRecord | None) -> tuple[Submission, list[str]]:
        """The submission within MaxArraySize and MaxSubmitJobs."""
        from slurmgpu.executors import slurm_preview

        less, notes = slurm_preview.respect_limits(submission)
        return less, notes + slurm_preview.hazards(container)

    def preview(self, submission: Submission, run_dir: Path, container: ContainerRecord | None) -> Preview:
        """The scripts, what sbatch says about them, and the limits that hold."""
        from slurmgpu.executors import slurm_preview

        seen = super().preview(submission, run_dir, container)
        try:
            refuse_other_cluster()
            slurm_preview.ask_slurm(seen, run_dir, container)
        except commands.SlurmUnavailableError as error:
            seen.notes.append(f"Limits and scripts cannot be shown. {error}")
            seen.walltime_s = submission.walltime_s
            seen.bound_gpu_hours = submission.bound_gpu_hours(seen.walltime_s)
        return seen

    def place(self, run: Run, submission: Submission) -> dict[str, Any]:
        """The cluster."""
        for options in (submission.slurm, submission.merge):
            private.refuse_hidden(run.folder, options)
        return {"cluster": commands.cluster_name()}

    def start(self, run: Run, submission: Submission) -> Started:
        """Queue the array and its merge job."""
        from slurmgpu.executors import slurm_jobs

        return Started({"state": "queued", **slurm_jobs.submit(run, submission, self.not_in_paths)})

    def look(self, run: Run, lines: Lines, waiting_merge: str | None) -> Sight:
        """The run's jobs in the queue."""
        queued = _queue(lines)
        if queued is None:
            return Sight()
        if jobs := _jobs(run, waiting_merge, queued):
            return Sight(f"Slurm has {len(jobs)} of its jobs, such as {jobs[0].job_id} ({jobs[0].state})")
        cluster = queue.own_cluster()
        return Sight(
            elsewhere=_elsewhere(lines, cluster),
            has_ended=lambda task: _is_over(task, cluster, queued),
        )

    def cancel(self, run: Run, lines: Lines, among: Sequence[Any] | None = None) -> list[str]:
        """Cancel its jobs, also those that have not joined the run yet, or were requeued after its end."""
        if not (jobs := self.jobs_to_cancel(run, lines, among)):
            return []
        self.cancel_jobs(jobs)
        return [f"{self.title} jobs {', '.join(jobs)}"]

    def cancel_jobs(self, jobs: Sequence[str]) -> None:
        """One scancel."""
        commands.cancel(*jobs)

    def jobs_to_cancel(self, run: Run, lines: Lines, among: Sequence[Any] | None = None) -> list[str]:
        """Its jobs in the queue, whose submissions are recorded as cancelled."""
        if among is None or any(line.get("uid", os.getuid()) != os.getuid() for line in lines):
            among = _queue(lines) or ()
        queued = _surely_of(run, queue.jobs_of(run, among, and_requeued=True))
        jobs = sorted({job.array_job for job in queued}, key=int)
        # Slurm is asked for the cluster's name only if needed: there may be a thousand runs.
        is_one = len({line.get("cluster") for line in lines}) == 1 and all(job.is_of(run) for job in queued)
        cluster = queue.own_cluster() if lines and not (jobs and is_one) else None
        if not jobs and cluster is not None and (others := _elsewhere(lines, cluster)):
            raise SlurmGPUError(
                f"Jobs of {run.folder} may be in the queue of the cluster {others[0]}, which cannot be seen here. "
                f"Type `slurmgpu cancel {run.typed}` on that cluster."
            )
        here = [line for line in lines if cluster is None or line.get("cluster", cluster) == cluster]
        if not jobs:
            for line in here:  # PrivateData of slurm.conf may hide jobs of others
                if line["state"] not in ENDS:
                    refuse_other_users(run, line)
            return []
        # A submission without ids may have queued jobs before it recorded them.
        here = [line for line in here if ({line[key] for key in JOB_KEYS if key in line} or set(jobs)) & set(jobs)]
        for line in here:
            refuse_other_users(run, line)
        for line in here:
            run.record_submission({"submission": line["submission"], "cancelled": True})
        return jobs

    def drop_waiting(self, job: str) -> None:
        """Cancel the pending tasks, so that jobs that wait for the array can start."""
        try:
            commands.cancel("--state=PENDING", job)
        except commands.SlurmUnavailableError as error:
            log.warning("pending tasks stay in the queue: %s", error)

    def requeue_preempted(self) -> None:
        """Requeue this job if it is being preempted."""
        try:
            commands.requeue_preempted(os.environ["SLURM_JOB_ID"])
        except commands.SlurmUnavailableError as error:
            log.warning("this task may not start again: %s", error)

    def own_jobs(self) -> list[queue.QueuedJob]:
        """One call of squeue."""
        return queue.own_jobs()

    def queued(self, run: Run, among: Sequence[Any] | None = None, last: list[Job] | None = None) -> list[Job] | None:
        """The jobs of squeue."""
        return queue.queued_jobs(run, among, last)

    def accounting(self, run: Run, *, settled: bool = False) -> Accounting | None:
        """The attempts by sacct."""
        return accounting.accounting_of(run, settled=settled)

    def jobs_completing(self, other: Run) -> tuple[str, ...]:
        """The last merge job of the other run; one that was submitted by hand may not be recorded yet.

        By submission, not by id: behind MaxJobId ids begin again.
        """
        lines = other.submissions()
        merge_jobs = [line.get("merge_job") for line in lines]
        jobs = [job for job in queue.jobs_of(other, _queue(lines)) if job.is_merge or job.array_job in merge_jobs]
        if not jobs:
            for line in lines:
                if line["state"] not in ENDS and (uid := line.get("uid", os.getuid())) != os.getuid():
                    name = name_in_words(uid)
                    raise SlurmGPUError(
                        f"{other.folder} is incomplete, and Slurm shows no job of {name} that will complete it. If it "
                        f"hides others' jobs, wait for that run's end; otherwise {name} resubmits it."
                    )
            raise SlurmGPUError(
                f"{other.folder} is incomplete, and Slurm has no job that will complete it. "
                f"Type `slurmgpu resubmit {other.typed}` first."
            )
        recorded = [merge_jobs.index(job.array_job) for job in jobs if job.array_job in merge_jobs]
        new = [job.array_job for job in jobs if job.array_job not in merge_jobs]
        return (new[-1] if new else str(merge_jobs[max(recorded)]),)

    def wait_for(self, run: Run, others: Sequence[Run]) -> None:
        """The array waits for the merge jobs of now: one that has ended since did not find it in the queue."""
        line = run.last_submission()
        try:
            with run_lock(run.folder, "postponing", patient=True) as lock:
                missing = [other for other in others if not is_complete(other)]
                jobs = dict.fromkeys(job for other in missing for job in self.jobs_completing(other))
                if jobs.keys() - set(line["after"]):
                    lock.check()
                    _set_dependency(line["array_job"], ",".join(f"afterok:{job}" for job in jobs))
        except (SlurmGPUError, OSError) as error:  # it is queued, and mostly as it should be
            log.warning("if what job %s waits for has ended just now, Slurm cancels it: %s", line["array_job"], error)

    def hand_over(self, line: SubmissionLine, jobs: Mapping[str, str]) -> None:
        """Jobs that wait for this merge job wait for the next one, which sends the mail as well."""
        own_job = os.environ["SLURM_JOB_ID"]
        if line["merge"].keys() & {"mail_user", "mail_type"}:
            try:
                commands.run("scontrol", "update", f"JobId={own_job}", "MailType=NONE")
            except commands.SlurmUnavailableError as error:
                log.warning("Slurm may send its mail before the run's end: %s", error)
        queued = {job.array_job: job for job in queue.own_jobs()}
        for job, _ in queue.dependents(own_job):
            try:
                with _alone(queued.get(job)) as check:
                    dependency = dict(queue.dependents(own_job)).get(job)
                    if dependency is None:
                        continue  # it was cancelled
                    renamed = re.sub(rf"(?<!\d){own_job}(?!\d)", jobs["merge_job"], dependency)
                    check()
                    _set_dependency(job, renamed)
            except (SlurmGPUError, OSError) as error:
                if isinstance(error, commands.SlurmUnavailableError) and error.is_silent:
                    raise
                log.warning("job %s waits for this job, which ends: %s", job, error)  # the others go on

    def command_on_node(self, config: RunFile, command: list[str]) -> list[str]:
        """The command, run by srun."""
        from slurmgpu.executors import slurm_jobs

        return slurm_jobs.check_command(config, command)


@contextlib.contextmanager
def _alone(waiting: queue.QueuedJob | None) -> Iterator[Callable[[], None]]:
    """Hold the lock of the run of a job that waits, and yield what checks it.

    scontrol replaces the whole dependency, as the merge of another run may do that the job waits for as well. Few runs
    wait for two: one whose directory is gone, or on a full disk, is postponed without the lock.
    """
    check: Callable[[], None] = lambda: None  # noqa: E731 - of a job of another program, or one that cannot be locked
    with contextlib.ExitStack() as stack:
        try:
            if waiting is not None and (folder := waiting.run_folder) is not None:
                check = stack.enter_context(run_lock(folder, "postponing", patient=True)).check
        except (SlurmGPUError, OSError) as error:
            log.warning("job %s is postponed without its run's lock: %s", waiting and waiting.job_id, error)
        yield check


def _set_dependency(job: str, dependency: str) -> None:
    commands.run("scontrol", "update", f"JobId={job}", f"Dependency={dependency}")
    log.info("job %s now waits for %s", job, dependency)


def refuse_other_cluster() -> None:
    """Raise SlurmGPUError if the environment asks for a cluster whose queue cannot be seen here."""
    if why := commands.other_cluster():
        raise SlurmGPUError(
            f"{why} slurmgpu sees only the queue of the cluster it runs on. Submit from a login node of that "
            f"cluster, or unset the variable to submit here."
        )


def _elsewhere(lines: Lines, cluster: str | None) -> list[str]:
    """The clusters, other than this one, on which submissions may have jobs."""
    open_ones = [line for line in lines if line["state"] in ("submitting", "queued")]
    clusters = [line.get("cluster") for line in open_ones if not line.get("cancelled")]
    return [name for name in clusters if name and name != cluster]


def _queue(lines: Lines) -> list[queue.QueuedJob] | None:
    """The jobs in the queue of all users that submitted the run; None if there is no Slurm and none is needed."""
    try:
        return queue.own_jobs(line["uid"] for line in lines if "uid" in line)
    except commands.SlurmUnavailableError as error:
        if not lines:
            return None  # without Slurm nothing was submitted by hand
        text = f"The run's jobs in the queue are unknown. {error}"
        is_absent = shutil.which("squeue") is None
        raise commands.SlurmUnavailableError(text, is_absent=is_absent, is_silent=error.is_silent) from error


def _jobs(run: Run, waiting_merge: str | None, queued: Sequence[queue.QueuedJob]) -> list[queue.QueuedJob]:
    # Also find jobs by the run directory: a submission that died between sbatch and its record has no job ids, and a
    # refused one may have an array that could not be cancelled.
    jobs = queue.jobs_of(run, queued)
    if waiting_merge is None:
        return jobs
    waiting = {waiting_merge, *(line.get("merge_job") for line in run.submissions() if line.get("by_hand"))}
    waiting |= {job.array_job for job in jobs if job.is_merge and not job.is_submitits(run)}
    return [job for job in jobs if job.array_job not in waiting]


def _surely_of(run: Run, jobs: Sequence[queue.QueuedJob]) -> list[queue.QueuedJob]:
    """The jobs that may safely be cancelled: all of them, unless another user may have written their ids.

    In that case only those whose scripts or comments in Slurm name the run: only their owner can have set these.
    """
    if not jobs or (why := why_forgeable(run)) is None:
        return list(jobs)
    logs = run.logs.resolve() if not run.logs.is_symlink() else None
    found = []
    for job in jobs:
        if job.is_of(run) or Path(job.command).parent.resolve() == logs:
            found.append(job)
        else:
            log.warning(LEFT_ALONE, f"job {job.job_id}", why)
    return found


def _is_over(task: ObservedTask, cluster: str | None, queued: Sequence[queue.QueuedJob]) -> bool:
    """Whether a task is known to have ended: its job, of this user and cluster, is not in the queue."""
    told = task.told
    if told.get("cluster") is None or told["cluster"] != cluster or told.get("uid") != os.getuid():
        return False
    # Tasks of the local executor are not in the queue, even if they run in an allocation.
    return str(told.get("job")).isdecimal() and all(job.array_job != told.get("job") for job in queued)
