"""Judging by scores of a trained head instead of a rubric: one text of each item, or the texts of two runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.answers.metrics import win_rate
from slurmgpu.shards.columns import Array, Column, Text
from slurmgpu.workload import Item, Row
from slurmgpu.workloads.judge.rubrics import TIE, Rubric
from slurmgpu.workloads.language_model import good_values
from slurmgpu.workloads.samples import Samples
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
"""The columns that a comparison adds to those of the input's text."""

OTHER = "text of the second run"
"""The field of an item that gets the second run's text."""


class ByScorer(Score):
    """Scores of items by a trained head, or comparisons of two texts by their scores.

    By default the scorer sees the fields `question` and `text`, as a prompt and its answer.
    """

    owner = "the scorer"
    rubric = PREFERENCE
    right = None
    table: Mapping[str, Any]
    compares = False

    @classmethod
    def open(cls, scorer: str | ScorerSettings) -> ByScorer:
        """The scorer that a setting describes."""
        table, defaults = scorer_table(scorer), {}
        if not any(name in table for name in INPUTS):
            defaults["prompt"] = "{question}"
            if "steps" not in table:
                defaults["answer"] = "{text}"
        found = open_scorer(scorer, defaults, cls)
        found.table = table
        return found

    @property
    def asked(self) -> frozenset[str]:
        """The fields in the templates."""
        return frozenset(self.fields)

    @property
    def whole_fields(self) -> frozenset[str]:
        """The fields that the templates use without a key."""
        found = super().whole_fields
        return found | {OTHER} if self.compares and "text" in found else found

    def compare(self, each: str | None) -> tuple[str, str]:
        """Score two texts of each item from now on; returns the names of their fields.

        SlurmGPUError for a scorer that does not see the field `text`, or for several texts.
        """
        if each is not None:
            raise SlurmGPUError(
                "against compares one text of each item with one of another run, but each selects several texts. "
                "Remove against or each."
            )
        if "text" not in self.fields:
            raise SlurmGPUError(
                f"against compares the texts of two runs, but the scorer sees {', '.join(sorted(self.fields))}; "
                f"expected {{text}} in its answer or pair. If the items' field has another name, set "
                f'fields = {{text = "…"}}.'
            )
        self.compares = True
        self.columns = {**self.columns, **COMPARED}
        return "text", OTHER

    @property
    def frozen_settings(self) -> dict[str, Any]:
        """Settings that the plan fixes, including those read from the head."""
        return {"scorer": {**self.table, **super().frozen_settings}}

    def __call__(self, items: Sequence[Item]) -> list[Row | ItemError]:
        """The scores of each item, or its comparison, or an ItemError."""
        if not self.compares:
            return super().__call__(items)
        pairs = []
        for item in items:
            data = {**item.data}
            other = data.pop(OTHER)
            pairs += [replace(item, data=data), replace(item, data={**data, "text": other})]
        rows = super().__call__(pairs)
        return [_compared(first, second) for first, second in zip(rows[::2], rows[1::2], strict=True)]

    def summarize(self, merged: Merged, samples: Samples | None = None) -> dict[str, Any]:
        """Describe the scores; a comparison has counts of the verdicts as well."""
        return _summarize_compared(merged) if self.compares else super().summarize(merged, samples)


def check_alone(given: Collection[str]) -> None:
    """Refuse settings for rubrics and their models if `scorer` is set."""
    if not given:
        return
    name = min(given)
    place = f"Remove {name}, or scorer."
    if name != "model" and name in get_type_hints(ScorerSettings):
        place = f'Put it into the table: scorer = {{model = "…", {name} = …}}.'
    raise SlurmGPUError(
        f"scorer and {name} are both set; a scorer is a model with a trained head, and replaces rubric and model. "
        f"{place}"
    )


def _compared(first: Row | ItemError, second: Row | ItemError) -> Row | ItemError:
    """The row of a comparison, by the higher score."""
    if isinstance(first, ItemError):
        return first
    if isinstance(second, ItemError):
        return ItemError(f"the second run's text: {second}")
    # Compare the scores as stored, so that a verdict does not contradict its row.
    a, b = np.float32(first["score"]), np.float32(second["score"])
    return {**first, "verdict": TIE if a == b else "a" if a > b else "b", "score_b": b}


def _summarize_compared(merged: Merged) -> dict[str, Any]:
    """Counts of the verdicts, the win rate of the input's texts, and the distribution of both runs' scores.

    Failed items count as lost in `win_rate`; `scored_win_rate` leaves them out.
    """
    verdicts = Counter[str](good_values(merged, "verdict"))
    scores, others = (np.fromiter(good_values(merged, name), np.float64) for name in ("score", "score_b"))
    won = sum(PREFERENCE.values[name] * count for name, count in verdicts.items())
    return {
        "n_items": len(merged),
        "n_failed": len(merged) - verdicts.total(),
        "verdicts": {name: verdicts[name] for name in PREFERENCE.names},
        **win_rate(won, len(merged)),
        **win_rate(won, verdicts.total(), "scored_"),
        **distribution(scores),
        **{f"{name}_b": value for name, value in distribution(others).items()},
    }
