"""Which of two runs is right more often, tested on the items where only one of them is right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import log
from typing import Any

import numpy as np

from slurmgpu.results.published import Row
from slurmgpu.shards.columns import Array, Column, Text

LABEL, TRUTH = "label", "truth"
"""The columns of classify: a row is right if both are equal."""

VERDICT = "verdict"
"""The column of judge: a row is right if its verdict is one of `right_verdicts`. (A score may be an expected value.)"""

RIGHT = "correct"
"""The end of the names of boolean columns that say whether a row is right, such as `vote_correct`."""


@dataclass
class PairedTest:
    """Of `n` items with a right answer, how many are right in A alone and in B alone; a failed item is wrong."""

    n: int = 0
    n_only_a: int = 0
    n_only_b: int = 0
    right: tuple[frozenset[str], ...] = field(default=(frozenset(), frozenset()), repr=False, compare=False)
    """The verdicts of A and of B that say that an answer is right."""

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
        ours, theirs = (
            _is_right(name, each, truth, verdicts) for each, verdicts in zip((row, its), self.right, strict=True)
        )
        self.n += 1
        self.n_only_a += ours and not theirs
        self.n_only_b += theirs and not ours

    def to_json(self) -> dict[str, Any]:
        """The counts and the p-value."""
        return {"n": self.n, "n_only_a": self.n_only_a, "n_only_b": self.n_only_b, "p_value": self.p_value}


def tests_of(names: Iterable[str], *runs: tuple[Mapping[str, Column], frozenset[str]]) -> dict[str, PairedTest]:
    """A test for each of these columns that says in both runs whether a row is right.

    `runs` are the columns of A and of B, each with its `right_verdicts`.
    """
    right = tuple(verdicts for _, verdicts in runs)
    return {name: PairedTest(right=right) for name in names if all(_tells(name, *each) for each in runs)}


def right_verdicts(settings: Mapping[str, Any]) -> frozenset[str]:
    """The verdicts with which judge calls an answer right, by its settings; none if its rubric measures no accuracy."""
    rubric = settings.get("rubric")
    if not isinstance(rubric, Mapping) or rubric.get("measure") != "accuracy":
        return frozenset()
    values = rubric.get("values")  # another workload's rubric may be anything
    return (
        frozenset(name for name, value in values.items() if value == 1) if isinstance(values, Mapping) else frozenset()
    )


def sign_test(n_one: int, n_other: int) -> float:
    """The two-sided probability of counts at least as uneven, if each of their items falls on either side equally."""
    n, fewer = n_one + n_other, min(n_one, n_other)
    if n - 2 * fewer <= 1:
        return 1.0  # which a sum of logarithms may miss by a rounding
    place = np.arange(1, fewer + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log((n + 1 - place) / place))])  # of the binomial coefficients
    return min(1.0, 2 * float(np.exp(logs - n * log(2)).sum()))


def _tells(name: str, columns: Mapping[str, Column], verdicts: frozenset[str]) -> bool:
    column = columns.get(name)
    if name == VERDICT:
        return type(column) is Text and bool(verdicts)
    if name == LABEL:  # others' columns of these names may hold anything
        return all(type(each) is Text for each in (column, columns.get(TRUTH)))
    is_flag = isinstance(column, Array) and column.dtype == bool and not column.shape
    return is_flag and name.rpartition("_")[2] == RIGHT


def _is_right(name: str, row: Row, truth: str | None, verdicts: frozenset[str]) -> bool:
    if row.error is not None:
        return False
    value = row.values[name]
    if name == VERDICT:
        return value in verdicts
    return bool(value == truth if name == LABEL else value)
