"""Probes: compute some whole batches of a draft's items with one task, in a separate run next to the run."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import live_tasks
from slurmgpu.executors.registry import executor_named
from slurmgpu.operations.replacement import room
from slurmgpu.operations.submit import submission_of, submit_draft
from slurmgpu.operations.wait import wait_for
from slurmgpu.plan.allocation import allocate
from slurmgpu.plan.planner import Draft
from slurmgpu.plan.run_file import parse_resources
from slurmgpu.progress import following
from slurmgpu.report.forecast import FORECAST_FORMAT, FORECAST_VERSION, forecast, observe
from slurmgpu.report.report_file import Report
from slurmgpu.report.status import Status
from slurmgpu.run.directory import Run
from slurmgpu.run.frozen_plan import PROMISED
from slurmgpu.util.amounts import count_of
from slurmgpu.util.early_signals import INTERRUPTS

SUFFIX = "-probe"
SHOWN_ERRORS = 3


@dataclass(frozen=True)
class Failed:
    """Why a probe failed: the failure class, its message, and the log's path."""

    failure: str
    message: str
    log: str

    def to_json(self) -> dict[str, str]:
        """The keys of `failure` in the JSON of a probe."""
        return {"class": self.failure, "message": self.message, "log": self.log}


def probe_dir(run_dir: Path) -> Path:
    """The directory of a run's probe."""
    return run_dir.with_name(f"{run_dir.name}{SUFFIX}")


def probe_draft(
    draft: Draft,
    small: Draft,
    on_tick: Callable[[Run], None] = lambda run: None,
    on_status: Callable[[Status], None] = lambda status: None,
) -> dict[str, Any]:
    """Compute `small`, the probe of a draft; return the keys of `slurmgpu submit --probe --json`.

    An exception cancels the probe.
    """
    submission = submission_of(draft)
    run, report = compute_probe(small, on_tick, on_status)
    head = {"run_dir": str(draft.run_dir), "probe_dir": str(run.folder)}
    failed, seen = why_failed(run, report), observe(run.attempts())
    if failed is not None or seen is None:
        failed = failed or Failed("lost", "no task recorded its batches", str(run.logs))
        return {"format": FORECAST_FORMAT, "version": FORECAST_VERSION, **head, "failure": failed.to_json()}
    found = forecast(
        draft.plan, submission, seen, resumes=draft.resumes, queues=executor_named(submission.executor).queues
    )
    return {**found, **head, "failure": None, "errors": report["errors"][:SHOWN_ERRORS]}


def compute_probe(
    small: Draft,
    on_tick: Callable[[Run], None] = lambda run: None,
    on_status: Callable[[Status], None] | None = None,
) -> tuple[Run, Report]:
    """Compute a small draft, which replaces an earlier one next to the run; return its run and its report.

    Without `on_status` the progress is shown as `RunHandle.wait` shows it. An exception cancels the run.
    """
    submission = submission_of(small)
    executor = executor_named(submission.executor)
    executor.check(submission, small.plan.container)
    with contextlib.ExitStack() as stack:
        stack.enter_context(room(small.run_dir, "probe"))
        run = None
        try:
            submitted = submit_draft(small, on_tick=on_tick)
            stack.close()
            run = submitted.run
            report = submitted.outcome.report if submitted.outcome else None
            if report is None:
                with following(run, None) if on_status is None else contextlib.nullcontext(on_status) as tick:
                    report = wait_for(run, tick)
            return run, report
        except BaseException as error:
            if isinstance(error, INTERRUPTS) and small.run_dir.exists():
                run = Run.open(small.run_dir)  # it may be queued although no status has been reported yet
            if run is not None and executor.queues:
                live_tasks.cancel(run)
            raise


def draft_probe(draft: Draft, n_items: int) -> Draft:
    """The draft of a probe of `n_items`, rounded up to whole batches, evenly spread over the run's input."""
    plan, spec = draft.plan, draft.items.spec
    if n_items < 1:
        raise SlurmGPUError(f"--probe {n_items}: expected the number of items to compute first, at least 1.")
    if draft.extension is not None:
        raise SlurmGPUError(
            "--probe estimates a whole run, but --extend computes only added items. Leave one of them out."
        )
    if n_items >= plan.n_items:
        n_batches = (plan.n_items - 1) // plan.batch_size  # whole batches that are fewer than all items
        fewer = f"Probe fewer of them, such as --probe {max(1, n_batches // 2) * plan.batch_size}, or submit"
        raise SlurmGPUError(
            f"--probe {n_items}: the run has only {count_of(plan.n_items, 'item')}, and would recompute the probe's "
            f"items. {fewer if n_batches else 'Submit'} without --probe."
        )
    if promised := [file.path for file in spec.files if file.size_bytes == PROMISED]:
        raise SlurmGPUError(
            f"{promised[0]} does not exist yet, so none of its items can be probed. "
            f"Wait for the run that makes it, or submit without --probe."
        )
    return draft_part(draft, spread(plan.n_items, plan.batch_size, n_items))


def draft_part(draft: Draft, ranges: Sequence[tuple[int, int]]) -> Draft:
    """The draft of a run with one task, next to the run, over some ranges of its items."""
    plan, target = draft.plan, probe_dir(draft.run_dir)
    taken = draft.items.spec.taking(ranges)
    copies = draft.items.files[0].parent / "probe"
    copies.mkdir(exist_ok=True)
    # copy2 keeps the modification time, by which tasks recognise an input that slurmgpu made.
    files = [_copied(file, copies / file.name) for file in draft.items.files]
    n_gpus = allocate(draft.resources, n_shards=None).gpus_per_task
    resources = {**plan.resources, "gpus": n_gpus, "array": False, "tasks": 1}
    resources |= {"gpus_per_task": None, "tasks_per_node": None}
    small = replace(
        plan,
        name=target.name,
        input=taken.to_json(),
        n_items=taken.n_items,
        shard_items=plan.batch_size,  # so that the time of each batch is known
        auto_resubmit=0,
        resources=resources,
        slurm=_without_mail(plan.slurm),
        merge=_without_mail(plan.merge),
        summarizes=False,
        on_end=None,
        html=False,
        track=(),
        look="probe",
    )
    return replace(
        draft,
        plan=small,
        run_dir=target,
        items=replace(draft.items, spec=taken, files=files),
        resources=parse_resources(resources),
    )


def _copied(source: Path, target: Path) -> Path:
    """A copy of a file, or of the folder of a repacked input."""
    return Path(shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target))


def spread(n_items: int, batch_size: int, n_wanted: int) -> list[tuple[int, int]]:
    """Ranges of whole batches of an input, evenly spread, with at least `n_wanted` items; all items if it has fewer."""
    n_whole, n_batches = n_items // batch_size, -(-n_wanted // batch_size)
    if n_batches > n_whole:
        return [(0, n_items)]
    ranges: list[tuple[int, int]] = []
    for number in range(n_batches):
        start = (2 * number + 1) * n_whole // (2 * n_batches) * batch_size  # the middle of its part of the input
        first = ranges.pop()[0] if ranges and ranges[-1][1] == start else start
        ranges.append((first, start + batch_size))
    return ranges


def why_failed(run: Run, report: Report) -> Failed | None:
    """Why the probe gives no forecast (it is incomplete, or all of its items failed); None if it gives one."""
    if report["complete"] and report["n_errors"] < report["n_items"]:
        return None
    logs = [run.logs / f"{attempt['attempt']}.log" for attempt in report["attempts"]]
    failed = [attempt for attempt in report["attempts"] if attempt["failure"]]
    if not report["complete"] and failed:
        last = failed[-1]
        return Failed(str(last["failure"]), last["message"], str(run.logs / f"{last['attempt']}.log"))
    log, errors = str(logs[0] if logs else run.logs), report["errors"]
    if not errors:
        return Failed("lost", "it lacks items, and no task recorded a failure", log)
    first = errors[0]
    message = f"all of its items failed. The first is item {first['index']} of the input: {first['message']}"
    return Failed(errors[0]["class"], message, log)


def _without_mail(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if not key.startswith("mail")}
