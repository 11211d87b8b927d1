"""Rows of the merged file on the page: the distribution of each column, and a few example rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from slurmgpu import results
from slurmgpu.errors import SlurmGPUError
from slurmgpu.page.svg import COLOURS, figure, picture
from slurmgpu.page.words import cut
from slurmgpu.report.report_file import Report
from slurmgpu.results import Merged
from slurmgpu.results.distributions import Distribution, Spread, distribution_of, sampled_rows
from slurmgpu.run.directory import Run
from slurmgpu.util.amounts import count_of
from slurmgpu.util.json_values import json_value
from slurmgpu.util.redact import hidden
from slurmgpu.util.shared_files import exists

log = logging.getLogger(__name__)

MAX_COLUMNS = 20
"""The most columns that the page describes."""
N_EXAMPLES = 6
VALUE_CHARACTERS = 300
MOST_WHOLE = 1e9
"""Below this, no number has an exponent: lengths and counts are numbers, too."""
WIDTH, HEIGHT = 180, 30


@dataclass(frozen=True)
class Described:
    """A column in words, with a picture of the distribution of its numbers, or else of its lengths.

    `missing` is the number of rows without a value, `not_finite` the number with NaN or infinity.
    """

    name: str
    type_name: str
    missing: str
    not_finite: str
    numbers: str
    lengths: str
    picture: Markup | None


@dataclass(frozen=True)
class Example:
    """A row: its item, its error, or its values by column."""

    index: int
    error: str | None
    values: Mapping[str, str]


@dataclass(frozen=True)
class Rows:
    """The rows for the page; `sentence` says how many were read."""

    columns: list[Described]
    n_more: int
    examples: list[Example]
    sentence: str


def rows_of(run: Run, report: Report) -> Rows | None:
    """The rows of merged.h5 for the page; None if there are none, or they cannot be read."""
    try:
        if not exists(run.merged):
            return None
        with results.open(run.merged) as merged:
            return _rows(merged, report, run.plan.keep) if len(merged) else None
    except (SlurmGPUError, OSError) as error:
        log.warning("the page has no rows: %s", error)
        return None


def _rows(merged: Merged, report: Report, kept: Collection[str]) -> Rows:
    places = sampled_rows(merged)
    names = list(merged.columns)
    not_finite = report["not_finite"]
    columns = [
        _described(number, distribution_of(merged, name, places), len(places), not_finite, is_kept=name in kept)
        for number, name in enumerate(names[:MAX_COLUMNS])
    ]
    chosen = sorted({int(places[(2 * number + 1) * len(places) // (2 * N_EXAMPLES)]) for number in range(N_EXAMPLES)})
    examples = [_example(merged, place, names[:MAX_COLUMNS]) for place in chosen]
    if len(places) == len(merged):
        sentence = f"From all {count_of(len(merged), 'row')}; failed items have no value."
    else:
        sentence = f"From {len(places):,} of {count_of(len(merged), 'row')}, evenly spaced; failed items have no value."
    return Rows(columns, len(names) - len(columns), examples, sentence)


def _described(
    number: int,
    found: Distribution,
    n_rows: int,
    not_finite: Mapping[str, Mapping[str, int]] | None,
    *,
    is_kept: bool,
) -> Described:
    drawn = found.numbers or found.lengths
    svg = None
    if drawn is not None:
        what = "numbers" if found.numbers else "lengths"
        sentence = f"Histogram of the {what} of {cut(found.name, 80)}: {_in_words(drawn)}."
        svg = Markup(picture(f"column-{number}", sentence, partial(_histogram, drawn)))
    counts = (not_finite or {}).get(found.name, {})
    words = [f"{counts[key]:,} {word}" for key, word in (("nan", "NaN"), ("infinite", "infinite")) if counts.get(key)]
    return Described(
        cut(found.name, 80),
        f"{found.type_name}, of the item" if is_kept else found.type_name,
        f"{n_rows - found.n_values:,}" if found.n_values < n_rows else "",
        ", ".join(words),
        "" if found.numbers is None else _in_words(found.numbers),
        "" if found.lengths is None else _in_words(found.lengths),
        svg,
    )


def _in_words(spread: Spread) -> str:
    least, median, largest = map(_number, (spread.least, spread.median, spread.largest))
    return f"always {least}" if least == largest else f"{least} to {largest}, median {median}"


def _number(value: float) -> str:
    """A number to four digits, or with all those before its point unless there are many."""
    is_whole = value.is_integer() or abs(value) >= 9999.5
    return f"{value:,.0f}" if is_whole and abs(value) < MOST_WHOLE else f"{value:.4g}"


def _histogram(spread: Spread) -> Figure:
    made = figure(WIDTH, HEIGHT, left=1, right=1, top=1, bottom=1)
    axes = made.add_subplot()
    axes.set_axis_off()
    counts = np.array(spread.counts, float)
    # Keep a bin with few values visible.
    heights = np.where(counts > 0, np.maximum(counts / counts.max(), 0.06), 0.0)
    axes.stairs(heights, np.arange(len(heights) + 1), fill=True, color=COLOURS["running"])
    axes.set_xlim(0, len(heights))
    axes.set_ylim(0, 1)
    return made


def _example(merged: Merged, place: int, names: list[str]) -> Example:
    index, error = int(merged["index"][place]), str(merged["error"][place])
    if error:
        return Example(index, cut(error, VALUE_CHARACTERS), {})
    values = {name: _shown(name, merged[name][place]) for name in names}
    return Example(index, None, {cut(name, 80): text for name, text in values.items()})


def _shown(name: str, value: Any) -> str:
    if isinstance(value, np.ndarray) and value.size > 8:
        text = np.array2string(value, threshold=8, edgeitems=3, precision=4, max_line_width=1 << 30)
        return cut(f"{' '.join(text.split())} {'×'.join(map(str, value.shape))}", VALUE_CHARACTERS)
    if isinstance(value, np.floating):
        return str(value)  # with the digits that its dtype has
    if isinstance(value, str):
        value = value[: 4 * VALUE_CHARACTERS]  # a row may have a gigabyte
    found = hidden(json_value(value), name)
    return cut(found if isinstance(found, str) else json.dumps(found, ensure_ascii=False), VALUE_CHARACTERS)
