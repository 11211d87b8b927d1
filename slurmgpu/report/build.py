"""The report: missing shards, attempts, failed items, and the command that computes the rest.

docs/reference/report.md lists the keys of report.json. Standard library only: `status` reads it on login nodes.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

from slurmgpu.code import snapshots
from slurmgpu.code.versions import RowsByCode, Stretch, rows_by_code
from slurmgpu.containers.settings import Identity
from slurmgpu.errors import SlurmGPUError
from slurmgpu.report.attempts import (
    Accounting,
    AttemptRow,
    Making,
    attempts_of,
    computed_with,
    makings_of,
    of_last_submission,
    rows_of,
    unrecorded,
)
from slurmgpu.report.ledger import Ledger, counting, ledger, spent
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import POLICIES
from slurmgpu.run.frozen_plan import Plan
from slurmgpu.run.mapped_function import function_by_value, with_another_function
from slurmgpu.run.private import public
from slurmgpu.run.records import Death, Record, Unread
from slurmgpu.run.submissions import Git, SubmissionLine, is_over, is_slurms
from slurmgpu.shards.merged_head import read_merged_head
from slurmgpu.util.redact import hidden
from slurmgpu.util.shared_files import PATIENCE_S, UnusableFileError, read_bytes
from slurmgpu.util.typed_json import check_objects

log = logging.getLogger(__name__)

REPORT_FORMAT = "slurmgpu report"
REPORT_VERSION = 1
MOST_BYTES = 1 << 30
"""More than the report of MOST_LISTED failed items and a million attempts."""
MOST_LISTED = 100_000
"""The most failed items that a report lists; merged.h5 has all. Listing 10 million took 20 GB of memory."""
N_WHOLE_MESSAGES = 10_000
MESSAGE_CHARACTERS = 240
"""The messages of further failed items are cut after this many characters; merged.h5 has them whole."""
MOST_FILES = 100
"""The most files of an input that a report lists; run.json has all."""


Errors = list[tuple[int, str]]
"""The place of each failed item in the plan, and its error."""


@dataclass(frozen=True)
class Joined:
    """The content of merged.h5 after a join.

    `shards` are in it. `damaged` are the shards left out, and why; `aside` are files with wrong bytes, and why.
    `n_failed` counts the failed items by failure class, and `errors` are the first MOST_LISTED. `not_finite` counts by
    column the rows with NaN and with infinities. `code` says which code computed which rows.
    """

    n_rows: int
    shards: frozenset[int]
    damaged: tuple[tuple[int, str], ...]
    aside: tuple[tuple[Path, str], ...]
    n_failed: Mapping[str, int]
    errors: Errors
    not_finite: dict[str, dict[str, int]]
    code: tuple[Stretch, ...]


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


def build_report(
    run: Run,
    *,
    joined: Joined | None,
    accounting: Accounting | None = None,
    summary: Mapping[str, Any] | None = None,
    may_live: bool = False,
) -> Report:
    """The report of a run; if tasks `may_live`, those without a recorded end have not failed.

    `joined` is the content of merged.h5, None without one. `accounting` is None if it could not be asked. `summary`
    is the workload's summary of all rows.
    """
    plan = run.plan
    records, left_out = run.read_attempts()
    published = run.published()
    records = _with_unrecorded(run, records, published)
    attempts = rows_of(run, records, left_out, accounting, may_live=may_live)
    _enter_spent(attempts, records, published)
    missing = _holes(run, joined)
    n_rows = 0 if joined is None else joined.n_rows
    complete = n_rows == plan.n_items
    n_failed: Mapping[str, int] = {} if joined is None else joined.n_failed
    errors = [] if joined is None else joined.errors
    items = [_failed_item(plan.indices(place, place + 1)[0], message) for place, message in errors]
    for item in items[N_WHOLE_MESSAGES:]:
        item["message"] = item["message"][:MESSAGE_CHARACTERS]
    return {
        "format": REPORT_FORMAT,
        "version": REPORT_VERSION,
        "run": run.name,
        "run_dir": str(run.folder),
        "written": time.time(),
        "fingerprint": plan.fingerprint,
        "complete": complete,
        "n_items": plan.n_items,
        "n_rows": n_rows,
        "n_errors": sum(n_failed.values()),
        "n_missing_items": plan.n_items - n_rows,
        "n_shards": plan.n_shards,
        "n_shards_done": plan.n_shards - len(missing),
        "merged": str(run.merged) if joined is not None else None,
        "summary": summary,
        "not_finite": None if joined is None else joined.not_finite,
        "missing": missing,
        "errors": items,
        "errors_by_class": dict(sorted(n_failed.items())),
        "attempts": attempts,
        "damaged_records": [name for name, why in left_out.items() if why is Unread.DAMAGED],
        "damaged_revisions": run.damaged_revisions(),
        "unreadable_records": [name for name, why in left_out.items() if why is Unread.UNREADABLE],
        "failures": dict(sorted(Counter(a["failure"] for a in attempts if a["failure"]).items())),
        "worker_deaths": dict(sorted(Counter(d["class"] for a in attempts for d in a["deaths"]).items())),
        "gpu_hours": round(sum(attempt["gpu_hours"] for attempt in attempts), 4),
        "ledger": ledger(attempts),
        "accounting": accounting is not None and any(map(is_slurms, attempts)),
        "submissions": list(map(public, run.submissions())),
        "resubmit": _resubmit(run, complete),
        "resubmit_failed": _resubmit_failed(run, sum(n_failed.values())),
        "image": _image(run),
        "computed_with": computed_with(records),
        "code": _code(run, () if joined is None else joined.code),
        "provenance": {**plan.provenance, **_planned(plan)},
    }


def _planned(plan: Plan) -> dict[str, Any]:
    """What the rows are of, for readers without run.json; of an input of many files the first MOST_FILES."""
    files = plan.named_files[:MOST_FILES]
    return {
        "workload": plan.workload,
        "settings": hidden(plan.settings),
        "input": {
            "format": plan.input["format"],
            "n_files": len(plan.input["files"]),
            "files": [{"path": hidden(each["path"]), "sha256": each["sha256"]} for each in files],
            "folders": hidden(plan.input["folders"][:MOST_FILES]),
        },
        "input_digest": plan.input_digest,
        "seed": plan.seed,
        "batch_size": plan.batch_size,
        "keep": plan.keep,
    }


def judged_attempts(run: Run) -> list[AttemptRow]:
    """Every attempt, with failure and message from the last report if it has them; see `attempts.verdict_of`."""
    told: dict[str, AttemptRow] = {}
    try:
        if (report := read_report(run)) is not None:
            told = {row["attempt"]: row for row in report["attempts"]}
    except SlurmGPUError as error:
        log.debug("%s", error)
    attempts = attempts_of(run, None, told, may_live=not is_over(run.submissions()))
    return [*attempts, *unrecorded(told, (attempt["attempt"] for attempt in attempts))]


def _with_unrecorded(run: Run, records: Sequence[Record], published: Set[int]) -> list[Record]:
    """The records, extended by shards that killed attempts published after their last record."""
    killed = {record["attempt"] for record in records if record["ended"] is None}
    recorded = {shard for record in records for shard, _, _, won, *_ in record["published"] if won}
    found: dict[str, list[Making]] = {}
    for making in makings_of(run, published - recorded) if killed else ():
        found.setdefault(making.attempt, []).append(making)
    return [_with(record, found.get(record["attempt"], ()) if record["ended"] is None else ()) for record in records]


def _with(record: Record, makings: Sequence[Making]) -> Record:
    published = [[making.shard, making.started, making.seconds, True] for making in makings]
    return {
        **record,
        "n_items": record["n_items"] + sum(making.n_items for making in makings),
        "n_errors": record["n_errors"] + sum(making.n_errors for making in makings),
        "published": [*record["published"], *published],
    }


def _enter_spent(attempts: Sequence[AttemptRow], records: Sequence[Record], published: Set[int]) -> None:
    counts, known = counting(records, published), {record["attempt"]: record for record in records}
    for row in attempts:
        if record := known.get(row["attempt"]):
            row["spent"] = spent(record, row["seconds"], row["failure"], counts)


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
    now["resubmit"] = _resubmit(run, report["complete"])
    now["resubmit_failed"] = _resubmit_failed(run, report["n_errors"])
    return now


def _resubmit(run: Run, is_complete: bool) -> str | None:
    return None if is_complete else f"slurmgpu resubmit {run.typed}"


def _resubmit_failed(run: Run, n_errors: int) -> str | None:
    if not n_errors:
        return None
    name = function_by_value(run)
    return f"slurmgpu resubmit {run.typed} --failed" if name is None else with_another_function(run, name)


def every_item_failed(report: Report) -> bool:
    """Whether a run is complete and every item failed."""
    return report["complete"] and report["n_errors"] == report["n_rows"] > 0


def is_complete(run: Run) -> bool:
    """Whether the merged file has a row for every item, and no submission will replace it."""
    head = read_merged_head(run.merged, PATIENCE_S)
    return (
        head is not None and head.complete and head.fingerprint == run.plan.fingerprint and is_over(run.submissions())
    )


def command_to_continue(run: Run) -> str:
    """The command to type once nothing of an incomplete run is alive: `merge` if every shard is published."""
    verb = "merge" if len(run.published(fresh=True)) == run.plan.n_shards else "resubmit"
    return f"slurmgpu {verb} {run.typed}"


def report_path(run: Run) -> Path:
    """The path of the report."""
    return run.folder / "report.json"


def _code(run: Run, stretches: Sequence[Stretch]) -> list[CodeRows]:
    lines = run.submissions()
    return [_version(run, lines, digest, n) for digest, n in rows_by_code(stretches).items()]


def _version(run: Run, lines: Sequence[SubmissionLine], digest: str | None, n_items: int) -> CodeRows:
    """Files, versions and submissions of a snapshot; without files if it cannot be read."""
    found = {line["submission"]: snapshots.code_of([line]) for line in lines}
    used = {number: code for number, code in found.items() if code is not None and code["digest"] == digest}
    last: Mapping[str, Any] = next(reversed(used.values()), {})
    files = None
    if digest is not None:
        try:
            files = {file.name: file.digest for file in snapshots.read(run.folder, digest, with_sources=False).files}
        except SlurmGPUError as error:
            log.warning("%s", error)
    return {
        "digest": digest,
        "submissions": list(used),
        "files": files,
        "python": last.get("python"),
        "distributions": last.get("distributions"),
        "image": last.get("image"),
        "git": last.get("git"),
        "left_out": last.get("left_out") or [],
        "items": n_items,
    }


def _image(run: Run) -> Image | None:
    container = run.plan.container
    return None if container is None else cast(Image, {"path": container["image"], **container["identity"]})


def _holes(run: Run, joined: Joined | None) -> list[Hole]:
    there = frozenset() if joined is None else joined.shards
    damaged = run.damaged() | dict(() if joined is None else joined.damaged)
    holes = sorted(set(range(run.plan.n_shards)) - there)
    spans = (run.plan.spans(*run.plan.bounds(shard)) for shard in holes)
    return [
        {"shard": shard, "start": its[0][0], "stop": its[-1][1], "damaged": damaged.get(shard)}
        for shard, its in zip(holes, spans, strict=True)
    ]


def count_failed(errors: Iterable[str]) -> Counter[str]:
    """How many of these errors are of each failure class."""
    return Counter(class_and_message(error)[0] for error in errors)


def _failed_item(index: int, error: str) -> FailedItem:
    kind, message = class_and_message(error)
    return {"index": index, "class": kind, "message": message, "name": None}


def class_and_message(error: str) -> tuple[str, str]:
    """The failure class and the message of an item's error."""
    kind, colon, rest = error.partition(": ")
    return (kind, rest) if colon and kind in POLICIES else ("item_error", error)
