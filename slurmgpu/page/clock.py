"""The time axis of all pictures: from the first submission on, without long pauses between submissions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator

from slurmgpu.page.svg import COLOURS
from slurmgpu.util.amounts import duration

MINUTE, HOUR, DAY = 60, 3600, 86400
STEPS = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(HOUR * n for n in (1, 2, 3, 6, 12)),
    *(DAY * n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)),
)
LONG_GAP = 0.2
"""A pause longer than this share of the busy time is cut out."""
CUT_WIDTH = 0.025


@dataclass(frozen=True)
class Clock:
    """Maps times to places on an axis, in seconds without the pauses that were cut out.

    `times` (since the epoch) lie at `places`, with linear interpolation between them; `pieces` are the ranges of
    places in which something is drawn.
    """

    begin: float
    times: np.ndarray
    places: np.ndarray
    pieces: Sequence[tuple[float, float]]

    @property
    def end(self) -> float:
        """The last place."""
        return float(self.places[-1])

    def place(self, time: float | np.ndarray) -> np.ndarray:
        """The place of a time."""
        return np.asarray(np.interp(time, self.times, self.places))

    def time(self, place: float | np.ndarray) -> np.ndarray:
        """The time at a place."""
        return np.asarray(np.interp(place, self.places, self.times))

    @property
    def pauses(self) -> list[float]:
        """The seconds of each pause that was cut out."""
        return [float(self.time(start) - self.time(stop)) for (_, stop), (start, _) in pairwise(self.pieces)]

    def draw(self, axes: Axes, n_ticks: int) -> None:
        """Set the x axis, with about `n_ticks` ticks and bands where a pause was cut out."""
        axes.set_xlim(0, self.end)
        places, names = self._ticks(n_ticks)
        axes.xaxis.set_major_locator(FixedLocator(places))
        axes.xaxis.set_major_formatter(FixedFormatter(names))
        for (_, stop), (start, _) in pairwise(self.pieces):
            axes.axvspan(stop, start, facecolor=COLOURS["cut"], edgecolor="none", zorder=3)

    def _ticks(self, n_ticks: int) -> tuple[list[float], list[str]]:
        step = next((step for step in STEPS if self.end / step <= n_ticks), STEPS[-1])
        places: list[float] = []
        names: list[str] = []
        for start, stop in self.pieces:
            first, last = (float(self.time(place)) - self.begin for place in (start, stop))
            numbers = range(math.ceil(first / step - 1e-6), math.floor(last / step + 1e-6) + 1)
            for since in [number * step for number in numbers] or [first]:
                place = float(self.place(self.begin + since))
                if not places or place - places[-1] > 0.6 * self.end / n_ticks:
                    places.append(place)
                    names.append(duration(since) if since else "0")
        return places, names


def make_clock(begin: float, spans: Iterable[tuple[float, float]]) -> Clock:
    """The clock from `begin` on that covers these spans of time."""
    pieces: list[list[float]] = [[begin, begin]]
    for start, stop in sorted((max(start, begin), max(stop, begin)) for start, stop in spans):
        if start <= pieces[-1][1]:
            pieces[-1][1] = max(pieces[-1][1], stop)
        else:
            pieces.append([start, stop])
    busy = sum(stop - start for start, stop in pieces) or 1.0
    kept = [pieces[0]]
    for start, stop in pieces[1:]:
        if start - kept[-1][1] > max(MINUTE, LONG_GAP * busy):
            kept.append([start, stop])
        else:
            kept[-1][1] = stop
    if kept[0][0] == kept[0][1] and len(kept) > 1:  # the wait for the first task was cut out
        kept[0][1] += 0.01 * busy
    if kept[-1][1] - kept[-1][0] <= 0:
        kept[-1][1] = kept[-1][0] + 1.0
    width = CUT_WIDTH * sum(stop - start for start, stop in kept)
    times: list[float] = []
    places: list[float] = []
    drawn: list[tuple[float, float]] = []
    place = 0.0
    for start, stop in kept:
        drawn.append((place, place + stop - start))
        times += [start, stop]
        places += drawn[-1]
        place = drawn[-1][1] + width
    return Clock(begin, np.array(times), np.array(places), drawn)
