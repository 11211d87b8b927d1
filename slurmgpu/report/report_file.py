"""report.json: its keys, how it is read, and what it says of a run.

docs/reference/report.md lists the keys. Standard library only: `status` reads it on login nodes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

from slurmgpu.code.versions import RowsByCode
from slurmgpu.containers.settings import Identity
from slurmgpu.errors import SlurmGPUError
from slurmgpu.report.attempts import AttemptRow, attempts_of, of_last_submission
from slurmgpu.report.ledger import Ledger
from slurmgpu.report.outcomes import unrecorded
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import POLICIES
from slurmgpu.run.mapped_function import function_by_value, with_another_function
from slurmgpu.run.records import Death
from slurmgpu.run.submissions import Git, SubmissionLine, is_over
from slurmgpu.util.regular_files import UnusableFileError
from slurmgpu.util.shared_files import read_bytes
from slurmgpu.util.typed_json import check_objects

log = logging.getLogger(__name__)

REPORT_FORMAT = "slurmgpu report"
REPORT_VERSION = 1
MOST_BYTES = 1 << 30
"""More than the report of MOST_LISTED failed items and a million attempts."""


class Hole(TypedDict):
    """A shard that merged.h5 lacks; `damaged` says what was wrong if a merge set it aside.

    Its items are `start` to `stop` - 1 of the input; a run of some items may not have all of these.
    """

    shard: int
    start: int
    stop: int
    damaged: str | None


_FailedItem = TypedDict("_FailedItem", {"index": int, "class": str, "message": str})


class FailedItem(_FailedItem, total=False):
    """An item whose row is an error."""

    name: str | None


class Image(Identity):
    """The image of a run."""

    path: str


class CodeRows(RowsByCode):
    """A version of the code and the number of its rows; the rest is None for code that no submission names."""

    submissions: list[int]
    files: dict[str, str] | None
    python: str | None
    distributions: dict[str, str] | None
    image: str | None
    git: Git | None
    left_out: list[str]


class Report(TypedDict):
    """The content of report.json."""

    format: str
    version: int
    run: str
    run_dir: str
    written: float
    fingerprint: str
    complete: bool
    n_items: int
    n_rows: int
    n_errors: int
    n_missing_items: int
    n_shards: int
    n_shards_done: int
    merged: str | None
    summary: Mapping[str, Any] | None
    not_finite: dict[str, dict[str, int]] | None
    missing: list[Hole]
    errors: list[FailedItem]
    errors_by_class: dict[str, int]
    attempts: list[AttemptRow]
    damaged_records: list[str]
    damaged_revisions: dict[str, str]
    unreadable_records: list[str]
    failures: dict[str, int]
    worker_deaths: dict[str, int]
    gpu_hours: float
    ledger: Ledger
    accounting: bool
    submissions: list[SubmissionLine]
    resubmit: str | None
    resubmit_failed: str | None
    image: Image | None
    computed_with: dict[str, dict[str, int]]
    code: list[CodeRows]
    provenance: Mapping[str, Any]


def report_path(run: Run) -> Path:
    """The path of the report."""
    return run.folder / "report.json"


def read_report(run: Run) -> Report | None:
    """The report of the last merge, None before the first. SlurmGPUError if it is damaged."""
    path, merge = report_path(run), f"slurmgpu merge {run.typed}"
    try:
        return _checked(json.loads(read_bytes(path, max_bytes=MOST_BYTES)))
    except FileNotFoundError:
        return None
    except UnusableFileError as error:
        raise SlurmGPUError(
            f"{path} cannot be read: {error.strerror}. Remove it; `{merge}` writes it again."
        ) from error
    except (ValueError, RecursionError) as error:
        raise SlurmGPUError(f"{path} is damaged: {error}. `{merge}` writes it again.") from error


def _checked(report: Any) -> Report:
    """The report if it is valid, else ValueError."""
    if not isinstance(report, dict) or report.get("format") != REPORT_FORMAT:
        raise ValueError("it is not a report")
    if report.get("version") != REPORT_VERSION:
        raise ValueError(f"its version is {report.get('version')!r:.80}; this slurmgpu reads {REPORT_VERSION}")
    check_objects("", [report], Report)
    return cast(Report, report)


def last_report(run: Run, known: Report | None = None) -> Report:
    """The report of the last merge with the run's present paths. SlurmGPUError before the first merge.

    `known` is what `read_report` has just given.
    """
    report = known or read_report(run)
    if report is None:
        raise SlurmGPUError(
            f"{run.folder} has no report yet, because no merge has finished. While the run is running, `slurmgpu "
            f"status --watch {run.typed}` shows its progress. If it is over, `slurmgpu merge {run.typed}` merges what "
            f"is published and writes the report and the page, and `slurmgpu logs {run.typed}` lists what jobs wrote."
        )
    merged = None if report["merged"] is None else str(run.merged)
    now: Report = {**report, "run": run.name, "run_dir": str(run.folder), "merged": merged}
    now["resubmit"] = command_to_resubmit(run, report["complete"])
    now["resubmit_failed"] = command_to_resubmit_failed(run, report["n_errors"])
    return now


def command_to_resubmit(run: Run, is_complete: bool) -> str | None:
    """The command that computes what is missing; None if nothing is."""
    return None if is_complete else f"slurmgpu resubmit {run.typed}"


def command_to_resubmit_failed(run: Run, n_errors: int) -> str | None:
    """The command that computes failed items again; None if no item failed."""
    if not n_errors:
        return None
    name = function_by_value(run)
    return f"slurmgpu resubmit {run.typed} --failed" if name is None else with_another_function(run, name)


def only_input_failed(report: Report) -> bool:
    """Whether nothing is missing, and the input is at fault for every failed item: the same input fails again."""
    return report["complete"] and [*report["errors_by_class"]] == ["input_error"]


def judged_attempts(run: Run) -> list[AttemptRow]:
    """Every attempt, with failure and message from the last report if it has them; see `outcomes.verdict_of`."""
    told: dict[str, AttemptRow] = {}
    try:
        if (report := read_report(run)) is not None:
            told = {row["attempt"]: row for row in report["attempts"]}
    except SlurmGPUError as error:
        log.debug("%s", error)
    attempts = attempts_of(run, None, told, may_live=not is_over(run.submissions()))
    return [*attempts, *unrecorded(told, (attempt["attempt"] for attempt in attempts))]


def retriable(report: Report) -> bool:
    """Whether another submission may compute the rest: the last one had only retriable failures."""
    # A merge job that is requeued after Slurm refused its resubmission tries that again.
    taken = [line for line in report["submissions"] if line["state"] != "refused"]
    attempts = of_last_submission(report["attempts"], taken) if taken else []
    # Without any attempt, the user cancelled the whole array in the queue.
    # A failure that is the fault of one node may succeed on another.
    return bool(attempts) and all(POLICIES[a["failure"]].retriable or a["bad_node"] for a in attempts if a["failure"])


def last_death(deaths: Sequence[Death]) -> str | None:
    """The failure class of an attempt's last worker death; None without one."""
    return deaths[-1]["class"] if deaths else None


def faults_of(report: Report) -> str:
    """The injected faults; empty if the run is no rehearsal."""
    return ", ".join(dict.fromkeys(str(each) for line in report["submissions"] for each in line.get("inject") or ()))


def bad_nodes(attempts: Iterable[AttemptRow]) -> list[str]:
    """The nodes at fault for failures."""
    return sorted({a["bad_node"] for a in attempts if a["bad_node"]})


def every_item_failed(report: Report) -> bool:
    """Whether a run is complete and every item failed."""
    return report["complete"] and report["n_errors"] == report["n_rows"] > 0
