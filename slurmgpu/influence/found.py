"""What is found for test examples: lists of the most extreme training examples, and facts about the whole rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Listed:
    """The most extreme training examples of each test: `lines` (n, k), `values` (n, k), `shares` (n, k, G).

    The most extreme comes first, of equals the lowest line. Where there are fewer, line -1 and 0 fill up.
    """

    lines: Array
    values: Array
    shares: Array


@dataclass(frozen=True)
class Found:
    """What was found for n tests. `groups`: the names of the G parameter groups, in the order of the shares.

    `loss` and `score` (n,) are the last checkpoint's; `self_influence` (n,) is never normalised.
    The statistics (n,) are those of the row, of the training examples that are allowed: how many, the sum, the sum of
    absolute values, the standard deviation, the share that is positive. Of no values, which is so where nothing is
    streamed, sums are 0 and the other two NaN.
    `full` (n, n_train); in float16 it is to be multiplied by `full_scale` (n,), else there is none.
    `precision_error` and `top10_overlap` (n,) are there where the precision is reduced.
    `problems`: what is wrong with a row, by its number; the row then says nothing else.
    """

    groups: tuple[str, ...]
    proponents: Listed
    opponents: Listed
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


def joined(n: int, parts: Iterable[Found]) -> Found:
    """The same of the n tests of all parts, in order. A part is let go of before the next one is asked for."""
    whole: dict[str, Any] = {}
    problems: dict[int, str] = {}
    start = 0
    for part in parts:
        if len(part.loss) == n:
            return part
        rows = slice(start, start + len(part.loss))
        for field in fields(Found):
            if field.name not in {"groups", "problems"}:
                whole[field.name] = _written(whole.get(field.name), getattr(part, field.name), n, rows)
        problems |= {start + row: text for row, text in part.problems.items()}
        start, groups = rows.stop, part.groups
        del part
    return Found(groups=groups, problems=problems, **whole)


def _written(whole: Any, part: Any, n: int, rows: slice) -> Any:
    """The values of all tests with those of some rows, which are the first if there are none yet."""
    if part is None:
        return None
    if isinstance(part, Listed):
        names = [field.name for field in fields(Listed)]
        return Listed(*(_written(whole and getattr(whole, name), getattr(part, name), n, rows) for name in names))
    if whole is None:
        whole = np.empty((n, *part.shape[1:]), part.dtype)
    whole[rows] = part
    return whole


def in_halves(rows: Array) -> tuple[Array, Array]:
    """Rows (n, m) of float32 as float16, in the same memory, and what each is to be multiplied by (n,).

    That is a power of two, by which the largest lies near float16's end: as many others as can be are numbers of full
    precision, and none is beyond it.
    """
    largest = np.maximum(rows.max(1, initial=0), -rows.min(1, initial=0))
    exponents = np.frexp(np.where(np.isfinite(largest), largest, 0))[1]
    scales = np.ldexp(np.float32(1), np.where(largest > 0, np.maximum(exponents - 15, -126), 0)).astype(np.float32)
    halves: Array = rows.view(np.float16)[:, : rows.shape[1]]
    for row, half, scale in zip(rows, halves, scales, strict=True):
        half[:] = row / scale
    return halves, scales
