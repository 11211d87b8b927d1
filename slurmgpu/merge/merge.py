"""The merge: join published shards in input order, set damaged ones aside, and write the report.

The caller ensures that no task of the run is alive. merged.h5 defines the state of the run: it is complete if it has a
row for every item, and the report, `status` and `resubmit` agree.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slurmgpu import page as pages
from slurmgpu import results
from slurmgpu.code import importer
from slurmgpu.code.snapshots import code_digest
from slurmgpu.code.versions import Stretch, makers_of
from slurmgpu.errors import SlurmGPUError
from slurmgpu.loader.build import build
from slurmgpu.merge.former_rows import FormerRows
from slurmgpu.merge.item_names import name_items
from slurmgpu.merge.join import join
from slurmgpu.merge.merged_file import Places
from slurmgpu.merge.sources import Source
from slurmgpu.report.attempts import Accounting
from slurmgpu.report.build import Joined, build_report
from slurmgpu.report.report_file import Report, read_report, report_path
from slurmgpu.run import owners
from slurmgpu.run.crash_history import history_path
from slurmgpu.run.directory import Run
from slurmgpu.run.lock import checked
from slurmgpu.run.recompute import Again, Recompute, spans_of
from slurmgpu.run.revisions import former_rows, made_again, publish_rows, put_over
from slurmgpu.shards.columns import Column, columns_from_json
from slurmgpu.shards.made_by import MadeBy, Maker
from slurmgpu.shards.shard_file import examine, read_directory, read_errors, verify_shard
from slurmgpu.shards.userblock import DamagedShardError, Reader
from slurmgpu.util.atomic_files import write_bytes, write_json
from slurmgpu.util.early_signals import INTERRUPTS
from slurmgpu.util.exceptions import described
from slurmgpu.util.process_wide import working_folder
from slurmgpu.util.shared_files import PATIENCE_S, exists, list_fresh, list_names, remove, replace, retried
from slurmgpu.worker.call_failures import check_debugger_left
from slurmgpu.worker.parts import remove_parts

log = logging.getLogger(__name__)

Check = Callable[[], None]
"""Raises if this process may no longer merge."""


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
    leftovers = _partials(run)
    _take_back(run, check)
    plan, sources = run.plan, _Sources(run, check)
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
            _set_aside(path, reason)
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
    _clear_away(run, leftovers, joined, check)
    if plan.html:
        _draw(run, report)
    return report


@dataclass
class _Sources:
    """The files to join: the newest revision of each shard, and rows that only the former merged.h5 has."""

    run: Run
    check: Check
    columns: Mapping[str, Column] = field(init=False)
    patience_s: float = field(init=False)
    damaged: str = ""

    def __post_init__(self) -> None:
        self.columns = columns_from_json(self.run.plan.columns)
        self.patience_s = max(PATIENCE_S, self.run.plan.lease_s)

    def look(self) -> list[Source]:
        """All published shards, listed again; rows that only merged.h5 has become shards again."""
        files = self.run.shard_files(fresh=True)
        with self.former() as former:
            if former is not None:
                for shard in sorted(former.shards.keys() - files.keys()):
                    if self._restore(former, shard):
                        files[shard] = [0]
        return [self._source(shard, revisions) for shard, revisions in sorted(files.items())]

    def review(self, copied: Mapping[int, Places], damaged: Mapping[Path, str]) -> list[Source]:
        """New shards, and files with good rows that merged.h5 would lose otherwise."""
        more = [source for source in self.look() if source.shard not in copied and source.path not in damaged]
        more = [source for source in more if exists(source.path)]
        suspects = {shard for shard, failed in copied.items() if len(failed)}
        suspects |= {numbers[0] for path in damaged if (numbers := Run.revision_of(path.name)) is not None}
        files = self.run.shard_files()
        with self.former() as former:
            if former is None:
                return more
            for shard in sorted(suspects & former.shards.keys()):
                if shard not in copied:
                    source = self._replace(former, shard, damaged)
                else:
                    source = self._keep(former, shard, files.get(shard, [0]), copied[shard], damaged)
                if source is not None:
                    more.append(source)
        return more

    def keep_damaged(self) -> None:
        """Rename a damaged merged.h5 instead of replacing it, if it may have rows to save that are nowhere else."""
        if self.damaged:
            aside = self.run.merged.with_suffix(".damaged.h5")
            log.error("the former merged.h5 is damaged (%s) and was renamed to %s", self.damaged, aside)
            with contextlib.suppress(FileNotFoundError):
                replace(self.run.merged, aside)

    def _source(self, shard: int, revisions: Sequence[int]) -> Source:
        newest, *older = [self.run.revision_path(shard, revision) for revision in reversed(revisions)]
        return Source(shard, newest, *self.run.plan.bounds(shard), tuple(older))

    @contextlib.contextmanager
    def former(self) -> Iterator[FormerRows | None]:
        """The rows of the present merged.h5; None if it is missing or unreadable."""
        try:
            rows = FormerRows(self.run.merged, self.columns, self.run.plan.fingerprint, self.patience_s)
        except FileNotFoundError:
            yield None
        except DamagedShardError as error:
            if not self.damaged:
                log.warning("%s is damaged and will be written again from the shards: %s", self.run.merged, error)
            self.damaged = str(error)
            yield None
        else:
            with contextlib.closing(rows):
                yield rows

    def _restore(self, former: FormerRows, shard: int, damage: str | None = None) -> bool:
        """Publish a shard from its rows in merged.h5, replacing a file with `damage`; False if they are damaged."""
        what = "missing" if damage is None else "damaged"
        try:
            rows = former.rows(shard)
        except DamagedShardError as error:
            log.error("shard %d is %s, and its rows in merged.h5 are damaged: %s", shard, what, error)
            self.damaged = self.damaged or str(error)
            return False
        if damage is not None:
            self.check()
            _set_aside(self.run.revision_path(shard, 0), damage)
        log.warning("shard %d is %s; its rows are taken from merged.h5", shard, what)
        publish_rows(self.run, shard, 0, self.columns, rows, {}, _made_by(former.code(shard)))
        return True

    def _replace(self, former: FormerRows, shard: int, damaged: Mapping[Path, str]) -> Source | None:
        """A shard without an intact file, from its rows in merged.h5; None if they are damaged."""
        restored = self._restore(former, shard, damaged.get(self.run.revision_path(shard, 0)))
        return self._source(shard, [0]) if restored else None

    def _keep(
        self,
        former: FormerRows,
        shard: int,
        revisions: Sequence[int],
        failed: Places,
        damaged: Mapping[Path, str],
    ) -> Source | None:
        """A shard's next revision, in which good rows of merged.h5 replace errors; None if there are none.

        If the shard's newest file is damaged and merged.h5 has its rows, these replace all older rows.
        """
        *older, newest = revisions
        is_damaged = self.run.revision_path(shard, newest) in damaged
        start, stop = self.run.plan.bounds(shard)
        try:
            good: set[int] = {*failed.tolist()}
            if is_damaged and not any(self._has_same(former, shard, revision) for revision in older):
                good = set(range(start, stop))  # merged.h5 took them from the damaged file
            good -= former.failed(shard)
            if not good:
                return None
            rows = former.rows(shard)
            now = former_rows(self.run, shard, newest + 1, self.columns)
        except DamagedShardError as error:
            log.error("rows of shard %d in merged.h5 cannot be kept: %s", shard, error)
            self.damaged = self.damaged or str(error)
            return None
        why = "its newest file is damaged" if is_damaged else "recomputing them failed"
        log.warning("shard %d: %d rows of merged.h5 are kept, because %s", shard, len(good), why)
        combined = put_over(now.rows, {index: rows[index - start] for index in good}, start)
        made_by = now.made_by
        for stretch in former.code(shard):
            if kept := sorted(index for index in good if stretch.start <= index < stretch.stop):
                made_by = made_again(made_by, {**_maker(), "code": stretch.digest}, kept)
        publish_rows(self.run, shard, newest + 1, self.columns, combined, now.notes, made_by)
        return self._source(shard, [*revisions, newest + 1])

    def _has_same(self, former: FormerRows, shard: int, revision: int) -> bool:
        """Whether merged.h5 has the rows of this file."""
        try:
            directory = read_directory(self.run.revision_path(shard, revision))
        except (DamagedShardError, FileNotFoundError):
            return False
        return former.are_of(shard, directory)


def _maker() -> Maker:
    """The maker of rows that a merge took from an earlier merged.h5."""
    return {"attempt": "merge", "started": time.time(), "seconds": 0.0}


def _made_by(code: Sequence[Stretch]) -> MadeBy:
    """The makers of rows that a merge took from an earlier merged.h5, given the code that computed them."""
    found = makers_of(code)
    return {**_maker(), **found, "revisions": [{**_maker(), **each} for each in found.get("revisions", ())]}


def _partials(run: Run) -> dict[str, tuple[int, int]]:
    """Unfinished shards with size and time, which show whether they are still written."""
    found = {}
    for name in list_fresh(run.shards):
        if name.endswith(".partial"):
            with contextlib.suppress(FileNotFoundError):
                stat = retried((run.shards / name).lstat)
                found[name] = stat.st_size, stat.st_mtime_ns
    return found


def _clear_away(run: Run, leftovers: Mapping[str, tuple[int, int]], joined: Joined | None, check: Check) -> None:
    """Remove unfinished shards that did not change during the merge, and damaged ones that were replaced."""
    aside = set() if joined is None else {path.stem for path, _ in joined.aside}
    files = run.shard_files()
    for name in checked(list_names(run.shards), check):
        stem = name.removesuffix(".txt").removesuffix(".damaged")
        which = run.revision_of(f"{stem}.h5") if ".damaged" in name else None
        is_replaced = which is not None and max(files.get(which[0], [0])) >= which[1]
        if joined and which and which[0] in joined.shards and is_replaced and stem not in aside:
            with contextlib.suppress(IsADirectoryError, PermissionError):  # not our file
                remove(run.shards / name)
    unchanged = _partials(run)
    for name, mark in checked(leftovers.items(), check):
        if unchanged.get(name) == mark:
            remove(run.shards / name)


def _take_back(run: Run, check: Check) -> None:
    """Publish shards that an earlier merge set aside and that are intact now: only the reading was at fault."""
    for name in checked(list_names(run.shards), check):
        stem = name.removesuffix(".damaged")
        target = run.shards / f"{stem}.h5"
        if stem == name or (revision := run.revision_of(target.name)) is None or exists(target):
            continue
        start, stop = run.plan.bounds(revision[0])
        try:
            verify_shard(run.shards / name, fingerprint=run.plan.fingerprints, start=start, stop=stop)
        except (DamagedShardError, FileNotFoundError):
            continue
        check()  # reading may have taken long
        log.warning("%s is intact and is used again", name)
        replace(run.shards / name, target)


def _set_aside(path: Path, reason: str) -> None:
    shard, revision = Run.revision_of(path.name) or (path.name, 0)
    which = f"revision {revision} of shard {shard}" if revision else f"shard {shard}"
    log.error("%s is not merged: %s", which, reason)
    write_bytes(path.with_suffix(".damaged.txt"), f"{reason}\n".encode())
    with contextlib.suppress(FileNotFoundError):
        replace(path, path.with_suffix(".damaged"))


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


def failed_again(run: Run, submission: int) -> Recompute:
    """The failed items of all published shards, for a submission that recomputes them."""
    found, sources = {}, _Sources(run, lambda: None)
    with sources.former() as former:
        good = set() if former is None else former.without_failures()
    for shard, revisions in sorted(run.shard_files(fresh=True).items()):
        if shard in good:
            continue  # no later merge takes an error in place of a good row of merged.h5
        try:
            with Reader(run.revision_path(shard, revisions[-1])) as reader:
                errors = reader.twice(lambda: read_errors(reader, examine(reader)))
        except (DamagedShardError, FileNotFoundError):
            continue  # the merge reports it
        if errors:
            found[shard] = Again(revisions[-1] + 1, spans_of([index for index, _ in errors]))
    return Recompute(submission, found)


def forget_deaths(run: Run, shards: Sequence[int]) -> None:
    """Remove the crash histories of shards, so that quarantined items are recomputed."""
    for shard in shards:
        remove(history_path(run.claims.folder, shard))


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
    if its != now:  # other code has computed rows anew
        return None
    found = former["summary"]
    if not found or found.keys() == {"error"}:
        return None
    log.warning("the summary of an earlier merge of the same rows is kept")
    return found
