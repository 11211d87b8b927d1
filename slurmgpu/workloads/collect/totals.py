"""The totals of collected paths, over all questions of a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.answers.metrics import accuracy, ratio
from slurmgpu.workloads.language_model import good_blocks, good_values, total

if TYPE_CHECKING:
    from slurmgpu.results import Merged

FLOAT32_DIGITS = 7


def totals(merged: Merged, n_independent: int, pass_at: Sequence[int]) -> dict[str, Any]:
    """Sums of paths and steps, and the number of answered questions; a failed question counts as not answered.

    pass@k is computed from the first `n_independent` paths of each question, which are sampled from the question alone.
    """
    n_right = Counter(int(row[:n_independent].sum()) for row in good_values(merged, "rewards"))
    n, n_good, n_paths, n_cut = len(merged), n_right.total(), total(merged, "n_paths"), total(merged, "n_cut")
    shares = sum(float(each.sum(dtype=np.float64)) for each in good_blocks(merged, "accuracy"))
    share = ratio(shares, n_good)
    return {
        "n_questions": n,
        "n_failed": n - n_good,
        "n_paths": n_paths,
        "n_correct": total(merged, "n_correct"),
        "accuracy": None if share is None else round(share, FLOAT32_DIGITS),
        **accuracy(total(merged, "vote_correct"), n, "vote_"),
        "n_cut": n_cut,
        "cut_rate": ratio(n_cut, n_paths),
        "n_steps": sum(map(len, good_values(merged, "depths"))),
        **{name: total(merged, name) for name in ("n_long", "n_rollouts", "n_tokens")},
        "pass_rate": pass_rates(n_right, n_independent, n, pass_at),
    }


def checked_pass_at(asked: Sequence[int], n_independent: int) -> list[int]:
    """The k of pass@k, sorted: those asked for, else the powers of 2 up to the number of paths, and that number."""
    if any(not 1 <= k <= n_independent for k in asked):
        raise SlurmGPUError(
            f"pass_at is {list(asked)}; expected whole numbers from 1 to {n_independent}, the number of paths that "
            f"are sampled from the question itself."
        )
    return sorted({*asked} or {*(2**power for power in range(n_independent.bit_length())), n_independent})


def pass_rates(n_right: Mapping[int, int], n_paths: int, n_questions: int, pass_at: Sequence[int]) -> dict[str, float]:
    """The share of questions that k paths would answer, by k: the unbiased estimate of arXiv:2107.03374, section 2.1.

    `n_right` counts the questions by how many of their `n_paths` independent paths are right.
    """
    rates = {}
    for k in pass_at if n_questions else ():
        passed = sum(
            count * (1 - math.comb(n_paths - right, k) / math.comb(n_paths, k)) for right, count in n_right.items()
        )
        rates[str(k)] = passed / n_questions
    return rates
