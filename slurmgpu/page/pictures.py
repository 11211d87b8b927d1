"""The timeline, the throughput and the ledger, drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from slurmgpu.page.clock import Clock
from slurmgpu.page.spans import AttemptSpan, rows_of
from slurmgpu.page.svg import COLOURS, NARROW, RIGHT, figure
from slurmgpu.report.ledger import KINDS
from slurmgpu.run.records import ATTEMPT_STATES

MAX_HEIGHT = 1000
ROW_HEIGHT = 18
LABELLED_ROWS, LABELLED_ROWS_NARROW = 64, 50
"""The most tasks whose rows are all labelled; with more tasks only some are."""
LEAST_LEFT = 56
"""The least pixels to the left of the axes: room for rates and names of tasks."""
TICK_GAP = 1.5
"""Ticks of shards that are closer, in pixels, are drawn as one."""
N_BINS = 160
OF_SHARDS = ("useful", "repeated", "lost")
"""Kinds of shard computations, from bottom to top."""


def timeline(spans: Sequence[AttemptSpan], clock: Clock, width: int) -> Figure:
    """Every attempt as a bar, a row for each task, and a tick for each published shard."""
    rows = rows_of(spans)
    narrow = width <= NARROW
    height = min(MAX_HEIGHT * (0.6 if narrow else 1), max(60, ROW_HEIGHT * len(rows)))
    row = height / max(1, len(rows))
    left = left_of(spans, width)
    made = figure(width, height + 34, left=left, right=RIGHT, top=4, bottom=30)
    axes = made.add_subplot()
    axes.set_ylim(len(rows) - 0.5, -0.5)
    clock.draw(axes, 4 if narrow else 12)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.tick_params(axis="y", length=0)
    _name_rows(axes, rows, width)
    thickness = max(0.8, row * 0.72)
    scale = (width - left - RIGHT) / clock.end  # pixels for each second
    for state in ATTEMPT_STATES:
        points: list[tuple[float, float]] = []
        for number, (_, its) in enumerate(rows):
            for start, stop in ((start, stop) for span in its for kind, start, stop in span.phases if kind == state):
                place = float(clock.place(start))
                points += [(place, number), (max(float(clock.place(stop)), place + 0.6 / scale), number)]
        _strokes(axes, points, COLOURS[state], thickness)
    _ticks(axes, rows, clock, scale, thickness / row)
    _ends(axes, rows, clock, max(4.0, min(thickness, 10)))
    return made


def left_of(spans: Sequence[AttemptSpan], width: int) -> float:
    """Pixels to the left of the axes, the same for all pictures over the whole width."""
    rows = rows_of(spans)
    n_jobs = _n_jobs(rows)
    if _are_labelled(rows, width):
        names = [_row_name(task, its, width, n_jobs) for task, its in rows]
    else:
        names = [task for task, _ in rows] if n_jobs > 1 else []
    return max([LEAST_LEFT, *(14 + 6.4 * len(name) for name in names)])


def _are_labelled(rows: Sequence[tuple[str, list[AttemptSpan]]], width: int) -> bool:
    return len(rows) <= (LABELLED_ROWS_NARROW if width <= NARROW else LABELLED_ROWS)


def _n_jobs(rows: Sequence[tuple[str, list[AttemptSpan]]]) -> int:
    """The number of submissions; with several, task numbers alone are ambiguous."""
    return len({task.rpartition("_")[0] for task, _ in rows})


def _row_name(task: str, its: Sequence[AttemptSpan], width: int, n_jobs: int) -> str:
    if width <= NARROW:
        return task if n_jobs > 1 else task.rpartition("_")[2]
    return f"{task}  {its[-1].node}".strip()[-28:]


def _name_rows(axes: Axes, rows: Sequence[tuple[str, list[AttemptSpan]]], width: int) -> None:
    n_jobs = _n_jobs(rows)
    if _are_labelled(rows, width):
        axes.yaxis.set_major_locator(FixedLocator(list(range(len(rows)))))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda at, _: _row_name(*rows[int(at)], width, n_jobs)))
    else:
        names = [task if n_jobs > 1 else f"task {task.rpartition('_')[2]}" for task, _ in rows]
        axes.yaxis.set_major_locator(MaxNLocator(10, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda at, _: names[int(at)] if 0 <= at < len(rows) else ""))


def _strokes(axes: Axes, points: Sequence[tuple[float, float]], colour: str, thickness: float, z: float = 2) -> None:
    """Draw lines between pairs of points as one path: a patch for each would take a megabyte for a thousand tasks."""
    if points:
        outline = Outline(points, [Outline.MOVETO, Outline.LINETO] * (len(points) // 2))
        axes.add_patch(
            PathPatch(outline, facecolor="none", edgecolor=colour, linewidth=thickness, capstyle="butt", zorder=z)
        )


def _ticks(axes: Axes, rows: Sequence[tuple[str, list[AttemptSpan]]], clock: Clock, scale: float, share: float) -> None:
    points = []
    for number, (_, its) in enumerate(rows):
        last = -1e9
        for place in sorted(float(clock.place(stop)) for span in its for _, _, stop, _ in span.shards):
            if (place - last) * scale >= TICK_GAP:
                points += [(place, number - share / 2), (place, number + share / 2)]
                last = place
    _strokes(axes, points, COLOURS["surface"], 0.7, 2.5)


def _ends(axes: Axes, rows: Sequence[tuple[str, list[AttemptSpan]]], clock: Clock, size: float) -> None:
    """Mark failed ends of attempts, and with smaller marks worker deaths."""
    for kind, marker, share in (("deaths", "D", 0.65), ("failed", "X", 1.0)):
        found = [
            (float(clock.place(at)), number)
            for number, (_, its) in enumerate(rows)
            for span in its
            for at in (span.deaths if kind == "deaths" else [span.stop] if span.failed else [])
        ]
        if found:
            axes.plot(
                *np.array(found).T,
                linestyle="none",
                marker=marker,
                markersize=size * share,
                color=COLOURS["bad"],
                markeredgecolor=COLOURS["surface"],
                markeredgewidth=0.8,
                clip_on=False,
                zorder=4,
            )


def rates(
    spans: Sequence[AttemptSpan], clock: Clock, n_items: Mapping[tuple[str, int, float], float]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Edges of time bins, and items per second in each bin by kind of shard computation.

    `n_items` are those of each computation, by attempt, shard and start. They are spread evenly over its time.
    """
    edges = np.linspace(0, clock.end, N_BINS + 1)
    found = {}
    for kind in OF_SHARDS:
        shards = [(span.attempt, *entry) for span in spans for entry in span.shards if entry[3] == kind]
        starts, stops = (clock.place(np.array([shard[i] for shard in shards] or [0.0], float)) for i in (2, 3))
        items = np.array([n_items.get(shard[:3], 0) for shard in shards] or [0], float)
        found[kind] = _spread(edges, starts, np.maximum(stops, starts + 1e-3), items)
    return edges, found


def _spread(edges: np.ndarray, starts: np.ndarray, stops: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    """Amounts per second in each bin; the amount before an edge is a sum of ramps."""
    speeds = amounts / (stops - starts)
    times = np.concatenate([starts, stops])
    order = np.argsort(times, kind="stable")
    times = times[order]
    speed = np.cumsum(np.concatenate([speeds, -speeds])[order])
    done = np.concatenate([[0.0], np.cumsum(speed[:-1] * np.diff(times))])
    before: np.ndarray = np.interp(edges, times, done, left=0.0)
    return np.maximum(0.0, np.diff(before) / np.diff(edges))


def throughput(
    edges: np.ndarray, rates_by_kind: Mapping[str, np.ndarray], clock: Clock, width: int, *, left: float, unit: str
) -> Figure:
    """Stacked rates over time in `unit`; `left` is the margin of the timeline."""
    made = figure(width, 206, left=left, right=RIGHT, top=24, bottom=30)
    axes = made.add_subplot()
    axes.set_title(unit, loc="left", color=COLOURS["muted"])
    middles = np.repeat(edges, 2)[1:-1]
    top = np.zeros(len(middles))
    for kind, rate in rates_by_kind.items():
        if rate.any():
            below, top = top, top + np.repeat(rate, 2)
            axes.fill_between(middles, below, top, color=COLOURS[kind], linewidth=0)
    clock.draw(axes, 4 if width <= NARROW else 12)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:g}"))
    return made


def ledger_bar(parts: Mapping[str, float], width: int) -> Figure:
    """A bar of the allocated hours, divided into kinds."""
    made = figure(width, 44, left=1, right=1, top=1, bottom=1)
    axes = made.add_subplot()
    axes.set_axis_off()
    total = sum(parts.values()) or 1.0
    axes.set_xlim(0, total)
    at = 0.0
    for name in KINDS:
        share = parts.get(name, 0.0)
        if share > 0:
            axes.barh(0, share, left=at, height=1, color=COLOURS[name], edgecolor=COLOURS["surface"], linewidth=1)
            at += share
    axes.set_ylim(-0.5, 0.5)
    return made
