"""The report: the state of every shard, attempt and failed item, and the command that computes the rest.

docs/reference/report.md lists the keys of report.json. Standard library only: `status` reads it on login nodes.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from slurmgpu.attempts import Lives, Making, attempts_of, makings_of, rows_of
from slurmgpu.errors import SlurmGPUError
from slurmgpu.failures import POLICIES
from slurmgpu.ledger import counting, ledger, spent
from slurmgpu.runs import Run
from slurmgpu.submissions import is_over

log = logging.getLogger(__name__)

REPORT_FORMAT = "slurmgpu report"
REPORT_VERSION = 1

VALUES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("n_items", "n_rows", "n_errors", "n_missing_items", "n_shards", "n_shards_done"), int),
    **dict.fromkeys(("errors_by_class", "failures", "worker_deaths", "provenance"), dict),
    **dict.fromkeys(("written", "gpu_hours"), (int, float)),
    **dict.fromkeys(("run", "run_dir"), str),
    "complete": bool,
}
"""What every report has, whichever slurmgpu wrote it …"""
LISTS = {
    "missing": {"shard", "start", "stop"},
    "errors": {"index", "class", "message"},
    "attempts": {"attempt", "submission", "node", "started", "ended", "failure", "message", "deaths"},
    "submissions": {"submission", "state"},
}
"""… and lists of objects that have these keys."""


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
    records, published = _with_unrecorded(run, records), run.published()
    attempts = rows_of(run, records, damaged, lives)
    _enter_spent(attempts, records, published)
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
        "resubmit": _resubmit(run, complete),
        "image": _image(run),
        "provenance": plan.provenance,
    }


def judged_attempts(run: Run) -> list[dict[str, Any]]:
    """Every attempt, with the failure and the message of the last report where that has judged it.

    The merge has asked Slurm's accounting, which alone knows why somebody wrote no end. Of an attempt that may live, or
    that no merge has judged yet, and wrote no end, no failure is known. A damaged report has judged nothing.
    """
    try:
        judged = {row["attempt"]: row for row in (read_report(run) or {"attempts": ()})["attempts"]}
    except SlurmGPUError as error:
        log.debug("%s", error)
        judged = {}
    may_live = not is_over(run.submissions())
    attempts = attempts_of(run, None)
    for attempt in attempts:
        verdict = judged.pop(attempt["attempt"], None)
        # Older reports do not say when it last wrote; after one that does, it may have lived on.
        if verdict is not None and (verdict.get("updated", attempt["updated"]) or 0) >= attempt["updated"]:
            attempt["failure"], attempt["message"] = verdict["failure"], verdict["message"]
        elif attempt["ended"] is None and may_live:
            attempt["failure"], attempt["message"] = None, ""
    return [*attempts, *(row for row in judged.values() if row["submission"] is None)]


def _with_unrecorded(run: Run, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records, also with what attempts have published after they last wrote theirs, and before they were killed."""
    killed = {record["attempt"] for record in records if record["ended"] is None}
    recorded = {shard for record in records for shard, _, _, *won in record["published"] if all(won[:1])}
    found: dict[str, list[Making]] = {}
    for making in makings_of(run, run.published() - recorded) if killed else ():
        found.setdefault(making.attempt, []).append(making)
    return [_with(record, found.get(record["attempt"], ()) if record["ended"] is None else ()) for record in records]


def _with(record: dict[str, Any], makings: Sequence[Making]) -> dict[str, Any]:
    published = [[making.shard, making.started, making.seconds, True] for making in makings]
    counts = {name: record[name] + sum(getattr(making, name) for making in makings) for name in ("n_items", "n_errors")}
    return {**record, **counts, "published": [*record["published"], *published]}


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
    """The report that the last merge wrote; None before the first, and a sentence if it is damaged."""
    path = report_path(run)
    try:
        return _checked(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise SlurmGPUError(f"{path} is damaged: {error}. `slurmgpu merge {run.typed}` writes it anew.") from error


def _checked(report: Any) -> dict[str, Any]:
    """The report; ValueError says what makes no sense of it."""
    if not isinstance(report, dict) or report.get("format") != REPORT_FORMAT:
        raise ValueError("it is no report")
    if report.get("version") != REPORT_VERSION:
        raise ValueError(f"it is of version {report.get('version')!r:.80}, and this slurmgpu reads {REPORT_VERSION}")
    for name, kind in VALUES.items():
        if not isinstance(report.get(name), kind):
            raise ValueError(f"its {name} is {report.get(name)!r:.80}")
    for name, keys in LISTS.items():
        listed = report.get(name)
        if not isinstance(listed, list) or not all(isinstance(each, dict) and keys <= each.keys() for each in listed):
            raise ValueError(f"its {name} make no sense")
    return report


def last_report(run: Run) -> dict[str, Any]:
    """The report that the last merge wrote, with the paths of where the run is now; a sentence before the first."""
    report = read_report(run)
    if report is None:
        raise SlurmGPUError(
            f"{run.folder} has no report yet: its merge has not run. "
            f"`slurmgpu status {run.typed}` shows where it stands; "
            f"`slurmgpu merge {run.typed}` merges what there is, once no task is alive."
        )
    merged = None if report.get("merged") is None else str(run.merged)
    return {**report, "run_dir": str(run.folder), "merged": merged, "resubmit": _resubmit(run, report["complete"])}


def _resubmit(run: Run, is_complete: bool) -> str | None:
    return None if is_complete else f"slurmgpu resubmit {run.typed}"


def is_complete(run: Run) -> bool:
    """Whether the run's merged file has a row for every item, and no submission is going to replace it."""
    report, lines = read_report(run), run.submissions()
    all_published = len(run.published()) == run.plan.n_shards
    return bool(report and report["complete"]) and all_published and is_over(lines) and run.merged.exists()


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
