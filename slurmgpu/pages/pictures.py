"""The timeline, the throughput and the ledger, drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from slurmgpu.pages.clock import Clock
from slurmgpu.pages.spans import STATES, Life, rows_of
from slurmgpu.pages.svg import COLOURS, NARROW, figure

MAX_HEIGHT = 1000
ROW_HEIGHT = 18
LABELLED_ROWS = 64
"""So many tasks have their names beside their rows; of more, every so manyth has."""
TICK_GAP = 1.5
"""Ticks of shards that are less than this many pixels apart are drawn as one."""
N_BINS = 160
PARTS = ("useful", "loading", "idle", "lost", "repeated")


def timeline(lives: Sequence[Life], clock: Clock, width: int) -> Figure:
    """Every attempt as a bar, the attempts of one task in one row; ticks where a shard was published."""
    rows = rows_of(lives)
    narrow = width <= NARROW
    height = min(MAX_HEIGHT * (0.6 if narrow else 1), max(60, ROW_HEIGHT * len(rows)))
    row = height / max(1, len(rows))
    labelled = len(rows) <= (height / 12 if narrow else LABELLED_ROWS)
    names = [_row_name(task, its, narrow) if labelled else task.rpartition("_")[2] for task, its in rows]
    left = 14 + 6.4 * max(map(len, names), default=1) if labelled else 56
    made = figure(width, height + 34, left=left, right=14, top=4, bottom=30)
    axes = made.add_subplot()
    axes.set_ylim(len(rows) - 0.5, -0.5)
    clock.draw(axes, 5 if narrow else 12)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.tick_params(axis="y", length=0)
    _name_rows(axes, names, labelled)
    thickness = max(0.8, row * 0.72)
    scale = (width - left - 14) / clock.end  # pixels for each second
    for state in STATES:
        bars = [
            (clock.place(start), clock.place(stop), number)
            for number, (_, its) in enumerate(rows)
            for life in its
            for kind, start, stop in life.phases
            if kind == state
        ]
        _bars(axes, bars, COLOURS[state], thickness, least=0.6 / scale)
    _ticks(axes, rows, clock, scale, thickness / row)
    _ends(axes, rows, clock, max(4.0, min(thickness, 10)))
    return made


def _row_name(task: str, its: Sequence[Life], narrow: bool) -> str:
    return task.rpartition("_")[2] if narrow else f"{task}  {its[-1].node}".strip()[-28:]


def _name_rows(axes: Axes, names: Sequence[str], labelled: bool) -> None:
    if labelled:
        axes.yaxis.set_major_locator(FixedLocator(list(range(len(names)))))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda at, _: names[int(at)]))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(10, integer=True))
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda at, _: f"task {names[int(at)]}" if 0 <= at < len(names) else "")
        )


def _bars(axes: Axes, bars: Iterable[tuple[Any, Any, int]], colour: str, thickness: float, least: float) -> None:
    """One path for all bars: a patch for each would make a thousand tasks a megabyte."""
    points: list[tuple[float, float]] = []
    for start, stop, number in bars:
        points += [(float(start), number), (max(float(stop), float(start) + least), number)]
    _strokes(axes, points, colour, thickness)


def _strokes(axes: Axes, points: Sequence[tuple[float, float]], colour: str, thickness: float, z: float = 2) -> None:
    if points:
        outline = Outline(points, [Outline.MOVETO, Outline.LINETO] * (len(points) // 2))
        axes.add_patch(
            PathPatch(outline, facecolor="none", edgecolor=colour, linewidth=thickness, capstyle="butt", zorder=z)
        )


def _ticks(axes: Axes, rows: Sequence[tuple[str, list[Life]]], clock: Clock, scale: float, share: float) -> None:
    points = []
    for number, (_, its) in enumerate(rows):
        last = -1e9
        for place in sorted(float(clock.place(stop)) for life in its for _, _, stop, _ in life.shards):
            if (place - last) * scale >= TICK_GAP:
                points += [(place, number - share / 2), (place, number + share / 2)]
                last = place
    _strokes(axes, points, COLOURS["surface"], 0.7, 2.5)


def _ends(axes: Axes, rows: Sequence[tuple[str, list[Life]]], clock: Clock, size: float) -> None:
    """A mark where an attempt ended badly, a smaller one where a worker died and the attempt went on."""
    for kind, marker, share in (("deaths", "D", 0.65), ("failed", "X", 1.0)):
        found = [
            (float(clock.place(at)), number)
            for number, (_, its) in enumerate(rows)
            for life in its
            for at in (life.deaths if kind == "deaths" else [life.stop] if life.failed else [])
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
    lives: Sequence[Life], clock: Clock, shard_items: Mapping[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges of bins on the clock, and items per second in each: of shards that counted, and of those done twice.

    The items of a shard are spread evenly over the time that it took.
    """
    edges = np.linspace(0, clock.end, N_BINS + 1)
    totals = []
    for counted in (True, False):
        shards = [(s, a, b) for life in lives for s, a, b, won in life.shards if bool(won) == counted]
        starts, stops = (clock.place(np.array([shard[i] for shard in shards] or [0.0], float)) for i in (1, 2))
        items = np.array([shard_items.get(shard[0], 0) for shard in shards] or [0], float)
        totals.append(_spread(edges, starts, np.maximum(stops, starts + 1e-3), items))
    return edges, totals[0], totals[1]


def _spread(edges: np.ndarray, starts: np.ndarray, stops: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    """Amounts for each second in bins; how much came before an edge is a sum of ramps."""
    speeds = amounts / (stops - starts)
    times = np.concatenate([starts, stops])
    order = np.argsort(times, kind="stable")
    times = times[order]
    speed = np.cumsum(np.concatenate([speeds, -speeds])[order])
    done = np.concatenate([[0.0], np.cumsum(speed[:-1] * np.diff(times))])
    before: np.ndarray = np.interp(edges, times, done, left=0.0)
    return np.maximum(0.0, np.diff(before) / np.diff(edges))


def throughput(edges: np.ndarray, useful: np.ndarray, repeated: np.ndarray, clock: Clock, width: int) -> Figure:
    """Items per second over time, those of shards that were computed twice on top."""
    made = figure(width, 190, left=52, right=14, top=8, bottom=30)
    axes = made.add_subplot()
    middles = np.repeat(edges, 2)[1:-1]
    axes.fill_between(middles, 0, np.repeat(useful, 2), color=COLOURS["useful"], linewidth=0)
    if repeated.any():
        axes.fill_between(
            middles, np.repeat(useful, 2), np.repeat(useful + repeated, 2), color=COLOURS["repeated"], linewidth=0
        )
    clock.draw(axes, 5 if width <= NARROW else 12)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    return made


def ledger_bar(parts: Mapping[str, float], width: int) -> Figure:
    """One bar, as long as all that was allocated, and the parts of it."""
    made = figure(width, 44, left=1, right=1, top=1, bottom=1)
    axes = made.add_subplot()
    axes.set_axis_off()
    total = sum(parts.values()) or 1.0
    axes.set_xlim(0, total)
    at = 0.0
    for name in PARTS:
        share = parts.get(name, 0.0)
        if share > 0:
            axes.barh(0, share, left=at, height=1, color=COLOURS[name], edgecolor=COLOURS["surface"], linewidth=1)
            at += share
    axes.set_ylim(-0.5, 0.5)
    return made
