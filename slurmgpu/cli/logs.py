"""`logs`: the files in which a task, its workers and Submitit wrote what they had to say."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from slurmgpu.cli.output import result
from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.runs import Run


def list_logs(run: Run) -> None:
    """Name each attempt with its log files."""
    names = [record["attempt"] for record in run.attempts()]
    if not names:
        raise SlurmGPUError(f"No task of {run.folder} has started yet.")
    for name in names:
        for path in _files(run, name):
            result(f"{name}  {path}")


def print_logs(run: Run, task: str, *, follow: bool) -> None:
    """Print the logs of an attempt ("1234_7.0") or of all attempts of a task ("1234_7", or just "7")."""
    records = run.attempts()
    wanted = [
        record["attempt"]
        for record in records
        if task in (record["attempt"], record["attempt"].rpartition(".")[0], str(record["task"]))
    ]
    if not wanted:
        raise SlurmGPUError(f"{run.folder} has no task {task!r}." + did_you_mean(task, [r["attempt"] for r in records]))
    paths = list(dict.fromkeys(path for name in wanted for path in _files(run, name)))
    positions = {path: _print_from(path, 0, heading=True) for path in paths}
    while follow and _alive(run, wanted):
        time.sleep(0.5)
        positions = {path: _print_from(path, position) for path, position in positions.items()}


def _alive(run: Run, names: list[str]) -> bool:
    return any(record["state"] != "ended" for record in run.attempts() if record["attempt"] in names)


def _files(run: Run, attempt: str) -> list[Path]:
    """Where an attempt's output lies: its task's, by Submitit's naming, then its workers'."""
    record = next(record for record in run.attempts() if record["attempt"] == attempt)
    job, task = record["job"], record["task"]
    stems = [f"{name}_{rank}_log" for rank in range(record["n_nodes"]) for name in (f"{job}_{task}", job)]
    candidates = [f"{stem}.{end}" for stem in stems for end in ("out", "err")]
    if record["executor"] == "local":
        line = next(line for line in run.submissions() if line["submission"] == record["submission"])
        pid = line.get("pids", [])[task : task + 1]
        candidates = [f"{p}_0_log.{end}" for p in pid for end in ("out", "err")]
    candidates += [f"{attempt}.log", *(f"{attempt}.node{rank}.log" for rank in range(1, record["n_nodes"]))]
    return [path for name in candidates if (path := run.logs / name).exists()]


def _print_from(path: Path, position: int, *, heading: bool = False) -> int:
    with open(path, "rb") as file:
        file.seek(position)
        content = file.read()
    if heading and content:
        result(f"==> {path} <==")
    sys.stdout.write(content.decode(errors="replace"))
    sys.stdout.flush()
    return position + len(content)
