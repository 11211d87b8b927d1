"""Build the report: missing shards, attempts, failed items, and the command that computes the rest."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from slurmgpu.code import snapshots
from slurmgpu.code.versions import Stretch, rows_by_code
from slurmgpu.errors import SlurmGPUError
from slurmgpu.report.attempts import AttemptRow, rows_of
from slurmgpu.report.ledger import counting, ledger, spent
from slurmgpu.report.makings import Making, makings_of
from slurmgpu.report.outcomes import Accounting
from slurmgpu.report.report_file import (
    REPORT_FORMAT,
    REPORT_VERSION,
    CodeRows,
    FailedItem,
    Hole,
    Image,
    Report,
    command_to_resubmit,
    command_to_resubmit_failed,
)
from slurmgpu.report.versions import computed_with
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import class_and_message
from slurmgpu.run.frozen_plan import Plan
from slurmgpu.run.private import public
from slurmgpu.run.records import Record, Unread
from slurmgpu.run.submissions import SubmissionLine, is_slurms
from slurmgpu.run.telemetry_log import energy_of
from slurmgpu.util.redact import hidden
from slurmgpu.util.shared_files import list_entries

log = logging.getLogger(__name__)

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
    _enter_energy(run, attempts)
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
        "resubmit": command_to_resubmit(run, complete),
        "resubmit_failed": command_to_resubmit_failed(run, sum(n_failed.values())),
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


def _enter_energy(run: Run, attempts: Sequence[AttemptRow]) -> None:
    """Add what the GPUs of an attempt's other nodes used, which only the files of their samples tell."""
    if all(row["n_nodes"] == 1 for row in attempts):
        return
    others: dict[str, list[float]] = {}
    for entry in list_entries(run.folder / "telemetry"):
        attempt, is_other, _ = entry.name.partition(".node")
        if is_other and (energy_j := energy_of(Path(entry.path))) is not None:
            others.setdefault(attempt, []).append(energy_j)
    for row in attempts:
        if own := others.get(row["attempt"]):
            known = row["usage"].get("energy_j") or 0.0
            row["usage"] = {**row["usage"], "energy_j": round(known + sum(own), 1)}


def _code(run: Run, stretches: Sequence[Stretch]) -> list[CodeRows]:
    lines = run.submissions()
    return [_version(run, lines, digest, n) for digest, n in rows_by_code(stretches).items()]


def _version(run: Run, lines: Sequence[SubmissionLine], digest: str | None, n_items: int) -> CodeRows:
    """Files, versions and submissions of a snapshot; without files if it cannot be read."""
    found = {line["submission"]: snapshots.code_of([line]) for line in lines}
    used = {number: code for number, code in found.items() if code is not None and code["digest"] == digest}
    last: Mapping[str, Any] = next(reversed(used.values()), {})
    files = None
    if digest is not None and (used or not run.plan.extends):  # else it is in the run that this one extends
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
