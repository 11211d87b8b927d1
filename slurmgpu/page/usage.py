"""GPU and host usage over time: quantiles over all tasks, and curves of single tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from slurmgpu.page.clock import Clock
from slurmgpu.page.spans import AttemptSpan
from slurmgpu.page.svg import COLOURS, MARK, RIGHT, SMALL, figure
from slurmgpu.report.attempts import AttemptRow
from slurmgpu.report.report_file import Report
from slurmgpu.run.telemetry_log import Sample, some_samples, telemetry_path
from slurmgpu.util.array_ids import task_of_attempt

N_BINS = 120
SAMPLES_A_BIN = 2
LEAST_SAMPLES = 16
HELD = 1.5
"""A sample is valid for this many sampling intervals: a busy node takes the next one late."""
ROOM = 1.08
"""The height of a picture relative to its highest value: a line at the edge is invisible."""
N_LINES = 60
"""The most tasks with curves of their own."""


@dataclass(frozen=True)
class Quantity:
    """A sampled quantity: its title, its unit, and the factor from a sample's value.

    `top` is its maximum; `sizes` are the capacities of the GPUs that were used.
    """

    key: str
    title: str
    unit: str
    scale: float = 1.0
    top: float | None = None
    sizes: Sequence[float] = ()


QUANTITIES = (
    Quantity("utilisation", "GPU utilisation", "%", top=100),
    Quantity("memory_bytes", "GPU memory", "GB", 1e-9),
    Quantity("power_w", "Power", "W"),
    Quantity("temperature_c", "GPU temperature", "°C"),
    Quantity("rss_bytes", "Host memory of the worker", "GB", 1e-9),
)


@dataclass(frozen=True)
class Usage:
    """The samples of a run in time bins: `values[quantity]` is an array (attempt and node, bin) with NaN for no sample.

    Values are as sampled; `of` converts them to the quantity's unit. `damaged` are files with unreadable lines.
    """

    edges: np.ndarray
    owners: Sequence[str]
    values: Mapping[str, np.ndarray]
    damaged: Sequence[str]

    def of(self, quantity: Quantity) -> np.ndarray:
        """The values of a quantity in its unit."""
        return self.values[quantity.key] * quantity.scale

    def known(self, gpu_memory: Sequence[float] = ()) -> list[Quantity]:
        """The quantities with values, in suitable units; `gpu_memory` is the capacity of the GPUs in bytes."""
        known = [quantity for quantity in QUANTITIES if np.isfinite(self.values[quantity.key]).any()]
        sized = [replace(each, sizes=gpu_memory) if each.key == "memory_bytes" else each for each in known]
        return [
            replace(quantity, unit="MB", scale=1e-6)
            if quantity.unit == "GB" and not quantity.sizes and np.nanmax(self.of(quantity)) < 1
            else quantity
            for quantity in sized
        ]


def read_usage(
    folder: Path, spans: Sequence[AttemptSpan], n_nodes: Mapping[str, int], clock: Clock, sample_s: float
) -> Usage:
    """The samples in telemetry/, a few for each bin: reading all of a thousand tasks would take minutes."""
    edges = np.linspace(0, clock.end, N_BINS + 1)
    owners: list[str] = []
    rows: list[dict[str, np.ndarray]] = []
    damaged: set[Path] = set()
    for span in spans:
        share = float(clock.place(span.stop) - clock.place(span.start)) / clock.end
        n_samples = max(LEAST_SAMPLES, math.ceil(SAMPLES_A_BIN * N_BINS * share))
        for node in range(n_nodes.get(span.attempt, 1)):
            if samples := some_samples(telemetry_path(folder, span.attempt, node), n_samples, damaged):
                owners.append(span.task)
                rows.append(_binned(samples, edges, clock, HELD * sample_s, span.stop))
    values = {q.key: np.array([row[q.key] for row in rows]).reshape(len(rows), N_BINS) for q in QUANTITIES}
    return Usage(edges, owners, values, sorted(path.name for path in damaged))


def _binned(
    samples: Sequence[Sample], edges: np.ndarray, clock: Clock, held_s: float, stop: float
) -> dict[str, np.ndarray]:
    """The mean of each quantity in each bin; in a bin without samples, the last value before it while that is valid.

    Otherwise a quantile would cover only the few tasks with a sample in the bin.
    """
    samples = sorted(samples, key=lambda sample: sample.time)
    times = np.array([sample.time for sample in samples])
    bins = np.clip(np.searchsorted(edges, clock.place(times), side="right") - 1, 0, N_BINS - 1)
    moments = clock.time((edges[1:] + edges[:-1]) / 2)
    last = np.searchsorted(times, moments, side="right") - 1
    none = (last < 0) | (moments - times[last] > held_s) | (moments > stop)
    row = {}
    for quantity in QUANTITIES:
        numbers = [getattr(sample, quantity.key) for sample in samples]
        values = np.array([math.nan if number is None else number for number in numbers], float)
        there = np.isfinite(values)
        counts = np.bincount(bins[there], minlength=N_BINS)
        sums = np.bincount(bins[there], values[there], minlength=N_BINS)
        held = np.where(none, math.nan, values[last])
        row[quantity.key] = np.where(counts > 0, sums / np.maximum(counts, 1), held)
    return row


def chosen_tasks(report: Report, usage: Usage, first: str | None) -> dict[str, str]:
    """The tasks with curves of their own, and why: failed, least used, hottest, then others."""
    sampled = dict.fromkeys(usage.owners)
    attempts = [a for a in report["attempts"] if task_of_attempt(str(a["attempt"])) in sampled]
    chosen: dict[str, str] = {first: ""} if first in sampled and first is not None else {}

    def add(some: Iterable[AttemptRow], n_most: int, why: Callable[[AttemptRow], str]) -> None:
        for attempt in list(some)[:n_most]:
            task = task_of_attempt(str(attempt["attempt"]))
            if not chosen.get(task) and len(chosen.keys() | {task}) <= N_LINES:
                chosen[task] = why(attempt)

    add((a for a in attempts if a["failure"]), N_LINES // 2, lambda a: a["failure"] or "")
    add((a for a in attempts if a["deaths"]), N_LINES // 3, lambda a: f"{len(a['deaths'])} worker deaths")
    add(_most(attempts, "gpu_utilisation", -1), 8, lambda a: f"least used, {_used(a, 'gpu_utilisation'):.0f} %")
    add(_most(attempts, "temperature_max_c", 1), 8, lambda a: f"hottest, {_used(a, 'temperature_max_c'):.0f} °C")
    add(attempts, N_LINES, lambda a: str(a["node"] or ""))
    return chosen


Used = Literal["gpu_utilisation", "temperature_max_c"]


def _used(attempt: AttemptRow, key: Used) -> float | None:
    return attempt["usage"].get(key)


def _most(attempts: Sequence[AttemptRow], key: Used, sign: int) -> list[AttemptRow]:
    known = [(value, a) for a in attempts if (value := _used(a, key)) is not None]
    return [a for _, a in sorted(known, key=lambda pair: -sign * pair[0])]


def draw_usage(usage: Usage, quantity: Quantity, chosen: Sequence[str], clock: Clock) -> Figure:
    """Bands of all tasks (range and middle half), the median, and a curve for each chosen task."""
    made = figure(SMALL, 190, left=46, right=RIGHT, top=10, bottom=28)
    axes = made.add_subplot()
    values = usage.of(quantity)
    there = np.isfinite(values).any(axis=0)
    middles = ((usage.edges[1:] + usage.edges[:-1]) / 2)[there]
    quantiles = np.nanpercentile(values[:, there], [0, 25, 50, 75, 100], axis=0)
    middles, least, lower, median, upper, most = _interrupted(middles, *quantiles, clock=clock)
    if len(set(usage.owners)) > 1:
        axes.fill_between(middles, least, most, color=COLOURS["band"], alpha=0.25, linewidth=0)
        axes.fill_between(middles, lower, upper, color=COLOURS["band"], alpha=0.45, linewidth=0)
    axes.plot(middles, median, color=COLOURS["running"], linewidth=1.6)
    for number, task in enumerate(chosen):
        mine = values[[row for row, owner in enumerate(usage.owners) if owner == task]]
        known = np.isfinite(mine).any(axis=0)
        line = np.nanmean(mine[:, known], axis=0)
        places = ((usage.edges[1:] + usage.edges[:-1]) / 2)[known]
        places, line = _interrupted(places, line, clock=clock)
        axes.plot(places, line, color=COLOURS["chosen"], linewidth=1.6, gid=f"{MARK}{number}")
    for size in quantity.sizes:
        axes.axhline(size * quantity.scale, color=COLOURS["muted"], linewidth=1, linestyle=(0, (4, 3)))
    clock.draw(axes, 4)
    highest = quantity.top or max([float(np.nanmax(values)), *(size * quantity.scale for size in quantity.sizes)])
    axes.set_ylim(0, ROOM * highest or 1)
    axes.yaxis.set_major_locator(MaxNLocator(4) if quantity.top is None else MultipleLocator(quantity.top / 4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    return made


def _interrupted(places: np.ndarray, *lines: np.ndarray, clock: Clock) -> list[np.ndarray]:
    """The places and the curves over them with NaN after a cut, and after a pause of a tenth of the time."""
    wide = np.diff(places) > max(0.1 * clock.end, 3 * clock.end / N_BINS)
    cut = [np.searchsorted(places, stop, side="right") for _, stop in clock.pieces[:-1]]
    gaps = np.unique([*(np.flatnonzero(wide) + 1), *cut]).astype(int)
    return [np.insert(line, gaps, np.nan) for line in (places, *lines)]
