"""The verdict on an item, from one prompt, or from a prompt for each order of its two texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmgpu.errors import ItemError
from slurmgpu.llm.interface.engine import Prompt, Scores
from slurmgpu.workload import Row
from slurmgpu.workloads.judge.rubrics import TIE, Rubric

HOW = ("parsed", "parsed again", "scored", "not at all")
"""How a verdict was found, the most direct way first."""


@dataclass
class JudgePrompt:
    """One prompt to the judge and its outcome; an item has one, or one for each order of its two texts.

    `how` says how the verdict was found: "parsed", "parsed again" after a retry, "scored", or "not at all".
    """

    order: int
    prompt: Prompt
    seed: int
    rationale: str = ""
    finish_reason: str = ""
    verdict: str | None = None
    probabilities: npt.NDArray[np.float64] | None = None
    how: str = "not at all"
    n_truncated: int = 0
    error: str | None = None


def verdict_row(rubric: Rubric, asked: Sequence[JudgePrompt], *, truncates: bool) -> Row:
    """The columns of an item's verdict, a tie if two orders disagree; ItemError if a prompt failed.

    With `truncates`, also the number of truncated prompt tokens, from the order that lost more.
    """
    for one in asked:
        if one.error is not None:
            raise ItemError(one.error)
    first = asked[0]
    verdicts = [first.verdict, *(one.verdict and rubric.mirrored(one.verdict) for one in asked[1:])]
    parsed = None not in verdicts
    agree = parsed and len(set(verdicts)) == 1
    row: dict[str, Any] = {
        "verdict": "" if not parsed else verdicts[0] if agree else TIE,
        "score": _worth(rubric, asked, verdicts),
        "parse_ok": parsed,
        "rationale": first.rationale,
        "how": max((one.how for one in asked), key=HOW.index),
    }
    if truncates:
        row["n_truncated"] = max(one.n_truncated for one in asked)
    if rubric.method == "score":
        row["probabilities"] = _mean_shares(rubric, asked)
    else:
        row["finish_reason"] = first.finish_reason
    if rubric.swap:
        row |= {"agreement": agree, "verdicts": verdicts, "rationale_swapped": asked[1].rationale}
    return row


def shares_of(scores: Scores) -> npt.NDArray[np.float64]:
    """Each verdict's share (verdict,) of the total probability of the verdicts.

    `scores` has two spellings of each verdict, one after the other. ItemError if they are not finite.
    """
    logprobs = np.logaddexp.reduce(np.asarray(scores.logprobs, np.float64).reshape(-1, 2), axis=1)
    shares: npt.NDArray[np.float64] = np.exp(logprobs - logprobs.max())
    if not np.isfinite(shares).all():
        raise ItemError('the verdicts\' scores are not finite: they overflow; precision = "fp32" has a larger range')
    shares /= shares.sum()
    return shares


def _worth(rubric: Rubric, asked: Sequence[JudgePrompt], verdicts: Sequence[str | None]) -> float:
    """The verdict's value, the expected value where verdicts were scored; the mean over both orders.

    The expected value is the score of G-Eval (Liu et al. 2023, arXiv:2303.16634).
    """
    worth = [np.nan if name is None else rubric.values[name] for name in verdicts]
    for number, one in enumerate(asked):
        if one.probabilities is not None:
            worth[number] = float(_mean_shares(rubric, [one]) @ [rubric.values[name] for name in rubric.names])
    return float(np.mean(worth))


def _mean_shares(rubric: Rubric, asked: Sequence[JudgePrompt]) -> npt.NDArray[np.float64]:
    total = np.zeros(len(rubric.names))
    for one in asked:
        if one.probabilities is not None:
            for name, share in zip(rubric.names, one.probabilities, strict=True):
                total[rubric.names.index(rubric.mirrored(name) if one.order else name)] += share
    return total / len(asked)
