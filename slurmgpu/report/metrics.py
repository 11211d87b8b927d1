"""A run's progress as a text file for Prometheus, read by node_exporter's textfile collector. Stdlib only.

The text is valid in both formats, Prometheus' own and OpenMetrics (https://prometheus.io/docs/specs/om/open_metrics_spec/),
so every metric is a gauge, none carries a timestamp, and the last line is `# EOF`. Units are Prometheus' base units, as
`promtool check metrics` asks.
docs/how-to/notify.md lists the metrics.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from slurmgpu.report.queued import Job
from slurmgpu.report.status import Status, StatusAttempt
from slurmgpu.run.records import ATTEMPT_STATES
from slurmgpu.util.atomic_files import write_bytes

log = logging.getLogger(__name__)

STATES = ("planned", "queued", "running", "merging", "complete", "incomplete", "ended")
"""The states of a run; exactly one of them is 1."""

READABLE = 0o644
"""The file's permissions, whatever the umask: the exporter runs as another user."""

Samples = list[tuple[Mapping[str, str], float | None]]
"""The labels of each sample of a metric, and its value; None is unknown and not written."""


def keep_metrics(status: Status, path: Path) -> None:
    """Write a status to `path`; a failure, such as a full disk, is logged as a warning."""
    try:
        write_metrics(status, path)
    except OSError as error:
        log.warning("the metrics were not written: %s", error)


def write_metrics(status: Status, path: Path) -> None:
    """Write a status to `path` atomically; the exporter can read the file."""
    # Not fsynced: it is rewritten within seconds and useless after a crash.
    write_bytes(path, metrics_text(status).encode("utf-8", "replace"), durable=False, mode=READABLE)


def metrics_text(status: Status) -> str:
    """A status as metrics."""
    run = {"run": status["run"], "run_dir": status["run_dir"]}
    lines = []
    for name, (text, samples) in metrics_of(status).items():
        full = f"slurmgpu_run_{name}"
        known = [(labels, value) for labels, value in samples if value is not None]
        lines += [f"# HELP {full} {text}", f"# TYPE {full} gauge"] if known else []
        lines += [f"{full}{{{_labels({**run, **labels})}}} {value!r}" for labels, value in known]
    return "\n".join([*lines, "# EOF"]) + "\n"


def metrics_of(status: Status) -> dict[str, tuple[str, Samples]]:
    """The help and the samples of each metric, by its name without the `slurmgpu_run_` before it."""
    attempts, state = status["attempts"], status["state"]
    counts = Counter(attempt["state"] for attempt in attempts)

    gpu_s = None if (hours := status["gpu_hours"]) is None else 3600 * hours

    def one(value: float | None) -> Samples:
        return [({}, value)]

    def by(label: str, values: Mapping[str, int]) -> Samples:
        return [({label: name}, value) for name, value in values.items()]

    return {
        "items": ("Items of the run's input.", one(status["n_items"])),
        "items_done": ("Items of published shards.", one(status["n_items_done"])),
        "items_failed": ("Items whose row is an error.", one(status["n_errors"])),
        "shards": ("Shards of the run.", one(status["n_shards"])),
        "shards_done": ("Shards that are published.", one(status["n_shards_done"])),
        "shards_claimed": ("Shards that tasks compute.", one(status["n_shards_claimed"])),
        "state": ("1 for the run's state, 0 for the others.", by("state", {s: int(s == state) for s in STATES})),
        "attempts": ("Attempts by their last recorded state.", by("state", {s: counts[s] for s in ATTEMPT_STATES})),
        "attempts_silent": ("Attempts without an end that stopped writing.", one(sum(a["silent"] for a in attempts))),
        "attempts_failed": ("Attempts that failed, by failure class.", by("class", status["failures"])),
        "worker_deaths": ("Workers that died, by failure class.", by("class", status["worker_deaths"])),
        "tasks_pending": ("Tasks that wait in Slurm's queue.", one(_pending(status["queue"]))),
        "items_per_second": ("Items computed per second over the last minutes.", one(status["pace"]["items_per_s"])),
        "left_seconds": ("Estimated seconds until all items are computed.", one(status["pace"]["left_s"])),
        "gpu_seconds": ("GPUs times seconds of all attempts, used or not.", one(gpu_s)),
        "gpu_utilisation_ratio": ("Mean GPU utilisation of running tasks.", one(_utilisation(attempts))),
        "updated_timestamp_seconds": ("Time of the status, in seconds since the epoch.", one(status["time"])),
    }


def _pending(queue: Iterable[Job] | None) -> int | None:
    if queue is None:
        return None
    return sum(job["n_tasks"] for job in queue if job["state"] == "PENDING")


def _utilisation(attempts: Iterable[StatusAttempt]) -> float | None:
    """The mean GPU utilisation of running attempts at their last sample, from 0 to 1."""
    gpus = [attempt["gpu"] for attempt in attempts if attempt["state"] == "running"]
    known = [gpu["utilisation"] for gpu in gpus if gpu and gpu["utilisation"] is not None]
    return sum(known) / len(known) / 100 if known else None


def _labels(labels: Mapping[str, str]) -> str:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return ",".join(f'{name}="{value.translate(escapes)}"' for name, value in labels.items())
