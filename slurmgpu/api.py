"""What the command line does, for Python: `run = slurmgpu.submit("slurmgpu.toml", gpus=4, array=True)`."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from slurmgpu.code import former
from slurmgpu.code import functions as code_functions
from slurmgpu.code.functions import Packed
from slurmgpu.code.imports import refuse_if_importing
from slurmgpu.containers.registry import runtime_named
from slurmgpu.containers.settings import ContainerError
from slurmgpu.errors import NoAnswerError, NothingToSubmitError, SlurmGPUError
from slurmgpu.executors import liveness, resubmission
from slurmgpu.executors import probe as probes
from slurmgpu.executors import submission as submitting
from slurmgpu.executors.detached import Background
from slurmgpu.executors.making_room import PLANNED, check_room, remove_left, room
from slurmgpu.executors.registry import executor_named, queued_jobs
from slurmgpu.executors.submission import Outcome
from slurmgpu.faults import check_faults, parse_faults
from slurmgpu.faults.verdicts import Verdict, judge
from slurmgpu.merge import merge
from slurmgpu.plan.container_spec import contain_again
from slurmgpu.plan.items import look_at
from slurmgpu.plan.overrides import Overrides
from slurmgpu.plan.planner import Draft, draft_run
from slurmgpu.plan.site_file import GivenRunFile, RunFileSource, put_profile
from slurmgpu.plan.variants import Drafts, Variant, drafted, variants_of
from slurmgpu.progress import following
from slurmgpu.report.build import Report, is_complete, last_report
from slurmgpu.report.forecast import FORECAST_FORMAT, FORECAST_VERSION, forecast, observe
from slurmgpu.report.status import Status, StatusReader, read_status
from slurmgpu.results import Merged
from slurmgpu.results import open as open_merged
from slurmgpu.results.published import Row as RunRow
from slurmgpu.results.published import RunRows
from slurmgpu.results.views import ColumnData
from slurmgpu.run.directory import Run, create_run
from slurmgpu.run.lock import Lock
from slurmgpu.run.recompute import Recompute, recompute_path, write_recompute
from slurmgpu.run.submissions import Submission, is_over
from slurmgpu.util.atomic_files import write_bytes
from slurmgpu.util.early_signals import INTERRUPTS
from slurmgpu.util.home import expanded
from slurmgpu.util.plurals import count_of
from slurmgpu.util.shared_files import exists, remove, status_of

log = logging.getLogger(__name__)

EXIT_COMPLETE, EXIT_FAILED, EXIT_BAD_USAGE, EXIT_INCOMPLETE = 0, 1, 2, 3

LOOK_S = 0.2
"""Between two looks at a run that is waited for."""
ROWS_LOOK_S, LAST_LOOK_S, FEW_SHARDS = 0.1, 0.02, 8
"""Between looks for the next rows: the first pause behind some, in general and when only so many shards are left."""
ENDING_S = 15.0
"""How long to wait for cancelled jobs to end before their run directory is left in place."""


@dataclass(frozen=True)
class RunHandle:
    """A submitted run. It holds no resources; any number of handles may refer to the same run.

    `run["text"][:]` waits for the merge, and reads a column; a warning says how many of its values are blank, as their
    items failed.
    """

    run: Run
    outcome: Outcome | None = None

    def __hash__(self) -> int:
        return hash(self.folder)

    def __repr__(self) -> str:
        return f"<run {self.folder}: {count_of(self.run.plan.n_items, 'item')}>"

    def __getitem__(self, name: str) -> ColumnData:
        if not isinstance(name, str):  # also raised by iteration
            raise TypeError(
                f"{name!r} names no column; rows are in rows() and, once the run has ended, in results().row(number), "
                f"columns in [name]."
            )
        merged = self.results()
        if n_failed := int(merged.failed.sum()):
            failed = count_of(n_failed, "item")
            log.warning("%s: %s failed, whose values in %r are blank. results().errors says why.", self, failed, name)
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

        Without `on_tick`, which gets each status, a terminal and a notebook show the progress. An interrupt ends the
        waiting, and nothing else.
        """
        refuse_if_importing("wait")
        with following(self.run, on_tick) as tick:
            return cast(dict[str, Any], wait_for(self.run, tick))

    def rows(self) -> Iterator[RunRow]:
        """The rows in input order, each shard's as soon as it is published.

        A row has `index`, `error`, which is None for a good one, and its columns: `row["text"]`. SlurmGPUError at the
        end if rows are missing.
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

        `function` and `load` take the place of those that `slurmgpu.map` was given, in this submission and later ones.

        `code` is `former` or the digest of a snapshot; by default the user's modules are taken as they are now. With
        `other_code`, rows that other code computed are computed again. Raises SlurmGPUError while a task of the run
        is alive or may be alive, unless `force` is set.
        """
        refuse_if_importing("resubmit")
        given = _packed(self.run, function, load, code)
        outcome = resubmit(
            self.run, resources, failed=failed, force=force, code=code, other_code=other_code, functions=given
        )
        return RunHandle(self.run, outcome)

    def cancel(self) -> str:
        """Stop the run's tasks and its merge, and say what was stopped."""
        return liveness.cancel(self.run)


def open_run(folder: str | Path) -> RunHandle:
    """The run in a run directory, whoever submitted it: for rows, status and results, also while it works.

    SlurmGPUError if there is none, or one of a newer slurmgpu.
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
    after: str | Path | None = None,
    on_tick: Callable[[Run], None] = lambda run: None,
    inject: Sequence[str] = (),
    **resources: Any,
) -> RunHandle:
    """Plan a run file, make its run directory, and submit it.

    `run_file` is the path of one, or a mapping with its keys and tables, whose relative paths start at the working
    directory: `submit({"input": "items.jsonl", "workload": {"use": "embed"}}, gpus=4)`. `resources` are keys of
    [resources]: gpus, array, gpus_per_task and so on; `settings` are those of [settings], and `image` that of
    [container]. `overrides` are values of any keys of the run file, as in
    `{"slurm.partition": "a100", "input": "other.jsonl"}`, and `profile` is one of the site file. With `limit` or
    `items`, such as "10:20,35", it is a run of these items only, in RUN-look, in place of an earlier one. `extend`
    is a run of an input that has more items since, of which only these are computed. `after` is a run that has
    to be complete before tasks start. With the executors local and debug, the run is computed and merged when this
    returns; local calls `on_tick(run)` meanwhile. `inject` are faults on demand, such as `crash@17`;
    `RunHandle.rehearsed` returns their outcome. Notes on the run file, such as a misspelt member of the workload, are
    logged as warnings.
    """
    refuse_if_importing("slurmgpu.submit")
    other = Run.open(Path(after)) if after is not None else None
    values = overrides_of(settings, image, resources, overrides, profile, run_dir)
    old, look = None if extend is None else Run.open(Path(extend)), look_at(items, limit)
    with draft_run(_source(run_file), values, _path(run_dir), after=other, look=look, extends=old) as draft:
        for note in draft.notes:
            log.warning("%s", note)
        return submit_draft(draft, other, on_tick, inject)


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
    after: str | Path | None = None,
    on_tick: Callable[[Run], None] = lambda run: None,
    **resources: Any,
) -> dict[str, RunHandle]:
    """Submit every run that [sweep] of a run file stands for, and return them by name.

    The arguments are those of `submit`; `run_dir` is the folder of the runs, and `resources` are of each. All are
    planned before anything is queued. Runs of the sweep that exist already are known by their values, and
    returned as they are under the names that they have.
    SlurmGPUError if [sweep] does not vary keys of the run file.
    """
    refuse_if_importing("slurmgpu.submit_all")
    other = Run.open(Path(after)) if after is not None else None
    values = overrides_of(settings, image, resources, overrides, profile, run_dir)
    source, look = _source(run_file), look_at(items, limit)
    variants = variants_of(source, values, _path(run_dir), look)
    if variants is None:
        raise SlurmGPUError("[sweep] varies no key of the run file, so there is one run: slurmgpu.submit submits it.")
    with drafted(source, variants, other, look) as drafts:
        for note in (*drafts.notes(), *(note for _, draft in drafts.to_submit for note in draft.notes)):
            log.warning("%s", note)
        check_drafts(drafts, other)
        drafts.record()
        found = {run.name: RunHandle(run) for run in drafts.there}
        for variant, draft in drafts.to_submit:
            with naming_submitted(drafts, variant):
                drafts.record()  # another process may have left out what was not made yet
                found[variant.name] = submit_draft(draft, other, on_tick)
        drafts.record()
    return {variant.name: found[variant.name] for variant in drafts.variants.runs}


def check_drafts(drafts: Drafts, after: Run | None = None, inject: Sequence[str] = ()) -> None:
    """Check the submissions of a sweep's runs, and where they will lie, before the first is made."""
    for _, draft in drafts.to_submit:
        check_place(draft)
        submission = submission_of(draft, after, inject)
        executor_named(submission.executor).check(submission, draft.plan.container)


@contextlib.contextmanager
def naming_submitted(drafts: Drafts, variant: Variant) -> Iterator[None]:
    """Say in the error of one submission of a sweep which runs were submitted before it."""
    try:
        yield
    except SlurmGPUError as error:
        names = [each.name for each, _ in drafts.to_submit]
        before = names[: names.index(variant.name)]
        told = f"Submitted before it: {', '.join(before)}." if before else "None was submitted."
        if not drafts.variants.replace_looks:
            told += " The same command submits those that do not exist yet."
        raise SlurmGPUError(f"Run {variant.name} of [sweep]: {error} {told}") from error


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

    The arguments are those of `submit`. The keys are those of `slurmgpu submit --probe --json` without `submitted`;
    `failure` is None if the probe succeeded.
    """
    refuse_if_importing("slurmgpu.probe")
    values = overrides_of(settings, image, resources, overrides, profile, run_dir)
    with draft_run(_source(run_file), values, _path(run_dir)) as draft:
        return probe_draft(draft, n_items, on_tick)


def overrides_of(
    settings: Mapping[str, Any] | None,
    image: str | Path | None,
    resources: Mapping[str, Any],
    keys: Mapping[str, Any] | None,
    profile: str | None,
    run_dir: str | Path | None = None,
) -> Overrides:
    """The values over a run file that `submit` is given; `keys` are those of any of its keys.

    SlurmGPUError where `keys` set what another argument does, or the `run_dir`.
    """
    found = Overrides()
    if run_dir:  # which is relative to the working directory, as the key is not
        found.sources["", "run_dir"] = "--run-dir"
    put_profile(found, profile)
    container = {} if image is None else {"image": str(expanded(image).absolute())}
    found.put({"settings": settings or {}, "resources": resources, "container": container})
    found.assign_keys(keys or {})
    return found


def _source(run_file: str | Path | Mapping[str, Any]) -> RunFileSource:
    return GivenRunFile(run_file, Path.cwd()) if isinstance(run_file, Mapping) else Path(run_file)


def _path(run_dir: str | Path | None) -> Path | None:
    return Path(run_dir) if run_dir else None


def probe_draft(
    draft: Draft,
    n_items: int,
    on_tick: Callable[[Run], None] = lambda run: None,
    on_status: Callable[[Status], None] = lambda status: None,
) -> dict[str, Any]:
    """Probe a draft; the keys of `slurmgpu submit --probe --json`. An exception cancels the probe."""
    small = probes.draft_probe(draft, n_items)
    submission = submission_of(draft)
    run, report = compute_probe(small, on_tick, on_status)
    head = {"run_dir": str(draft.run_dir), "probe_dir": str(run.folder)}
    failed, seen = probes.why_failed(run, report), observe(run.attempts())
    if failed is not None or seen is None:
        failed = failed or probes.Failed("lost", "no record of a task has its batches", str(run.logs))
        return {"format": FORECAST_FORMAT, "version": FORECAST_VERSION, **head, "failure": failed.to_json()}
    found = forecast(
        draft.plan, submission, seen, resumes=draft.resumes, queues=executor_named(submission.executor).queues
    )
    return {**found, **head, "failure": None, "errors": report["errors"][: probes.SHOWN_ERRORS]}


def compute_probe(
    small: Draft,
    on_tick: Callable[[Run], None] = lambda run: None,
    on_status: Callable[[Status], None] | None = None,
) -> tuple[Run, Report]:
    """The run of a small draft beside a run, which takes the place of an earlier one, and its report.

    Without `on_status` the progress is shown as by `RunHandle.wait`. An exception cancels the run.
    """
    submission = submission_of(small)
    executor = executor_named(submission.executor)
    executor.check(submission, small.plan.container)
    with contextlib.ExitStack() as stack:
        stack.enter_context(room(small.run_dir))
        run = None
        try:
            handle = submit_draft(small, None, on_tick)
            stack.close()
            run = handle.run
            report = handle.outcome.report if handle.outcome else None
            if report is None:
                report = wait_for(run, on_status) if on_status is not None else cast(Report, handle.wait())
            return run, report
        except BaseException as error:
            if isinstance(error, INTERRUPTS) and small.run_dir.exists():
                run = Run.open(small.run_dir)  # it may be queued although no tick has reported it
            if run is not None and executor.queues:
                liveness.cancel(run)
            raise


def plan_draft(draft: Draft) -> tuple[Run, list[str], list[str]]:
    """Make the run directory of a draft without queueing it; the run, the two lines that submit it, and notes."""
    from slurmgpu.executors.manual import Manual

    by_hand = Manual()
    submission, notes = by_hand.fit(submission_of(draft), draft.plan.container)
    with _room_for(draft):
        run = create_run(draft.run_dir, draft.plan, draft.items.files)
        draft.fill(run)
        write_bytes(run.folder / PLANNED, b"")
    return run, [*by_hand.start(run, submission).to_type], notes


def submit_draft(
    draft: Draft,
    after: Run | None = None,
    on_tick: Callable[[Run], None] = lambda run: None,
    inject: Sequence[str] = (),
    *,
    background: Background | None = None,
) -> RunHandle:
    """Make the run directory of a draft and submit it, by the process `background` if there is one.

    `inject` are faults on demand.
    """
    submission = submission_of(draft, after, inject)
    executor_named(submission.executor).check(submission, draft.plan.container)
    with _room_for(draft):
        run = create_run(draft.run_dir, draft.plan, draft.items.files)
        made = status_of(run.folder / "run.json")
        try:
            draft.fill(run)
            notes = [*draft.code.left_out, *resubmission.fewer_tasks(submission, draft.plan, draft.n_missing)]
            if background is not None:
                return RunHandle(run, background.start(run, submission, notes))
            return RunHandle(run, submitting.start(run, lambda _: (submission, notes), lambda: on_tick(run)))
        except BaseException:
            there = status_of(run.folder / "run.json")
            if made is not None and there is not None and os.path.samestat(made, there):  # not another process's
                remove_unused(run)
            raise


def check_place(draft: Draft) -> None:
    """Raise SlurmGPUError if there is an earlier look whose place a draft cannot take."""
    if draft.replaces_look:
        check_room(draft.run_dir, "look")


def _room_for(draft: Draft) -> contextlib.AbstractContextManager[None]:
    if draft.replaces_look:
        return room(draft.run_dir, "look")
    if draft.plan.look:
        remove_left(draft.run_dir)
    return contextlib.nullcontext()


def submission_of(draft: Draft, after: Run | None = None, inject: Sequence[str] = ()) -> Submission:
    """The first submission of a draft."""
    submission = resubmission.first_submission(draft.plan.resources, draft.plan.most_tasks(draft.n_missing))
    executor = executor_named(submission.executor)
    waits_for = () if after is None or is_complete(after) else executor.jobs_completing(after)
    faults = parse_faults(inject)
    executor.check_faults(faults)
    check_faults(faults, draft.plan)
    inject = tuple(map(str, faults))
    submission = replace(submission, slurm=draft.plan.slurm, merge=draft.plan.merge, after=waits_for, inject=inject)
    return replace(submission, code=draft.code.line())


def check_image(container: Mapping[str, Any]) -> None:
    """Raise SlurmGPUError if the image is not the one that the run was planned with."""
    try:
        runtime_named(container["runtime"]).same_image(Path(container["image"]), container["identity"])
    except ContainerError as error:
        text = str(error)
        raise SlurmGPUError(f"{text[:1].upper()}{text[1:].rstrip('.')}.") from error


def remove_unused(run: Run) -> None:
    """Remove the run directory if its first submission failed and none of its jobs is queued."""
    lines = run.submissions()
    if lines and (len(lines) > 1 or lines[0]["state"] != "refused"):
        return
    # A task that had started before it was cancelled takes a moment to end.
    patience = time.monotonic() + ENDING_S
    try:
        while lines and executor_named(lines[0]["executor"]).look(run, lines, None).at_work:
            if time.monotonic() > patience:
                return
            time.sleep(0.5)
    except NoAnswerError as error:
        log.warning("%s stays, as jobs of it may be queued. %s", run.folder, error)
        return
    shutil.rmtree(run.folder)


def resubmit(
    run: Run,
    resources: Mapping[str, Any] | None = None,
    slurm: Mapping[str, Any] | None = None,
    on_tick: Callable[[Run], None] = lambda run: None,
    *,
    failed: bool = False,
    merging: Mapping[str, Any] | None = None,
    force: bool = False,
    code: str | None = None,
    other_code: bool = False,
    functions: Packed | None = None,
    tell: Callable[[str], None] | None = None,
) -> Outcome:
    """Submit the missing items as `RunHandle.resubmit` does; the outcome's notes say what was adjusted.

    `slurm` and `merging` are sbatch options of the array job and the merge job; they override those of the last
    submission. Changes in the code are notes, too; if `tell` is given, it gets them before anything starts.
    `functions` take the place of those of a mapped run.
    """

    def prepare(lock: Lock) -> tuple[Submission, list[str]]:
        liveness.refuse_alive(run, "resubmit", force=force)
        liveness.forget_dead_tasks(run)  # whose silence the merge at the end would wait for once more
        number = max((line["submission"] for line in run.submissions()), default=0) + 1
        again = merge.failed_again(run, number) if failed else Recompute(number, {})
        n_missing = run.plan.n_shards - len(run.published(fresh=True))
        if not n_missing and not again.shards and not other_code:
            raise _nothing_to_compute(run, failed)
        if code:
            taken, changed = former.former_code(run, code)
        else:
            taken, changed = former.code_now(run, run.plan.container, functions)
        if other_code:
            again = former.with_rows_of_others(run, again, taken["digest"])
            if not n_missing and not again.shards:
                raise NothingToSubmitError(f"{run.folder} has every shard, and this code computed all rows.")
        submission, notes = resubmission.next_submission(run, resources, slurm, merging, n_again=len(again.shards))
        if container := submission.container or run.plan.container:
            container, changes = contain_again(
                container, Path(run.plan.provenance["run_file"]), run.plan.provenance.get("container", {})
            )
            check_image(container)
            submission = replace(submission, container=container)
            notes += changes
        executor_named(submission.executor).check(submission, container)
        submission = replace(submission, code=taken)
        if tell is None:
            notes += changed
        else:
            for note in changed:
                tell(note)
        run.claims.clear(lock.check)
        lock.check()
        remove(recompute_path(run.folder))  # left by a failed submission of the same number
        if again.shards:
            write_recompute(run.folder, again)
            merge.forget_deaths(run, list(again.shards))
            what = count_of(again.n_items, "item" if other_code else "failed item")
            verb, where = "is" if again.n_items == 1 else "are", count_of(len(again.shards), "shard")
            notes.append(f"{what} {verb} computed again, in {where}; all other rows stay as they are.")
        if failed and functions is None and (name := code_functions.function_by_value(run)) is not None:
            notes.append(
                f"They are computed with the function that the run keeps; an edited one takes Python: "
                f"{code_functions.with_another_function(run, name)}"
            )
        return submission, notes

    return submitting.start(run, prepare, lambda: on_tick(run))


def _packed(
    run: Run, function: Callable[..., Any] | None, load: Callable[..., Any] | None, code: str | None
) -> Packed | None:
    """The pickle of functions that a mapped run is to be computed with; None if none is given."""
    given = {role: each for role, each in (("function", function), ("load", load)) if each is not None}
    if not given:
        return None
    plan = run.plan
    if plan.workload != code_functions.MAPPED:
        raise SlurmGPUError(
            f"function= and load= are for runs of slurmgpu.map; {run.folder} computes {plan.workload}, whose code "
            f"is taken as it is now."
        )
    if code is not None:
        raise SlurmGPUError(
            f"code={code!r} has the functions of that code: leave out either it, or function= and load=."
        )
    loads = load is not None or plan.settings.get("load") is not None
    code_functions.check(function, load, loads=loads)
    return code_functions.pack(given, Path(plan.search_path), plan.settings.get("argv"))


def _nothing_to_compute(run: Run, failed: bool) -> SlurmGPUError:
    if not is_complete(run):
        return SlurmGPUError(
            f"{run.folder} has every shard, but merged.h5 lacks some of their rows. "
            f"`slurmgpu merge {run.typed}` merges them."
        )
    if failed:
        return NothingToSubmitError(f"{run.folder} has every shard, and no item failed: there is nothing to compute.")
    if run.plan.look:
        more = "it has some items of its input: for all of them submit again without --limit and --items"
    else:
        more = f"items that were added to its input take another run: submit again by --extend {run.typed}"
    return NothingToSubmitError(
        f"{run.folder} has every shard: there is nothing to compute. "
        f"`slurmgpu resubmit --failed {run.typed}` computes its failed items again; {more}, with another --run-dir."
    )


def wait_for(run: Run, on_tick: Callable[[Status], None] = lambda status: None) -> Report:
    """Wait until no task of the run is queued or alive, and return the report. Asks Slurm at most every 5 s."""
    reader = StatusReader(run)
    for _ in _while_alive(run):
        on_tick(reader.read(gpus_of=()))
    report = last_report(run)
    if report["submissions"][-1]["submission"] != run.last_submission()["submission"]:
        raise SlurmGPUError(
            f"The merge of {run.folder} did not finish. `slurmgpu logs {run.typed} --merge` may say why; "
            f"`slurmgpu merge {run.typed}` merges what there is."
        )
    return report


def follow_rows(run: Run) -> Iterator[RunRow]:
    """The rows of a run as `RunHandle.rows` gives them."""
    left = deque(run.plan.ranges)  # of the items without a row yet
    pause_s = ROWS_LOOK_S

    def wait() -> None:
        nonlocal pause_s
        refuse_if_importing("rows of a run that is at work")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LOOK_S)

    for _ in _while_alive(run, wait):
        shard = run.plan.shard_of(left[0][0])
        if not exists(run.revision_path(shard, 0)):
            continue
        with RunRows(run) as present:
            for row in present.rows(left[0][0]):
                start, stop = left[0]
                if row.index != start:
                    break  # its shard is not published yet
                yield row
                left.popleft()
                if start + 1 < stop:
                    left.appendleft((start + 1, stop))
                if not left:
                    return
        is_nearly_over = run.plan.n_shards - run.plan.shard_of(left[0][0]) <= FEW_SHARDS
        pause_s = LAST_LOOK_S if is_nearly_over else ROWS_LOOK_S
    n_missing = sum(stop - start for start, stop in left)
    with RunRows(run) as present:
        for row in present.rows(left[0][0]):
            n_missing -= 1
            yield row
    if n_missing:
        raise SlurmGPUError(incomplete(run, n_missing))


def incomplete(run: Run, n_missing: int | None = None) -> str:
    """A sentence on the rows that a run lacks after its end."""
    some = "rows" if n_missing is None else count_of(n_missing, "row")
    return (
        f"{run.folder} lacks {some} of its {run.plan.n_items:,}: `slurmgpu resubmit {run.typed}`, or resubmit() of its "
        f"handle, computes them. `slurmgpu report {run.typed}` says why."
    )


def _while_alive(run: Run, pause: Callable[[], None] = lambda: time.sleep(LOOK_S)) -> Iterator[None]:
    """A look after each pause, the last one after everything of the run has ended. Asks Slurm at most every 5 s."""
    asked, alive = 0.0, True
    while alive:
        yield
        if is_over(run.submissions()) or time.monotonic() - asked > 5:
            asked = time.monotonic()
            try:
                alive = liveness.alive(run) is not None
            except NoAnswerError as error:
                log.warning("%s", error)
        if alive:
            pause()
