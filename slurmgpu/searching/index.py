"""The index of a run's logs: `slurmgpu logs --json`, see docs/reference/report.md."""

from __future__ import annotations

from typing import Any

from slurmgpu.logs import LogFile, attempts_with_logs, files_of, merge_files
from slurmgpu.report import attempts_of
from slurmgpu.runs import Run

INDEX_FORMAT = "slurmgpu logs"
INDEX_VERSION = 1


def read_index(run: Run) -> dict[str, Any]:
    """Every attempt with its state, its failure and its log files, and the files of the merge jobs."""
    lines = run.submissions()
    known = {attempt["attempt"]: attempt for attempt in attempts_of(run, None)}
    is_over = bool(lines) and lines[-1]["state"] == "ended"
    attempts = []
    for record in attempts_with_logs(run):
        failure = known.get(record["attempt"], {}).get("failure")
        if failure == "lost" and not is_over:
            failure = None  # it lives, as far as anybody knows
        about = {key: record.get(key) for key in ("attempt", "submission", "executor", "node", "state", "started")}
        files = [_described(file) for file in files_of(run, record, lines)]
        attempts.append({**about, "failure": failure, "files": files})
    return {
        "format": INDEX_FORMAT,
        "version": INDEX_VERSION,
        "run": run.plan.name,
        "run_dir": str(run.folder),
        "attempts": attempts,
        "merge": [_described(file) for file in merge_files(run)],
    }


def _described(file: LogFile) -> dict[str, Any]:
    about = file.path.stat()
    return {"path": str(file.path), "source": file.source, "size_bytes": about.st_size, "modified": about.st_mtime}
