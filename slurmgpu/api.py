"""What the command line does, for Python: `run = slurmgpu.submit("slurmgpu.toml", gpus=4, array=True)`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from slurmgpu.code.import_guard import refuse_if_importing
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import live_tasks
from slurmgpu.executors.registry import queued_jobs
from slurmgpu.executors.submission import Outcome
from slurmgpu.faults.verdicts import Verdict, judge
from slurmgpu.operations.probe import draft_probe, probe_draft
from slurmgpu.operations.resubmit import Request, packed, resubmit
from slurmgpu.operations.submit import Submitted, check_drafts, naming_submitted, submit_draft
from slurmgpu.operations.wait import follow_rows, incomplete, wait_for
from slurmgpu.plan.items import look_at
from slurmgpu.plan.overrides import Overrides
from slurmgpu.plan.planner import draft_run
from slurmgpu.plan.site_file import GivenRunFile, RunFileSource, put_profile
from slurmgpu.plan.variants import drafted, variants_of
from slurmgpu.progress import following
from slurmgpu.report.completeness import is_complete
from slurmgpu.report.report_file import last_report
from slurmgpu.report.status import read_status
from slurmgpu.results import Merged
from slurmgpu.results import open as open_merged
from slurmgpu.results.published import Row as RunRow
from slurmgpu.results.views import ColumnData
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import is_over
from slurmgpu.slurm.commands import settings_asked_once
from slurmgpu.util.amounts import count_of
from slurmgpu.util.users import expanded

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunHandle:
    """A submitted run. It holds no resources; any number of handles may refer to the same run.

    `run["text"][:]` waits for the merge, and reads a column; the first time, a warning says how many values are blank
    because their items failed.
    """

    run: Run
    outcome: Outcome | None = None
    _warned: set[int] = field(default_factory=set, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash(self.folder)

    def __repr__(self) -> str:
        return f"<run {self.folder}: {count_of(self.run.plan.n_items, 'item')}>"

    def __getitem__(self, name: str) -> ColumnData:
        if not isinstance(name, str):  # also raised by iteration
            raise TypeError(
                f"{name!r} is not a column's name; use [name] for columns, rows() for rows, and once the run has "
                f"ended results().row(number)."
            )
        merged = self.results()
        if (n_failed := int(merged.failed.sum())) not in (0, *self._warned):
            self._warned.add(n_failed)
            failed = count_of(n_failed, "item")
            log.warning("%s: %s failed; their values are blank. results().errors says why.", self, failed)
        return merged[name]

    @property
    def folder(self) -> Path:
        """The run directory."""
        return self.run.folder

    def status(self) -> dict[str, Any]:
        """The run's status: the keys of `slurmgpu status --json`."""
        return cast(dict[str, Any], read_status(self.run, queued_jobs(self.run)))

    def report(self) -> dict[str, Any]:
        """The report of the last merge. Raises SlurmGPUError before the first merge."""
        return cast(dict[str, Any], last_report(self.run))

    def rehearsed(self) -> list[Verdict]:
        """The outcome of each injected fault up to the last merge; empty if no fault was injected."""
        return judge(self.run, last_report(self.run))

    def wait(self, on_tick: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
        """Wait until no task of the run is queued or alive, and return the report.

        `on_tick` gets each status; without it, a terminal and a notebook show the progress. An interrupt only ends the
        waiting.
        """
        refuse_if_importing("wait")
        with following(self.run, on_tick) as tick:
            report = wait_for(self.run, tick)
            tick(read_status(self.run))  # the last status in `wait_for` was read before the end of the merge
            return cast(dict[str, Any], report)

    def rows(self) -> Iterator[RunRow]:
        """The rows in input order, each shard's as soon as it is published.

        A row has `index`, `error` (None for a good row), and its columns: `row["text"]`. SlurmGPUError at the end if
        rows are missing.
        """
        return follow_rows(self.run)

    def results(self) -> Merged:
        """The merged file, open, once the run has ended; SlurmGPUError if it lacks rows."""
        if not is_complete(self.run) or not is_over(self.run.submissions()):
            self.wait()
        if not is_complete(self.run):
            raise SlurmGPUError(incomplete(self.run))
        return open_merged(self.run.merged)

    def resubmit(
        self,
        *,
        failed: bool = False,
        force: bool = False,
        code: str | None = None,
        other_code: bool = False,
        function: Callable[..., Any] | None = None,
        load: Callable[..., Any] | None = None,
        **resources: Any,
    ) -> RunHandle:
        """Submit the missing items, and with `failed` the failed items; `resources` are keys of [resources].

        `function` and `load` replace those of `slurmgpu.map`, in this submission and later ones. `code` is `former` or
        the digest of a snapshot; by default the user's current modules are used. With `other_code`, rows that other
        code computed are recomputed. Raises SlurmGPUError while a task of the run is alive or may be alive, unless
        `force` is set. Notes, such as on changed code, are logged as warnings.
        """
        refuse_if_importing("resubmit")
        given = packed(self.run, function, load, code)
        asked = Request(resources, failed=failed, code=code, other_code=other_code, functions=given)
        return RunHandle(self.run, resubmit(self.run, asked, force=force, tell=_warn))

    def cancel(self) -> str:
        """Stop the run's tasks and its merge, and say what was stopped."""
        return live_tasks.cancel(self.run)


def open_run(folder: str | Path) -> RunHandle:
    """A handle on the run in a run directory, also on another user's: for rows, status and results.

    SlurmGPUError if there is no run, or if a newer slurmgpu made it.
    """
    return RunHandle(Run.open(Path(folder)))


def submit(
    run_file: str | Path | Mapping[str, Any] = "slurmgpu.toml",
    *,
    run_dir: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    image: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    profile: str | None = None,
    limit: int | None = None,
    items: str | None = None,
    extend: str | Path | None = None,
    after: str | Path | Sequence[str | Path] | None = None,
    on_tick: Callable[[Run], None] = lambda run: None,
    inject: Sequence[str] = (),
    **resources: Any,
) -> RunHandle:
    """Plan a run file, make its run directory, and submit it.

    `run_file` is a path, or a mapping with the keys and tables of a run file, whose paths are relative to the working
    directory: `submit({"input": "items.jsonl", "workload": {"use": "embed"}}, gpus=4)`.

    `resources` are keys of [resources]: gpus, array, gpus_per_task and so on. `settings` are keys of [settings],
    `image` is the image of [container], and `overrides` are values of any keys, as in
    `{"slurm.partition": "a100", "input": "other.jsonl"}`. `profile` is a profile of the site file.

    With `limit` or `items`, such as "10:20,35", only these items are computed, in RUN-look, which replaces an earlier
    one. `extend` is a run of the same input with fewer items: only the new items are computed. `after` is a run, or a
    list of runs, that must be complete before tasks start. `inject` are faults on demand, such as `crash@17`;
    `RunHandle.rehearsed` returns their outcome.

    With the executors local and debug, the call returns when the run is computed and merged; `on_tick(run)` is called
    meanwhile, by debug after each shard. Notes, such as on a misspelt member of the workload, are logged as warnings.
    SlurmGPUError for anything that the user can fix, before anything is queued.
    """
    refuse_if_importing("slurmgpu.submit")
    others = _runs(after)
    values = overrides_of(settings, image, resources, overrides, profile, run_dir)
    old, look = None if extend is None else Run.open(Path(extend)), look_at(items, limit)
    with draft_run(_source(run_file), values, _path(run_dir), after=others, look=look, extends=old) as draft:
        for note in draft.notes:
            _warn(note)
        return _handle(submit_draft(draft, others, on_tick, inject, tell=_warn))


def submit_all(
    run_file: str | Path | Mapping[str, Any] = "slurmgpu.toml",
    *,
    run_dir: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    image: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    profile: str | None = None,
    limit: int | None = None,
    items: str | None = None,
    after: str | Path | Sequence[str | Path] | None = None,
    on_tick: Callable[[Run], None] = lambda run: None,
    **resources: Any,
) -> dict[str, RunHandle]:
    """Submit all runs of a run file's [sweep], and return them by name.

    The arguments are as in `submit`; `run_dir` is the folder of the runs, and `resources` are for each run. All are
    planned before anything is queued. Existing runs with the same values are not submitted again, but returned under
    their names. SlurmGPUError if [sweep] does not vary keys of the run file.
    """
    refuse_if_importing("slurmgpu.submit_all")
    others = _runs(after)
    values = overrides_of(settings, image, resources, overrides, profile, run_dir)
    source, look = _source(run_file), look_at(items, limit)
    variants = variants_of(source, values, _path(run_dir), look)
    if variants is None:
        raise SlurmGPUError("[sweep] varies no key of the run file, so there is one run. Use slurmgpu.submit.")
    with drafted(source, variants, others, look) as drafts, settings_asked_once():
        for note in (*drafts.notes(), *(note for _, draft in drafts.to_submit for note in draft.notes)):
            _warn(note)
        check_drafts(drafts, others)
        drafts.record()
        found = {run.name: RunHandle(run) for run in drafts.there}
        for variant, draft in drafts.to_submit:
            with naming_submitted(drafts, variant):
                drafts.record()  # another process may have left out runs that did not exist yet
                found[variant.name] = _handle(submit_draft(draft, others, on_tick, tell=_warn))
        drafts.record()
    return {variant.name: found[variant.name] for variant in drafts.variants.runs}


def probe(
    run_file: str | Path | Mapping[str, Any] = "slurmgpu.toml",
    n_items: int = 1,
    *,
    run_dir: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    image: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    profile: str | None = None,
    on_tick: Callable[[Run], None] = lambda run: None,
    **resources: Any,
) -> dict[str, Any]:
    """Estimate a run's time, memory and cost: one task computes `n_items` in RUN-probe. The run is not queued.

    The arguments are as in `submit`. The result has the keys of `slurmgpu submit --probe --json` without `submitted`;
    `failure` is None if the probe succeeded.
    """
    refuse_if_importing("slurmgpu.probe")
    values = overrides_of(settings, image, resources, overrides, profile, run_dir)
    with draft_run(_source(run_file), values, _path(run_dir)) as draft:
        return probe_draft(draft, draft_probe(draft, n_items), on_tick)


def overrides_of(
    settings: Mapping[str, Any] | None,
    image: str | Path | None,
    resources: Mapping[str, Any],
    keys: Mapping[str, Any] | None,
    profile: str | None,
    run_dir: str | Path | None = None,
) -> Overrides:
    """The values that replace those of a run file, from the arguments of `submit`; `keys` are its `overrides`.

    SlurmGPUError if `keys` set the `run_dir`, or a key that another argument sets.
    """
    found = Overrides()
    if run_dir:  # as the option, it is relative to the working directory; the key is relative to the run file
        found.sources["", "run_dir"] = "--run-dir"
    put_profile(found, profile)
    container = {} if image is None else {"image": str(expanded(image).absolute())}
    found.put({"settings": settings or {}, "resources": resources, "container": container})
    found.assign_keys(keys or {})
    return found


def _source(run_file: str | Path | Mapping[str, Any]) -> RunFileSource:
    if isinstance(run_file, Mapping):
        return GivenRunFile(run_file, Path.cwd())
    try:
        return Path(run_file)
    except TypeError as error:
        raise SlurmGPUError(
            f"run_file has the type {type(run_file).__name__}; expected the path of a run file, or a mapping with its "
            f"keys and tables."
        ) from error


def _runs(after: str | Path | Sequence[str | Path] | None) -> list[Run]:
    given = [] if after is None else [after] if isinstance(after, (str, Path)) else after
    return [Run.open(Path(folder)) for folder in given]


def _path(run_dir: str | Path | None) -> Path | None:
    return Path(run_dir) if run_dir else None


def _warn(note: str) -> None:
    log.warning("%s", note)


def _handle(submitted: Submitted) -> RunHandle:
    return RunHandle(submitted.run, submitted.outcome)
