"""What the page says in words and numbers: figures, failures, what is missing, attempts, provenance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmgpu.failures import POLICIES
from slurmgpu.pages.secrets import hidden
from slurmgpu.pages.spans import Life, begin_of
from slurmgpu.pages.words import count_of, cut, duration, gigabytes, moment, percent, plain
from slurmgpu.pages.words import hours as as_hours
from slurmgpu.runs import Run

MAX_ITEMS = 1000
"""Failed items, and missing shards, that the page lists; of more it has the numbers and the first ones."""
MAX_REASONS = 30
"""So many reasons are told in full."""
MESSAGE_CHARACTERS = 240
REASON_CHARACTERS = 4000
MAX_NAMES = 8
OF_PLANNING = ("planned",)
"""Settings that planning made itself, which nobody reads."""


@dataclass(frozen=True)
class Figure:
    """A number of the report: its name, its key in report.json (with dots), its value there, and how it is shown."""

    name: str
    key: str
    value: Any
    text: str
    alarming: bool = False


@dataclass
class Reason:
    """Why items or attempts failed: those that say the same, and what the log has of the first.

    `excerpt` is the log before, at and behind the line at `where`; `death` is that of the first, if a worker died.
    """

    failure: str
    message: str
    who: list[str] = field(default_factory=list)
    n: int = 0
    n_others: int = 0
    traceback: str = ""
    first: Any = None
    death: Mapping[str, Any] | None = None
    where: str = ""
    excerpt: Sequence[str] = ()
    number: int = 0


def figures_of(report: Mapping[str, Any], lives: Sequence[Life]) -> list[Figure]:
    """The numbers that stand first."""
    n_failures = sum(report["failures"].values())
    unit = (report.get("ledger") or {}).get("unit") or "GPU-hours"
    begin, end = begin_of(report, lives), max((life.stop for life in lives), default=report["written"])
    figures = [
        _count(report, "n_items", "items"),
        _count(report, "n_rows", "rows"),
        _count(report, "n_errors", "failed items", alarm=True),
        _count(report, "n_missing_items", "missing items", alarm=True),
        Figure("attempts", "attempts.length", len(report["attempts"]), f"{len(report['attempts']):,}"),
        Figure("attempts that failed", "failures.sum", n_failures, f"{n_failures:,}", n_failures > 0),
    ]
    hours = report["gpu_hours"]
    if hours or unit == "GPU-hours":
        figures.append(Figure("GPU-hours", "gpu_hours", hours, as_hours(hours, hours)))
    energy = (report.get("ledger") or {}).get("energy_kwh")
    if energy is not None:
        figures.append(Figure("kWh of the GPUs", "ledger.energy_kwh", energy, f"{energy:,.2f}"))
    if lives:
        figures.append(Figure("from submission to end", "wall_s", round(end - begin, 3), duration(end - begin)))
    return figures


def _count(report: Mapping[str, Any], key: str, name: str, *, alarm: bool = False) -> Figure:
    value = report[key]
    return Figure(name, key, value, f"{value:,}", alarm and value > 0)


def classes_of(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The failure classes that were met, in how many items, attempts and workers, and what each means."""
    counts = [report[key] for key in ("errors_by_class", "failures", "worker_deaths")]
    return [
        {
            "name": name,
            "counts": [count.get(name, 0) for count in counts],
            "meaning": POLICIES[name].meaning if name in POLICIES else "",
            "policy": _policy(name),
        }
        for name in sorted({name for count in counts for name in count})
    ]


def _policy(name: str) -> str:
    policy = POLICIES.get(name)
    if policy is None:
        return ""
    again = "another submission may compute it" if policy.retriable else "computing it again does not help by itself"
    return again + ("; it leaves the node out" if policy.node_at_fault else "")


def item_reasons(report: Mapping[str, Any]) -> tuple[list[Reason], dict[int, Reason]]:
    """Why items failed, the most frequent reason first; and which of them is that of an item, by its index."""
    reasons: dict[tuple[str, str], Reason] = {}
    of_item = {}
    for item in report["errors"]:
        # Numbers differ from item to item where the reason does not.
        key = (item["class"], re.sub(r"\d+", "#", item["message"][:MESSAGE_CHARACTERS]))
        reason = reasons.setdefault(key, Reason(item["class"], cut(item["message"], REASON_CHARACTERS)))
        reason.first = item["index"] if reason.first is None else reason.first
        _join(reason, f"item {item['index']}")
        of_item[item["index"]] = reason
    return _ranked(reasons), of_item


def attempt_reasons(report: Mapping[str, Any]) -> list[Reason]:
    """Why attempts ended badly, and why workers died, the most frequent reason first."""
    reasons: dict[tuple[str, str, bool], Reason] = {}
    for attempt in report["attempts"]:
        said = [(attempt["failure"], attempt["message"], None)] if attempt["failure"] else []
        said += [(death["class"], death["message"], death) for death in attempt["deaths"]]
        for failure, message, death in said:
            key = (failure, re.sub(r"\d+", "#", str(message)), death is None)
            reason = reasons.setdefault(key, Reason(failure, cut(message, REASON_CHARACTERS)))
            reason.traceback = reason.traceback or plain(attempt["traceback"] or "")[-REASON_CHARACTERS:]
            if reason.first is None:
                reason.first, reason.death = attempt["attempt"], death
            _join(reason, attempt["attempt"])
    return _ranked(reasons)


def _join(reason: Reason, who: str) -> None:
    reason.n += 1
    if who in reason.who[-1:]:  # an attempt, of which several workers died
        return
    if len(reason.who) < MAX_NAMES:
        reason.who.append(plain(who))
    else:
        reason.n_others += 1


def _ranked(reasons: Mapping[Any, Reason]) -> list[Reason]:
    ranked = sorted(reasons.values(), key=lambda reason: -reason.n)
    for number, reason in enumerate(ranked):
        reason.number = number
    return ranked


def failed_items(report: Mapping[str, Any], shard_items: int, of_item: Mapping[int, Reason]) -> list[dict[str, Any]]:
    """The failed items, the first of them, each with the attempt that computed it and its reason."""
    owners = {
        entry[0]: attempt["attempt"]
        for attempt in report["attempts"]
        for entry in attempt.get("shards") or ()
        if len(entry) < 4 or entry[3]
    }
    return [
        {
            "index": item["index"],
            "class": item["class"],
            "message": cut(item["message"].partition("\n")[0], MESSAGE_CHARACTERS),
            "attempt": owners.get(item["index"] // shard_items, ""),
            "reason": of_item[item["index"]],
        }
        for item in report["errors"][:MAX_ITEMS]
    ]


def holes_of(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The missing shards, the first of them; of a damaged one the report tells why it is missing."""
    return [
        {
            "shard": hole["shard"],
            "start": hole["start"],
            "items": f"{hole['start']:,} … {hole['stop'] - 1:,}",
            "why": f"damaged: {cut(hole['damaged'], MESSAGE_CHARACTERS)}" if hole["damaged"] else "",
        }
        for hole in report["missing"][:MAX_ITEMS]
    ]


def attempts_table(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Every attempt in a row, and the names of the columns: only those of which anything is known."""
    columns = [
        ("attempt", lambda a, u: a["attempt"]),
        ("node", lambda a, u: a["node"] or ""),
        ("started", lambda a, u: moment(a["started"]).rpartition(" ")[0]),
        ("time", lambda a, u: duration(a["seconds"])),
        ("GPUs", lambda a, u: f"{a['n_gpus'] * a['n_nodes']}"),
        ("shards", lambda a, u: f"{a['n_shards']:,}"),
        ("items", lambda a, u: f"{a['n_items']:,}"),
        ("failed", lambda a, u: f"{a['n_errors']:,}"),
        ("deaths", lambda a, u: f"{len(a['deaths'])}"),
        ("useful", lambda a, u: _useful(a)),
        ("GPU %", lambda a, u: _whole(u.get("gpu_utilisation"))),
        ("GPU GB", lambda a, u: gigabytes(u.get("gpu_memory_peak_bytes"))),
        ("W", lambda a, u: _whole(u.get("power_mean_w"))),
        ("°C", lambda a, u: _whole(u.get("temperature_max_c"))),
        ("host GB", lambda a, u: gigabytes(u.get("host_memory_peak_bytes"))),
        ("end", lambda a, u: a["failure"] or (f"ok ({a['reason']})" if a["reason"] else "ok")),
    ]
    rows = []
    for attempt in report["attempts"]:
        usage = attempt.get("usage") or {}
        rows.append([_cell(show, attempt, usage) for _, show in columns])
    known = [n for n in range(len(columns)) if n < 4 or any(row[n] not in ("–", "0", "") for row in rows)]
    return [columns[n][0] for n in known], [[row[n] for n in known] for row in rows]


def _cell(show: Any, attempt: Mapping[str, Any], usage: Mapping[str, Any]) -> str:
    try:
        return cut(show(attempt, usage), 80)
    except (KeyError, TypeError, ValueError):
        return "–"  # damaged, or of another version


def _whole(number: float | None) -> str:
    return "–" if number is None else f"{number:.0f}"


def _useful(attempt: Mapping[str, Any]) -> str:
    spent = attempt.get("spent") or {}
    total = sum(value for key, value in spent.items() if key in ("useful", "loading", "idle", "lost", "repeated"))
    return percent(spent["useful"] / total) if total else "–"


def provenance_of(run: Run, report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What made the run: a name and a text each."""
    plan, made_by = run.plan, report["provenance"]
    git, image = made_by.get("git"), report.get("image")
    entries = [
        ("run directory", report["run_dir"]),
        ("run file", made_by.get("run_file", "–")),
        (
            "git commit",
            f"{git['commit']}{' and uncommitted changes' if git['dirty'] else ''}" if git else "no repository",
        ),
        ("workload", plan.workload),
        ("image", f"{image['path']} (sha256 {image.get('sha256', '–')})" if image else "none"),
        ("versions", ", ".join(f"{name} {version}" for name, version in (made_by.get("versions") or {}).items())),
        ("input", f"{count_of(plan.n_items, 'item')}, digest {plan.input_digest}"),
        ("shards", f"{plan.n_shards:,} of {count_of(plan.shard_items, 'item')}, in batches of {plan.batch_size:,}"),
        ("seed", str(plan.seed)),
        ("fingerprint", report["fingerprint"]),
        ("GPUs", ", ".join(_gpus(report)) or "none"),
        ("report written", moment(report["written"])),
    ]
    return [(name, plain(text)) for name, text in entries]


def _gpus(report: Mapping[str, Any]) -> list[str]:
    names = (name for a in report["attempts"] for name in a["gpus"] or () if isinstance(name, str))
    return sorted(name for name in set(names) if not name.isdecimal())


def settings_of(run: Run) -> str:
    """The workload's settings and the resources that the run first asked for, as JSON."""
    settings = {name: value for name, value in run.plan.settings.items() if name not in OF_PLANNING}
    value = {"settings": settings, "resources": run.plan.resources, "slurm": run.plan.slurm}
    return cut(json.dumps(_without_values(hidden(value)), indent=2, ensure_ascii=False), 20_000)


def _without_values(value: dict[str, Any]) -> dict[str, Any]:
    """The same, with the names alone of variables that sbatch exports."""
    return {**value, "slurm": {key: _option(key, each) for key, each in value["slurm"].items()}}


def _option(key: str, value: Any) -> Any:
    return ",".join(part.partition("=")[0] for part in value.split(",")) if key == "export" else value


def submissions_of(report: Mapping[str, Any]) -> list[list[str]]:
    """Every submission in a row: number, time, executor, tasks, jobs, options."""
    rows = []
    for line in report["submissions"]:
        jobs = [f"{line[key]}" for key in ("array_job", "merge_job") if line.get(key)]
        options = " ".join(f"{key}={_option(key, value)}" for key, value in hidden(line.get("slurm") or {}).items())
        state = "cancelled" if line.get("cancelled") else ""
        row = [line.get("submission", ""), moment(line.get("time")), line.get("executor", ""), line.get("n_tasks", "")]
        rows.append([plain(cell) for cell in (*row, ", ".join(jobs) or "–", options or "–", state)])
    return rows
