"""A run's progress as a text file for Prometheus, which node_exporter's textfile collector hands on. Stdlib only.

The text is valid in both formats, Prometheus' own and OpenMetrics (https://prometheus.io/docs/specs/om/open_metrics_spec/),
so every metric is a gauge, none carries a timestamp, and the last line is `# EOF`.
docs/how-to/notify.md lists the metrics.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from slurmgpu.report.queued import Job
from slurmgpu.report.status import Status, StatusAttempt
from slurmgpu.util.atomic_files import write_bytes

log = logging.getLogger(__name__)

STATES = ("planned", "queued", "running", "merging", "complete", "incomplete", "ended")
"""A run's; exactly one of them is 1."""
ATTEMPT_STATES = ("starting", "loading", "running", "ended")

METRICS = {
    "items": "Items of the run's input.",
    "items_done": "Items of published shards.",
    "items_failed": "Items whose row is an error.",
    "shards": "Shards of the run.",
    "shards_done": "Shards that are published.",
    "shards_claimed": "Shards that tasks compute.",
    "state": "1 for the state that the run is in, 0 for the others.",
    "attempts": "Attempts of tasks, by the state that they last wrote.",
    "attempts_silent": "Attempts that wrote no end, and nothing for so long that they must be dead.",
    "attempts_failed": "Attempts that failed, by failure class.",
    "worker_deaths": "Workers that died, by failure class; their attempts may have gone on.",
    "tasks_pending": "Tasks that wait in Slurm's queue.",
    "items_per_second": "Items computed in a second, over the last minutes.",
    "left_seconds": "Seconds until all items are computed, as far as it can be told.",
    "gpu_hours": "GPUs times hours of all attempts, used or not.",
    "gpu_utilisation_ratio": "Share of time in which a kernel ran, mean over the tasks at work, at their last sample.",
    "updated_timestamp_seconds": "When the run was looked at, in seconds since the epoch.",
}
"""Every metric without the `slurmgpu_run_` before it, and its help."""

READABLE = 0o644
"""The file's permissions, whatever the umask: who exports it is another user."""

Sample = tuple[str, Mapping[str, str], float | None]
"""A metric's name, its own labels, and its value; None is not known, and not written."""


def keep_metrics(status: Status, path: Path) -> None:
    """Put a status at `path` for the next reader; a disk that is full for a while costs a warning, not the watch."""
    try:
        write_metrics(status, path)
    except OSError as error:
        log.warning("the metrics were not written: %s", error)


def write_metrics(status: Status, path: Path) -> None:
    """Put a status, as `read_status` gives it, at `path`, in one step; whoever exports it can read the file."""
    # Not fsynced: it is written again within seconds, and worth nothing after a crash.
    write_bytes(path, metrics_text(status).encode("utf-8", "replace"), durable=False, mode=READABLE)


def metrics_text(status: Status) -> str:
    """The lines that stand for a status."""
    run = {"run": status["run"], "run_dir": status["run_dir"]}
    by_name: dict[str, list[str]] = {}
    for name, labels, value in _samples(status):
        if value is not None:
            line = f"slurmgpu_run_{name}{{{_labels({**run, **labels})}}} {value!r}"
            by_name.setdefault(name, []).append(line)
    lines = []
    for name, text in METRICS.items():
        if name in by_name:
            full = f"slurmgpu_run_{name}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} gauge", *by_name[name]]
    return "\n".join([*lines, "# EOF"]) + "\n"


def _samples(status: Status) -> Iterable[Sample]:
    attempts = status["attempts"]
    yield "items", {}, status["n_items"]
    yield "items_done", {}, status["n_items_done"]
    yield "items_failed", {}, status["n_errors"]
    yield "shards", {}, status["n_shards"]
    yield "shards_done", {}, status["n_shards_done"]
    yield "shards_claimed", {}, status["n_shards_claimed"]
    for state in STATES:
        yield "state", {"state": state}, int(status["state"] == state)
    counts = Counter(attempt["state"] for attempt in attempts)
    for state in ATTEMPT_STATES:
        yield "attempts", {"state": state}, counts[state]
    yield "attempts_silent", {}, sum(attempt["silent"] for attempt in attempts)
    for failure, count in status["failures"].items():
        yield "attempts_failed", {"class": failure}, count
    for failure, count in status["worker_deaths"].items():
        yield "worker_deaths", {"class": failure}, count
    yield "tasks_pending", {}, _pending(status["queue"])
    yield "items_per_second", {}, status["pace"]["items_per_s"]
    yield "left_seconds", {}, status["pace"]["left_s"]
    yield "gpu_hours", {}, status["gpu_hours"]
    yield "gpu_utilisation_ratio", {}, _utilisation(attempts)
    yield "updated_timestamp_seconds", {}, status["time"]


def _pending(queue: Iterable[Job] | None) -> int | None:
    if queue is None:
        return None
    return sum(job["n_tasks"] for job in queue if job["state"] == "PENDING")


def _utilisation(attempts: Iterable[StatusAttempt]) -> float | None:
    """The mean of what the GPUs of running attempts did at their last sample."""
    gpus = [attempt["gpu"] for attempt in attempts if attempt["state"] == "running"]
    known = [gpu["utilisation"] for gpu in gpus if gpu and gpu["utilisation"] is not None]
    return sum(known) / len(known) / 100 if known else None


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
