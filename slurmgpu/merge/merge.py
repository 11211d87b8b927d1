"""The merge: join published shards in input order, set damaged ones aside, and write the report.

The caller ensures that no task of the run is alive. merged.h5 defines the state of the run: it is complete if it has a
row for every item, and the report, `status` and `resubmit` agree.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from slurmgpu import page as pages
from slurmgpu import results
from slurmgpu.code import importer
from slurmgpu.code.snapshots import code_digest
from slurmgpu.errors import SlurmGPUError
from slurmgpu.loader.build import build
from slurmgpu.merge.files_to_join import FilesToJoin
from slurmgpu.merge.item_names import name_items
from slurmgpu.merge.join import join
from slurmgpu.merge.shards_folder import Check, clear_away, partials, set_aside, take_back
from slurmgpu.report.build import Joined, build_report
from slurmgpu.report.outcomes import Accounting
from slurmgpu.report.report_file import Report, read_report, report_path
from slurmgpu.run import owners
from slurmgpu.run.directory import Run
from slurmgpu.run.lock import checked
from slurmgpu.util.atomic_files import write_json
from slurmgpu.util.early_signals import INTERRUPTS
from slurmgpu.util.exceptions import described
from slurmgpu.util.process_wide import working_folder
from slurmgpu.util.shared_files import remove
from slurmgpu.worker.call_failures import check_debugger_left
from slurmgpu.worker.parts import remove_parts

log = logging.getLogger(__name__)


def merge(
    run: Run, accounting: Accounting | None = None, check: Check = lambda: None, *, may_live: bool = False
) -> Report:
    """Write merged.h5 and report.json from the published shards; return the report.

    A shard that is damaged in two readings, or belongs to another plan, is renamed to `NNNNN.damaged`, with the reason
    in a file next to it. Unless the old merged.h5 has its rows, it counts as missing until a merge finds it intact. The
    new file keeps every good row of the old one. An error that remains after retries ends the merge and leaves both
    files as they were. `check` is called before each step that cannot be undone. `may_live`: attempts without a
    recorded end may be running.
    """
    run.make_folders()
    leftovers = partials(run)
    take_back(run, check)
    plan, sources = run.plan, FilesToJoin(run, check)
    joined: Joined | None = None

    def about_to_replace() -> None:
        check()
        sources.keep_damaged()

    if found := sources.look():
        joined = join(
            found,
            sources.columns,
            fingerprints=plan.fingerprints,
            n_items=plan.n_items,
            target=run.merged,
            attributes={"run": plan.name, "seed": plan.seed, "workload": plan.workload},
            patience_s=sources.patience_s,
            review=sources.review,
            check=about_to_replace,
        )
        for path, reason in checked(joined.aside, check):
            set_aside(path, reason)
    else:
        about_to_replace()
    summary = _summary(run) if joined and joined.n_rows and plan.summarizes else None
    report = build_report(run, joined=joined, accounting=accounting, summary=summary, may_live=may_live)
    name_items(run, report["errors"])
    if summary and summary.keys() == {"error"}:
        report["summary"] = _former_summary(run, report) or summary
    check()
    write_json(report_path(run), report)
    run.claims.clear(check)
    check()
    remove_parts(run)
    clear_away(run, leftovers, joined, check)
    if plan.html:
        _draw(run, report)
    return report


def _draw(run: Run, report: Report) -> None:
    """Write report.html, or log why not: nothing depends on it."""
    path = pages.page_path(run)
    if missing := pages.missing_packages():
        log.info("report.html is not written without %s: pip install 'slurmgpu[html]'", " and ".join(missing))
        _remove_former(path)
        return
    try:
        pages.write_page(run, report, path)
    except Exception:
        log.warning("report.html cannot be drawn", exc_info=True)
        _remove_former(path)


def _remove_former(page: Path) -> None:
    try:
        remove(page)
    except OSError as error:
        log.warning("%s is from an earlier merge and cannot be removed: %s", page, error.strerror)


def _summary(run: Run) -> dict[str, Any]:
    """The workload's summary of all rows; {"error": why} if it fails, since the report must be written anyway."""
    plan = run.plan
    if why := owners.why_foreign(run):
        log.warning("the workload's summary is left out: %s. To allow it: slurmgpu merge --trust %s", why, run.typed)
        return {"error": f"the workload was not run: {why}"}
    try:
        with (
            working_folder(Path(plan.search_path)),
            importer.using(run.folder, code_digest(run.submissions())),
            results.open(run.merged) as merged,
        ):
            summarize = build(plan.workload, plan.settings, Path(plan.search_path)).summarize
            if summarize is None:
                raise SlurmGPUError(f"Workload {plan.workload} no longer has `summarize`.")
            summary: dict[str, Any] = json.loads(json.dumps(dict(summarize(merged)), allow_nan=False))
    except INTERRUPTS:
        raise
    except BaseException as error:
        check_debugger_left(error)
        log.warning("the workload cannot summarize the merged file", exc_info=True)
        return {"error": described(error)}
    return summary


def _former_summary(run: Run, report: Report) -> Mapping[str, Any] | None:
    """The summary of an earlier merge of the same rows; None if there is none."""
    try:
        former = read_report(run)
    except SlurmGPUError:
        return None  # damaged; this merge writes it again
    names: Sequence[Literal["fingerprint", "n_rows", "missing", "n_errors", "errors"]]
    names = ("fingerprint", "n_rows", "missing", "n_errors", "errors")  # not all errors are listed
    if former is None or any(former[name] != report[name] for name in names):
        return None
    its, now = ([(each["digest"], each["items"]) for each in of["code"]] for of in (former, report))
    if its != now:  # other code has computed rows again
        return None
    found = former["summary"]
    if not found or found.keys() == {"error"}:
        return None
    log.warning("the summary of an earlier merge of the same rows is kept")
    return found
