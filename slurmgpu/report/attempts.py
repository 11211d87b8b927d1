"""Every attempt of a run and its outcome, from its own record or else from Slurm's accounting.

Standard library only: `status` reads it on login nodes.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar, cast

from slurmgpu.report.ledger import Charged, last_sign, spent_unrecorded
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import Policy, policy_of
from slurmgpu.run.records import Attempt, BriefRecord, Death, Record, Takeover, Unread, new_record, task_of
from slurmgpu.run.submissions import SubmissionLine, abroad, job_here

log = logging.getLogger(__name__)


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


IDLE_PERCENT = 10
"""A GPU with a lower mean utilisation while items are computed counts as idle."""
IDLE_SAMPLES = 3

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


class AttemptRow(Told, Charged):
    """An attempt in report.json: see docs/reference/report.md."""

    executor: str
    node: str
    gpus: list[str]
    memory_mb: int | None
    state: str
    phases: list[list[Any]]
    started: float | None
    ended: float | None
    seconds: float
    load_s: float | None
    shard: int | None
    progress: str | None
    n_shards: int
    shards: list[list[Any]]
    n_items: int
    n_errors: int
    reason: str | None
    traceback: str
    bad_node: str | None
    deaths: list[Death]
    takeovers: list[Takeover]
    n_retried: int
    waited_s: float
    idle_gpu: bool
    slurm_state: str | None


class Named(TypedDict):
    """A value that belongs to an attempt."""

    attempt: str


NamedT = TypeVar("NamedT", bound=Named)
ToldT = TypeVar("ToldT", bound=Told)
Rows = Mapping[str, Told]
"""The attempts of a report, by name."""
Verdict = tuple[str | None, str]
"""The outcome of an attempt: its failure class, None without one, and the message."""


def attempts_of(
    run: Run, accounting: Accounting | None, told: Rows | None = None, *, may_live: bool = False
) -> list[AttemptRow]:
    """Every attempt with its failure class, from its own record or else from Slurm's accounting.

    `told` and `may_live` are as in `verdict_of`.
    """
    return rows_of(run, *run.read_attempts(), accounting, told, may_live=may_live)


def rows_of(
    run: Run,
    records: Sequence[Record],
    left_out: Mapping[str, Unread],
    accounting: Accounting | None,
    told: Rows | None = None,
    *,
    may_live: bool = False,
) -> list[AttemptRow]:
    """The same from records already read; `left_out` says why others are missing."""
    lines = run.submissions()
    cancelled = {line["submission"] for line in lines if line.get("cancelled")}
    per_node = {line["submission"]: line.get("tasks_per_node", 1) for line in lines}
    jobs: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        jobs.setdefault(_job_of(record, per_node), []).append(record)
    lost_leases = leases_lost(records)
    rows = []
    for record in records:
        name = record["attempt"]
        _, at, cluster = name.partition("@")
        accounted = _accounted(accounting, f"{task_of(record)}{at}{cluster}", record["restart"])
        if accounted is not None and len(mates := jobs[_job_of(record, per_node)]) > 1:
            accounted = _not_of_others(accounted, [mate for mate in mates if mate is not record])
        verdict = verdict_of(
            record,
            cancelled=record["submission"] in cancelled,
            n_lost=lost_leases[name],
            told=(told or {}).get(name),
            may_live=may_live,
            accounted=accounted,
        )
        rows.append(_attempt(record, accounted, *verdict))
    recorded = {record["attempt"] for record in records}
    for task, of_task in sorted((accounting or {}).items()):
        for restart, accounted in enumerate(of_task):
            job_task, at, cluster = task.partition("@")
            name = f"{job_task}.{restart}{at}{cluster}"
            # The last task cancels pending ones: a cancelled task that never ran has not failed.
            policy = policy_of(accounted.failure)
            failed = policy is not None and not policy.on_purpose
            if name not in recorded and accounted.ended and (failed or name in left_out):
                rows.append(_attempt_without_record(name, accounted, left_out.get(name)))
    return rows


def of_last_submission(attempts: Iterable[AttemptRow], lines: Sequence[SubmissionLine]) -> list[AttemptRow]:
    """The attempts of the last submission; those without a record are recognised by its job id."""
    last = lines[-1]
    job = last.get("array_job") or job_here(last["executor"], last["submission"])
    cluster = abroad(lines, last.get("cluster") or "")

    def is_its_own(attempt: AttemptRow) -> bool:
        task, _, at = attempt["attempt"].partition("@")
        is_of_job = (task.rpartition("_")[0], at) == (job, cluster)
        return attempt["submission"] == last["submission"] or (attempt["submission"] is None and is_of_job)

    return list(filter(is_its_own, attempts))


def outcome_of(attempt: AttemptRow) -> str:
    """The end of an attempt in words: its failure class, or `ok`, with the reason if one is recorded."""
    if not attempt["failure"] and attempt["state"] != "ended":
        return "at work"  # only after a forced merge
    return attempt["failure"] or (f"ok ({attempt['reason']})" if attempt["reason"] else "ok")


def in_task_order(attempts: Iterable[NamedT]) -> list[NamedT]:
    """Attempts sorted by job, task and restart, as numbers."""
    return sorted(attempts, key=lambda attempt: _numbers(attempt["attempt"]))


def _numbers(name: str) -> list[tuple[int, str]]:
    return [(int(part or 0), text) for text, part in re.findall(r"(\D*)(\d*)", name)]


def _accounted(accounting: Accounting | None, task: str, restart: int) -> Accounted | None:
    of_task = (accounting or {}).get(task, ())
    return of_task[restart] if restart < len(of_task) else None


def _job_of(record: Record, per_node: Mapping[int, int]) -> tuple[Any, ...]:
    """What attempts have in common that shared a job."""
    _, at, cluster = record["attempt"].partition("@")
    index = record["task"] // per_node.get(record["submission"], 1)
    return record["submission"], record["job"], index, record["restart"], at, cluster


def _not_of_others(accounted: Accounted, others: Sequence[Record]) -> Accounted:
    """What Slurm says of a job, for one of its tasks: without a failure that others of them recorded as their own."""
    policy = policy_of(accounted.failure)
    known = {kind for other in others for kind in (other["failure"], *(death["class"] for death in other["deaths"]))}
    if policy is None or policy.is_stop or policy.node_at_fault or accounted.failure not in known:
        return accounted
    return replace(accounted, failure="lost")


def _attempt(record: Record, accounted: Accounted | None, failure: str | None, message: str) -> AttemptRow:
    seconds = round(max(last_sign(record) - record["started"], float(accounted.elapsed_s) if accounted else 0.0), 3)
    copied = {key: value for key, value in record.items() if key in AttemptRow.__annotations__}
    derived = {
        "seconds": seconds,
        "gpu_hours": record["n_gpus"] * record["n_nodes"] * seconds / 3600,
        "n_shards": len(record["published"]),
        "shards": record["published"],
        "failure": failure,
        "message": message,
        "bad_node": record["bad_node"] or _bad_node(failure, record["node"], record["n_nodes"]),
        "idle_gpu": _is_idle(record),
        "slurm_state": accounted.state if accounted else None,
    }
    return cast(AttemptRow, {**copied, **derived})


def _bad_node(failure: str | None, node: str, n_nodes: int) -> str | None:
    """The node at fault for a failure; None if none is, or if it is one of several."""
    policy = policy_of(failure)
    return node or None if policy is not None and policy.node_at_fault and n_nodes == 1 else None


def _is_idle(record: Record) -> bool:
    usage = record["usage"]
    used = usage.get("gpu_utilisation")
    if not record["n_gpus"] or record["device"] == "cpu" or used is None:
        return False
    return used < IDLE_PERCENT and (usage.get("n_samples_ready") or 0) >= IDLE_SAMPLES


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


def node_of(row: AttemptRow) -> str:
    """The first node of an attempt and the number of others: `node7 +1`."""
    return row["node"] + (f" +{row['n_nodes'] - 1}" if row["n_nodes"] > 1 else "")


def _attempt_without_record(name: str, accounted: Accounted, why: Unread | None) -> AttemptRow:
    what = why.value if why else "it ended before it could write a record"
    attempt = Attempt("", 0, executor=accounted.executor, n_gpus=accounted.n_gpus)
    record = new_record(attempt, accounted.node, 0, [], 0.0)
    failure, message = accounted.failure, f"{what} ({accounted.message or accounted.state}); its log may say why"
    if why is None and accounted.state == "REQUEUED" and not accounted.began:
        failure = "node_fail"
        message = "Slurm could not start it there (a prolog may have failed) and queued it again; it has no log"
    row = _attempt(record, accounted, failure, message)
    several = "[" in accounted.node or "," in accounted.node
    return {
        **row,
        "attempt": name,
        "submission": None,
        "state": "ended",
        "phases": [],
        "started": None,
        "updated": None,
        "bad_node": _bad_node(failure, accounted.node, 2 if several else 1),
        "spent": spent_unrecorded(accounted.elapsed_s),
    }
