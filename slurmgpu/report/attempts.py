"""The rows of a report's attempts, from their own records or else from Slurm's accounting.

Standard library only: `status` reads it on login nodes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, TypeVar, cast

from slurmgpu.report.ledger import Charged, last_sign, spent_unrecorded
from slurmgpu.report.outcomes import Accounted, Accounting, Rows, Told, leases_lost, verdict_of
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import policy_of
from slurmgpu.run.records import Attempt, Death, Record, Takeover, Unread, new_record, task_of
from slurmgpu.run.submissions import SubmissionLine, abroad, job_here

IDLE_PERCENT = 10
"""A GPU with a lower mean utilisation while items are computed counts as idle."""
IDLE_SAMPLES = 3


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


def ran_out_of_memory(attempts: Iterable[AttemptRow], of_items: Collection[str] = ()) -> bool:
    """Whether an attempt, a worker or an item (with a class in `of_items`) failed for lack of memory to ask for."""
    met = {kind for a in attempts for kind in (a["failure"], *(death["class"] for death in a["deaths"]))}
    policies = map(policy_of, {*met, *of_items})
    return any(policy is not None and policy.more_memory for policy in policies)


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
