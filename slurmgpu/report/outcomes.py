"""The outcome of an attempt: from its own record, the last report, and Slurm's accounting.

Standard library only: `status` reads it on login nodes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, TypeVar

from slurmgpu.run.failures import Policy, policy_of
from slurmgpu.run.records import BriefRecord


@dataclass(frozen=True)
class Accounted:
    """One attempt as accounted for by Slurm, or by the process that started it on this machine.

    `failure` is its class; None for a success or while it is alive. `message` adds to `state`. `began` is false if its
    batch script never ran.
    """

    state: str
    failure: str | None
    ended: bool
    elapsed_s: int
    n_gpus: int
    node: str
    message: str = ""
    executor: str = "slurm"
    began: bool = True


TOO_LARGE = "did not fit in the walltime; if none ever does, ask for more time"
"""An attempt's message on its current shard when its walltime ended."""
CUT_FINER = ", or plan a run with fewer shard_items"
"""The same, of a shard with several items."""
_ADVICE = re.compile(rf"\. Shard \d+ {TOO_LARGE}({CUT_FINER})?$")

Accounting = Mapping[str, Sequence[Accounted]]
"""The attempts of array tasks by restart. Keys: `1234_7`, or `1234_7@other` on another cluster than the run's first."""


class Told(TypedDict):
    """The outcome of an attempt in a report."""

    attempt: str
    submission: int | None
    updated: float | None
    failure: str | None
    message: str
    gpu_hours: float


ToldT = TypeVar("ToldT", bound=Told)
Rows = Mapping[str, Told]
"""The attempts of a report, by name."""
Verdict = tuple[str | None, str]
"""The outcome of an attempt: its failure class, None without one, and the message."""


def leases_lost(records: Iterable[BriefRecord]) -> Counter[str]:
    """The number of shards that were taken over from each attempt."""
    return Counter(takeover["from"] for record in records for takeover in record["takeovers"])


def is_of(told: Told, record: BriefRecord) -> bool:
    """Whether a report's row is as recent as the record: the attempt may have continued after the report."""
    return told["updated"] is not None and told["updated"] >= record["updated"]


def verdict_of(
    record: BriefRecord,
    *,
    cancelled: bool,
    n_lost: int,
    told: Told | None,
    may_live: bool,
    accounted: Accounted | None = None,
) -> Verdict:
    """The outcome of an attempt.

    The row `told` of the last report comes first: that merge asked Slurm's accounting, which knows who sent a signal
    and why a task recorded no end. Next come the attempt's own record and what is `accounted` of it. An attempt
    without an end that `may_live` has no failure, unless it has ended by accounting. `cancelled`: its submission was
    cancelled with `slurmgpu cancel`; `n_lost` of its shards were taken over.
    """
    has_ended = record["ended"] is not None
    if told is not None and is_of(told, record) and (has_ended or told["failure"]):  # else it was running
        return told["failure"], told["message"]
    if not has_ended and may_live and not (accounted and accounted.ended):
        return None, ""
    failure, message = record["failure"], record["message"]
    policy = policy_of(failure)
    if policy is not None and policy.is_stop and not policy.on_purpose:
        return _interruption(record, policy, accounted, cancelled)
    if failure is not None:
        return failure, message
    if has_ended:
        return None, ""
    if cancelled:
        return "cancelled", "it was killed before it could record its end"
    if accounted is not None and accounted.failure not in (None, "lost"):
        return accounted.failure, f"no end was recorded; {accounted.message or f'Slurm: {accounted.state}'}"
    lease = f"; others took over {n_lost} of its shards" if n_lost else ""
    more = f"; {accounted.message}" if accounted is not None and accounted.message else ""
    return "lost", f"no end was recorded{lease}{more}"


def _interruption(record: BriefRecord, policy: Policy, accounted: Accounted | None, cancelled: bool) -> Verdict:
    """The outcome of an attempt that was stopped by a signal, which does not say who sent it, nor why.

    `policy` is that of the failure in its record.
    """
    failure, message = record["failure"], record["message"]
    cause = None if accounted is None else policy_of(accounted.failure)
    # A node that a health check sets down also ends its tasks with a signal.
    if accounted is not None and cause is not None and (cause.is_stop or cause.node_at_fault):
        if accounted.failure != failure:
            failure, message = accounted.failure, f"{_ADVICE.sub('', message)} (Slurm: {accounted.state})"
    elif cancelled and (policy.is_guess or record["reason"] is None):
        # An attempt with a reason ended by itself, because little was left of its walltime.
        failure, message = "cancelled", _ADVICE.sub("", message)
    if accounted is not None and accounted.message:
        message += f"; {accounted.message}"
    return failure, message


def unrecorded(told: Mapping[str, ToldT], recorded: Iterable[str]) -> list[ToldT]:
    """The rows of a report for attempts without a record, which only accounting knows."""
    known = set(recorded)
    return [row for name, row in told.items() if row["submission"] is None and name not in known]
