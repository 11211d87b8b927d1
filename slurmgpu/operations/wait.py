"""Wait for a run, and yield its rows as they are published."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator

from slurmgpu.code.import_guard import refuse_if_importing
from slurmgpu.errors import NoAnswerError, SlurmGPUError
from slurmgpu.executors import live_tasks
from slurmgpu.executors.registry import queued_jobs
from slurmgpu.report.report_file import Report, last_report, read_report
from slurmgpu.report.states import made_since
from slurmgpu.report.status import Status, StatusReader
from slurmgpu.results.published import Row as RunRow
from slurmgpu.results.published import RunRows
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import is_over
from slurmgpu.util.amounts import count_of
from slurmgpu.util.pauses import rest_s
from slurmgpu.util.shared_files import exists

log = logging.getLogger(__name__)

LOOK_S, QUEUE_S = 0.2, 30.0
"""The least pause between two looks at a run, and that between two requests of Slurm's queue for its status."""
ROWS_LOOK_S, LAST_LOOK_S, FEW_SHARDS = 0.1, 0.02, 8
"""The first pause after new rows, at least: in general, and when at most FEW_SHARDS shards are left."""


def wait_for(run: Run, on_tick: Callable[[Status], None] = lambda status: None) -> Report:
    """Wait until no task of the run is queued or alive, and return the report. Asks Slurm at most every 5 s.

    `on_tick` gets each status; its queue is at most QUEUE_S old.
    """
    reader, queued, asked, took_s = StatusReader(run), None, -QUEUE_S, 0.0

    def pause() -> None:
        time.sleep(rest_s(took_s, LOOK_S))

    for _ in _while_alive(run, pause):
        if time.monotonic() - asked >= QUEUE_S:
            queued, asked = queued_jobs(run, queued), time.monotonic()
        begun = time.monotonic()
        status = reader.read(queued, gpus_of=())
        took_s = time.monotonic() - begun
        on_tick(status)
    report, lines = read_report(run), run.submissions()
    if made_since(lines, report["submissions"] if report else ()) is not None:
        raise SlurmGPUError(
            f"The merge of {run.folder} did not finish. `slurmgpu logs {run.typed} --merge` may say why; "
            f"`slurmgpu merge {run.typed}` merges what is published."
        )
    return last_report(run, report)


def follow_rows(run: Run) -> Iterator[RunRow]:
    """The rows of a run as `RunHandle.rows` gives them."""
    left = deque(run.plan.ranges)  # of the items without a row yet
    pause_s = ROWS_LOOK_S

    def wait() -> None:
        nonlocal pause_s
        refuse_if_importing("rows of a running run")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LOOK_S)

    for _ in _while_alive(run, wait):
        shard = run.plan.shard_of(left[0][0])
        if not exists(run.revision_path(shard, 0)):
            continue
        begun = time.monotonic()
        with RunRows(run) as present:
            took_s = time.monotonic() - begun
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
        pause_s = rest_s(took_s, LAST_LOOK_S if is_nearly_over else ROWS_LOOK_S)
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
    said = (
        f"{run.folder} lacks {some} of its {run.plan.n_items:,}. To compute them: `slurmgpu resubmit {run.typed}`, or "
        f"resubmit() of its handle."
    )
    if (report := read_report(run)) is None:
        return f"{said} `slurmgpu merge {run.typed}` writes a report that says why."
    last = run.last_submission()["submission"]
    failed = [a for a in report["attempts"] if a["failure"] and a["submission"] == last]
    if not failed:
        return f"{said} `slurmgpu report {run.typed}` says why."
    message = (failed[-1]["message"].splitlines() or [""])[0].rstrip(".")
    cause = f"{failed[-1]['attempt']} failed with {failed[-1]['failure']}: {message}."
    return f"{said} {cause} `slurmgpu report {run.typed}` says more."


def _while_alive(run: Run, pause: Callable[[], None]) -> Iterator[None]:
    """Yield once per look, with a pause after each, until the run has ended. Asks Slurm at most every 5 s."""
    asked, alive, said = 0.0, True, ""
    while alive:
        yield
        if is_over(run.submissions()) or time.monotonic() - asked > 5:
            asked = time.monotonic()
            try:
                alive, said = live_tasks.alive(run) is not None, ""
            except NoAnswerError as error:
                if str(error) != said:
                    log.warning("%s", said := str(error))
        if alive:
            pause()
