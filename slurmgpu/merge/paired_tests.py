"""Which of two runs is right more often, tested on the items where only one of them is right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np

from slurmgpu.results.published import Row
from slurmgpu.shards.columns import Array, Column, Text

LABEL, TRUTH = "label", "truth"
"""The columns of classify: a row is right if both are equal."""

VERDICT, SCORE = "verdict", "score"
"""The columns of judge: where its summary counts right answers (`n_right`), those of 1 are right."""

RIGHT = "correct"
"""The end of the names of boolean columns that say whether a row is right, such as `vote_correct`."""


@dataclass
class PairedTest:
    """Of `n` items with a right answer, how many are right in A alone and in B alone; a failed item is wrong."""

    n: int = 0
    n_only_a: int = 0
    n_only_b: int = 0

    @property
    def p_value(self) -> float:
        """The exact McNemar test, two-sided: how likely such a difference is if both runs are equally good."""
        return sign_test(self.n_only_a, self.n_only_b)

    def add(self, name: str, row: Row, its: Row) -> None:
        """Count an item by its rows of both runs, and the column that says whether they are right."""
        truth = None
        if name == LABEL:
            truths = {each.values[TRUTH] for each in (row, its) if each.values[TRUTH]}
            if len(truths) != 1:
                return
            [truth] = truths
        ours, theirs = (_is_right(name, each, truth) for each in (row, its))
        self.n += 1
        self.n_only_a += ours and not theirs
        self.n_only_b += theirs and not ours


Described = tuple[Mapping[str, Column], Mapping[str, Any] | None]
"""The columns of a run, and its summary, if there is one."""


def tests_of(names: Iterable[str], *runs: Described) -> dict[str, PairedTest]:
    """A test for each of these columns that says in both runs whether a row is right."""
    return {name: PairedTest() for name in names if all(_tells(name, *each) for each in runs)}


def sign_test(n_one: int, n_other: int) -> float:
    """The two-sided probability of counts at least as uneven, if each of their items falls on either side equally."""
    n, fewer = n_one + n_other, min(n_one, n_other)
    if n - 2 * fewer <= 1:
        return 1.0  # which a sum of logarithms may miss by a rounding
    place = np.arange(1, fewer + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log((n + 1 - place) / place))])  # of the binomial coefficients
    return min(1.0, 2 * float(np.exp(logs - n * log(2)).sum()))


def _tells(name: str, columns: Mapping[str, Column], summary: Mapping[str, Any] | None) -> bool:
    column = columns.get(name)
    if name == SCORE:
        is_number = isinstance(column, Array) and not column.shape
        return is_number and type(columns.get(VERDICT)) is Text and "n_right" in (summary or {})
    if name == LABEL:  # others' columns of these names may hold anything
        return all(type(each) is Text for each in (column, columns.get(TRUTH)))
    is_flag = isinstance(column, Array) and column.dtype == bool and not column.shape
    return is_flag and name.rpartition("_")[2] == RIGHT


def _is_right(name: str, row: Row, truth: str | None) -> bool:
    if row.error is not None:
        return False
    value = row.values[name]
    return bool(value == truth if name == LABEL else value == 1)
