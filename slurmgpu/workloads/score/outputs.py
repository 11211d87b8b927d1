"""Scores from a head's outputs, and their distribution."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from slurmgpu.llm.heads.head import Activation

PathScore = Literal["min", "product", "mean", "last"]


def path_score(steps: npt.NDArray[np.float64], how: PathScore) -> float:
    """The score of a path, from the scores (n,) of its n > 0 steps."""
    if how == "last":
        return float(steps[-1])
    if how == "mean":
        return float(steps.mean())
    return float(steps.prod() if how == "product" else steps.min())


def activated(logits: npt.NDArray[np.float64], activation: Activation) -> npt.NDArray[np.float64]:
    """The head's outputs (…, output) with an activation over the last axis."""
    if activation == "none":
        return logits
    if activation == "sigmoid":
        # The exponent is never positive, so exp does not overflow.
        small: npt.NDArray[np.float64] = np.exp(-np.abs(logits))
        found: npt.NDArray[np.float64] = np.where(logits >= 0, 1, small) / (1 + small)
        return found
    shares: npt.NDArray[np.float64] = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return shares


def distribution(scores: npt.NDArray[Any]) -> dict[str, Any]:
    """Part of a summary: mean, standard deviation and quartiles of scores (n,) other than NaN; null without any."""
    scores = scores[~np.isnan(scores)]
    if not len(scores):
        return {"mean_score": None, "standard_deviation": None, "score_quartiles": None}
    wide = scores.astype(np.float64)
    return {
        "mean_score": float(wide.mean()),
        "standard_deviation": float(wide.std()),
        "score_quartiles": [float(each) for each in np.quantile(wide, [0, 0.25, 0.5, 0.75, 1])],
    }
