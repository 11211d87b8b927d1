"""Metrics of labels and verdicts, from exact counts; None if undefined, such as the precision of an unused label.

A matrix is counts[truth, predicted] over the labels; more columns may follow for predictions that are not labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

NO_LEAD = 2**-22
"""The relative difference up to which two weights of a vote are equal: twice that of two sums of float32 weights."""

Counts = npt.NDArray[np.int64]


def wilson_interval(n_right: float, n: int) -> list[float] | None:
    """The 95 % confidence interval of the share `n_right` / `n` (Wilson 1927); None for n = 0.

    `n_right` may count a tie as half a win: values between 0 and 1 vary no more than wins and losses with their mean
    do, so the interval is then rather too wide than too narrow.

    Unlike the share ± its standard error, it stays within 0 and 1, and holds for few items and for shares near 0 or 1.
    """
    if n == 0:
        return None
    z = 1.959963984540054  # the 97.5 % quantile
    share, spread = n_right / n, z * z / n
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    # Exact at the ends, without rounding errors.
    return [0.0 if n_right == 0 else middle - half, 1.0 if n_right == n else middle + half]


def ratio(part: float, whole: int) -> float | None:
    """A share, or a mean; None if `whole` is 0."""
    return part / whole if whole else None


def accuracy(n_right: int, n: int, of: str = "") -> dict[str, Any]:
    """The share of right answers and its interval, for JSON; the names begin with `of`."""
    return {f"{of}accuracy": ratio(n_right, n), f"{of}accuracy_interval": wilson_interval(n_right, n)}


def win_rate(won: float, n: int, of: str = "", *, are_shares: bool = True) -> dict[str, Any]:
    """The share of wins and its interval, for JSON; the names begin with `of`.

    The interval is None unless the summed values `are_shares`, between loss (0) and win (1).
    """
    interval = wilson_interval(won, n) if are_shares else None
    return {f"{of}win_rate": ratio(won, n), f"{of}win_rate_interval": interval}


def best_of(scores: Sequence[float]) -> int:
    """The index of the first highest score; -1 if all are NaN."""
    known = [place for place, score in enumerate(scores) if not math.isnan(score)]
    return max(known, key=scores.__getitem__, default=-1)


def vote(answers: Sequence[str | None], weights: Sequence[Fraction | float]) -> int:
    """The index where the answer with the largest weight first appears (the first among equals); -1 without answers.

    Weights that differ by `NO_LEAD` are equal: those of a tree are read in float32, in which three times a ninth is
    less than a third.
    With equal weights it is the majority answer of the samples (Wang et al. 2023, arXiv:2203.11171).
    """
    votes: dict[str, Fraction | float] = {}
    for answer, weight in zip(answers, weights, strict=True):
        if answer is not None:
            votes[answer] = votes.get(answer, 0) + weight
    most = max(votes.values(), default=0)
    return next((answers.index(each) for each, won in votes.items() if math.isclose(won, most, rel_tol=NO_LEAD)), -1)


def vote_weights(scores: Sequence[float], *, is_raw: bool) -> list[float]:
    """The weights of texts in a vote, from their scores: 0 for NaN, and exponentials, at most 1, for raw scores."""
    highest = max((score for score in scores if not math.isnan(score)), default=0.0)
    weights = [math.exp(score - highest) if is_raw else score for score in scores]
    return [0.0 if math.isnan(weight) else weight for weight in weights]


def count_matrix(pairs: Mapping[tuple[str, str], int], labels: Sequence[str]) -> Counts:
    """counts[truth, predicted] of (truth, predicted) pairs; the last column counts predictions that are not labels.

    Pairs with a truth that is not a label are left out.
    """
    place = {label: number for number, label in enumerate(labels)}
    counts = np.zeros((len(labels), len(labels) + 1), np.int64)
    for (truth, predicted), count in pairs.items():
        if truth in place:
            counts[place[truth], place.get(predicted, len(labels))] += count
    return counts


def class_metrics(counts: Counts) -> dict[str, list[float | None]]:
    """`precision`, `recall` and `f1` of each label."""
    n = len(counts)
    right = np.diag(counts).tolist()
    given, true = counts[:, :n].sum(axis=0).tolist(), counts.sum(axis=1).tolist()
    return {
        "precision": [ratio(tp, total) for tp, total in zip(right, given, strict=True)],
        "recall": [ratio(tp, total) for tp, total in zip(right, true, strict=True)],
        "f1": [ratio(2 * tp, one + other) for tp, one, other in zip(right, given, true, strict=True)],
    }


def macro_f1(counts: Counts) -> float | None:
    """The mean F1 of the labels that occur as a truth or a prediction."""
    found = [f1 for f1 in class_metrics(counts)["f1"] if f1 is not None]
    return sum(found) / len(found) if found else None


def cohen_kappa(counts: Counts) -> float | None:
    """Agreement of two raters beyond chance (Cohen 1960), from a square matrix; None if chance agreement is 1."""
    n = int(counts.sum())
    if n == 0:
        return None
    observed = int(np.trace(counts)) / n
    by_chance = sum(int(a) * int(b) for a, b in zip(counts.sum(axis=0), counts.sum(axis=1), strict=True)) / n**2
    return None if by_chance == 1 else (observed - by_chance) / (1 - by_chance)


def label_rates(counts: Counts, label: int) -> dict[str, float | None]:
    """One label against all others: how often it is predicted when it is true, and when it is not."""
    given, true, n = int(counts[:, label].sum()), int(counts[label].sum()), int(counts.sum())
    right = int(counts[label, label])
    return {
        "predicted_rate": ratio(given, n),
        "true_positive_rate": ratio(right, true),
        "false_positive_rate": ratio(given - right, n - true),
    }


def classification_summary(counts: Counts, labels: Sequence[str], n_failed: int = 0) -> dict[str, Any]:
    """Accuracy with its interval, macro F1, Cohen's kappa, each label's metrics and the confusion matrix, for JSON.

    Failed items, which have no truth, and items without a label count as wrong in the accuracy. Kappa leaves them out.
    """
    n, n_right = int(counts.sum()) + n_failed, int(np.trace(counts))
    metrics, support = class_metrics(counts), counts.sum(axis=1).tolist()
    names = (*labels, "(none)")[: counts.shape[1]]
    return {
        **accuracy(n_right, n),
        "macro_f1": macro_f1(counts),
        "kappa": cohen_kappa(counts[:, : len(counts)]),
        "by_label": {
            label: {"n": support[i], **{name: values[i] for name, values in metrics.items()}}
            for i, label in enumerate(labels)
        },
        "confusion": {label: dict(zip(names, counts[i].tolist(), strict=True)) for i, label in enumerate(labels)},
    }
