"""The summary of a judge's verdicts: accuracy, win rate or mean, and agreement between orders and with the truth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from slurmgpu.llm.answers.metrics import accuracy, cohen_kappa, count_matrix, ratio, win_rate
from slurmgpu.workloads.judge.rubrics import Rubric, are_shares
from slurmgpu.workloads.language_model import ends_summary, good_blocks, good_values, n_truncated
from slurmgpu.workloads.samples import flat

if TYPE_CHECKING:
    from slurmgpu.results import Merged


SILENT_RATE = 0.5
"""The share of items without a verdict in an answer above which a summary has a hint."""


def summarize(merged: Merged, rubric: Rubric, max_tokens: int, *, with_truth: bool) -> dict[str, Any]:
    """The counts of the verdicts, and the rubric's measure.

    Items that failed or have no verdict count as wrong in `accuracy`, and as lost in the win rate; `parsed_accuracy`,
    `parsed_win_rate` and the mean leave them out. Accuracy and win rate are computed from the counted verdicts: two
    orders that disagree are a tie, whatever the mean of their values is.
    """
    verdicts = Counter[str](filter(None, good_values(merged, "verdict")))
    n, n_failed, n_parsed = len(merged), int(merged.failed.sum()), verdicts.total()
    summary: dict[str, Any] = {"n_items": n, "n_failed": n_failed, **_unparsed(n - n_failed - n_parsed, n)}
    if "n_truncated" in merged.columns:
        summary["n_truncated"] = n_truncated(merged)
    ends = good_values(merged, "finish_reason")
    summary |= _counted(verdicts, good_values(merged, "how"), ends, rubric, max_tokens)
    if rubric.measure == "accuracy":
        n_right = sum(count for name, count in verdicts.items() if rubric.values[name] == 1)
        summary |= {"n_right": n_right, **accuracy(n_right, n), **accuracy(n_right, n_parsed, "parsed_")}
    elif rubric.measure == "win_rate":
        won = sum(count * rubric.values[name] for name, count in verdicts.items())
        shares = are_shares(rubric.values.values())
        summary |= win_rate(won, n, are_shares=shares)
        summary |= win_rate(won, n_parsed, "parsed_", are_shares=shares)
    else:
        summary |= _mean_and_deviation(_sum_of_scores(merged), _sum_of_scores(merged, power=2), n_parsed)
    if rubric.swap:
        summary |= _positions(merged, rubric)
    return summary | (_agreement(merged, rubric) if with_truth else {})


def summarize_each(merged: Merged, rubric: Rubric, max_tokens: int) -> dict[str, Any]:
    """Counts of the verdicts on all texts of items that have several, and the mean and deviation of their scores."""
    verdicts = Counter(flat(merged, "verdict"))
    del verdicts[None]  # texts without a row
    n_texts, n_unparsed = verdicts.total(), verdicts.pop("", 0)
    summary = _unparsed(n_unparsed, n_texts)
    if "n_truncated" in merged.columns:
        summary["n_truncated"] = sum(int(count > 0) for count in flat(merged, "n_truncated"))
    how, ends = (filter(None, flat(merged, name)) for name in ("how", "finish_reason"))
    summary |= _counted(verdicts, how, ends, rubric, max_tokens)
    scores = np.fromiter(flat(merged, "score"), np.float64)
    n_scored = int((~np.isnan(scores)).sum())
    return summary | _mean_and_deviation(float(np.nansum(scores)), float(np.nansum(scores**2)), n_scored)


def _unparsed(n_unparsed: int, n: int) -> dict[str, Any]:
    return {"n_unparsed": n_unparsed, "unparsed_rate": ratio(n_unparsed, n)}


def _counted(
    verdicts: Counter[str], how: Iterable[str], ends: Iterable[str], rubric: Rubric, max_tokens: int
) -> dict[str, Any]:
    """Part of a summary: the verdicts, how they were found, why free answers ended, and a hint if most had none."""
    counts, by_way = {name: verdicts[name] for name in rubric.names}, Counter(how)
    found: dict[str, Any] = {"verdicts": counts, "how": dict(sorted(by_way.items()))}
    if rubric.method != "parse":
        return found
    found |= ends_summary(Counter(ends), max_tokens)
    n, n_silent = by_way.total(), by_way["scored"] + by_way["not at all"]
    if n_silent > SILENT_RATE * n:
        hint = (
            f"{n_silent:,} of {n:,} verdicts are in no answer of the judge; {by_way['scored']:,} of these were scored "
            "instead: the likeliest ones, however unlikely. Read some answers in the column rationale. Examples "
            "(fewshot) show the judge how to end, and choices or regex keep it to a verdict."
        )
        found["hint"] = " ".join(filter(None, [found.get("hint"), hint]))
    return found


def _mean_and_deviation(total: float, total_of_squares: float, n: int) -> dict[str, Any]:
    mean, square = ratio(total, n), ratio(total_of_squares, n)
    deviation = None if mean is None or square is None else max(square - mean * mean, 0.0) ** 0.5
    return {"mean_score": mean, "standard_deviation": deviation}


def _sum_of_scores(merged: Merged, power: int = 1) -> float:
    return sum(float(np.nansum(np.asarray(each, np.float64) ** power)) for each in good_blocks(merged, "score"))


def _positions(merged: Merged, rubric: Rubric) -> dict[str, Any]:
    """How often both orders agree, and how often the same position won in both.

    As in Shi et al. 2024 (arXiv:2406.07791): position consistency, and preference for a position.
    """
    pairs = Counter(map(tuple, good_values(merged, "verdicts")))
    parsed = {pair: count for pair, count in pairs.items() if None not in pair}
    n = sum(parsed.values())
    n_flipped = sum(count for (one, other), count in parsed.items() if one != other)
    found = {"agreement_rate": ratio(n - n_flipped, n), "position_bias_rate": ratio(n_flipped, n)}
    toward = Counter[str]()
    for (one, other), count in parsed.items():
        # The second order's verdict is translated to the texts' own order: the same position won in both if the first
        # text won in one and the second text in the other, by however much. Beside a tie no position is preferred.
        won = {_sign_of_win(rubric, one), -_sign_of_win(rubric, other)}
        if won == {1} or won == {-1}:
            toward["first" if won == {1} else "second"] += count
    return {**found, "preferred_position": {place: toward[place] for place in ("first", "second")}}


def _sign_of_win(rubric: Rubric, verdict: str) -> int:
    """1 if the first text won, -1 if the second one did, 0 for a tie: by the values of a verdict and its mirror."""
    worth, mirrored = rubric.values[verdict], rubric.values[rubric.mirrored(verdict)]
    return (worth > mirrored) - (worth < mirrored)


def _agreement(merged: Merged, rubric: Rubric) -> dict[str, Any]:
    pairs = Counter(zip(good_values(merged, "truth"), good_values(merged, "verdict"), strict=True))
    matrix = count_matrix(pairs, rubric.names)
    square = matrix[:, :-1]
    n_with_truth, n_agree = int(matrix.sum()), int(np.trace(square))
    truths = Counter[str]()
    for (truth, _), count in pairs.items():
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
