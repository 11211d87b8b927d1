"""The job that this process runs in, and when it ends: from the environment, and from squeue while the task begins."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from slurmgpu.errors import SlurmGPUError
from slurmgpu.run.submissions import seconds_of
from slurmgpu.slurm import commands
from slurmgpu.util import gpus

log = logging.getLogger(__name__)

IDENTITY_S = 5.0
"""How long to wait for squeue if the environment may be another job's; a busy slurmctld takes longer."""
CLOCK_S = (-2.0, 60.0)
"""A job began at most this long ago if this node and slurmctld have the same clock; a long prolog takes longer."""
OF_ONE_TASK = {
    **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS"), "0"),
    **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), "1"),
    **dict.fromkeys(("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), "1"),
}
"""What srun says to the only process of a job."""
YEAR_S = 365 * 86400
"""From Slurm 23.02 on, a job without a time limit has this walltime in its environment."""


@dataclass(frozen=True)
class OwnJob:
    """The job of this process: the array's id and the index in it, or a plain job's id and 0.

    A job may have several tasks, numbered as if each job of the array had as many: `tasks_per_node`. `restart` is how
    often it was requeued; `n_tasks` is the number of tasks in the array. `end_time` returns when the walltime ends, in
    seconds since the epoch; None without a limit, and until Slurm has answered.
    """

    array_job: str
    task: int
    restart: int
    n_tasks: int = 1
    end_time: Callable[[], float | None] = lambda: None
    tasks_per_node: int = 1

    @property
    def job_id(self) -> str:
        """The job as Slurm names it in the array: "1234_7", "1234_0" for a plain job."""
        return f"{self.array_job}_{self.task // self.tasks_per_node}"


def nodes_here() -> int:
    """The nodes on which srun has started this task; 1 without srun."""
    return int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))


def tasks_here() -> int:
    """The tasks of this job, all on this node, by the processes that srun started; 1 for a task on several nodes."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) if nodes_here() == 1 else 1


def refuse_copies(tasks_per_node: int = 1) -> None:
    """Raise SlurmGPUError unless the job has so many processes on its node, or one on each of its nodes.

    Copies of a task would compute on the same GPUs, and each would consider its claims and files its own.
    """
    n_nodes, n_job_nodes = nodes_here(), int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    n_processes = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks_per_node > 1 and (n_processes, n_nodes, n_job_nodes) != (tasks_per_node, 1, 1):
        raise SlurmGPUError(
            f"srun started {n_processes} processes on {n_nodes} of the job's {n_job_nodes} nodes; expected "
            f"{tasks_per_node} on one: a process for each of its tasks."
        )
    if tasks_per_node == 1 and (n_processes != n_nodes or n_nodes != n_job_nodes):
        raise SlurmGPUError(
            f"The task was started {n_processes} times on {n_nodes} of the job's {n_job_nodes} nodes; expected once "
            "per node: srun --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1, as in the scripts in sbatch/. The task "
            "starts the processes for its GPUs itself. Several tasks of a job need the GPUs of all of them: sbatch "
            "--ntasks-per-node=4 --gpus-per-node=4."
        )


def take_share(n_gpus: int, tasks_per_node: int, processes: str) -> None:
    """Let this task of a job with several see its own GPUs only, and start no more threads than its share of the cores.

    Unless Slurm has bound them to the task: srun shows each task the GPUs of the whole step, if the site or the script
    does not say --gpus-per-task, and its cores, if there is no --cpus-per-task or the cluster does not bind tasks.
    """
    if tasks_per_node == 1:
        return
    n_cores = len(os.sched_getaffinity(0))
    share = min(n_cores, int(os.environ.get("SLURM_CPUS_PER_TASK", n_cores // tasks_per_node)))
    n_processes = max(1, n_gpus) if processes == "per-gpu" else 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share // n_processes)))
    if not n_gpus:
        return
    ids, rank = gpus.visible_ids(), int(os.environ["SLURM_LOCALID"])
    if ids is None:
        ids = [str(number) for number in range(n_gpus * tasks_per_node)]
    if len(ids) > n_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids[rank * n_gpus : (rank + 1) * n_gpus])


def as_only_task() -> dict[str, str]:
    """Variables by which a worker in a job of several tasks takes its task for the job's only one; none in other jobs.

    The tasks are no ranks of one program: one that takes its part of an input by SLURM_PROCID would take a part of each
    slice, and Lightning would wait for the other ranks, and write no checkpoints on all but one.
    """
    return {name: text for name, text in OF_ONE_TASK.items() if name in os.environ} if tasks_here() > 1 else {}


def own_job(*, own_array: bool) -> OwnJob:
    """The job of this process by its environment; squeue is asked if that is ambiguous, or of another clock.

    sbatch passes the variables of an array task to jobs that are submitted in it, and only an array overwrites them.
    `own_array`: this job is an array, or was submitted without such variables; then nothing is ambiguous.
    """
    environ = os.environ
    job_id = environ["SLURM_JOB_ID"]
    is_in_array = True if own_array else _is_in_array(environ)
    is_end_told = "SLURM_JOB_END_TIME" in environ and _is_of_this_clock(environ)
    known_end = _end_time(environ)
    asked = _Asked(job_id, known_end) if is_in_array is None or not is_end_told else None
    end_time = asked.end_time if asked and not is_end_told else lambda: known_end
    if is_in_array is None and asked and (told := asked.answer(IDENTITY_S)):
        array_job, index, restart = told
    else:
        array_job, index = environ.get("SLURM_ARRAY_JOB_ID", job_id), environ.get("SLURM_ARRAY_TASK_ID", "N/A")
        restart = environ.get("SLURM_RESTART_COUNT", "0")
    n_jobs = int(environ.get("SLURM_ARRAY_TASK_COUNT", "1"))
    if is_in_array is False or not index.isdecimal():
        array_job, index, n_jobs = job_id, "0", 1
    per_node = tasks_here()
    task = int(index) * per_node + (int(environ.get("SLURM_PROCID", "0")) if per_node > 1 else 0)
    return OwnJob(array_job, task, int(restart), n_jobs * per_node, end_time, per_node)


def _is_in_array(environ: Mapping[str, str]) -> bool | None:
    """Whether this job is a task of the array that the environment names; None if that is not known."""
    array_job = environ.get("SLURM_ARRAY_JOB_ID")
    if array_job is None:
        return False
    # Each task of an array has its own job id; the last one to start has the array's.
    if array_job == environ["SLURM_JOB_ID"]:
        return True
    return False if environ.get("SLURM_ARRAY_TASK_COUNT") == "1" else None


def _is_of_this_clock(environ: Mapping[str, str]) -> bool:
    """Whether times of slurmctld's may be taken for this node's; else squeue is asked for the time that is left."""
    begin = environ.get("SLURM_JOB_START_TIME", "")
    return not begin.isdecimal() or CLOCK_S[0] <= time.time() - int(begin) <= CLOCK_S[1]


def _end_time(environ: Mapping[str, str]) -> float | None:
    """The end of the walltime from Slurm 23.02 on; None for "never", which is a number too large, or a year."""
    text, begin = environ.get("SLURM_JOB_END_TIME", ""), environ.get("SLURM_JOB_START_TIME", "")
    if not text.isdecimal() or not 0 < int(text) < 0xFFFFFFF0:
        return None
    is_limited = not begin.isdecimal() or int(text) - int(begin) < YEAR_S
    return float(text) if is_limited else None


@dataclass
class _Asked:
    """squeue's answer on a job, asked in a thread, so that the task computes meanwhile.

    `known_end` is the end by another clock, if squeue does not answer.
    """

    job_id: str
    known_end: float | None = None
    _answered: threading.Event = field(default_factory=threading.Event)
    _identity: tuple[str, str, str] | None = None
    _end: float | None = None

    def __post_init__(self) -> None:
        threading.Thread(target=self._ask, daemon=True, name="squeue").start()

    def answer(self, timeout_s: float) -> tuple[str, str, str] | None:
        """The array's id, the index in it and the restarts; None without an answer in time."""
        if not self._answered.wait(timeout_s):
            log.warning("squeue has not answered within %.0f s; the environment is used instead", timeout_s)
        return self._identity

    def end_time(self) -> float | None:
        """When the walltime ends; None if it is not known yet."""
        return self._end

    def _ask(self) -> None:
        columns = ("JobID", "ArrayJobID", "ArrayTaskID", "RestartCnt", "TimeLeft")
        try:
            # For the last task of an array, whose id is the array's, squeue prints all of the tasks.
            asked = ",".join(f"{name}:24" for name in columns)
            text = commands.run("squeue", "--noheader", "--all", "--jobs", self.job_id, "--Format", asked)
            fields = next(line.split() for line in text.splitlines() if line.split()[:1] == [self.job_id])
            array_job, index, restart, left = fields[1:]
            int(restart)
        except (commands.SlurmUnavailableError, StopIteration, ValueError) as error:
            self._end = self.known_end
            log.warning("the end of the walltime is unknown: %s", error or "squeue does not know this job")
        else:
            seconds = seconds_of(left)
            self._end = None if seconds is None else time.time() + seconds
            self._identity = array_job, index, restart
        self._answered.set()
