"""Ask squeue for jobs, and find those that belong to a run."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, cast

from slurmgpu.errors import NoAnswerError
from slurmgpu.report.queued import Job, is_held
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import ENDS, JOB_KEYS, SubmissionLine, ended_jobs, is_slurms
from slurmgpu.slurm import commands
from slurmgpu.util.array_ids import array_of, indices_of
from slurmgpu.util.shared_files import is_file
from slurmgpu.util.users import name_of

log = logging.getLogger(__name__)

JOB_NAME = "slurmgpu"
MERGE_NAME = "slurmgpu-merge"
"""Prefixes of the names of jobs: Submitit's, and those of sbatch/*.sbatch."""
COMMENT = "slurmgpu:"
"""The prefix of the comments of jobs that the commands of `slurmgpu plan` submit; the run directory follows."""
SUBMITTING_S = 300.0
"""Much longer than a process needs to submit and to record the jobs; a wrong clock does no harm."""


@dataclass(frozen=True)
class QueuedJob:
    """A line of squeue: an array task, or the not yet started rest of an array.

    `start` is when it started, or will by Slurm's estimate, in seconds since the epoch; None if that is not known.
    """

    job_id: str
    state: str
    reason: str
    name: str
    folder: str
    command: str
    start: float | None = None
    comment: str = ""

    def to_json(self, is_merge: bool, tasks_per_node: int = 1) -> Job:
        """The job in the JSON of status."""
        n_tasks = 0 if is_merge else len(indices_of(self.job_id, tasks_per_node))  # "1234_[5-9,12%4]" has six jobs
        # RequeueExitHold of slurm.conf: it is pending, and held.
        state = "PENDING" if self.state == "SPECIAL_EXIT" else self.state
        told = {"job_id": self.job_id, "state": state, "reason": self.reason}
        several = {"tasks_per_node": tasks_per_node} if tasks_per_node > 1 else {}
        job = cast(Job, {**told, "start": self.start, "n_tasks": n_tasks, **several})
        return {**job, "start": None} if is_held(job) else job

    @property
    def array_job(self) -> str:
        """The id before the underscore."""
        return array_of(self.job_id)

    @property
    def is_merge(self) -> bool:
        """Whether it merges."""
        return self.name.startswith(MERGE_NAME)

    def is_submitits(self, run: Run) -> bool:
        """Whether Submitit wrote its script, into the run directory."""
        return self._script_folder == run.logs

    @cached_property
    def _script_folder(self) -> Path:
        return Path(self.command).parent  # each job is compared with each run of a sweep

    @property
    def _commented_folder(self) -> Path | None:
        """The run directory that the comment of a job by hand names."""
        return Path(self.comment.removeprefix(COMMENT)) if self.comment.startswith(COMMENT) else None

    @property
    def run_folder(self) -> Path | None:
        """The run directory that has its script, or that its comment names; None for a job of another program."""
        folder = self._commented_folder or self._script_folder.parent
        return folder if is_file(folder / "run.json") else None

    @property
    def lacks_arguments(self) -> bool:
        """Whether it may be a run's, and squeue shows its script without arguments."""
        if not self.name.startswith(JOB_NAME) or self.comment.startswith(COMMENT) or not self.command:
            return False
        is_submitits = "submission_file" in Path(self.command).name
        return not is_submitits and (" " not in self.command or os.path.isfile(self.command))

    def is_of(self, run: Run) -> bool:
        """Whether it belongs to a run by its script: Submitit's lies in the run directory.

        A job that was submitted by hand names the run in its comment; or its name begins with "slurmgpu", and one of
        its arguments is the run.
        """
        if self.is_submitits(run):
            return True
        if self._commented_folder is not None:
            return self._commented_folder.resolve() == run.folder.resolve()
        if not self.name.startswith(JOB_NAME) or run.folder.name not in self.command:
            return False
        # squeue shows the arguments joined by blanks, which a path may hold too.
        words = self.command.split(" ")[1:]
        spans = (" ".join(words[a:b]) for a in range(len(words)) for b in range(a + 1, len(words) + 1))
        folder = run.folder.resolve()
        return any(Path(self.folder, span).resolve() == folder for span in spans if Path(span).name == folder.name)


def own_jobs(and_of: Iterable[int] = ()) -> list[QueuedJob]:
    """All jobs of this user in the queue, and of other users by uid, that have not ended; by one call of squeue."""
    uids = {os.getuid(), *and_of}
    # All jobs: one in --jobs that Slurm has forgotten makes squeue fail for all of them.
    # Arguments may hold any character, also newlines. The separators are in no name or argument of a run's job. The
    # arguments come last: if they hold a separator they are cut, and the job is still known.
    fields = "\x1f".join(("%U", "%i", "%T", "%r", "%j", "%S", "%k", "%Z", "%o")) + "\x1e"
    text = commands.run("squeue", "--noheader", "--all", *_of_users(uids), "--format", fields)
    records = [[part.strip() for part in record.split("\x1f")] for record in text.split("\x1e\n")]
    wanted = {str(uid) for uid in uids}
    jobs = [
        QueuedJob(job_id, state, reason, name, folder, command, commands.epoch(start), comment)
        for uid, job_id, state, reason, name, start, comment, folder, command in (
            record for record in records if len(record) == 9
        )
        if uid.rpartition("\n")[2] in wanted  # a site's wrapper may print lines before the first
    ]
    # REQUEUED is an end in accounting; in the queue it is a job that will be pending again.
    return _with_arguments([job for job in jobs if job.state == "REQUEUED" or not commands.has_ended(job.state)])


def _of_users(uids: Iterable[int]) -> tuple[str, ...]:
    """The option of squeue for the jobs of these users; none if it would skip one of them.

    Before Slurm 25.05 it prints nothing, with exit code 0, for a uid that has no name here.
    """
    names = [name_of(uid) for uid in uids]
    return () if None in names else ("--user", ",".join(sorted(map(str, uids))))


def _with_arguments(jobs: list[QueuedJob]) -> list[QueuedJob]:
    """The jobs, with the command line that submitted them instead of a script without arguments.

    squeue of Slurm 24.11 and later shows none. Accounting has the line since 21.08; without it jobs stay as they are.
    """
    doubtful = {job.array_job for job in jobs if job.lacks_arguments}
    if unknown := sorted(doubtful - _SUBMITTED_BY.keys()):
        try:
            _SUBMITTED_BY.update(commands.submit_lines(unknown))
        except commands.SlurmUnavailableError as error:
            log.debug("the arguments of jobs %s are not known: %s", ", ".join(unknown), error)
    lines = {job_id: line for job_id in doubtful if (line := _SUBMITTED_BY.get(job_id))}
    return [replace(job, command=lines.get(job.array_job, job.command)) for job in jobs]


_SUBMITTED_BY: dict[str, str] = {}
"""The lines from accounting: `status --watch` asks for the queue again and again."""


_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
"""States of a job in the queue that has not started, or not again."""


def jobs_of(run: Run, among: Sequence[QueuedJob] | None = None, *, and_requeued: bool = False) -> list[QueuedJob]:
    """A run's jobs in the queue, for all submissions that have not ended, and those that have not joined it yet.

    `and_requeued`: also jobs of submissions that have ended, as where somebody requeues one after its run's merge.

    The id is not enough to identify a job: on another cluster that shares the disk it is another job's, and so it is
    where ids began again because slurmctld lost its state. `among` are all of the user's jobs, if they are known
    already.
    """
    lines = run.submissions()
    ids = {line[key] for line in lines for key in JOB_KEYS if key in line}
    jobs = [job for job in (own_jobs() if among is None else among) if job.array_job in ids or job.is_of(run)]
    over = ended_jobs(lines)
    # Slurm is asked for the cluster's name only if that matters: `status --watch` calls this again and again.
    if any(job.array_job in over or not job.is_of(run) for job in jobs):
        here = own_cluster()
        lines = [line for line in lines if here is None or line.get("cluster", here) == here]
        over = ended_jobs(lines)
    names = {line[key]: _name_of(run, line, key) for line in lines for key in JOB_KEYS if key in line}
    # A merge runs on behind the end that it records: it tells of the end, and sends to trackers.
    telling = {line.get("merge_job") for line in lines if not line.get("merges_again")}

    def is_known(job: QueuedJob) -> bool:
        if job.array_job not in names:
            return False
        name = names[job.array_job]
        return job.name.startswith(JOB_NAME) if name is None else job.name == name.strip()

    def counts(job: QueuedJob) -> bool:
        if job.array_job not in over:
            return job.is_of(run) or is_known(job)
        return and_requeued and (job.array_job not in telling or job.state in _WAITING) and job.is_of(run)

    return [job for job in jobs if counts(job)]


def _name_of(run: Run, line: SubmissionLine, key: Literal["array_job", "merge_job"]) -> str | None:
    """The name of a submission's job; None if it is not recorded."""
    if key == "array_job":
        told, options, prefix = line.get("array_name"), line.get("slurm"), JOB_NAME
    else:
        told, options, prefix = line.get("merge_name"), line.get("merge"), MERGE_NAME
    return told if line.get("by_hand") else str((options or {}).get("job_name") or f"{prefix}:{run.plan.name}")


def queued_jobs(run: Run, among: Sequence[QueuedJob] | None = None, last: list[Job] | None = None) -> list[Job] | None:
    """A run's jobs in the queue, by one call of squeue; `last` if it does not answer.

    An empty list means that the queue lacks the jobs that it should have; None that it need not have any, for example
    for a run on another cluster. `among` are all of the user's jobs, if they are known already.
    """
    lines = run.submissions()
    # Also of an array whose merge job could not be queued, and which could not be cancelled.
    expected = any(line["state"] not in ENDS and ("array_job" in line or _was_lost(line)) for line in lines)
    merges = {line.get("merge_job") for line in lines}
    per_node = {line["array_job"]: line.get("tasks_per_node", 1) for line in lines if "array_job" in line}
    try:
        told = [
            job.to_json(job.is_merge or job.array_job in merges, per_node.get(job.array_job, 1))
            for job in jobs_of(run, among, and_requeued=True)
        ]
        expected = expected and (bool(told) or _are_here(lines))
    except commands.SlurmUnavailableError as error:
        log.log(logging.WARNING if expected else logging.DEBUG, "the queue is unknown: %s", in_short(error))
        return last
    return told if told or expected else None


def _was_lost(line: SubmissionLine) -> bool:
    """Whether the process of a submission to Slurm will record no jobs: it was cancelled, or begun long ago."""
    is_past = bool(line.get("cancelled")) or time.time() - line.get("time", 0.0) > SUBMITTING_S
    return is_slurms(line) and line["state"] == "submitting" and is_past


def _are_here(lines: Sequence[SubmissionLine]) -> bool:
    """Whether all queued submissions were made on this cluster, as far as is known."""
    clusters = {line["cluster"] for line in lines if line["state"] not in ENDS and "cluster" in line}
    return not clusters or clusters == {commands.cluster_name()}


def own_cluster() -> str | None:
    """The name of this cluster; None without an answer."""
    try:
        return os.environ.get("SLURM_CLUSTER_NAME") or commands.cluster_name() or None
    except commands.SlurmUnavailableError:
        return None


def in_short(error: NoAnswerError) -> str:
    """Why the queue does not answer, in one line."""
    return str(error).splitlines()[-1].rpartition("error: ")[2].partition(". ")[0].removesuffix(".")


def dependents(job_id: str) -> list[tuple[str, str]]:
    """Jobs of this user that wait for `job_id`, each with its dependency in the format of `scontrol update`."""
    found = []
    own = _of_users([os.getuid()])
    asked = ("--noheader", "--all", *own, "--states", "PENDING", "--format", "%U|%i|%E")
    for uid, waiting, dependency in commands.table("|", 3, "squeue", *asked):
        if uid.strip() != str(os.getuid()):
            continue
        plain = re.sub(r"\([^)]*\)", "", dependency)  # afterok:12(unfulfilled)
        if re.search(rf"(?<!\d){job_id}(?!\d)", plain):
            found.append((array_of(waiting), plain))
    return sorted(set(found))
