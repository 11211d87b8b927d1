"""The merge: joins the published shards in input order, sets damaged ones aside, and writes the report.

It is for moments when no task of the run is alive; who calls it has made sure. What it joins decides what the run is:
complete means that merged.h5 holds a row for every item, and the report, `status` and `resubmit` say the same.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slurmgpu import page as pages
from slurmgpu import results
from slurmgpu.code import importer
from slurmgpu.code.snapshots import code_digest
from slurmgpu.code.versions import Stretch, makers_of
from slurmgpu.errors import SlurmGPUError
from slurmgpu.merge.former_rows import FormerRows
from slurmgpu.merge.item_names import name_items
from slurmgpu.merge.join import Source, join, verify_joined
from slurmgpu.report.attempts import Lives
from slurmgpu.report.build import Errors, Joined, Report, build_report, read_report, report_path
from slurmgpu.run import owners
from slurmgpu.run.crash_history import history_path
from slurmgpu.run.directory import Run
from slurmgpu.run.lock import checked
from slurmgpu.run.recompute import Again, Recompute, spans_of
from slurmgpu.run.revisions import former_rows, made_again, publish_rows, put_over
from slurmgpu.shards.columns import Column, columns_from_json
from slurmgpu.shards.shard_file import examine, read_errors, verify_shard
from slurmgpu.shards.userblock import DamagedShardError, Reader
from slurmgpu.util.atomic_files import working_folder, write_bytes, write_json
from slurmgpu.util.early_signals import EndedBySignalError
from slurmgpu.util.shared_files import PATIENCE_S, exists, list_anew, list_names, remove, replace, retried
from slurmgpu.worker.computer import check_debugger_left
from slurmgpu.workload import build

log = logging.getLogger(__name__)

Check = Callable[[], None]
"""Raises unless who merges may still do so."""


def merge(run: Run, lives: Lives | None = None, check: Check = lambda: None) -> Report:
    """Write merged.h5 and report.json from what is published; the report.

    A shard that was read twice and is damaged, or of another plan, is renamed to `NNNNN.damaged`, the reason beside
    it: it is missing then, until a merge finds it whole. The new file has every good row of the one that it replaces.
    An error that remains ends the merge, and leaves both files as they were. `check` is called before each step that
    cannot be taken back.
    """
    leftovers = _partials(run)
    _take_back(run, check)
    plan, joining = run.plan, _Joining(run)
    joined: Joined | None = None

    def about_to_replace() -> None:
        check()
        joining.keep_damaged()

    if parts := joining.look():
        joined = join(
            parts,
            joining.columns,
            fingerprint=plan.fingerprint,
            n_items=plan.n_items,
            target=run.merged,
            attributes={"run": plan.name, "seed": plan.seed, "workload": plan.workload},
            patience_s=joining.patience_s,
            review=joining.review,
            check=about_to_replace,
        )
        for path, reason in checked(joined.aside, check):
            _set_aside(path, reason)
    else:
        about_to_replace()
    summary = _summary(run) if joined and joined.n_rows and plan.summarizes else None
    report = build_report(run, joined=joined, lives=lives, summary=summary)
    name_items(run, report["errors"])
    if summary and summary.keys() == {"error"}:
        report["summary"] = _former_summary(run, report) or summary
    check()
    write_json(report_path(run), report)
    run.claims.clear(check)
    _clear_away(run, leftovers, joined, check)
    if plan.html:
        _draw(run, report)
    return report


@dataclass
class _Joining:
    """What is to be joined: the newest revision of each shard, and rows that only the former merged.h5 has."""

    run: Run
    columns: Mapping[str, Column] = field(init=False)
    patience_s: float = field(init=False)
    damaged: str = ""

    def __post_init__(self) -> None:
        self.columns = columns_from_json(self.run.plan.columns)
        self.patience_s = max(PATIENCE_S, self.run.plan.lease_s)

    def look(self) -> list[Source]:
        """All that is published, asked for again; rows that are in merged.h5 alone become shards again."""
        files = self.run.shard_files(fresh=True)
        with self._former() as former:
            for shard in sorted(former.shards.keys() - files.keys()) if former else ():
                if self._restore(former, shard):
                    files[shard] = [0]
        return [self._source(shard, revisions) for shard, revisions in sorted(files.items())]

    def review(self, copied: Mapping[int, Errors]) -> list[Source]:
        """What has appeared since, and shards that would take good rows out of merged.h5, with these rows put over."""
        more = [source for source in self.look() if source.shard not in copied and exists(source.path)]
        with self._former() as former:
            for shard, errors in copied.items():
                if errors and former and shard in former.shards and (source := self._keep(former, shard, errors)):
                    more.append(source)
        return more

    def keep_damaged(self) -> None:
        """Leave a merged.h5 that cannot be read beside the one that takes its place: it may have rows to save."""
        if self.damaged:
            aside = self.run.merged.with_suffix(".damaged.h5")
            log.error("the former merged.h5 (%s) is %s now", self.damaged, aside)
            with contextlib.suppress(FileNotFoundError):
                replace(self.run.merged, aside)

    def _source(self, shard: int, revisions: Sequence[int]) -> Source:
        newest, *older = [self.run.revision_path(shard, revision) for revision in reversed(revisions)]
        return Source(shard, newest, *self.run.plan.bounds(shard), tuple(older))

    @contextlib.contextmanager
    def _former(self) -> Any:
        """The rows of the merged.h5 that is there; None where there is none, or none that can be read."""
        try:
            rows = FormerRows(self.run.merged, self.columns, self.run.plan.fingerprint, self.patience_s)
        except FileNotFoundError:
            yield None
        except DamagedShardError as error:
            if not self.damaged:
                log.warning("%s is damaged, and written again from the shards: %s", self.run.merged, error)
            self.damaged = str(error)
            yield None
        else:
            with rows:
                yield rows

    def _restore(self, former: FormerRows, shard: int) -> bool:
        """Publish a shard from its rows in merged.h5; whether these are whole."""
        try:
            rows = former.rows(shard)
        except DamagedShardError as error:
            log.error("shard %d is gone, and its rows in merged.h5 are damaged: %s", shard, error)
            return False
        log.warning("shard %d is gone; its rows are taken from merged.h5", shard)
        publish_rows(self.run, shard, 0, self.columns, rows, {}, {**_maker(), **_with_maker(former.code(shard))})
        return True

    def _keep(self, former: FormerRows, shard: int, errors: Errors) -> Source | None:
        """A shard's next revision, with the good rows of merged.h5 over errors; None where there are none."""
        try:
            good = {index for index, _ in errors} - former.failed(shard)
            if not good:
                return None
            rows = former.rows(shard)
            revisions = self.run.shard_files().get(shard, [0])
            now = former_rows(self.run, shard, revisions[-1] + 1, self.columns)
        except DamagedShardError as error:
            log.error("rows of shard %d in merged.h5 cannot be kept: %s", shard, error)
            return None
        start, _ = self.run.plan.bounds(shard)
        log.warning("shard %d: %d rows of merged.h5 have failed since; they are kept", shard, len(good))
        combined = put_over(now.rows, {index: rows[index - start] for index in good}, start)
        made_by = now.made_by
        for stretch in former.code(shard):
            if kept := sorted(index for index in good if stretch.start <= index < stretch.stop):
                made_by = made_again(made_by, {**_maker(), "code": stretch.digest}, kept)
        publish_rows(self.run, shard, revisions[-1] + 1, self.columns, combined, now.notes, made_by)
        return self._source(shard, [*revisions, revisions[-1] + 1])


def _maker() -> dict[str, Any]:
    """Who made rows that a merge has taken out of an earlier merged.h5."""
    return {"attempt": "merge", "started": time.time(), "seconds": 0.0}


def _with_maker(code: Sequence[Stretch]) -> dict[str, Any]:
    """Which code has computed rows that a merge has taken out of an earlier merged.h5."""
    found = makers_of(code)
    return found | {"revisions": [{**_maker(), **each} for each in found.get("revisions", ())]}


def _partials(run: Run) -> dict[str, tuple[int, int]]:
    """The shards that were not finished, with what shows whether they are still written."""
    found = {}
    for name in list_anew(run.shards):
        if name.endswith(".partial"):
            with contextlib.suppress(FileNotFoundError):
                stat = retried((run.shards / name).lstat)
                found[name] = stat.st_size, stat.st_mtime_ns
    return found


def _clear_away(run: Run, leftovers: Mapping[str, tuple[int, int]], joined: Joined | None, check: Check) -> None:
    """Remove unfinished shards that have not changed while the merge worked, and damaged ones that were replaced."""
    aside = set() if joined is None else {path.stem for path, _ in joined.aside}
    for name in checked(list_names(run.shards), check):
        stem = name.removesuffix(".txt").removesuffix(".damaged")
        which = run.revision_of(f"{stem}.h5") if ".damaged" in name else None
        if joined and which and which[0] in joined.shards and stem not in aside:
            with contextlib.suppress(IsADirectoryError, PermissionError):  # no file of ours
                remove(run.shards / name)
    unchanged = _partials(run)
    for name, mark in checked(leftovers.items(), check):
        if unchanged.get(name) == mark:
            remove(run.shards / name)


def _take_back(run: Run, check: Check) -> None:
    """Publish shards again that an earlier merge set aside, and that are whole now; the reading had been at fault.

    And those that a `resubmit --failed` of an older slurmgpu set aside, as NNNNN.failed.
    """
    for name in checked(list_names(run.shards), check):
        stem, dot, kind = name.rpartition(".")
        target = run.shards / f"{stem}.h5"
        if not dot or kind not in ("damaged", "failed") or (revision := run.revision_of(target.name)) is None:
            continue
        if exists(target):
            if kind == "failed":
                remove(run.shards / name)
            continue
        start, stop = run.plan.bounds(revision[0])
        try:
            verify_shard(run.shards / name, fingerprint=run.plan.fingerprint, start=start, stop=stop)
        except (DamagedShardError, FileNotFoundError):
            continue
        check()  # to read it may have taken long
        log.warning("%s is whole, and is taken back", name)
        replace(run.shards / name, target)
        remove(run.shards / f"{stem}.damaged.txt")


def _set_aside(path: Path, reason: str) -> None:
    shard, revision = Run.revision_of(path.name) or (path.name, 0)
    which = f"revision {revision} of shard {shard}" if revision else f"shard {shard}"
    log.error("%s is not merged: %s", which, reason)
    write_bytes(path.with_suffix(".damaged.txt"), f"{reason}\n".encode())
    with contextlib.suppress(FileNotFoundError):
        replace(path, path.with_suffix(".damaged"))


def _draw(run: Run, report: Report) -> None:
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
        remove(page)
    except OSError as error:
        log.warning("%s is not of this merge, and cannot be removed: %s", page, error.strerror)


def failed_again(run: Run, submission: int) -> Recompute:
    """The failed items of all published shards, to be computed again by a submission."""
    found = {}
    for shard, revisions in sorted(run.shard_files(fresh=True).items()):
        try:
            with Reader(run.revision_path(shard, revisions[-1])) as reader:
                errors = read_errors(reader, examine(reader))
        except (DamagedShardError, FileNotFoundError):
            continue  # the merge will say so
        if errors:
            found[shard] = Again(revisions[-1] + 1, spans_of([index for index, _ in errors]))
    return Recompute(submission, found)


def forget_deaths(run: Run, shards: Sequence[int]) -> None:
    """Forget what killed workers in shards: what was quarantined is computed again."""
    for shard in shards:
        remove(history_path(run.claims.folder, shard))


def verify(run: Run) -> list[str]:
    """What is wrong with merged.h5, a sentence for each problem; none when every byte of it is as it was written."""
    if not exists(run.merged):
        return [f"there is no {run.merged}"]
    return verify_joined(run.merged)


def _summary(run: Run) -> dict[str, Any]:
    """What the workload says of all rows; {"error": why} where it fails, for the report is more than this."""
    plan = run.plan
    if why := owners.why_foreign(run):
        log.warning("there is no summary by the workload: %s. To have it: slurmgpu merge --trust %s", why, run.typed)
        return {"error": f"the workload was not asked, as {why}"}
    try:
        with (
            working_folder(Path(plan.search_path)),
            importer.using(run.folder, code_digest(run.submissions())),
            results.open(run.merged) as merged,
        ):
            summarize = build(plan.workload, plan.settings, Path(plan.search_path)).summarize
            if summarize is None:
                raise SlurmGPUError(f"Workload {plan.workload} has no `summarize` any more.")
            summary: dict[str, Any] = json.loads(json.dumps(dict(summarize(merged)), allow_nan=False))
    except EndedBySignalError:
        raise
    except (Exception, SystemExit) as error:
        check_debugger_left(error)
        log.warning("the workload cannot summarize the merged file", exc_info=True)
        return {"error": f"{type(error).__name__}: {error}"}
    return summary


def _former_summary(run: Run, report: Report) -> Mapping[str, Any] | None:
    """The summary that an earlier merge made of the same rows; None if there is none."""
    try:
        former = read_report(run)
    except SlurmGPUError:
        return None  # damaged; this merge writes it again
    names: Sequence[Literal["fingerprint", "n_rows", "missing", "errors"]]
    names = ("fingerprint", "n_rows", "missing", "errors")
    found = former.get("summary") if former else None
    same = former is not None and all(former.get(name) == report[name] for name in names)
    if not same or not found or found.keys() == {"error"}:
        return None
    log.warning("the summary of an earlier merge is kept: it is of the same rows")
    return found
