"""Texts and numbers of the page: figures, failures, missing items, attempts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from slurmgpu.page.spans import AttemptSpan, begin_of, makers_of
from slurmgpu.page.words import cut, moment, plain
from slurmgpu.report.attempts import AttemptRow, node_of, outcome_of
from slurmgpu.report.build import MESSAGE_CHARACTERS
from slurmgpu.report.ledger import energy_in_words, in_words
from slurmgpu.report.report_file import Report
from slurmgpu.run.failures import policy_of, without_numbers
from slurmgpu.run.records import Death, Usage
from slurmgpu.util.amounts import duration, share_of

MAX_ITEMS = 1000
"""The most failed items and missing shards that the page lists."""
MAX_REASONS = 30
"""The most reasons that the page lists."""
REASON_CHARACTERS = 4000
MAX_NAMES = 8


@dataclass(frozen=True)
class Figure:
    """A number of the report: its name, its key in report.json (with dots), its value there, and how it is shown."""

    name: str
    key: str
    value: Any
    text: str
    alarming: bool = False


class Column(NamedTuple):
    """A column of a table: its name, and whether it holds numbers."""

    name: str
    is_number: bool = False


@dataclass
class Reason:
    """A reason for failures, and the log of the first; `cases` are the items or attempts with the same message.

    `excerpt` is the log before, at and after the line at `where`; `death` is that of the first, if a worker died.
    """

    failure: str
    message: str
    cases: list[str] = field(default_factory=list)
    n: int = 0
    n_others: int = 0
    traceback: str = ""
    first: Any = None
    death: Death | None = None
    where: str = ""
    excerpt: Sequence[str] = ()
    number: int = 0


Count = Literal["n_items", "n_rows", "n_errors", "n_missing_items"]


def figures_of(report: Report, spans: Sequence[AttemptSpan]) -> list[Figure]:
    """The numbers at the top of the page."""
    n_failures = sum(report["failures"].values())
    ledger = report["ledger"]
    begin, end = begin_of(report, spans), max((span.stop for span in spans), default=report["written"])
    figures = [
        _count(report, "n_items", "items"),
        _count(report, "n_rows", "rows"),
        _count(report, "n_errors", "failed items", alarm=True),
        _count(report, "n_missing_items", "missing items", alarm=True),
        Figure("attempts", "attempts.length", len(report["attempts"]), f"{len(report['attempts']):,}"),
        Figure("attempts that failed", "failures.sum", n_failures, f"{n_failures:,}", n_failures > 0),
    ]
    if ledger["unit"] == "GPU-hours":  # gpu_hours is rounded, and would differ for a short run
        shown = in_words(ledger)
        figures.append(Figure(shown.unit, "ledger.allocated", ledger["allocated"], shown.texts["allocated"]))
    if (energy := ledger["energy_kwh"]) is not None:
        text, unit = energy_in_words(energy)
        figures.append(Figure(f"{unit} of the GPUs", "ledger.energy_kwh", energy, text))
    if spans:
        figures.append(Figure("from submission to end", "wall_s", round(end - begin, 3), duration(end - begin)))
    return figures


def _count(report: Report, key: Count, name: str, *, alarm: bool = False) -> Figure:
    value = report[key]
    return Figure(name, key, value, f"{value:,}", alarm and value > 0)


def classes_of(report: Report) -> list[dict[str, Any]]:
    """The failure classes that occurred: counts of items, attempts and workers, and the meaning."""
    counts = [report["errors_by_class"], report["failures"], report["worker_deaths"]]
    policies = {name: policy_of(name) for name in sorted({name for count in counts for name in count})}
    return [
        {
            "name": name,
            "counts": [count.get(name, 0) for count in counts],
            "meaning": policy.meaning if policy else "",
            "policy": policy.outlook() if policy else "",
        }
        for name, policy in policies.items()
    ]


def item_reasons(report: Report) -> tuple[list[Reason], dict[int, Reason]]:
    """The reasons of failed items, most frequent first; and the reason of each item, by index."""
    reasons: dict[tuple[str, str], Reason] = {}
    of_item = {}
    for item in report["errors"]:
        # Items with the same reason may have different numbers in their messages.
        key = (item["class"], without_numbers(item["message"][:MESSAGE_CHARACTERS]))
        if (reason := reasons.get(key)) is None:
            reason = reasons[key] = Reason(item["class"], cut(item["message"], REASON_CHARACTERS), first=item["index"])
        _join(reason, f"item {item['index']}")
        of_item[item["index"]] = reason
    return _ranked(reasons), of_item


def attempt_reasons(report: Report) -> list[Reason]:
    """The reasons of failed attempts and worker deaths, most frequent first."""
    reasons: dict[tuple[str, str, bool], Reason] = {}
    for attempt in report["attempts"]:
        said: list[tuple[str, str, Death | None]] = []
        if attempt["failure"]:
            said.append((attempt["failure"], attempt["message"], None))
        said += [(death["class"], death["message"], death) for death in attempt["deaths"]]
        for failure, message, death in said:
            key = (failure, without_numbers(str(message)), death is None)
            if (reason := reasons.get(key)) is None:
                reason = Reason(failure, cut(message, REASON_CHARACTERS), first=attempt["attempt"], death=death)
                reasons[key] = reason
            reason.traceback = reason.traceback or plain(attempt["traceback"] or "")[-REASON_CHARACTERS:]
            _join(reason, attempt["attempt"])
    return _ranked(reasons)


def _join(reason: Reason, case: str) -> None:
    reason.n += 1
    if case in reason.cases[-1:]:  # several workers of an attempt died
        return
    if len(reason.cases) < MAX_NAMES:
        reason.cases.append(plain(case))
    else:
        reason.n_others += 1


def _ranked(reasons: Mapping[Any, Reason]) -> list[Reason]:
    ranked = sorted(reasons.values(), key=lambda reason: -reason.n)
    for number, reason in enumerate(ranked):
        reason.number = number
    return ranked


def failed_items(
    report: Report, spans: Sequence[AttemptSpan], shard_of: Callable[[int], int], of_item: Mapping[int, Reason]
) -> list[dict[str, Any]]:
    """The first failed items, each with its attempt and its reason."""
    makers = makers_of(spans)
    return [
        {
            "index": item["index"],
            "name": cut(item.get("name") or "", MESSAGE_CHARACTERS),
            "class": item["class"],
            "message": cut(item["message"].partition("\n")[0], MESSAGE_CHARACTERS),
            "attempt": makers.get(shard_of(item["index"]), ""),
            "reason": of_item[item["index"]],
        }
        for item in report["errors"][:MAX_ITEMS]
    ]


def holes_of(report: Report) -> list[dict[str, Any]]:
    """The first missing shards; for a damaged one, the reason."""
    return [
        {
            "first": hole["shard"],
            "last": hole["shard"],
            "start": hole["start"],
            "stop": hole["stop"],
            "why": f"damaged: {cut(hole['damaged'], MESSAGE_CHARACTERS)}" if hole["damaged"] else "",
        }
        for hole in report["missing"][:MAX_ITEMS]
    ]


def stretches_of(holes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Holes, with adjacent ones of the same reason merged."""
    found: list[dict[str, Any]] = []
    for hole in holes:
        if found and found[-1]["last"] + 1 == hole["first"] and found[-1]["why"] == hole["why"]:
            found[-1] |= {"last": hole["last"], "stop": hole["stop"]}
        else:
            found.append(dict(hole))
    return found


def attempts_table(report: Report) -> tuple[list[Column], list[list[str]]]:
    """The columns with known values, and a row for each attempt."""
    hosts = [attempt["usage"].get("host_memory_peak_bytes") or 0 for attempt in report["attempts"]]
    zone = moment(report["written"]).rpartition(" ")[2]
    unit, size = ("GB", 1e9) if max(hosts, default=0) >= 1e9 else ("MB", 1e6)
    shown: list[tuple[Column, Callable[[AttemptRow, Usage], str]]] = [
        (Column("attempt"), lambda a, u: a["attempt"]),
        (Column("node"), lambda a, u: node_of(a)),
        (Column(f"started, {zone}"), lambda a, u: moment(a["started"]).removesuffix(f" {zone}")),
        (Column("time", True), lambda a, u: duration(a["seconds"])),
        (Column("GPUs", True), lambda a, u: f"{a['n_gpus'] * a['n_nodes']}"),
        (Column("shards", True), lambda a, u: f"{a['n_shards']:,}"),
        (Column("items", True), lambda a, u: f"{a['n_items']:,}"),
        (Column("failed", True), lambda a, u: f"{a['n_errors']:,}"),
        (Column("deaths", True), lambda a, u: f"{len(a['deaths'])}"),
        (Column("useful", True), lambda a, u: _useful(a)),
        (Column("GPU %", True), lambda a, u: _whole(u.get("gpu_utilisation"))),
        (Column("GPU GB", True), lambda a, u: _sized(u.get("gpu_memory_peak_bytes"), 1e9)),
        (Column("W", True), lambda a, u: _whole(u.get("power_mean_w"))),
        (Column("°C", True), lambda a, u: _whole(u.get("temperature_max_c"))),
        (Column(f"host {unit}", True), lambda a, u: _sized(u.get("host_memory_peak_bytes"), size)),
        (Column("end"), lambda a, u: outcome_of(a)),
    ]
    rows = []
    for attempt in report["attempts"]:
        usage = attempt["usage"]
        rows.append([cut(show(attempt, usage), 80) for _, show in shown])
    known = [n for n in range(len(shown)) if n < 4 or any(row[n] not in ("–", "0", "") for row in rows)]
    return [shown[n][0] for n in known], [[row[n] for n in known] for row in rows]


def _sized(n_bytes: int | None, unit: float) -> str:
    return "–" if n_bytes is None else f"{n_bytes / unit:,.{int(unit == 1e9)}f}"


def _whole(number: float | None) -> str:
    return "–" if number is None else f"{number:.0f}"


def _useful(attempt: AttemptRow) -> str:
    spent = attempt["spent"]
    total = sum(spent.values())
    return share_of(round(1000 * spent["useful"]), round(1000 * total))
