"""The log files of attempts and merges."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmgpu.run.directory import Run
from slurmgpu.run.records import Attempt, Record, new_record, task_of
from slurmgpu.run.submissions import SubmissionLine, job_here, slots_of
from slurmgpu.util.shared_files import exists, list_names

UNKNOWN = "unknown"
"""The state of an attempt with a log but without a readable record."""


@dataclass(frozen=True)
class LogFile:
    """A log file and its source: `worker`, `task` or `merge`, with `.node1` and so on for a task's other nodes.

    `.out` at the end is Submitit's file of standard output.
    """

    path: Path
    source: str

    @property
    def is_worker(self) -> bool:
        """Whether it is a worker's."""
        return self.source.startswith("worker")


def attempts_with_logs(run: Run) -> list[Record]:
    """Every attempt's record, also for attempts that have a log but no readable record."""
    recorded, left_out = run.read_attempts()
    records = list(recorded)
    restarts: dict[str, list[int]] = {task_of(record): [] for record in records}
    for name in left_out:
        task, _, number = name.rpartition(".")
        restarts.setdefault(task, []).extend([int(number)] if number.isdecimal() else [])
    names = list_names(run.logs)
    for line in run.submissions():
        for job, index in _logged_tasks(line, names):
            for restart in restarts.get(f"{job}_{index}", [0]):
                n_nodes = line.get("nodes_per_task", 1)
                attempt = Attempt(job, index, restart, line["submission"], line["executor"], n_nodes=n_nodes)
                records.append({**new_record(attempt, "", 0, [], 0.0), "state": UNKNOWN})
    return records


def _logged_tasks(line: SubmissionLine, names: Sequence[str]) -> Iterator[tuple[str, int]]:
    for slot, pid in enumerate(slots_of(line)):
        if any(name.startswith(f"{pid}_0_log.") for name in names):
            yield job_here(line["executor"], line["submission"]), slot
    if job := line.get("array_job"):
        # JOB_TASK_RANK_log, and JOB_RANK_log of a job that is no array
        found = (re.fullmatch(rf"{re.escape(job)}(?:_(\d+))?_(\d+)_log\.(?:err|out)", name) for name in names)
        per_node = line.get("tasks_per_node", 1)
        ranks = ((match, int(match[2]) if per_node > 1 else 0) for match in found if match)
        yield from sorted({(job, int(match[1] or 0) * per_node + rank) for match, rank in ranks})


def files_of(run: Run, record: Record, submissions: Sequence[SubmissionLine] | None = None) -> list[LogFile]:
    """The existing log files of an attempt: its task's, which a requeued task continues, then its workers'."""
    job, task, n_nodes = record["job"], record["task"], record["n_nodes"]
    lines = run.submissions() if submissions is None else submissions
    lines = [line for line in lines if line["submission"] == record["submission"]]
    index, first = divmod(task, lines[-1].get("tasks_per_node", 1) if lines else 1)
    stems = [(f"{name}_{first + rank}", rank) for rank in range(n_nodes) for name in (f"{job}_{index}", job)]
    if job == job_here(record["executor"], record["submission"]):
        stems = [(f"{slots[task]}_0", 0) for slots in map(slots_of, lines) if task < len(slots)] or stems
    found = [
        LogFile(run.logs / f"{stem}_log.{end}", f"task{_of_node(rank)}{'.out' if end == 'out' else ''}")
        for stem, rank in stems
        for end in ("out", "err")
    ]
    for rank in range(n_nodes):
        found.append(LogFile(run.logs / f"{record['attempt']}{_of_node(rank)}.log", f"worker{_of_node(rank)}"))
    return [file for file in found if exists(file.path)]


def _of_node(rank: int) -> str:
    return f".node{rank}" if rank else ""


def merge_files(run: Run) -> list[LogFile]:
    """The logs of the merge jobs, by submission; none if the command itself merged."""
    # A merge that was submitted by hand may belong to several submissions.
    jobs = dict.fromkeys(line["merge_job"] for line in run.submissions() if line.get("merge_job"))
    names = [(f"{job}_0_log.{end}", "merge.out" if end == "out" else "merge") for job in jobs for end in ("out", "err")]
    return [LogFile(run.logs / name, source) for name, source in names if exists(run.logs / name)]
