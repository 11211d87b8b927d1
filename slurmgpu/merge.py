"""The merge: joins the published shards in input order, sets damaged ones aside, and writes the report.

It is for moments when no task of the run is alive; who calls it has made sure.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurmgpu import pages, results, workloads
from slurmgpu.attempts import Lives
from slurmgpu.columns import columns_from_json
from slurmgpu.errors import SlurmGPUError
from slurmgpu.files import working_folder, write_bytes, write_json
from slurmgpu.histories import history_path
from slurmgpu.joins import join, verify_joined
from slurmgpu.regions import DamagedShardError
from slurmgpu.report import build_report, read_report, report_path
from slurmgpu.runs import Run
from slurmgpu.shards import read_directory

log = logging.getLogger(__name__)


def merge(run: Run, lives: Lives | None = None) -> dict[str, Any]:
    """Write merged.h5 and report.json from what is published; the report.

    A damaged shard, or one of another plan, is renamed to `NNNNN.damaged`, the reason beside it: it is missing then.
    """
    for leftover in run.shards.glob("*.partial"):
        leftover.unlink()
    for former in run.shards.glob("*.failed"):
        if former.with_suffix(".h5").exists():
            former.unlink()
    plan = run.plan
    published = sorted(run.published())
    parts = [(shard, run.shard_path(shard), *plan.bounds(shard)) for shard in published if shard < plan.n_shards]
    merged_rows, errors = None, []
    if not parts:
        run.merged.unlink(missing_ok=True)  # of an earlier merge, whose shards are gone
    else:
        joined = join(
            parts,
            columns_from_json(plan.columns),
            fingerprint=plan.fingerprint,
            n_items=plan.n_items,
            target=run.merged,
            attributes={"run": plan.name, "seed": plan.seed, "workload": plan.workload},
        )
        for shard, reason in joined.damaged:
            _set_aside(run, shard, reason)
        merged_rows, errors = joined.n_rows, list(joined.errors)
    summary = _summary(run) if merged_rows and plan.summarizes else None
    report = build_report(run, errors=errors, merged_rows=merged_rows, lives=lives, summary=summary)
    if summary and summary.keys() == {"error"}:
        report["summary"] = _former_summary(run, report) or summary
    write_json(report_path(run), report)
    run.claims.clear()
    if plan.html:
        _draw(run, report)
    return report


def _draw(run: Run, report: dict[str, Any]) -> None:
    """Write report.html, or say why there is none: nothing depends on it."""
    path = pages.page_path(run)
    if missing := pages.missing_packages():
        log.info("there is no report.html: %s not installed; pip install 'slurmgpu[html]'", " and ".join(missing))
        _remove_former(path)
        return
    try:
        pages.write_page(run, report, path)
    except Exception:
        log.warning("report.html cannot be drawn", exc_info=True)
        _remove_former(path)


def _remove_former(page: Path) -> None:
    """Remove the page of an earlier merge, which knew less."""
    try:
        page.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s is not of this merge, and cannot be removed: %s", page, error.strerror)


def shards_with_failed_items(run: Run) -> list[int]:
    """The published shards in which an item has no row but an error."""
    return [shard for shard in sorted(run.published()) if _has_failed_items(run, shard)]


def set_failed_aside(run: Run, shards: Sequence[int]) -> None:
    """Rename shards to `NNNNN.failed`, so that they count as missing, and forget what killed workers in them.

    The next merge removes those that were computed anew.
    """
    for shard in shards:
        path = run.shard_path(shard)
        path.rename(path.with_suffix(".failed"))
        history_path(run.claims.folder, shard).unlink(missing_ok=True)


def put_failed_back(run: Run) -> None:
    """Undo `set_failed_aside` for what nobody has computed anew."""
    for former in run.shards.glob("*.failed"):
        if not former.with_suffix(".h5").exists():
            former.rename(former.with_suffix(".h5"))


def verify(run: Run) -> list[str]:
    """What is wrong with merged.h5, a sentence for each problem; none when every byte of it is as it was written."""
    if not run.merged.exists():
        return [f"there is no {run.merged}"]
    return verify_joined(run.merged)


def _summary(run: Run) -> dict[str, Any]:
    """What the workload says of all rows; {"error": why} where it fails, for the report is more than this."""
    plan = run.plan
    try:
        with working_folder(Path(plan.search_path)), results.open(run.merged) as merged:
            workload: Any = workloads.build(plan.workload, plan.settings, Path(plan.search_path))
            summary: dict[str, Any] = json.loads(json.dumps(dict(workload.summarize(merged)), allow_nan=False))
    except (Exception, SystemExit) as error:
        log.warning("the workload cannot summarize the merged file", exc_info=True)
        return {"error": f"{type(error).__name__}: {error}"}
    return summary


def _former_summary(run: Run, report: dict[str, Any]) -> dict[str, Any] | None:
    """The summary that an earlier merge made of the same rows; None if there is none."""
    try:
        former = read_report(run) or {}
    except SlurmGPUError:
        return None  # damaged; this merge writes it anew
    same = all(former.get(name) == report[name] for name in ("fingerprint", "n_rows", "missing", "errors"))
    found: dict[str, Any] | None = former.get("summary")
    if not same or not found or found.keys() == {"error"}:
        return None
    log.warning("the summary of an earlier merge is kept: it is of the same rows")
    return found


def _has_failed_items(run: Run, shard: int) -> bool:
    try:
        return read_directory(run.shard_path(shard)).n_errors > 0
    except DamagedShardError:
        return False  # the merge will say so


def _set_aside(run: Run, shard: int, reason: str) -> None:
    path = run.shard_path(shard)
    log.error("shard %d is not merged: %s", shard, reason)
    write_bytes(path.with_suffix(".damaged.txt"), f"{reason}\n".encode())
    path.rename(path.with_suffix(".damaged"))
