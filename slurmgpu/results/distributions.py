"""The distribution of each column's values in a bounded sample of a file's rows, the same at every call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmgpu.results import Merged
from slurmgpu.shards.columns import Column
from slurmgpu.util.json_values import nearest_float

N_SAMPLED = 4096
"""The most rows of a sample; a file with fewer is read whole."""
SAMPLE_BYTES = 64 << 20
"""The most bytes of a sample, approximately."""
_LEAST_SAMPLED = 8
"""The fewest rows of a sample, however large they are."""
_N_STRETCHES = 64
_N_BINS = 24


@dataclass(frozen=True)
class Spread:
    """The minimum, median and maximum of finite numbers, and the count in each bin between `edges`."""

    least: float
    median: float
    largest: float
    counts: Sequence[int]
    edges: Sequence[float]


@dataclass(frozen=True)
class Distribution:
    """The spread of a column's numbers, elements of arrays included, and of the lengths of its texts and lists.

    None if a column has none of these. Failed items and JSON null do not count.
    """

    name: str
    type_name: str
    n_values: int
    numbers: Spread | None
    lengths: Spread | None


def sampled_rows(merged: Merged) -> npt.NDArray[np.int64]:
    """The positions of the sampled rows: all of a small file, else evenly spaced groups of consecutive rows."""
    n_rows = len(merged)
    most = max(_LEAST_SAMPLED, min(N_SAMPLED, n_rows * SAMPLE_BYTES // max(1, merged.size_bytes)))
    if n_rows <= most:
        return np.arange(n_rows)
    n_stretches = min(_N_STRETCHES, most)
    size = most // n_stretches
    firsts = np.linspace(0, n_rows - size, n_stretches).astype(np.int64)
    return np.unique((firsts[:, None] + np.arange(size)).ravel())


def distribution_of(merged: Merged, name: str, rows: npt.NDArray[np.int64]) -> Distribution:
    """The distribution of a column over the good rows."""
    column, good = merged.columns[name], rows[~merged.failed[rows]]
    values = list(merged[name][good])
    numbers: npt.NDArray[Any] | None = None
    lengths: list[int] | None = None
    if column.is_tensor and column.dtype.kind in "biufc":
        parts = [np.ravel(np.asarray(value)) for value in values]
        numbers = np.concatenate(parts) if parts else np.empty(0)
        lengths = None if column.shape is not None else [len(part) for part in parts]
    else:
        values = [value for value in values if value is not None]
        if values and all(isinstance(value, int | float) for value in values):
            numbers = np.array(list(map(nearest_float, values)))
        else:
            lengths = [len(value) for value in values if hasattr(value, "__len__")]
    type_name = _type_name(column) + ("" if column.kind != "json" else _in_common(values))
    return Distribution(name, type_name, len(values), _spread(numbers), _spread(np.array(lengths or ())))


def _in_common(values: Sequence[Any]) -> str:
    """The common type of a JSON column's values, in words; empty if they differ."""
    for kinds, word in (
        (str, " text"),
        (bool, " boolean"),
        ((int, float), " number"),
        (list, " list"),
        (dict, " object"),
    ):
        if values and all(isinstance(value, kinds) for value in values):
            return word
    return ""


def _type_name(column: Column) -> str:
    numbers = f" {column.dtype.name}" if column.is_tensor else ""
    shape = f" {'×'.join(map(str, column.shape))}" if column.shape else ""
    return f"{column.kind}{numbers}{shape}"


def _spread(values: npt.NDArray[Any] | None) -> Spread | None:
    if values is None:
        return None
    if values.dtype.kind == "c":
        values = np.abs(values)
    values = values.astype(np.float64)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    least, median, largest = values.min(), _median(values), values.max()
    with np.errstate(all="ignore"):
        scale = largest - least if np.isfinite(largest - least) and largest > least else 1.0
        places = np.minimum((values - least) / scale * _N_BINS, _N_BINS - 1).astype(np.int64)
    counts = np.bincount(places.clip(0, _N_BINS - 1), minlength=_N_BINS)
    edges = least + np.arange(_N_BINS + 1) / _N_BINS * scale
    return Spread(float(least), float(median), float(largest), counts.tolist(), edges.tolist())


def _median(values: npt.NDArray[np.float64]) -> float:
    """The median of finite numbers, also of those whose sum is not finite."""
    below, above = (float(np.quantile(values, 0.5, method=method)) for method in ("lower", "higher"))
    return below if below == above else below / 2 + above / 2
