"""The index of a run's logs, `slurmgpu logs --json`: see docs/reference/report.md."""

from __future__ import annotations

import time
from typing import TypedDict

from slurmgpu.logs.files import UNKNOWN, LogFile, files_of, merge_files
from slurmgpu.report.states import is_at_work
from slurmgpu.run.directory import Run
from slurmgpu.run.liveness import is_alive, patience
from slurmgpu.search.cached_run import cached
from slurmgpu.util.shared_files import retried

INDEX_FORMAT = "slurmgpu logs"
INDEX_VERSION = 1


class FileRecord(TypedDict):
    """A log file."""

    path: str
    source: str
    size_bytes: int
    modified: float


class LoggedAttempt(TypedDict):
    """An attempt and its log files."""

    attempt: str
    submission: int
    executor: str
    node: str | None
    state: str
    silent: bool
    started: float | None
    failure: str | None
    files: list[FileRecord]


class Index(TypedDict):
    """The output of `slurmgpu logs --json`."""

    format: str
    version: int
    run: str
    run_dir: str
    attempts: list[LoggedAttempt]
    merge: list[FileRecord]


def read_index(run: Run) -> Index:
    """Every attempt with its state, its failure and its log files, and the files of the merge jobs."""
    run = cached(run)
    lines = run.submissions()
    now, patience_s = time.time(), patience(run.plan.lease_s, is_at_work(lines, None))
    attempts: list[LoggedAttempt] = []
    for name, record in run.logged.items():
        judged = run.judged.get(name)
        is_recorded = record["state"] != UNKNOWN
        attempts.append(
            {
                "attempt": name,
                "submission": record["submission"],
                "executor": record["executor"],
                "node": record["node"] if is_recorded else None,
                "state": record["state"],
                "silent": is_recorded and record["state"] != "ended" and not is_alive(record, patience_s, now),
                "started": record["started"] if is_recorded else None,
                "failure": judged["failure"] if judged else None,
                "files": [_described(file) for file in files_of(run, record, lines)],
            }
        )
    return {
        "format": INDEX_FORMAT,
        "version": INDEX_VERSION,
        "run": run.name,
        "run_dir": str(run.folder),
        "attempts": attempts,
        "merge": [_described(file) for file in merge_files(run)],
    }


def _described(file: LogFile) -> FileRecord:
    about = retried(file.path.stat)
    return {"path": str(file.path), "source": file.source, "size_bytes": about.st_size, "modified": about.st_mtime}
