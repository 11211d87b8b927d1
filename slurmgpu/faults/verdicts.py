"""Verdicts on injected faults: compare the report, records and shards with what is promised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from slurmgpu.faults import KINDS, Fault, parse_faults
from slurmgpu.faults.injection import Mark, Marks
from slurmgpu.report.attempts import AttemptRow
from slurmgpu.report.makings import makings_of
from slurmgpu.report.report_file import Report
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import ITEM, policy_of
from slurmgpu.shards.shard_file import Directory, read_directory, verify_shard
from slurmgpu.shards.userblock import DamagedShardError
from slurmgpu.util.amounts import count_of

ITS_ROW_SAYS = "its row says"


@dataclass(frozen=True)
class Verdict:
    """A line about one fault, or about all other items; `kept` says whether all results so far are as promised."""

    text: str
    kept: bool = True


class BrokenPromiseError(Exception):
    """A finding that differs from what is promised."""


def judge(run: Run, report: Report) -> list[Verdict]:
    """A verdict on each fault that was injected into a run, as of its last merge, and one on all other items.

    Empty for a run without faults.
    """
    faults = parse_faults(text for line in report["submissions"] for text in line.get("inject") or ())
    if not faults:
        return []
    found = _Found(run, report, faults)
    return [*(_verdict(found, fault) for fault in faults), _of_the_others(found)]


def _verdict(found: _Found, fault: Fault) -> Verdict:
    try:
        if not found.marks(fault):
            return _unseen(found, fault)
        return Verdict(f"{fault}: {_TELL[fault.kind](found, fault)}")
    except BrokenPromiseError as error:
        return Verdict(f"{fault}: not as promised: {error}", kept=False)


def _unseen(found: _Found, fault: Fault) -> Verdict:
    """The verdict on a fault that has not struck."""
    if not found.report["complete"]:
        return Verdict(f"{fault}: it has not happened so far")
    if KINDS[fault.kind].takes == "item" and found.is_lifted(fault):
        return Verdict(f"{fault}: it did not happen before {found.maker_of(fault)} computed the item")
    reasons = {
        "item": "the workload was never called with this item in such a batch, or reports no progress",
        "shard": "no attempt with this fault published the shard",
    }
    why = reasons.get(KINDS[fault.kind].takes or "", "no task called its workload")
    return Verdict(f"{fault}: it did not happen: {why}", kept=False)


class _Found:
    def __init__(self, run: Run, report: Report, faults: tuple[Fault, ...]) -> None:
        self.run, self.report, self.faults = run, report, faults
        self.errors = {item["index"]: item for item in report["errors"]}
        self.n_unlisted = report["n_errors"] - len(self.errors)
        self.missing = {hole["shard"]: hole for hole in report["missing"]}
        self.attempts = {attempt["attempt"]: attempt for attempt in report["attempts"]}

    @cached_property
    def injected(self) -> dict[int, set[str]]:
        """The faults of each submission."""
        return {line["submission"]: set(line.get("inject") or ()) for line in self.report["submissions"]}

    def marks(self, fault: Fault) -> list[Mark]:
        """When and where the fault struck."""
        return Marks.of(self.run).read(fault)

    def shard(self, fault: Fault) -> int:
        """The shard of the fault."""
        assert fault.at is not None
        return fault.at if KINDS[fault.kind].takes == "shard" else self.run.plan.shard_of(fault.at)

    def directory(self, shard: int) -> Directory:
        """The header of a published shard."""
        try:
            return read_directory(self.run.shard_path(shard))
        except (OSError, DamagedShardError) as error:
            raise BrokenPromiseError(f"shard {shard} cannot be read: {error}") from error

    def maker(self, shard: int, item: int | None = None) -> str:
        """The attempt that published a shard, or the row of an item in it."""
        for making in makings_of(self.run, [shard], None if item is None else self.run.plan.place(item)):
            return making.attempt
        return str(self.directory(shard).made_by["attempt"])

    def maker_of(self, fault: Fault) -> str:
        """The attempt that computed the row of the fault's item, or published the fault's shard."""
        return self.maker(self.shard(fault), None if KINDS[fault.kind].takes == "shard" else fault.at)

    def is_lifted(self, fault: Fault) -> bool:
        """Whether a later submission, without the fault, computed the shard."""
        attempt = self.attempts.get(self.maker_of(fault))
        submission = attempt["submission"] if attempt else None
        return str(fault) not in self.injected.get(submission or 0, set())

    def deaths(self, fault: Fault) -> int:
        """How many workers died in the fault's shard."""
        deaths = (death for attempt in self.attempts.values() for death in attempt["deaths"])
        return sum(death.get("shard") == self.shard(fault) for death in deaths)

    def struck(self, fault: Fault) -> AttemptRow:
        """The attempt in which the fault struck first."""
        name = self.marks(fault)[0]["attempt"]
        if name not in self.attempts:
            raise BrokenPromiseError(f"it happened in {name}, which is not in the report")
        return self.attempts[name]


def _row(found: _Found, fault: Fault) -> str:
    """The message in the item's row; BrokenPromiseError if its failure class is not the fault's."""
    if found.shard(fault) in found.missing:
        return f"item {fault.at} has no row yet"
    if found.is_lifted(fault) and fault.at not in found.errors:
        return f"item {fault.at} has its row from {found.maker_of(fault)}, which ran without this fault"
    expected, error = KINDS[fault.kind].row, found.errors.get(fault.at or 0)
    if error is None and expected:
        if found.n_unlisted and (fault.at or 0) > max(found.errors):
            return f"item {fault.at} comes after the last failed item that the report lists"
        raise BrokenPromiseError(f"item {fault.at} has its row; expected {expected}")
    if error is not None and error["class"] != expected:
        instead = expected or "its row"
        raise BrokenPromiseError(
            f"item {fault.at} has failed ({error['class']}: {error['message']}); expected {instead}"
        )
    if error is None:
        return f"item {fault.at} has its row"
    first_line = error["message"].partition("\n")[0]
    return f"{ITS_ROW_SAYS} {error['class']}: {first_line}"


def _tell_crash(found: _Found, fault: Fault) -> str:
    n_marks, n_deaths, row = len(found.marks(fault)), found.deaths(fault), _row(found, fault)
    said = f"item {fault.at} killed {count_of(n_marks, 'worker')}"
    if n_deaths < n_marks:
        raise BrokenPromiseError(f"{said}, but the records show {n_deaths}")
    return f"{said}; it is quarantined, and {row}" if row.startswith(ITS_ROW_SAYS) else f"{said}; {row}"


def _tell_kill(found: _Found, fault: Fault) -> str:
    row = _row(found, fault)
    if not found.deaths(fault):
        raise BrokenPromiseError(f"a worker was killed with item {fault.at} in flight, but no record shows it")
    return f"a worker was killed with item {fault.at} in flight; another worker continued, and {row}"


def _tell_oom(found: _Found, fault: Fault) -> str:
    n_items, row, shard = len(found.marks(fault)[0]["items"]), _row(found, fault), found.shard(fault)
    said = f"out of memory with {n_items} items in the batch, including {fault.at}"
    if shard in found.missing or found.is_lifted(fault):
        return f"{said}; {row}"
    notes = found.directory(shard).notes
    # If a worker died in the same batch, its items are computed one by one instead.
    if not ({"oom_batch", "isolated_batches"} & notes.keys()):
        raise BrokenPromiseError(f"{said}, but shard {shard} records no smaller batches")
    batch = notes.get("oom_batch", 1)
    return f"{said}; shard {shard} continued with batches of at most {batch}, and {row}"


def _ended(found: _Found, fault: Fault) -> AttemptRow:
    """The attempt that the fault ended; BrokenPromiseError if it ended with another failure class."""
    attempt, expected = found.struck(fault), KINDS[fault.kind].end
    ends = [other for other in found.faults if KINDS[other.kind].end]
    # If two faults end an attempt, it records one of them.
    is_only_end = not all(found.marks(other) and found.struck(other) is attempt for other in ends)
    if attempt["failure"] not in ([expected] if is_only_end else [KINDS[other.kind].end for other in ends]):
        raise BrokenPromiseError(
            f"{attempt['attempt']} ended with {attempt['failure'] or 'no failure'}; expected {expected}"
        )
    return attempt


def _left_nothing(attempt: AttemptRow) -> bool:
    """Whether no shard was left when the attempt ended: then the fault that ended it cost nothing."""
    return (attempt["failure"], attempt["reason"]) == (None, "complete")


def _tell_preempt(found: _Found, fault: Fault) -> str:
    attempt, row, shard = found.struck(fault), _row(found, fault), found.shard(fault)
    said = f"{attempt['attempt']} got SIGTERM with item {fault.at} in flight"
    if _left_nothing(attempt):  # progress is saved at the end of an item, too
        return f"{said} and published the last shard; {row}"
    said += f" ({_ended(found, fault)['failure']})"
    if shard in found.missing:
        return f"{said} and released shard {shard}; {row}"
    return f"{said}; {found.maker(shard)} computed shard {shard}, and {row}"


def _tell_timeout(found: _Found, fault: Fault) -> str:
    attempt = found.struck(fault)
    said = f"the walltime of {attempt['attempt']} ended early"
    published = f"it published {count_of(attempt['n_shards'], 'shard')}"
    if _left_nothing(attempt):
        return f"{said}; {published}, and no other was left"
    return f"{said} ({_ended(found, fault)['failure']}); {published} and claimed no more"


def _tell_damage(found: _Found, fault: Fault) -> str:
    shard = found.shard(fault)
    said = f"a byte of shard {shard} was flipped on disk"
    if (hole := found.missing.get(shard)) is not None:
        if not hole["damaged"]:
            raise BrokenPromiseError(f"{said}; the shard is missing, but the report does not say that it is damaged")
        return f"{said}; the merge found the damage and set the shard aside"
    try:
        verify_shard(found.run.shard_path(shard))
    except (OSError, DamagedShardError) as error:
        raise BrokenPromiseError(f"{said}, but the merge did not find the damage: {error}") from error
    return f"{said}; the merge found the damage, and {found.maker(shard)} recomputed the shard"


_TELL: dict[str, Callable[[_Found, Fault], str]] = {
    "crash": _tell_crash,
    "kill": _tell_kill,
    "error": lambda found, fault: f"the workload raised for item {fault.at}; {_row(found, fault)}",
    "oom": _tell_oom,
    "cuda_oom": lambda found, fault: f"item {fault.at} does not fit into memory, even alone; {_row(found, fault)}",
    "preempt": _tell_preempt,
    "timeout": _tell_timeout,
    "damage": _tell_damage,
}


def _of_the_others(found: _Found) -> Verdict:
    report, failing = found.report, [fault for fault in found.faults if KINDS[fault.kind].row]
    failed = [item for item in report["errors"] if item["index"] not in {fault.at for fault in failing}]
    struck = {(found.shard(fault), KINDS[fault.kind].row) for fault in failing}
    for item in failed:
        shard, policy = found.run.plan.shard_of(item["index"]), policy_of(item["class"])
        is_own = policy is not None and policy.rest == ITEM  # workloads raise such errors themselves
        if not is_own and (shard, item["class"]) in struck:
            return Verdict(f"not as promised: item {item['index']} failed too ({item['class']})", kept=False)
    if n_missing := report["n_missing_items"]:
        return Verdict(
            f"without a row so far: {count_of(n_missing, 'item')}. To compute the rest: {report['resubmit']}"
        )
    if failed:
        n_more = len(failed) + found.n_unlisted
        return Verdict(f"{n_more:,} more failed without an injected fault; every other item has its row.")
    return Verdict("every other item has its row.")
