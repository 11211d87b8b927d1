"""The summary of a judge's verdicts: accuracy, win rate or mean, and agreement between orders and with the truth."""

from __future__ import annotations

from collections import Counter
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np

from slurmgpu.llm.answers.metrics import cohen_kappa, count_matrix, ratio, wilson_interval
from slurmgpu.workloads.judge.rubrics import Rubric
from slurmgpu.workloads.language_model import blocks, ends_summary, n_truncated
from slurmgpu.workloads.samples import flat

if TYPE_CHECKING:
    from slurmgpu.results import Merged


class _Counts:
    def __init__(self) -> None:
        self.verdicts = Counter[str]()
        self.how = Counter[str]()
        self.ends = Counter[str]()
        self.pairs = Counter[tuple[str, str]]()
        self.firsts = Counter[tuple[str | None, str | None]]()
        self.n_failed = 0
        self.total = self.squares = 0.0


def summarize(merged: Merged, rubric: Rubric, max_tokens: int, *, with_truth: bool) -> dict[str, Any]:
    """The verdicts' counts, and the rubric's measure.

    Items that failed or have no verdict count as wrong in `accuracy`, and as lost in the win rate; `parsed_accuracy`,
    `parsed_win_rate` and the mean leave them out.
    """
    counts = _count(merged, rubric, with_truth)
    n, n_parsed = len(merged), sum(counts.verdicts.values())
    summary: dict[str, Any] = {"n_items": n, "n_failed": counts.n_failed}
    summary |= {"n_unparsed": n - counts.n_failed - n_parsed, "unparsed_rate": ratio(n - counts.n_failed - n_parsed, n)}
    if "n_truncated" in merged.columns:
        summary["n_truncated"] = n_truncated(merged)
    summary["verdicts"] = {name: counts.verdicts[name] for name in rubric.names}
    summary["how"] = dict(sorted(counts.how.items()))
    if rubric.method == "parse":
        summary |= ends_summary(counts.ends, max_tokens)
    if rubric.measure == "accuracy":
        summary |= _accuracy(counts, rubric, n, n_parsed)
    elif rubric.measure == "win_rate":
        summary |= {"win_rate": ratio(counts.total, n), "parsed_win_rate": ratio(counts.total, n_parsed)}
    else:
        mean = ratio(counts.total, n_parsed)
        deviation = None if mean is None else max(counts.squares / n_parsed - mean * mean, 0.0) ** 0.5
        summary |= {"mean_score": mean, "standard_deviation": deviation}
    if rubric.swap:
        summary |= _positions(counts, rubric)
    return summary | (_agreement(counts, rubric) if with_truth else {})


def summarize_each(merged: Merged, rubric: Rubric, max_tokens: int) -> dict[str, Any]:
    """Counts of the verdicts on all texts of items that have several, and their mean score."""
    verdicts, how, ends, n_texts, total, n_scores = Counter[str](), Counter[str](), Counter[str](), 0, 0.0, 0
    for start, stop in blocks(len(merged)):
        found = [verdict for verdict in flat(merged, "verdict", start, stop) if verdict is not None]
        n_texts += len(found)
        verdicts.update(filter(None, found))
        how.update(filter(None, flat(merged, "how", start, stop)))
        if rubric.method == "parse":
            ends.update(filter(None, flat(merged, "finish_reason", start, stop)))
        scores = np.fromiter(flat(merged, "score", start, stop), np.float64)
        total, n_scores = total + float(np.nansum(scores)), n_scores + int((~np.isnan(scores)).sum())
    n_parsed = verdicts.total()
    summary: dict[str, Any] = {"n_unparsed": n_texts - n_parsed, "unparsed_rate": ratio(n_texts - n_parsed, n_texts)}
    if "n_truncated" in merged.columns:
        every = (flat(merged, "n_truncated", start, stop) for start, stop in blocks(len(merged)))
        summary["n_truncated"] = sum(int(count > 0) for some in every for count in some)
    summary["verdicts"] = {name: verdicts[name] for name in rubric.names}
    summary["how"] = dict(sorted(how.items()))
    if rubric.method == "parse":
        summary |= ends_summary(ends, max_tokens)
    return summary | {"mean_score": ratio(total, n_scores)}


def _count(merged: Merged, rubric: Rubric, with_truth: bool) -> _Counts:
    counts = _Counts()
    for start, stop in blocks(len(merged)):
        is_good = ~merged.failed[start:stop]
        good = is_good.tolist()
        counts.n_failed += good.count(False)
        verdicts = list(compress(merged["verdict"][start:stop], good))
        counts.verdicts.update(filter(None, verdicts))
        counts.how.update(compress(merged["how"][start:stop], good))
        if rubric.method == "parse":
            counts.ends.update(compress(merged["finish_reason"][start:stop], good))
        scores = np.asarray(merged["score"][start:stop][is_good], np.float64)
        counts.total += float(np.nansum(scores))
        counts.squares += float(np.nansum(scores**2))
        if with_truth:
            counts.pairs.update(zip(compress(merged["truth"][start:stop], good), verdicts, strict=True))
        if rubric.swap:
            counts.firsts.update(map(tuple, compress(merged["verdicts"][start:stop], good)))
    return counts


def _accuracy(counts: _Counts, rubric: Rubric, n: int, n_parsed: int) -> dict[str, Any]:
    n_right = sum(count for name, count in counts.verdicts.items() if rubric.values[name] == 1)
    return {
        "n_right": n_right,
        "accuracy": ratio(n_right, n),
        "accuracy_interval": wilson_interval(n_right, n),
        "parsed_accuracy": ratio(n_right, n_parsed),
        "parsed_accuracy_interval": wilson_interval(n_right, n_parsed),
    }


def _positions(counts: _Counts, rubric: Rubric) -> dict[str, Any]:
    """How often both orders agree, and how often the same position won in both.

    As in Shi et al. 2024 (arXiv:2406.07791): position consistency, and preference for a position.
    """
    parsed = {pair: count for pair, count in counts.firsts.items() if None not in pair}
    n = sum(parsed.values())
    n_flipped = sum(count for (one, other), count in parsed.items() if one != other)
    found = {"agreement_rate": ratio(n - n_flipped, n), "position_bias_rate": ratio(n_flipped, n)}
    toward = Counter[str]()
    for (one, other), count in parsed.items():
        # The second order's verdict is mirrored to the texts, so that two opposite wins mean the same position. A win
        # and a tie prefer no position.
        if one is not None and one != other and rubric.mirrored(one) == other:
            toward["first" if rubric.values[one] > rubric.values[other] else "second"] += count
    return {**found, "preferred_position": {place: toward[place] for place in ("first", "second")}}


def _agreement(counts: _Counts, rubric: Rubric) -> dict[str, Any]:
    matrix = count_matrix(counts.pairs, rubric.names)
    square = matrix[:, :-1]
    n_with_truth, n_agree = int(matrix.sum()), int(np.trace(square))
    truths = Counter[str]()
    for (truth, _), count in counts.pairs.items():
        truths[truth] += count
    n_without = truths.pop("", 0)
    return {
        "n_with_truth": n_with_truth,
        "n_without_truth": n_without,
        "n_unknown_truth": truths.total() - n_with_truth,
        "truth_agreement_rate": ratio(n_agree, n_with_truth),
        "truth_kappa": cohen_kappa(square),
        "truth_by_verdict": {
            name: dict(zip((*rubric.names, "(none)"), matrix[i].tolist(), strict=True))
            for i, name in enumerate(rubric.names)
        },
    }
