"""Results for test examples: lists of extreme training examples, and statistics of whole rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class TopExamples:
    """The most extreme training examples of each test: `lines` (n, k), `values` (n, k), `shares` (n, k, G).

    The most extreme comes first, ties by line. Padded with line -1 and 0.
    """

    lines: Array
    values: Array
    shares: Array


@dataclass(frozen=True)
class Results:
    """The results for n tests. `groups` names the G parameter groups in the order of the shares.

    `loss` and `score` (n,) are the last checkpoint's; `self_influence` (n,) is never normalised.
    The statistics (n,) are over a row's allowed training examples: count, sum, sum of absolute values, standard
    deviation, and share of positive values. If there are no values, or nothing is streamed, sums are 0 and the last two
    NaN. `full` is (n, n_train); in float16 it must be made float32 and multiplied by `full_scale` (n,).
    Only reduced precisions have `precision_error` and `top10_overlap` (n,).
    `problems` maps rows to what is wrong with them; such rows have no other results.
    """

    groups: tuple[str, ...]
    proponents: TopExamples
    opponents: TopExamples
    self_influence: Array
    loss: Array
    score: Array
    n_counted: Array
    sum: Array
    abs_sum: Array
    std: Array
    positive_share: Array
    full: Array | None = None
    full_scale: Array | None = None
    precision_error: Array | None = None
    top10_overlap: Array | None = None
    problems: Mapping[int, str] = dataclasses.field(default_factory=dict)


def joined(parts: Sequence[Results]) -> Results:
    """The results of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    names = [field.name for field in fields(Results) if field.name not in {"groups", "problems"}]
    starts = accumulate((len(part.loss) for part in parts), initial=0)
    return Results(
        groups=parts[0].groups,
        problems={
            start + row: why for start, part in zip(starts, parts, strict=False) for row, why in part.problems.items()
        },
        **{name: _concatenated([getattr(part, name) for part in parts]) for name in names},
    )


def _concatenated(values: Sequence[Any]) -> Any:
    if values[0] is None:
        return None
    if isinstance(values[0], TopExamples):
        return TopExamples(*map(np.concatenate, zip(*(vars(each).values() for each in values), strict=True)))
    return np.concatenate(values)


def as_float16(rows: Array) -> tuple[Array, Array]:
    """Rows (n, m) of float32 as float16, in the same memory, and the factor of each row (n,).

    The factor is a power of two that brings the largest value close to float16's maximum, so that as many others as
    possible keep full precision and none overflows.
    """
    largest = np.maximum(rows.max(1, initial=0), -rows.min(1, initial=0))
    exponents = np.frexp(np.where(np.isfinite(largest), largest, 0))[1]
    scales = np.ldexp(np.float32(1), np.where(largest > 0, np.maximum(exponents - 15, -126), 0)).astype(np.float32)
    halves: Array = rows.view(np.float16)[:, : rows.shape[1]]
    for row, half, scale in zip(rows, halves, scales, strict=True):
        half[:] = row / scale
    return halves, scales
