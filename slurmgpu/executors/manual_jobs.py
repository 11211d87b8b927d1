"""Jobs that were submitted by hand: their tasks find their submission, or record it themselves."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

from slurmgpu.code import snapshots
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors.resubmission import first_submission
from slurmgpu.plan.allocation import allocate
from slurmgpu.plan.merged_tables import merge_tables
from slurmgpu.plan.run_file import parse_resources
from slurmgpu.run.directory import Run
from slurmgpu.run.lock import run_lock
from slurmgpu.run.submissions import Submission, SubmissionLine
from slurmgpu.slurm.own_job import OwnJob, nodes_here, refuse_copies, tasks_here
from slurmgpu.util import gpus
from slurmgpu.util.logging import LogFormatter
from slurmgpu.util.regular_files import open_to_append

log = logging.getLogger(__name__)


def check_job() -> None:
    """Raise SlurmGPUError unless this is a process of a Slurm job."""
    if "SLURM_JOB_ID" not in os.environ:
        raise SlurmGPUError(
            "This is not a Slurm job. sbatch/array.sbatch runs `slurmgpu task` in one; "
            "to compute on this machine, use slurmgpu resubmit RUN --executor local."
        )


def own_gpus(run: Run) -> int:
    """The GPUs of this task on this node: those of the job, or its share where srun has started several tasks.

    SlurmGPUError if there are more or fewer processes than the GPUs are for: they would be copies of one task.
    """
    n_gpus, n_tasks = int(os.environ.get("SLURM_GPUS_ON_NODE", len(gpus.visible_ids() or []))), tasks_here()
    wanted = parse_resources(run.plan.resources)
    is_share = n_gpus == allocate(wanted, None).gpus_per_task * n_tasks
    # Of tasks on CPUs any number would be a share.
    refuse_copies(n_tasks if is_share and (n_gpus or n_tasks <= (wanted.tasks_per_node or 1)) else 1)
    return n_gpus // n_tasks


def join(
    run: Run, own: OwnJob, n_gpus: int, device: str | None, on_wait: Callable[[], None] = lambda: None
) -> SubmissionLine:
    """The submission of this job, `own`: its first task records it, other tasks and requeued ones find it.

    It has no merge job yet, because that is submitted by hand, too. A task has `n_gpus` on this node. `on_wait` is
    called while another task records it.
    """
    array_job = own.array_job
    cluster = os.environ.get("SLURM_CLUSTER_NAME")
    if given := _written(run, array_job, cluster):
        return given
    with run_lock(run.folder, "joining", patient=True, on_wait=on_wait) as lock:
        if given := _written(run, array_job, cluster):
            return given
        asked = _as_submission(run, own, n_gpus, device)
        lock.check()
        line: SubmissionLine = {**asked.to_json(), "state": "queued", "by_hand": True, "array_job": array_job}
        if name := os.environ.get("SLURM_JOB_NAME"):
            line["array_name"] = name
        run.record_submission(line if cluster is None else {**line, "cluster": cluster})
    return run.submission(asked.submission)


def _written(run: Run, array_job: str, cluster: str | None) -> SubmissionLine | None:
    """The recorded submission of this job, if any; two clusters that share the disk may give the same id."""
    lines = [line for line in reversed(run.submissions()) if line.get("array_job") == array_job]
    return next((line for line in lines if cluster is None or line.get("cluster", cluster) == cluster), None)


def _as_submission(run: Run, own: OwnJob, n_gpus: int, device: str | None) -> Submission:
    """The submission from Slurm's environment, with those values of the last one that later submissions need."""
    lines = run.submissions()
    planned: SubmissionLine = {"submission": 0, "slurm": run.plan.slurm, "merge": run.plan.merge}
    last = run.as_submitted(lines[-1]) if lines else planned
    asked = last.get("resources", run.plan.resources)
    wanted = merge_tables(asked, {"executor": "slurm", "device": device})
    n_nodes, digests = nodes_here(), snapshots.digests_in(run.folder)
    code = last.get("code")
    if code is None and digests:  # planning took it, unless it was killed before
        code = snapshots.read(run.folder, digests[0], with_sources=False).line()
    return replace(
        first_submission(wanted, run.plan.most_tasks(run.plan.n_shards)),
        submission=lines[-1]["submission"] + 1 if lines else 1,
        n_tasks=own.n_tasks,
        n_concurrent=own.n_tasks,
        gpus_per_task=n_gpus * n_nodes,
        nodes_per_task=n_nodes,
        tasks_per_node=own.tasks_per_node,
        slurm=last["slurm"],
        merge=last["merge"],
        exclude=tuple(last.get("exclude", ())),
        code=code,
    )


@contextlib.contextmanager
def log_beside(run: Run, job: str) -> Iterator[None]:
    """Also write this job's log to the file where `slurmgpu logs` looks for it, named as Submitit names it.

    `job` is 1234_7 for a task of an array, 1235 for a merge.
    """
    rank = os.environ.get("SLURM_PROCID", "0")
    file = open_to_append(run.logs / f"{job}_{rank}_log.err")
    handler = logging.StreamHandler(io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace"))
    handler.setFormatter(LogFormatter())
    logging.getLogger().addHandler(handler)
    try:
        yield
    except SlurmGPUError as error:
        # To the file only: the command line prints it to stderr.
        handler.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, str(error), (), None))
        raise
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
        with contextlib.suppress(OSError):  # each line that could not be written has told it
            handler.stream.close()
