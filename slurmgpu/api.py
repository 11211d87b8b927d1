"""What the command line does, for Python: `run = slurmgpu.submit("slurmgpu.toml", gpus=4, array=True)`."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from slurmgpu.code import former, snapshots
from slurmgpu.containers.registry import runtime_named
from slurmgpu.containers.settings import ContainerError
from slurmgpu.errors import NoAnswerError, SlurmGPUError
from slurmgpu.executors import liveness, resubmission
from slurmgpu.executors import probe as probes
from slurmgpu.executors import submission as submitting
from slurmgpu.executors.registry import executor_named, queued_jobs
from slurmgpu.executors.submission import Outcome
from slurmgpu.faults import check_faults, parse_faults
from slurmgpu.faults.verdicts import Verdict, judge
from slurmgpu.merge import merge
from slurmgpu.plan.container_spec import contain_again
from slurmgpu.plan.planner import Draft, draft_run
from slurmgpu.report.build import Report, is_complete, last_report
from slurmgpu.report.forecast import FORECAST_FORMAT, FORECAST_VERSION, forecast, observe
from slurmgpu.report.status import Status, StatusReader, read_status
from slurmgpu.run.directory import Run, create_run
from slurmgpu.run.lock import Lock
from slurmgpu.run.recompute import Recompute, recompute_path, write_recompute
from slurmgpu.run.submissions import Submission, is_over
from slurmgpu.util.shared_files import remove

log = logging.getLogger(__name__)

EXIT_COMPLETE, EXIT_FAILED, EXIT_BAD_USAGE, EXIT_INCOMPLETE = 0, 1, 2, 3

ENDING_S = 15.0
"""How long jobs that were cancelled are waited for, before their run directory is left where it is."""


@dataclass(frozen=True)
class RunHandle:
    """A submitted run. It holds nothing: `RunHandle(Run.open(folder))` is another one of the same run."""

    run: Run
    outcome: Outcome | None = None

    @property
    def folder(self) -> Path:
        """The run directory."""
        return self.run.folder

    def status(self) -> dict[str, Any]:
        """How the run stands: the keys of `slurmgpu status --json`."""
        return cast(dict[str, Any], read_status(self.run, queued_jobs(self.run)))

    def report(self) -> dict[str, Any]:
        """The report of the last merge; SlurmGPUError before the first."""
        return cast(dict[str, Any], last_report(self.run))

    def rehearsed(self) -> list[Verdict]:
        """What became of the faults that were injected into the run, up to its last merge; none without such."""
        return judge(self.run, last_report(self.run))

    def wait(self, on_tick: Callable[[dict[str, Any]], None] = lambda status: None) -> dict[str, Any]:
        """Wait until nothing of the run is queued or alive; the report."""
        return cast(dict[str, Any], wait_for(self.run, cast(Callable[[Status], None], on_tick)))

    def resubmit(
        self,
        *,
        failed: bool = False,
        force: bool = False,
        code: str | None = None,
        other_code: bool = False,
        **resources: Any,
    ) -> RunHandle:
        """Submit what is missing, with `failed` also failed items; the keys of [resources] change what it runs on.

        `code` is "former", or the digest of a snapshot; without it the user's modules are taken as they are now. With
        `other_code` the rows that other code has computed are computed again. It is refused while something of the run
        is, or may be, alive; with `force` it is not.
        """
        ways: dict[str, Any] = {"failed": failed, "force": force, "code": code, "other_code": other_code}
        return RunHandle(self.run, resubmit(self.run, resources, **ways))

    def cancel(self) -> str:
        """Stop what is alive of the run; what was done, in words."""
        return liveness.cancel(self.run)


def submit(
    run_file: str | Path = "slurmgpu.toml",
    *,
    run_dir: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    image: str | Path | None = None,
    after: str | Path | None = None,
    on_tick: Callable[[Run], None] = lambda run: None,
    inject: Sequence[str] = (),
    **resources: Any,
) -> RunHandle:
    """Plan the run file, make its run directory, and submit it.

    `resources` are the keys of [resources]: gpus, array, gpus_per_task and so on. With the local and the debug executor
    the run is over, merged and reported, when this returns. `inject` are faults on demand, such as "crash@17";
    `rehearsed()` of what is returned tells what became of them.
    """
    container = {} if image is None else {"image": str(Path(image).expanduser().absolute())}
    overrides = {"settings": dict(settings or {}), "resources": resources, "container": container}
    other = Run.open(Path(after)) if after is not None else None
    with draft_run(Path(run_file), overrides, Path(run_dir) if run_dir else None, after=other) as draft:
        return submit_draft(draft, other, on_tick, inject)


def probe(
    run_file: str | Path = "slurmgpu.toml",
    n_items: int = 1,
    *,
    run_dir: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    image: str | Path | None = None,
    on_tick: Callable[[Run], None] = lambda run: None,
    **resources: Any,
) -> dict[str, Any]:
    """What the run of a run file will take: computes `n_items` of it by one task, in RUN-probe, and queues no more.

    The arguments are those of `submit`. The keys are those of `slurmgpu submit --probe --json` but `submitted`;
    `failure` is None when the probe went well.
    """
    container = {} if image is None else {"image": str(Path(image).expanduser().absolute())}
    overrides = {"settings": dict(settings or {}), "resources": resources, "container": container}
    with draft_run(Path(run_file), overrides, Path(run_dir) if run_dir else None) as draft:
        return probe_draft(draft, n_items, on_tick)


def probe_draft(
    draft: Draft,
    n_items: int,
    on_tick: Callable[[Run], None] = lambda run: None,
    on_status: Callable[[Status], None] = lambda status: None,
) -> dict[str, Any]:
    """The forecast of a draft, which stays as it is; the keys of `slurmgpu submit --probe --json`.

    Whatever interrupts it cancels the probe.
    """
    small = probes.draft_probe(draft, n_items)
    first = submission_of(small)
    executor = executor_named(first.executor)
    executor.check(first, small.plan.container)
    probes.make_room(small.run_dir)
    submission, run = submission_of(draft), None
    try:
        handle = submit_draft(small, None, on_tick)
        run = handle.run
        report = handle.outcome.report if handle.outcome else None
        report = report or wait_for(run, on_status)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and small.run_dir.exists():
            run = Run.open(small.run_dir)  # it may be queued, and not told yet
        if run is not None and executor.queues:
            liveness.cancel(run)
        raise
    head = {"run_dir": str(draft.run_dir), "probe_dir": str(run.folder)}
    failed, seen = probes.why_failed(run, report), observe(run.attempts())
    if failed is not None or seen is None:
        failed = failed or probes.Failed("lost", "no record tells of its batches", str(run.logs))
        return {"format": FORECAST_FORMAT, "version": FORECAST_VERSION, **head, "failure": failed.to_json()}
    found = forecast(draft.plan, submission, seen, resumes=draft.resumes, queues=executor.queues)
    return {**found, **head, "failure": None, "errors": probes.failed_items(run, report)}


def plan_draft(draft: Draft) -> tuple[Run, list[str], list[str]]:
    """Make the run directory of a draft, and queue nothing; the two lines that submit it by hand, and notes on them."""
    from slurmgpu.executors.manual import Manual

    by_hand = Manual()
    submission, notes = by_hand.fit(submission_of(draft), draft.plan.container)
    run = create_run(draft.run_dir, draft.plan, draft.items.files)
    snapshots.write(run.folder, draft.code)
    return run, [*by_hand.start(run, submission).to_type], notes


def submit_draft(
    draft: Draft,
    after: Run | None = None,
    on_tick: Callable[[Run], None] = lambda run: None,
    inject: Sequence[str] = (),
) -> RunHandle:
    """Make the run directory of a draft, and submit it, with faults on demand."""
    submission = submission_of(draft, after, inject)
    executor_named(submission.executor).check(submission, draft.plan.container)
    run = create_run(draft.run_dir, draft.plan, draft.items.files)
    try:
        snapshots.write(run.folder, draft.code)
        notes = [*draft.code.left_out, *resubmission.fewer_tasks(submission, draft.plan.n_shards)]
        return RunHandle(run, submitting.start(run, lambda _: (submission, notes), lambda: on_tick(run)))
    except BaseException:
        remove_unused(run)
        raise


def submission_of(draft: Draft, after: Run | None = None, inject: Sequence[str] = ()) -> Submission:
    """The first submission of a draft."""
    submission = resubmission.first_submission(draft.plan.resources, draft.plan.n_shards)
    executor = executor_named(submission.executor)
    waits_for = () if after is None or is_complete(after) else executor.jobs_completing(after)
    faults = parse_faults(inject)
    executor.check_faults(faults)
    check_faults(faults, draft.plan)
    inject = tuple(map(str, faults))
    submission = replace(submission, slurm=draft.plan.slurm, merge=draft.plan.merge, after=waits_for, inject=inject)
    return replace(submission, code=draft.code.line())


def check_image(container: Mapping[str, Any]) -> None:
    """Refuse an image that is not the one that the run was planned with."""
    try:
        runtime_named(container["runtime"]).same_image(Path(container["image"]), container["identity"])
    except ContainerError as error:
        text = str(error)
        raise SlurmGPUError(f"{text[:1].upper()}{text[1:].rstrip('.')}.") from error


def remove_unused(run: Run) -> None:
    """Take the run directory away again when its first submission came to nothing, and nothing of it is queued."""
    lines = run.submissions()
    if lines and (len(lines) > 1 or lines[0]["state"] != "refused"):
        return
    # A task that had started before it was cancelled takes a moment to end.
    patience = time.monotonic() + ENDING_S
    while lines and executor_named(lines[0]["executor"]).look(run, lines, None).at_work:
        if time.monotonic() > patience:
            return
        time.sleep(0.5)
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
    tell: Callable[[str], None] | None = None,
) -> Outcome:
    """Submit what is missing, with `failed` also failed items; the notes say what was adjusted.

    With `force` also while something of the run may be alive.

    `slurm` and `merging` are options of sbatch's, for the array job and the merge job, over those of the last time.
    The user's modules are taken as they are now; `code` is "former" for the snapshot of the last submission, or the
    digest of another one. With `other_code` the rows that other code has computed are computed again. What has changed
    in the code is a note as well, or is told by `tell` before anything starts.
    """

    def prepare(lock: Lock) -> tuple[Submission, list[str]]:
        liveness.refuse_alive(run, "resubmit", force=force)
        number = max((line["submission"] for line in run.submissions()), default=0) + 1
        again = merge.failed_again(run, number) if failed else Recompute(number, {})
        n_missing = run.plan.n_shards - len(run.published(fresh=True))
        if not n_missing and not again.shards and not other_code:
            raise SlurmGPUError(_nothing_to_compute(run, failed))
        taken, changed = former.former_code(run, code) if code else former.code_now(run, run.plan.container)
        if other_code:
            again = former.with_rows_of_others(run, again, taken["digest"])
            if not n_missing and not again.shards:
                raise SlurmGPUError(f"{run.folder} lacks no shard, and all its rows are by this code.")
        submission, notes = resubmission.next_submission(run, resources, slurm, merging, n_again=len(again.shards))
        if container := submission.container or run.plan.container:
            container, changes = contain_again(container, Path(run.plan.provenance["run_file"]))
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
        remove(recompute_path(run.folder))  # of a submission that came to nothing, and had this number
        if again.shards:
            write_recompute(run.folder, again)
            merge.forget_deaths(run, list(again.shards))
            n_shards = len(again.shards)
            kind = "item" if other_code else "failed item"
            what = f"1 {kind} is" if again.n_items == 1 else f"{again.n_items:,} {kind}s are"
            where = "1 shard" if n_shards == 1 else f"{n_shards:,} shards"
            notes.append(f"{what} computed again, in {where}; all other rows stay as they are.")
        return submission, notes

    return submitting.start(run, prepare, lambda: on_tick(run))


def _nothing_to_compute(run: Run, failed: bool) -> str:
    if not is_complete(run):
        return (
            f"{run.folder} lacks no shard, but merged.h5 does not have all of their rows. "
            f"`slurmgpu merge {run.typed}` joins them."
        )
    said = f"{run.folder} lacks no shard{', and no item has failed' if failed else ''}: there is nothing to compute."
    return said if failed else f"{said} `slurmgpu resubmit --failed {run.typed}` computes its failed items again."


def wait_for(run: Run, on_tick: Callable[[Status], None] = lambda status: None) -> Report:
    """Wait until nothing of the run is queued or alive; the report. Asks Slurm every five seconds at most."""
    reader, asked, alive = StatusReader(run), 0.0, True
    while alive:
        on_tick(reader.read(gpus_of=()))
        if is_over(run.submissions()) or time.monotonic() - asked > 5:
            asked = time.monotonic()
            try:
                alive = liveness.alive(run) is not None
            except NoAnswerError as error:
                log.warning("%s", error)
        if alive:
            time.sleep(0.2)
    report = last_report(run)
    if report["submissions"][-1]["submission"] != run.last_submission()["submission"]:
        raise SlurmGPUError(
            f"The merge of {run.folder} did not come to its end. `slurmgpu logs {run.typed}` may say why; "
            f"`slurmgpu merge {run.typed}` merges what there is."
        )
    return report
