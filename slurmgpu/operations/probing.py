"""Computes some items of a draft, for an estimate or a look at them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from slurmgpu.executors import liveness
from slurmgpu.executors import probe as probes
from slurmgpu.executors.registry import executor_named
from slurmgpu.executors.replacement import room
from slurmgpu.operations.submitting import submission_of, submit_draft
from slurmgpu.operations.waiting import wait_for
from slurmgpu.plan.planner import Draft
from slurmgpu.progress import following
from slurmgpu.report.build import Report
from slurmgpu.report.forecast import FORECAST_FORMAT, FORECAST_VERSION, forecast, observe
from slurmgpu.report.status import Status
from slurmgpu.run.directory import Run
from slurmgpu.util.early_signals import INTERRUPTS


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
            submitted = submit_draft(small, None, on_tick)
            stack.close()
            run = submitted.run
            report = submitted.outcome.report if submitted.outcome else None
            if report is None:
                with following(run, None) if on_status is None else contextlib.nullcontext(on_status) as tick:
                    report = wait_for(run, tick)
            return run, report
        except BaseException as error:
            if isinstance(error, INTERRUPTS) and small.run_dir.exists():
                run = Run.open(small.run_dir)  # it may be queued although no tick has reported it
            if run is not None and executor.queues:
                liveness.cancel(run)
            raise
