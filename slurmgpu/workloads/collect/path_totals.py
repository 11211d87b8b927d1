"""The summary of collected paths: accuracy, majority votes, and how often one of k paths is right."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from slurmgpu.llm.metrics import ratio, wilson_interval
from slurmgpu.workloads.language_model import blocks, cut_hint

if TYPE_CHECKING:
    from slurmgpu.results import Merged

PASS_AT = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SUMMED = ("n_paths", "n_correct", "n_cut", "n_long", "n_rollouts", "n_tokens", "vote_correct")


def summarize(merged: Merged, n_paths: int, max_tokens: int) -> dict[str, Any]:
    """The totals, and the pass rates of up to `n_paths`, 0 for none.

    A failed question counts as one without a right answer.
    """
    sums, n_steps, spread = dict.fromkeys(SUMMED, 0), 0, Counter[tuple[int, int]]()
    for start, stop in blocks(len(merged)):
        good = ~merged.failed[start:stop]
        found = {name: merged[name][start:stop][good] for name in SUMMED}
        for name, values in found.items():
            sums[name] += int(values.sum(dtype=np.int64))
        spread.update(zip(found["n_paths"].tolist(), found["n_correct"].tolist(), strict=True))
        n_steps += sum(map(len, merged["depths"][start:stop]))
    n = len(merged)
    summary: dict[str, Any] = {
        "n_questions": n,
        "n_failed": int(merged.failed.sum()),
        "n_paths": sums["n_paths"],
        "n_correct": sums["n_correct"],
        "accuracy": ratio(sums["n_correct"], sums["n_paths"]),
        "vote_accuracy": ratio(sums["vote_correct"], n),
        "vote_accuracy_interval": wilson_interval(sums["vote_correct"], n),
        "cut_rate": ratio(sums["n_cut"], sums["n_paths"]),
        "n_steps": n_steps,
        "n_long": sums["n_long"],
        "n_rollouts": sums["n_rollouts"],
        "n_tokens": sums["n_tokens"],
    }
    summary |= cut_hint(sums["n_cut"], sums["n_paths"], max_tokens, "paths")
    return {**summary, "pass_rate": _pass_rates(spread, n, n_paths)} if n_paths else summary


def _pass_rates(spread: Mapping[tuple[int, int], int], n_questions: int, n_paths: int) -> dict[str, float]:
    """The share of questions that k paths would answer, by k: the unbiased estimate of arXiv:2107.03374, section 2.1.

    `spread` counts the questions by their numbers of paths and of right paths.
    """
    rates = {}
    for k in PASS_AT:
        if k <= n_paths and n_questions:
            passed = sum(
                count * (1 - math.comb(n - n_right, k) / math.comb(n, k)) for (n, n_right), count in spread.items()
            )
            rates[str(k)] = passed / n_questions
    return rates
