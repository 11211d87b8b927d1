"""The report: the state of every shard, attempt and failed item, and the command that computes the rest.

docs/reference/report.md lists the keys of report.json. Standard library only: `status` reads it on login nodes.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.failures import POLICIES
from slurmgpu.ledger import counting, ledger, spent, spent_unrecorded
from slurmgpu.runs import Run

REPORT_FORMAT = "slurmgpu report"
REPORT_VERSION = 1


@dataclass(frozen=True)
class Life:
    """What others than the task itself know of one attempt: Slurm's accounting, or who started it on this machine.

    `failure` is the class; None for a good end, or none yet.
    """

    state: str
    failure: str | None
    ended: bool
    elapsed_s: int
    n_gpus: int
    node: str


IDLE_PERCENT = 10
"""A GPU that is used less than this, on average while items are computed, is a GPU that somebody else could have."""
IDLE_SAMPLES = 3

Lives = Mapping[str, Sequence[Life]]
"""By array task ("1234_7"), its lives in order, one for each restart."""


def build_report(
    run: Run,
    *,
    errors: Sequence[tuple[int, str]],
    merged_rows: int | None,
    lives: Lives | None = None,
    summary: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The report of a run of which no task is alive.

    `errors` are the failed items of the merged file; `lives` is None where accounting could not be asked; `summary` is
    what the workload says of all rows, None if it says nothing.
    """
    plan = run.plan
    records, damaged = run.read_attempts()
    attempts = _rows(run, records, damaged, lives)
    _enter_spent(attempts, records, run.published())
    missing = _holes(run)
    complete = not missing
    items = [_failed_item(index, message) for index, message in errors]
    return {
        "format": REPORT_FORMAT,
        "version": REPORT_VERSION,
        "run": plan.name,
        "run_dir": str(run.folder),
        "written": time.time(),
        "fingerprint": plan.fingerprint,
        "complete": complete,
        "n_items": plan.n_items,
        "n_rows": merged_rows if merged_rows is not None else 0,
        "n_errors": len(items),
        "n_missing_items": sum(hole["stop"] - hole["start"] for hole in missing),
        "n_shards": plan.n_shards,
        "n_shards_done": plan.n_shards - len(missing),
        "merged": str(run.merged) if merged_rows is not None else None,
        "summary": summary,
        "missing": missing,
        "errors": items,
        "errors_by_class": dict(sorted(Counter(item["class"] for item in items).items())),
        "attempts": attempts,
        "damaged_records": damaged,
        "failures": dict(sorted(Counter(a["failure"] for a in attempts if a["failure"]).items())),
        "worker_deaths": dict(sorted(Counter(d["class"] for a in attempts for d in a["deaths"]).items())),
        "gpu_hours": round(sum(attempt["gpu_hours"] for attempt in attempts), 4),
        "ledger": ledger(attempts),
        "accounting": lives is not None and any(a["executor"] == "slurm" for a in attempts),
        "submissions": run.submissions(),
        "resubmit": None if complete else f"slurmgpu resubmit {run.typed}",
        "image": _image(run),
        "provenance": plan.provenance,
    }


def attempts_of(run: Run, lives: Lives | None) -> list[dict[str, Any]]:
    """Every attempt, from its own record first and Slurm's accounting second, with its failure class."""
    return _rows(run, *run.read_attempts(), lives)


def _rows(
    run: Run, records: Sequence[Mapping[str, Any]], damaged: Sequence[str], lives: Lives | None
) -> list[dict[str, Any]]:
    cancelled = {line["submission"] for line in run.submissions() if line.get("cancelled")}
    # How many shards were taken over from each attempt.
    lost_leases = Counter(takeover["from"] for record in records for takeover in record["takeovers"])
    rows = []
    for record in records:
        life = _life(lives, f"{record['job']}_{record['task']}", record["restart"])
        rows.append(_attempt(record, life, record["submission"] in cancelled, lost_leases[record["attempt"]]))
    recorded = {record["attempt"] for record in records}
    for task, its_lives in sorted((lives or {}).items()):
        for restart, life in enumerate(its_lives):
            name = f"{task}.{restart}"
            # The last one out cancels what is pending: a task that never ran and was cancelled is no failure.
            failed = life.failure not in (None, "cancelled")
            if name not in recorded and life.ended and (failed or name in damaged):
                rows.append(_attempt_without_record(name, life, name in damaged))
    return rows


def _enter_spent(attempts: Sequence[dict[str, Any]], records: Sequence[Mapping[str, Any]], published: Set[int]) -> None:
    counts, known = counting(records, published), {record["attempt"]: record for record in records}
    for row in attempts:
        if record := known.get(row["attempt"]):
            row["spent"] = spent(record, row["seconds"], row["failure"], counts)


def retriable(report: Mapping[str, Any]) -> bool:
    """Whether another submission may compute what is missing: the last one met nothing but retriable failures."""
    last = report["submissions"][-1]["submission"]
    attempts = [attempt for attempt in report["attempts"] if attempt["submission"] in (last, None)]
    # No attempt at all: the user took the whole array out of the queue.
    # What is the fault of one node, another one may well do.
    return bool(attempts) and all(POLICIES[a["failure"]].retriable or a["bad_node"] for a in attempts if a["failure"])


def last_death(attempt: Mapping[str, Any]) -> str | None:
    """The failure class of the last worker of an attempt that died; None if none did."""
    deaths = attempt["deaths"]
    return deaths[-1]["class"] if deaths else None


def bad_nodes(attempts: Iterable[Mapping[str, Any]]) -> list[str]:
    """The nodes that failures were the fault of."""
    return sorted({a["bad_node"] for a in attempts if a["bad_node"]})


def read_report(run: Run) -> dict[str, Any] | None:
    """The report that the last merge wrote; None before the first."""
    path = run.folder / "report.json"
    if not path.exists():
        return None
    try:
        report: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise SlurmGPUError(f"{path} is damaged: {error}. `slurmgpu merge {run.typed}` writes it anew.") from error
    return report


def last_report(run: Run) -> dict[str, Any]:
    """The report that the last merge wrote; a sentence before the first."""
    report = read_report(run)
    if report is None:
        raise SlurmGPUError(
            f"{run.folder} has no report yet: its merge has not run. "
            f"`slurmgpu status {run.typed}` shows where it stands; "
            f"`slurmgpu merge {run.typed}` merges what there is, once no task is alive."
        )
    return report


def is_complete(run: Run) -> bool:
    """Whether the run's merged file has a row for every item, and no submission is going to replace it."""
    report, lines = read_report(run), run.submissions()
    all_published = len(run.published()) == run.plan.n_shards
    ended = bool(lines) and lines[-1]["state"] == "ended"
    return bool(report and report["complete"]) and all_published and ended and run.merged.exists()


def report_path(run: Run) -> Path:
    """Where the merge writes the report."""
    return run.folder / "report.json"


def _image(run: Run) -> dict[str, Any] | None:
    """The image that the run is frozen to; None without one."""
    container = run.plan.container
    return None if container is None else {"path": container["image"], **container["identity"]}


def _holes(run: Run) -> list[dict[str, Any]]:
    """The shards that are not published; `damaged` says what was wrong with one that a merge set aside."""
    published, damaged = run.published(), run.damaged()
    holes = sorted(set(range(run.plan.n_shards)) - published)
    bounds = map(run.plan.bounds, holes)
    return [
        {"shard": shard, "start": start, "stop": stop, "damaged": damaged.get(shard)}
        for shard, (start, stop) in zip(holes, bounds, strict=True)
    ]


def _failed_item(index: int, message: str) -> dict[str, Any]:
    kind, colon, rest = message.partition(": ")
    known = bool(colon) and kind in POLICIES
    return {"index": index, "class": kind if known else "item_error", "message": rest if known else message}


def _life(lives: Lives | None, task: str, restart: int) -> Life | None:
    its_lives = (lives or {}).get(task, ())
    return its_lives[restart] if restart < len(its_lives) else None


def _attempt(record: Mapping[str, Any], life: Life | None, cancelled: bool, n_lost: int) -> dict[str, Any]:
    failure, message = _verdict(record, life, cancelled, n_lost)
    last_sign = record["ended"] or record["updated"]
    seconds = round(max(last_sign - record["started"], life.elapsed_s if life else 0), 3)
    return {
        "attempt": record["attempt"],
        "submission": record["submission"],
        "executor": record["executor"],
        "node": record["node"],
        "gpus": record["gpus"],
        "n_gpus": record["n_gpus"],
        "n_nodes": record["n_nodes"],
        "memory_mb": record["memory_mb"],
        "state": record["state"],
        "started": record["started"],
        "updated": record["updated"],
        "ended": record["ended"],
        "seconds": seconds,
        "gpu_hours": record["n_gpus"] * record["n_nodes"] * seconds / 3600,
        "phases": record["phases"],
        "load_s": record["load_s"],
        "shard": record["shard"],
        "progress": record["progress"],
        "n_shards": len(record["published"]),
        "shards": record["published"],
        "n_items": record["n_items"],
        "n_errors": record["n_errors"],
        "reason": record["reason"],
        "failure": failure,
        "message": message,
        "bad_node": record["bad_node"] or _bad_node(failure, record["node"], record["n_nodes"]),
        "traceback": record["traceback"],
        "deaths": record["deaths"],
        "takeovers": record["takeovers"],
        "usage": record["usage"],
        "idle_gpu": _is_idle(record),
        "slurm_state": life.state if life else None,
    }


def _bad_node(failure: str | None, node: str, n_nodes: int) -> str | None:
    """The node that a failure is the fault of; of several nodes it is not known which, unless the task has said so."""
    at_fault = failure is not None and POLICIES[failure].node_at_fault and n_nodes == 1
    return node or None if at_fault else None


def _is_idle(record: Mapping[str, Any]) -> bool:
    usage = record["usage"]
    if not record["n_gpus"] or record["device"] == "cpu" or usage.get("gpu_utilisation") is None:
        return False
    return bool(usage["gpu_utilisation"] < IDLE_PERCENT and (usage.get("n_samples_ready") or 0) >= IDLE_SAMPLES)


def _verdict(record: Mapping[str, Any], life: Life | None, cancelled: bool, n_lost: int) -> tuple[str | None, str]:
    """Failure class and message: from the attempt's own record first, then from Slurm."""
    failure, message = record["failure"], record["message"]
    if failure == "preempted" and cancelled:
        return "cancelled", message
    if failure == "preempted" and life and life.failure in ("cancelled", "timeout"):
        return life.failure, f"{message} (Slurm: {life.state})"
    if failure is not None:
        return failure, message
    if record["ended"] is not None:
        return None, ""
    if cancelled:
        return "cancelled", "it was killed before it could write down its end"
    if life is not None and life.failure not in (None, "lost"):
        return life.failure, f"it wrote no end; Slurm: {life.state}"
    lease = f"; others took {n_lost} of its shards over" if n_lost else ""
    return "lost", f"no end was recorded{lease}"


def _attempt_without_record(name: str, life: Life, is_damaged: bool) -> dict[str, Any]:
    what = "its record is damaged" if is_damaged else "it ended before it could write a record"
    return {
        "attempt": name,
        "submission": None,
        "executor": "local" if name.startswith("local") else "slurm",
        "node": life.node,
        "gpus": [],
        "n_gpus": life.n_gpus,
        "n_nodes": 1,
        "memory_mb": None,
        "state": "ended",
        "started": None,
        "updated": None,
        "ended": None,
        "seconds": float(life.elapsed_s),
        "gpu_hours": life.n_gpus * life.elapsed_s / 3600,
        "phases": [],
        "load_s": None,
        "shard": None,
        "progress": None,
        "n_shards": 0,
        "shards": [],
        "n_items": 0,
        "n_errors": 0,
        "reason": None,
        "failure": life.failure,
        "message": f"{what} ({life.state}); its log may say why",
        "bad_node": _bad_node(life.failure, life.node, 2 if "[" in life.node or "," in life.node else 1),
        "traceback": "",
        "deaths": [],
        "takeovers": [],
        "usage": {},
        "spent": spent_unrecorded(life.elapsed_s),
        "idle_gpu": False,
        "slurm_state": life.state,
    }
