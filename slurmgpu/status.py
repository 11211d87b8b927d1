"""How a run stands, from its files alone, while it works and after. Standard library only."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slurmgpu.report import attempts_of, last_death, read_report
from slurmgpu.runs import Run

STATUS_FORMAT = "slurmgpu status"
STATUS_VERSION = 1


def read_status(run: Run, queued: Sequence[Mapping[str, str]] | None = None) -> dict[str, Any]:
    """Progress, attempts and failures; `queued` are the run's jobs in Slurm's queue, None where it was not asked."""
    plan = run.plan
    published = run.published()
    claimed = run.claims.numbers() - published
    attempts = attempts_of(run, None)
    tasks = [
        {
            **{key: attempt[key] for key in ("attempt", "node", "state", "shard", "progress")},
            **{key: attempt[key] for key in ("n_shards", "n_items", "n_errors")},
            "n_deaths": len(attempt["deaths"]),
            "last_death": last_death(attempt),
            "age_s": round(time.time() - attempt["updated"], 1),
            # One that wrote no end may be alive: the report, made when none is, knows better.
            "failure": attempt["failure"] if attempt["state"] == "ended" else None,
            "message": attempt["message"] if attempt["state"] == "ended" else "",
        }
        for attempt in attempts
    ]
    report = read_report(run)
    return {
        "format": STATUS_FORMAT,
        "version": STATUS_VERSION,
        "run": plan.name,
        "run_dir": str(run.folder),
        "state": _state(run, len(published), tasks, queued, report),
        "n_items": plan.n_items,
        "n_items_done": sum(stop - start for start, stop in map(plan.bounds, published)),
        "n_shards": plan.n_shards,
        "n_shards_done": len(published),
        "n_shards_claimed": len(claimed),
        "n_errors": sum(task["n_errors"] for task in tasks),
        "attempts": tasks,
        "failures": dict(sorted(Counter(task["failure"] for task in tasks if task["failure"]).items())),
        "queue": None if queued is None else [dict(job) for job in queued],
        "merged": str(run.merged) if run.merged.exists() else None,
        "complete": bool(report and report["complete"] and len(published) == plan.n_shards),
    }


def _state(
    run: Run,
    n_done: int,
    tasks: Sequence[Mapping[str, Any]],
    queued: Sequence[Mapping[str, str]] | None,
    report: Mapping[str, Any] | None,
) -> str:
    """One of planned, queued, running, merging, complete, incomplete; "ended" if tasks are over, nothing merged."""
    submissions = run.submissions()
    if not submissions:
        return "queued" if queued else "planned"
    if submissions[-1]["state"] in ("ended", "refused") and not queued:
        return "complete" if report and report["complete"] and n_done == run.plan.n_shards else "incomplete"
    if queued is not None and not queued:
        return "ended"
    if n_done == run.plan.n_shards:
        return "merging"
    if queued is not None:
        return "queued" if all(job["state"] == "PENDING" for job in queued) else "running"
    if any(task["state"] != "ended" for task in tasks):
        return "running"
    return "ended" if tasks else "queued"
