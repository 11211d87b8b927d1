"""Judging by the scores of a trained head in place of a rubric: one text of an item, or those of two runs compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import compress
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.answers.metrics import ratio
from slurmgpu.shards.columns import Array, Column, Text
from slurmgpu.workload import Row
from slurmgpu.workloads.judge.rubrics import TIE, Rubric
from slurmgpu.workloads.language_model import blocks
from slurmgpu.workloads.score.outputs import distribution
from slurmgpu.workloads.score.scorer import INPUTS, ScorerSettings, open_scorer, scorer_table
from slurmgpu.workloads.score.workload import Score

if TYPE_CHECKING:
    from slurmgpu.results import Merged

PREFERENCE = Rubric(
    prompt="",
    verdicts={"a": "a", "b": "b", TIE: TIE},
    values={"a": 1.0, "b": 0.0, TIE: 0.5},
    method="score",
    measure="win_rate",
)
"""The verdicts of a comparison by scores: "a" is the input's text."""

COMPARED: Mapping[str, Column] = {"verdict": Text(), "score_b": Array("float32")}
"""The columns of a comparison, beside those of the input's text."""


def judging_scorer(scorer: str | ScorerSettings) -> Score:
    """The scorer; unless it says otherwise it is shown the fields `question` and `text`, as a prompt and its answer."""
    table, defaults = scorer_table(scorer), {}
    if not any(name in table for name in INPUTS):
        defaults["prompt"] = "{question}"
        if "steps" not in table:
            defaults["answer"] = "{text}"
    return open_scorer(scorer, defaults)


def check_alone(given: Collection[str]) -> None:
    """Refuse settings of rubrics, and of the models that follow them, beside `scorer`."""
    if not given:
        return
    name = min(given)
    place = f"Remove {name}, or scorer."
    if name != "model" and name in get_type_hints(ScorerSettings):
        place = f'Put it into the table: scorer = {{model = "…", {name} = …}}.'
    raise SlurmGPUError(
        f"scorer and {name} are both set; a scorer is a model with a trained head, in place of a rubric and a model "
        f"that follows it. {place}"
    )


def check_compared(scorer: Score, each: str | None) -> None:
    """Refuse a comparison of two runs by a scorer that is not shown the field `text`, or of several texts."""
    if each is not None:
        raise SlurmGPUError(
            "against compares one text of an item with one of another run, and each is set. Remove one of them."
        )
    if "text" not in scorer.fields:
        raise SlurmGPUError(
            f"against compares the texts of two runs, and the scorer is shown {', '.join(sorted(scorer.fields))}; "
            f'expected {{text}} in its answer or pair. What the items call it is said by fields = {{text = "…"}}.'
        )


def compared(first: Row | ItemError, second: Row | ItemError | None = None) -> Row | ItemError:
    """The row of a comparison, by the higher score; the first row itself if there is no second one."""
    if isinstance(first, ItemError) or second is None:
        return first
    if isinstance(second, ItemError):
        return ItemError(f"the second run's text: {second}")
    # As they are stored, so that a verdict does not contradict its row.
    a, b = np.float32(first["score"]), np.float32(second["score"])
    return {**first, "verdict": TIE if a == b else "a" if a > b else "b", "score_b": b}


def summarize_compared(merged: Merged) -> dict[str, Any]:
    """Counts of the verdicts, the win rate of the input's texts, and how both runs' scores are distributed.

    Failed items count as lost in `win_rate`; `scored_win_rate` leaves them out.
    """
    verdicts, scores, others = Counter[str](), [np.empty(0)], [np.empty(0)]
    for start, stop in blocks(len(merged)):
        good = ~merged.failed[start:stop]
        verdicts.update(compress(merged["verdict"][start:stop], good.tolist()))
        scores.append(merged["score"][start:stop][good])
        others.append(merged["score_b"][start:stop][good])
    won = sum(PREFERENCE.values[name] * count for name, count in verdicts.items())
    second = distribution(np.concatenate(others))
    return {
        "n_items": len(merged),
        "n_failed": len(merged) - verdicts.total(),
        "verdicts": {name: verdicts[name] for name in PREFERENCE.names},
        "win_rate": ratio(won, len(merged)),
        "scored_win_rate": ratio(won, verdicts.total()),
        **distribution(np.concatenate(scores)),
        **{f"{name}_b": value for name, value in second.items()},
    }
