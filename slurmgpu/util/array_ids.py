"""The tasks of a job array as Slurm's job ids name them: "1234_[5-9,12%4]", and attempts. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Indices:
    """Tasks of an array; `at_once` is how many may run at a time, None without a limit.

    `ranges` are the indices of jobs. A job has `per_job` tasks, which are numbered across all jobs.
    """

    ranges: tuple[range, ...]
    at_once: int | None = None
    per_job: int = 1

    def __len__(self) -> int:
        return sum(map(len, self.ranges)) * self.per_job

    def __contains__(self, task: int) -> bool:
        return any(task // self.per_job in numbers for numbers in self.ranges)

    def __iter__(self) -> Iterator[int]:
        jobs = (number for numbers in self.ranges for number in numbers)
        return (number * self.per_job + rank for number in jobs for rank in range(self.per_job))


UNKNOWN = Indices((range(-1, 0),))
"""One task with an unknown index."""


def array_of(job_id: str) -> str:
    """The array's id: "1234" of "1234_7", "1234_[5-9,12%4]", "1234" and "1234+1", which is a part of a hetjob."""
    return re.split(r"[_+]", job_id, maxsplit=1)[0]


def task_of_attempt(attempt: str) -> str:
    """The task's name: "1234_7" of "1234_7.0", "local1_7" of "local1_7.2"."""
    return attempt.rpartition(".")[0]


def indices_of(job_id: str, per_job: int = 1) -> Indices:
    """The tasks of "1234_[5-9,12%4]", "1234_[0-198:3]" or "1234_7", each a job of `per_job` tasks; of "1234", 0."""
    found = re.fullmatch(r"\[([\d,:-]+)(?:%(\d+))?\]|(\d+)", job_id.partition("_")[2] or "0")
    if found is None:
        return UNKNOWN
    parts = re.findall(r"(\d+)(?:-(\d+))?(?::(\d+))?", found[1] or found[3])
    ranges = tuple(range(int(first), int(last or first) + 1, int(step or 1)) for first, last, step in parts)
    return Indices(ranges, None if found[2] is None else int(found[2]) * per_job, per_job)
