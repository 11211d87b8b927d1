"""The page: its content, filled into the template beside this file."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from slurmgpu import __version__
from slurmgpu.loader.names import title_of
from slurmgpu.page import facts, provenance
from slurmgpu.page.clock import Clock, make_clock
from slurmgpu.page.excerpts import add_excerpts
from slurmgpu.page.pictures import ledger_bar, left_of, rates, throughput, timeline
from slurmgpu.page.rows import rows_of as merged_rows_of
from slurmgpu.page.spans import AttemptSpan, begin_of, items_of, rows_of, spans_of
from slurmgpu.page.svg import NARROW, WIDE, picture
from slurmgpu.page.usage import chosen_tasks, draw_usage, read_usage
from slurmgpu.page.words import as_typed, cut, moment, plain
from slurmgpu.report.attempts import in_task_order
from slurmgpu.report.ledger import KINDS, energy_in_words, in_words
from slurmgpu.report.next_step import next_step
from slurmgpu.report.origin import origin_in_words, origin_of
from slurmgpu.report.report_file import Report, every_item_failed, faults_of
from slurmgpu.report.summaries import summary_of
from slurmgpu.run.directory import Run
from slurmgpu.util.amounts import LEAST_PER_S, count_of, duration, rate_of, three_digits

log = logging.getLogger(__name__)

RATES = (
    (1e5, "thousand items per second", 1e-3),
    (LEAST_PER_S, "items per second", 1.0),
    (0.0, "items per hour", 3600.0),
)
"""The least items per second for each unit of rates, the unit, and its factor."""
MAX_ROWS, MAX_COLUMNS = 200, 20
"""Limits for each table of the summary."""

MEANINGS = {
    "useful": "shards that are in the result",
    "loading": "loading the workload in workers",
    "overhead": "starting, claiming, publishing and ending",
    "idle": "waiting for other tasks",
    "lost": "work lost when a worker or an attempt ended, and shards that were damaged or set aside",
    "repeated": "shards that were computed more than once",
}


@dataclass(frozen=True)
class Drawn:
    """A picture of the page: over the whole width, and a second one for phones."""

    wide: Markup
    narrow: Markup | None
    sentence: str


def render(run: Run, report: Report, task: str | None = None) -> str:
    """The page of a report as HTML."""
    report = {**report, "attempts": in_task_order(report["attempts"])}
    spans = spans_of(report)
    clock = make_clock(begin_of(report, spans), [(span.start, span.stop) for span in spans])
    items, of_item = facts.item_reasons(report)
    attempts = facts.attempt_reasons(report)
    holes = facts.holes_of(report)
    no_logs = add_excerpts(run, items, attempts, holes)
    columns, rows = facts.attempts_table(report)
    content = {
        "report": report,
        "origin": plain(origin_in_words(origin_of(run.plan), title_of(run.plan.workload, ""))),
        "every_failed": every_item_failed(report),
        "next_step": next_step(report, run),
        "version": __version__,
        "figures": facts.figures_of(report, spans),
        "summary": summary_of(report["summary"], MAX_ROWS, MAX_COLUMNS),
        "merged_rows": merged_rows_of(run, report),
        "no_logs": no_logs,
        "classes": facts.classes_of(report),
        "item_reasons": items[: facts.MAX_REASONS],
        "attempt_reasons": attempts[: facts.MAX_REASONS],
        "n_more_reasons": [max(0, len(reasons) - facts.MAX_REASONS) for reasons in (items, attempts)],
        "max_reasons": facts.MAX_REASONS,
        "failed_items": facts.failed_items(report, spans, run.plan.shard_of, of_item),
        "holes": facts.stretches_of(holes),
        "n_holes": len(holes),
        "n_damaged": sum(bool(hole["damaged"]) for hole in report["missing"]),
        "faults": faults_of(report),
        "columns": columns,
        "rows": rows,
        "damaged": [plain(name) for name in report["damaged_records"]],
        "unreadable": [plain(name) for name in report["unreadable_records"]],
        "provenance": provenance.provenance_of(run, report),
        "settings": provenance.settings_of(run),
        "submissions": provenance.submissions_of(report),
        "typed": run.typed,
        "submitted": moment(clock.begin),
        "pauses": _about_pauses(clock),
        "ledger": _ledger(report),
        "n_unknown": len(report["attempts"]) - len(spans),
        **_pictures(run, report, spans, clock, task),
    }
    return _template().render(content)


def _template() -> jinja2.Template:
    here = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(here), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters |= {
        "plain": plain,
        "as_typed": as_typed,
        "capitalized": lambda text: text[:1].upper() + text[1:],
    }
    environment.filters |= {"number": lambda value: f"{value:,}", "count_of": count_of, "cut": cut}
    environment.globals |= {name: Markup((here / f"page.{name}").read_text("utf-8")) for name in ("css", "js")}
    return environment.get_template("page.html.j2")


def _pictures(run: Run, report: Report, spans: Sequence[AttemptSpan], clock: Clock, task: str | None) -> dict[str, Any]:
    drawn: dict[str, Any] = dict.fromkeys(("timeline", "throughput", "ledger_bar"))
    drawn |= {"usage": [], "tasks": {}, "damaged_samples": []}
    if spans:
        drawn["timeline"] = _both(
            "timeline", _about_timeline(spans, clock), lambda width: timeline(spans, clock, width)
        )
        drawn["throughput"] = _throughput(run, report, spans, clock)
        try:
            drawn |= _usage(run, report, spans, clock, task)
        except Exception:
            log.warning("the page has no telemetry", exc_info=True)
    if (ledger := _ledger(report)) and ledger["total"]:
        parts = {row["name"]: row["amount"] for row in ledger["rows"]}
        sentence = ", ".join(f"{row['name']} {row['share']}" for row in ledger["rows"])
        drawn["ledger_bar"] = _both(
            "ledger", f"Where the time went: {sentence}.", lambda width: ledger_bar(parts, width)
        )
    return drawn


def _both(name: str, sentence: str, draw: Callable[[int], Figure]) -> Drawn | None:
    try:
        wide, narrow = (Markup(picture(f"{name}-{width}", sentence, partial(draw, width))) for width in (WIDE, NARROW))
    except Exception:
        log.warning("the page has no %s", name, exc_info=True)
        return None
    return Drawn(wide, narrow, sentence)


def _about_timeline(spans: Sequence[AttemptSpan], clock: Clock) -> str:
    n_failed = sum(span.failed for span in spans)
    return (
        f"Timeline of {count_of(len(spans), 'attempt')} of {count_of(len(rows_of(spans)), 'task')} over "
        f"{duration(float(clock.times[-1]) - clock.begin)}; {n_failed:,} ended badly."
    )


def _about_pauses(clock: Clock) -> str:
    """The meaning of the bands on the time axis; empty without bands."""
    pauses = [duration(pause) for pause in sorted(clock.pauses)]
    if len(pauses) < 2:
        return "".join(f"a pause of {pause}, left out" for pause in pauses)
    return f"{len(pauses)} pauses of {pauses[0]} to {pauses[-1]}, left out"


def _throughput(run: Run, report: Report, spans: Sequence[AttemptSpan], clock: Clock) -> Drawn | None:
    def size_of(shard: int) -> int:
        start, stop = run.plan.bounds(shard)
        return stop - start if 0 <= shard < run.plan.n_shards else 0

    edges, found = rates(spans, clock, items_of(report, size_of))
    if not any(rate.any() for rate in found.values()):
        return None
    top = np.sum(list(found.values()), axis=0)
    unit, scale = next((unit, scale) for least, unit, scale in RATES if top.max() >= least)
    told = found["useful"] if found["useful"].any() else top
    mean = told.sum() / (told > 0).sum()
    sentence = (
        f"Throughput in {unit}{'' if told is found['useful'] else ', none of which count'}: "
        f"{rate_of(told.max() * scale)} at most, {rate_of(mean * scale)} on average while there was any."
    )
    found = {kind: rate * scale for kind, rate in found.items()}
    return _both(
        "throughput",
        sentence,
        lambda width: throughput(edges, found, clock, width, left=left_of(spans, width), unit=unit),
    )


def _usage(run: Run, report: Report, spans: Sequence[AttemptSpan], clock: Clock, task: str | None) -> dict[str, Any]:
    """A picture for each quantity, the tasks with curves of their own, and the damaged files."""
    n_nodes = {a["attempt"]: a["n_nodes"] for a in report["attempts"]}
    usage = read_usage(run.folder, spans, n_nodes, clock, run.plan.sample_s)
    chosen = chosen_tasks(report, usage, task)
    pictures = []
    known = (attempt["usage"].get("gpu_memory_total_bytes") for attempt in report["attempts"])
    sizes = {float(size) for size in known if size}
    for quantity in usage.known(sorted(sizes)):
        values = usage.of(quantity)
        sentence = f"{quantity.title} in {quantity.unit} of {count_of(len(set(usage.owners)), 'task')} over time, "
        sentence += f"mean {three_digits(float(values[values == values].mean()))}."
        svg = picture(f"usage-{quantity.key}", sentence, partial(draw_usage, usage, quantity, list(chosen), clock))
        title = f"{quantity.title}, {quantity.unit}{'; dashed: what a GPU has' if quantity.sizes else ''}"
        svg = re.sub(r'class="task (t-0)"', r'class="task \1 shown"', svg)  # the first task is selected
        pictures.append((title, Drawn(Markup(svg), None, sentence)))
    return {"usage": pictures, "tasks": chosen, "damaged_samples": [plain(name) for name in usage.damaged]}


def _ledger(report: Report) -> dict[str, Any]:
    """The ledger in rows, with shares of the allocated hours."""
    ledger = report["ledger"]
    shown = in_words(ledger)
    rows = [
        {
            "name": name,
            "key": f"ledger.{name}",
            "amount": ledger[name],
            "text": shown.texts[name],
            "share": shown.shares[name],
            "meaning": MEANINGS[name],
        }
        for name in KINDS
    ]
    energy = ledger["energy_kwh"]
    return {
        "unit": shown.unit,
        "total": ledger["allocated"],
        "total_text": shown.texts["allocated"],
        "rows": rows,
        "energy": None if energy is None else " ".join(energy_in_words(energy)),
    }
